# SPDX-License-Identifier: Apache-2.0
"""A window over the state that ranks compare, another at every save."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mprecipes.checkpoint.digests import state_digests
from mprecipes.checkpoint.replicas import ReplicaWindow, compare_weights
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import NumericsError


@pytest.fixture
def live():
    generator = torch.Generator().manual_seed(1)
    return {
        "weights/a": torch.randn(300, generator=generator),
        "optimizer/a/exp_avg": torch.randn(20, 15, generator=generator).T,
        "weights/n": torch.tensor(3),
    }


def windows(live, count, window_bytes=500):
    window = ReplicaWindow(window_bytes)
    found = []
    for number in range(count):
        window.copy(live, number)
        found.append(window.digests())
    return found


def test_a_small_state_is_compared_in_full_at_every_save(live):
    """The digests are those of the state."""
    assert windows(live, 2, 1 << 20) == [state_digests(live)] * 2


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("weights/a", (0,)),
        ("weights/a", (299,)),
        ("optimizer/a/exp_avg", (7, 3)),
        ("weights/n", ()),
    ],
)
def test_windows_move_on_until_everything_was_seen(live, name, place):
    """A change anywhere in 2408 bytes shows in some of five windows of 500 bytes, not in all."""
    expected = windows(live, 5)
    live[name] = live[name].clone()
    live[name][place] += 1
    found = [a != b for a, b in zip(windows(live, 5), expected)]
    assert 1 <= sum(found) <= 2


def test_later_changes_do_not_reach_the_window(live):
    """The window is a copy."""
    window = ReplicaWindow(500)
    window.copy(live, 1)
    expected = windows(live, 2)[1]
    for tensor in live.values():
        tensor.zero_()
    assert window.digests() == expected


class ThreadRanks(Ranks):
    """Ranks that are threads of this process; `gather` meets the others."""

    def __init__(self, rank, size, box, barrier):
        super().__init__(rank, size)
        object.__setattr__(self, "meeting", (box, barrier))

    def gather(self, value):
        box, barrier = self.meeting
        box[self.rank] = value
        barrier.wait(10)
        values = list(box)
        barrier.wait(10)
        return values


def compare(*states):
    """Compares the weights of as many ranks, each on a thread; gives what each one raised."""
    box, barrier = [None] * len(states), threading.Barrier(len(states))

    def work(rank):
        try:
            compare_weights(states[rank], ThreadRanks(rank, len(states), box, barrier), step=7)
        except NumericsError as error:
            return error

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(work, range(len(states))))


def one_ulp_off(live, name):
    """Gives a copy in which the last element is the next float."""
    copy = {each: tensor.clone() for each, tensor in live.items()}
    copy[name].view(-1)[-1] = torch.nextafter(copy[name].view(-1)[-1], torch.tensor(9.0))
    return copy


def test_equal_weights_are_let_through(live):
    """Other moments do not matter: what they do shows in the weights one update later."""
    other = one_ulp_off(live, "weights/a")
    other["weights/a"] = live["weights/a"]
    other["optimizer/a/exp_avg"] = live["optimizer/a/exp_avg"] + 1
    assert compare(live, other) == [None, None]


def test_one_ulp_on_one_rank_is_named(live):
    """Of three ranks the one that is not as the others, wherever it is; the same on every rank."""
    for odd in range(3):
        states = [live] * 3
        states[odd] = one_ulp_off(live, "weights/a")
        errors = compare(*states)
        right = 1 if odd == 0 else 0
        assert {error.found for error in errors} == {
            f"replicas of the weights differ: rank {odd} differs in a (compared with rank {right})"
        }
        assert errors[0].where == "step 7"
        assert errors[0].expected.startswith("the same bits on every rank; no checkpoint")
        assert errors[0].action.startswith("launch again to go back")


def test_of_many_tensors_the_first_are_named():
    """Five names and how many more."""
    live = {f"weights/w{n}": torch.full((3,), float(n)) for n in range(8)}
    other = {name: tensor + 1 for name, tensor in live.items()}
    (error, _) = compare(live, other)
    assert "rank 1 differs in w0, w1, w2, w3, w4 and 3 more (compared with rank 0)" in error.found


def test_one_process_has_nothing_to_compare(live):
    """Nothing is computed."""
    compare_weights({"weights/a": None}, Ranks(), step=1)


def test_what_one_rank_alone_holds_is_not_compared(live):
    """Shards under names of their own differ by right; what all hold is compared all the same."""
    first = live | {"weights/s[0:3 of 6]": torch.ones(3)}
    second = live | {"weights/s[3:6 of 6]": torch.zeros(3)}
    assert compare(first, second) == [None, None]
    (error, _) = compare(first, one_ulp_off(second, "weights/a"))
    assert "rank 1 differs in a (compared with rank 0)" in error.found
    only = [{"weights/s[0:3 of 6]": torch.ones(3)}, {"weights/s[3:6 of 6]": torch.zeros(3)}]
    assert compare(*only) == [None, None]
