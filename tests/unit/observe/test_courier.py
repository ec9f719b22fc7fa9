# SPDX-License-Identifier: Apache-2.0
"""Whoever leaves a job never waits, and what is not done is counted."""

import threading

from mprecipes.observe.courier import Courier


class Gate:
    """A target whose first job stands still until it is let go."""

    def __init__(self):
        self.done = []
        self.entered, self.free = threading.Event(), threading.Event()

    def stand_still(self):
        self.entered.set()
        self.free.wait()


def courier_of(target, capacity=100, errors=None):
    errors = [] if errors is None else errors
    return Courier(lambda: target, capacity=capacity, on_error=errors.append)


def test_jobs_are_done_in_the_order_they_came():
    """A thousand jobs and the last one, in order."""
    gate = Gate()
    courier = courier_of(gate, capacity=1000)
    for number in range(1000):
        courier.send(lambda target, number=number: target.done.append(number))
    assert courier.close(lambda target: target.done.append("last"), 60)
    assert gate.done == [*range(1000), "last"]
    assert courier.lost == 0


def test_a_full_queue_loses_and_counts_and_never_waits():
    """While the target stands still, three jobs wait, seven are lost, and an alert finds room."""
    gate = Gate()
    courier = courier_of(gate, capacity=3)
    courier.send(lambda target: target.stand_still())
    assert gate.entered.wait(60)
    for number in range(10):  # the target is let go only after this loop
        courier.send(lambda target, number=number: target.done.append(number))
    courier.send(lambda target: target.done.append("alert"), counted=False)
    assert courier.lost == 7
    gate.free.set()
    assert courier.close(lambda target: None, 60)
    assert gate.done == [0, 1, 2, "alert"]


def test_a_job_that_raises_costs_itself_only():
    """Also SystemExit, which clients raise: it is told and counted, and the next job is done."""
    gate, errors = Gate(), []
    courier = courier_of(gate, errors=errors)

    def fail(target):
        raise SystemExit(-9)

    courier.send(fail)
    courier.send(fail, counted=False)
    courier.send(lambda target: target.done.append(1))
    assert courier.close(lambda target: None, 60)
    assert (courier.lost, gate.done) == (1, [1])
    assert [type(error) for error in errors] == [SystemExit, SystemExit]


def test_a_target_that_cannot_be_opened_costs_every_row_and_one_message():
    """Both rows are counted; the reason is told once."""
    errors = []

    def refused():
        raise ConnectionError("refused")

    courier = Courier(refused, capacity=9, on_error=errors.append)
    courier.send(lambda target: None)
    courier.send(lambda target: None)
    assert courier.close(lambda target: None, 60)
    assert courier.lost == 2
    assert [str(error) for error in errors] == ["refused"]


def test_the_end_waits_only_so_long():
    """No seconds for a target that stands still: its job and the two behind it are lost."""
    gate = Gate()
    courier = courier_of(gate)
    courier.send(lambda target: target.stand_still())
    assert gate.entered.wait(60)
    for _ in range(2):
        courier.send(lambda target: target.done.append("too late"))
    assert not courier.close(lambda target: target.done.append("last"), 0.0)
    assert courier.lost == 3
    gate.free.set()
    courier._thread.join(60)
    assert gate.done == []
    assert courier.lost == 3


def test_hurry_frees_what_stands_still():
    """When time is up, `hurry` lets the target go, and in the grace everything is done."""
    gate = Gate()
    courier = courier_of(gate)
    courier.send(lambda target: target.stand_still())
    courier.send(lambda target: target.done.append("row"))
    last = gate.done.append
    assert courier.close(lambda _: last("last"), 0.0, hurry=gate.free.set, grace_seconds=60)
    assert (courier.lost, gate.done) == (0, ["row", "last"])


def test_after_the_end_a_row_is_lost_and_a_second_end_is_nothing():
    """What comes too late is counted."""
    courier = courier_of(Gate())
    assert courier.close(lambda target: None, 60)
    courier.send(lambda target: None)
    assert courier.close(lambda target: None, 60)
    assert courier.lost == 1
