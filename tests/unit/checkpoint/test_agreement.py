# SPDX-License-Identifier: Apache-2.0
"""All ranks succeed together or fail together."""

from dataclasses import dataclass

import pytest

from mprecipes.checkpoint.agreement import agree, check_state
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import CheckpointError, DataError, NumericsError

DOING = ("saving step 3", "a whole file", "free space")


@dataclass(frozen=True)
class Peers(Ranks):
    """Rank 0 of two, whose peer answers with a fixed value."""

    world_size: int = 2
    answer: object = None

    def gather(self, value):
        return [value, self.answer]


FINE = (None, 7)


def fail():
    raise OSError(28, "No space left on device")


def test_the_value_comes_back():
    """With nothing wrong anywhere each rank has the values of all."""
    assert agree(Ranks(), DOING, lambda: 5) == [5]
    assert agree(Peers(answer=FINE), DOING, lambda: None) == [None, 7]


def test_a_failure_here_names_the_rank():
    """Any exception becomes a CheckpointError with an address, and its cause stays attached."""
    with pytest.raises(CheckpointError) as caught:
        agree(Peers(answer=FINE), DOING, fail)
    error = caught.value
    assert error.found == "rank 0: OSError: [Errno 28] No space left on device"
    assert (error.where, error.expected, error.action) == DOING
    assert isinstance(error.__cause__, OSError)


def test_a_failure_elsewhere_is_raised_here():
    """A peer's error stops this rank although its own work succeeded."""
    told = DataError("x", expected="y", where="z", action="a")
    with pytest.raises(DataError) as caught:
        agree(Peers(answer=(told, None)), DOING, lambda: 5)
    assert caught.value.found == "x"


def test_errors_of_ours_keep_their_kind():
    """What already says found, expected, where and action is not wrapped again."""

    def refuse():
        raise DataError("x", expected="y", where="z", action="a")

    with pytest.raises(DataError):
        agree(Ranks(), DOING, refuse)


def test_an_interrupt_is_not_held_up():
    """KeyboardInterrupt passes through at once."""

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        agree(Ranks(), DOING, interrupt)


def test_a_thread_that_would_end_is_a_failure():
    """SystemExit ends no thread that peers wait for."""

    def leave():
        raise SystemExit(3)

    with pytest.raises(CheckpointError, match="rank 0: SystemExit: 3"):
        agree(Peers(answer=FINE), DOING, leave)


def test_state_that_agrees_passes():
    """Equal digests and nothing infinite raise nothing."""
    check_state(3, [], [{"weights": "1"}, {"weights": "1"}])


def test_what_is_not_finite_on_any_rank_is_named():
    """The names of both ranks are in one message."""
    with pytest.raises(NumericsError) as caught:
        check_state(3, ["weights/b", "weights/a", "weights/b"], [{}, {}])
    assert caught.value.found == "2 tensors hold NaN or infinity: weights/a, weights/b"
    assert "nothing was published" in caught.value.expected
    assert caught.value.where == "saving step 3"
    assert "last good checkpoint" in caught.value.action


def test_replicas_that_differ_are_named():
    """A kind of state whose digest differs, or that a peer does not have, is listed."""
    mine = {"weights": "1", "exp_avg": "7", "step": "5"}
    with pytest.raises(NumericsError) as caught:
        check_state(3, [], [mine, {"weights": "2", "exp_avg": "7"}])
    assert caught.value.found == "replicas differ in step, weights"
    assert "the same bits on every rank" in caught.value.expected
    assert caught.value.where == "saving step 3"
    assert "batch norm" in caught.value.action
