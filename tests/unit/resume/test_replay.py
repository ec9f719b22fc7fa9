# SPDX-License-Identifier: Apache-2.0
"""Which differences of a replayed step count, and how exactly."""

import math

import pytest

from mprecipes.resume.replay import MEANINGS, Relation, Replay, relate

EXACT = {0: Relation()}


def found(replay, record):
    return [(mismatch.key, mismatch.policy) for mismatch in replay.compare(record)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("samples_seen", 47),
        ("batch_digest", "0000000000000007"),
        ("tokens", 119),
        ("updates", 5),
        ("learning_rate", math.nextafter(0.001, 1)),
        ("loss_scale", 2.0),
        ("loss", math.nextafter(3.625, 4)),
        ("loss", math.nan),
        ("grad_norm", math.nextafter(0.1, 1)),
    ],
)
def test_every_key_is_compared_to_the_last_bit(record, key, value):
    """The smallest change of any key is found, named, and halts."""
    replay = Replay({6: record(6)}, EXACT, 1e-2)
    assert found(replay, record(6, 1, **{key: value})) == [(key, "halt")]
    assert replay.tolerance == "bitwise: computed as in the first pass"


def test_an_equal_step_is_equal_whatever_it_cost(record):
    """Seconds and the attempt's number are no part of behaviour; a NaN equals itself."""
    replay = Replay({6: record(6, grad_norm=math.nan)}, EXACT, 0.0)
    again = record(6, attempt=1, step_seconds=99.0, grad_norm=math.nan)
    assert replay.compare(again) == []
    assert replay.num_compared == 1


def test_minus_zero_is_not_zero(record):
    """Bitwise means bits."""
    replay = Replay({6: record(6, loss=0.0)}, EXACT, 1e-2)
    assert found(replay, record(6, loss=-0.0)) == [("loss", "halt")]


def test_a_step_nobody_trained_before_is_not_compared(record):
    """A lost journal line leaves a step without a measure."""
    replay = Replay({6: record(6), 8: record(8)}, EXACT, 0.0)
    assert replay.compare(record(7, loss=9.0)) == []
    assert (replay.num_due, replay.num_compared, replay.last_step) == (2, 0, 8)


@pytest.mark.parametrize(
    ("factor", "keys"), [(1 + 0.9e-2, []), (1 + 1.1e-2, ["loss", "grad_norm"])]
)
def test_another_world_size_loosens_loss_and_gradient_norm_only(
    facts, classes, record, factor, keys
):
    """Sums in another order differ a little; data, position and learning rate still may not."""
    relations = relate({0: facts()}, facts(topology__world_size=1), classes)
    replay = Replay({6: record(6)}, relations, 1e-2)
    changed = {"loss": 3.625 * factor, "grad_norm": 0.1 * factor}
    assert [key for key, _ in found(replay, record(6, **changed))] == keys
    assert found(replay, record(6, learning_rate=0.001 * (1 + 1e-9))) == [("learning_rate", "halt")]
    assert replay.tolerance == (
        "0.01 relative for loss and grad_norm (topology.world_size); the rest exact"
    )


@pytest.mark.parametrize(
    ("change", "bitwise"),
    [
        ({}, True),
        ({"config__save_steps": 3}, True),
        ({"environment__git_commit": "def"}, True),
        ({"recipe__sha256": "bb"}, True),
        ({"environment__torch": "2.14.0"}, False),
        ({"topology__world_size": 4}, False),
        ({"config__torch_compile": True}, False),
        ({"data__micro_batch": 2}, False),
        ({"precision__mode": "bf16"}, False),
    ],
)
def test_bits_are_asked_for_exactly_where_nothing_numeric_changed(facts, classes, change, bitwise):
    """A new commit must give the same bits; another torch, machine shape or precision need not."""
    relations = relate({0: facts()}, facts(**change), classes)
    assert (relations[0].reasons == frozenset()) is bitwise


@pytest.mark.parametrize(
    ("change", "compared"),
    [
        ({"data__fingerprint": "beef"}, "samples_seen updates learning_rate loss_scale"),
        ({"data__seed": 2}, "samples_seen updates learning_rate loss_scale"),
        ({"data__global_batch": 16}, "updates learning_rate loss_scale"),
        ({"recipe__version": "2.0.0"}, "samples_seen"),
        (
            {"config__learning_rate": 0.01},
            "samples_seen batch_digest tokens updates loss_scale",
        ),
        (
            {"config__weight_decay": 0.0},
            "samples_seen batch_digest tokens updates learning_rate loss_scale",
        ),
    ],
)
def test_an_accepted_change_frees_what_it_makes_different_and_nothing_else(
    facts, classes, record, change, compared
):
    """With other data the learning rate must still be the same, and the other way round."""
    relations = relate({0: facts()}, facts(**change), classes)
    replay = Replay({6: record(6)}, relations, 1e-2)
    other = record(
        6, samples_seen=1, batch_digest="x", tokens=1, updates=1, learning_rate=1.0, loss=9.0,
        grad_norm=9.0,
    )  # fmt: skip
    expected = [key for key in compared.split() if key != "loss_scale"]
    assert [key for key, _ in found(replay, other)] == expected
    assert "not compared (changed_" in replay.tolerance


def test_with_a_loss_scaler_a_change_also_frees_what_overflows_decide(facts, classes, record):
    """Other numbers overflow at other steps, and updates and learning rate follow them."""
    relations = relate({0: facts()}, facts(data__seed=2), classes)
    replay = Replay({6: record(6, loss_scale=2.0)}, relations, 1e-2)
    other = record(6, loss_scale=1.0, updates=5, learning_rate=0.1, samples_seen=9)
    assert found(replay, other) == [("samples_seen", "halt")]


@pytest.mark.parametrize("change", [{"data__micro_batch": 2}, {"config__torch_compile": True}])
def test_other_dropout_masks_warn_and_do_not_halt(facts, classes, record, change):
    """The change was accepted and is known to alter masks: shown, within tolerance or not."""
    relations = relate({0: facts()}, facts(**change), classes)
    replay = Replay({6: record(6)}, relations, 1e-2)
    assert found(replay, record(6, loss=3.63)) == []
    assert found(replay, record(6, loss=3.9, tokens=1)) == [("tokens", "halt"), ("loss", "warn")]


def test_an_attempt_with_other_settings_in_between_counts(facts, classes):
    """2 -> 1 -> 2 processes: bits are asked for from the attempt after the detour only."""
    attempts = {
        0: facts(config__learning_rate=0.01),
        1: facts(topology__world_size=1),
        2: facts(),
    }
    relations = relate(attempts, facts(), classes)
    assert relations[2] == Relation()
    assert relations[1].reasons == {"topology.world_size"}
    assert relations[0].reasons == {"topology.world_size", "learning_rate"}
    assert relations[0].flags == {"changed_learning_rate"}


def test_once_a_step_was_allowed_to_differ_so_are_the_steps_after_it(record):
    """Later steps start from another state, whoever trained them before."""
    relations = {0: Relation(frozenset({"topology.world_size"})), 1: Relation()}
    first_pass = {5: record(5, attempt=1), 6: record(6), 7: record(7, attempt=1)}
    replay = Replay(first_pass, relations, 1e-2)
    assert found(replay, record(5, loss=3.6876)) == [("loss", "halt")]
    assert found(replay, record(6, loss=3.626)) == []
    assert found(replay, record(7, loss=3.563)) == []


def test_a_mismatch_reads_with_its_bits(record):
    """Step, key, both values, exact bits and the attempt it is measured by."""
    (mismatch,) = Replay({6: record(6)}, EXACT, 0.0).compare(record(6, loss=3.5))
    assert str(mismatch) == (
        "step 6: loss is 3.5 (0x1.c000000000000p+1), was 3.625 (0x1.d000000000000p+1) in attempt 0"
    )


def test_every_compared_key_has_a_meaning_and_a_remedy():
    """Nobody is left with two numbers and no next step."""
    assert list(MEANINGS) == [
        "samples_seen", "batch_digest", "tokens", "updates", "learning_rate", "loss_scale", "loss",
        "grad_norm",
    ]  # fmt: skip
    assert all(meaning and remedy for meaning, remedy in MEANINGS.values())


def test_steps_that_were_rolled_back_are_no_measure(record):
    """After going back to step 7, step 8 is compared with nothing."""
    replay = Replay({n: record(n) for n in (6, 7, 8)}, EXACT, 0.0)
    replay.forget_after(7)
    assert replay.compare(record(8, loss=9.0)) == []
    assert replay.last_step == 7
    replay.forget_after(0)
    assert replay.last_step == 0
