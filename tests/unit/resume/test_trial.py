# SPDX-License-Identifier: Apache-2.0
"""The comparisons of the five checks, each with a fault planted in its numbers."""

from types import SimpleNamespace

import pytest

from mprecipes.compute.collectives import Answer
from mprecipes.compute.ranks import Ranks
from mprecipes.resume.band import make_band
from mprecipes.resume.evidence import Evidence
from mprecipes.resume.policy import ProbationPolicy
from mprecipes.resume.replay import Relation
from mprecipes.resume.trial import (
    Trial,
    compare_probe,
    compare_replicas,
    judge_band,
    judge_collectives,
    judge_environment,
    judge_network,
    judge_throughput,
)

STORED = {
    "first_sample": 8, "batch_digest": "b0", "loss": (2.0).hex(), "grad_norm": (1.0).hex(),
    "grad_digest": "a0", "sketch": [1.0, 2.0], "matmul_bits": 23, "random": ["r0", "r1"],
}  # fmt: skip
RATE = {"tokens_per_second": 100.0, "mad": 0.0, "windows": 3, "window_steps": 5}
OTHER_TORCH = Relation(frozenset({"environment.torch"}))


def trial(relation=Relation(), **facts):  # noqa: B008
    manifest = SimpleNamespace(raw={"probe": STORED, "throughput": RATE}, step=5)
    return Trial(1, manifest, 5, 8, relation, 1e-2, **facts)


def evidence():
    return Evidence(ProbationPolicy())


def failed(found):
    return [(failure.check, failure.fact) for failure in found.failures]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"random": ["r1", "r0"]}, [("data_order", "random streams")]),
        ({"batch_digest": "b1"}, [("data_order", "probe batch")]),
        ({"loss": (2.0 + 2**-50).hex()}, [("optimizer", "probe loss")]),
        ({"matmul_bits": 10}, [("communication", "bits of an FP32 matmul")]),
        ({"grad_digest": "a1"}, [("communication", "probe gradient")]),
    ],
)
def test_each_difference_of_a_probe_has_its_owner(changes, expected):
    """Bit by bit where nothing changed; the same probe passes."""
    found = evidence()
    compare_probe(found, trial(), {**STORED, **changes})
    assert failed(found) == expected


def test_another_environment_is_measured_by_its_drift():
    """0.1 % of the loss and a cosine of 0.9999 are inside a profile of 1 %; 3 % are not."""
    for loss, inside in ((2.002, True), (2.06, False)):
        found, now = evidence(), trial(OTHER_TORCH, environment=("torch: 2.13 -> 2.14",))
        probe = {"loss": loss.hex(), "grad_digest": "a1", "sketch": [1.0, 2.02], "matmul_bits": 10}
        compare_probe(found, now, {**STORED, **probe})
        judge_environment(found, now, 0)
        assert now.drift_is_small is inside
        row = found.rows["communication"].found["environment"]
        assert row["drift"]["probe_loss_difference"] == pytest.approx(loss / 2 - 1)
        assert row["drift"]["probe_cosine"] > 0.9999
        assert (("communication", "environment") in failed(found)) is not inside


def test_an_environment_that_nobody_measured_needs_its_flag():
    """Without a probe: accepted, or replayed steps within the tolerance, or halted."""
    changes = {"environment": ("driver: 1 -> 2",)}
    for accepted, num_replayed, fails in ((["changed_environment"], 0, 0), ([], 3, 0), ([], 0, 1)):
        found = evidence()
        judge_environment(found, trial(OTHER_TORCH, accepted=accepted, **changes), num_replayed)
        assert len(found.fatal) == fails


def test_a_changed_dropout_frees_the_loss_of_the_probe():
    """The batch is still compared."""
    found = evidence()
    other = Relation(frozenset(), frozenset({"changed_dropout"}))
    compare_probe(found, trial(other), {**STORED, "loss": (9.0).hex(), "grad_digest": "ff"})
    assert failed(found) == []
    assert "probe batch" in found.rows["data_order"].found


def test_replicas_that_differ_are_named():
    """Rank 1 has another gradient."""
    found = evidence()
    compare_replicas(found, ["a0", "a1"])
    assert failed(found) == [("communication", "probe gradient on every rank")]
    assert found.failures[0].found == {"rank 1": "a1"}


def test_a_wrong_answer_names_the_rank():
    """Rank 1's sum is wrong; the time is the slowest rank's where all are right."""
    found, right = evidence(), Answer("all_reduce", 0.5)
    judge_collectives(found, [[right], [Answer("all_reduce", 0.1, "gave 2.0, not 3.0")]])
    assert found.failures[0].found == {"rank 1": "gave 2.0, not 3.0"}
    found = evidence()
    judge_collectives(found, [[right], [Answer("all_reduce", 0.1)]])
    assert found.rows["communication"].found == {"all_reduce": "in 0.5000 s"}


def test_steps_outside_of_the_band_are_the_optimizers(record):
    """Fewer than three are not judged, nor those after an accepted change."""
    band = make_band([record(n) for n in range(1, 20)])
    jumped = [record(n, loss=6.0) for n in (20, 21, 22)]
    for steps, flags, fails in ((jumped, (), 1), (jumped[:2], (), 0), (jumped, ("x",), 0)):
        found = evidence()
        judge_band(found, trial(Relation(flags=frozenset(flags)), band=band), steps)
        assert len(found.fatal) == fails
    assert "line through the losses" in make_band([record(n) for n in range(9)]).formula


def test_throughput_warns_and_is_not_compared_across_launches():
    """Half as fast is a warning with the slow rank's name; another world size is not judged."""
    found = evidence()
    judge_throughput(found, trial(), [50.0] * 5, [0.1, 0.2])
    assert failed(found) == [("throughput", "tokens_per_second")]
    assert found.fatal == []
    assert found.failures[0].found["slow ranks"][0].startswith("rank 1: 0.2000 s")
    found = evidence()
    judge_throughput(found, trial(OTHER_TORCH), [50.0] * 5, [0.1])
    assert "another launch" in found.rows["throughput"].found["not compared"]


def test_the_network_is_judged_between_machines():
    """On one machine what is lost is told; between two it is a warning."""
    counters = {"tcp_sent": 100, "tcp_retransmitted": 100}
    for ranks, fails in ((Ranks(0, 2, 0, 2), 0), (Ranks(0, 2, 0, 1), 1)):
        found = evidence()
        before = {"tcp_sent": 0, "tcp_retransmitted": 0}
        judge_network(found, trial(ranks=ranks, network=lambda: counters), before)
        assert (len(found.failures), found.fatal) == (fails, [])
