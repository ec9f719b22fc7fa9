# SPDX-License-Identifier: Apache-2.0
"""The drill's comparison sees one changed bit anywhere, and names the first step or element."""

from dataclasses import replace

import pytest
import torch

from mprecipes.resume.journal import StepRecord
from mprecipes.tools.drill_compare import (
    compare_journals,
    compare_tensors,
    compare_values,
    exact,
    last_pass,
)


def record(attempt: int, step: int, **changes) -> StepRecord:
    facts = StepRecord(
        attempt=attempt, step=step, updates=step, samples_seen=8 * step, tokens=504,
        batch_digest=f"{step:016x}", loss=5.0 - step / 16, grad_norm=1.5, learning_rate=1e-3 / step,
        loss_scale=None, skipped=False, step_seconds=0.1 + attempt,
    )  # fmt: skip
    return replace(facts, **changes)


def history(*spans: tuple[int, int]) -> dict[int, list[StepRecord]]:
    return {
        attempt: [record(attempt, step) for step in range(first, last + 1)]
        for attempt, (first, last) in enumerate(spans)
    }


def by_name(rows) -> dict:
    return {row.what: row for row in rows}


def test_exact_tells_bits_apart():
    """Floats become hex text, in which -0.0 is not 0.0 and a NaN is itself."""
    assert exact(0.1) == "0x1.999999999999ap-4"
    assert exact(-0.0) != exact(0.0)
    assert exact(float("nan")) == exact(float("nan"))
    assert exact(None) == "None"


def test_newest_attempt_counts():
    """Of a step two attempts reached, the record of the later one is taken."""
    steps = last_pass(history((1, 7), (5, 12)))
    assert list(steps) == list(range(1, 13))
    assert [steps[4].attempt, steps[5].attempt, steps[12].attempt] == [0, 1, 1]


def test_same_run_is_equal_in_every_row():
    """A run killed at 7, resumed from 4 and again killed at 9 compares equal, replays counted."""
    rows = compare_journals(history((1, 12)), history((1, 7), (5, 9), (9, 12)))
    assert all(row.equal for row in rows)
    assert {(row.compared, row.unit) for row in rows[:-1]} == {(12, "steps")}
    assert rows[-1].what == "replayed steps"
    assert rows[-1].compared == 4  # 5, 6, 7 by attempt 1, and 9 by attempt 2


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("samples (batch digest)", {"batch_digest": "f" * 16}),
        ("position (samples_seen)", {"samples_seen": 87}),
        ("target tokens", {"tokens": 503}),
        ("learning rate", {"learning_rate": 1e-3 / 11 * (1 + 2**-52)}),
        ("loss", {"loss": 5.0 - 11 / 16 + 2**-50}),
        ("gradient norm", {"grad_norm": 1.5 + 2**-52}),
        ("updates applied", {"updates": 10}),
    ],
)
def test_one_changed_value_is_found(what, change):
    """One last bit at step 11 of the resumed run makes its row, and only its row, different."""
    interrupted = history((1, 7), (5, 12))
    interrupted[1][6] = replace(interrupted[1][6], **change)
    rows = compare_journals(history((1, 12)), interrupted)
    assert [row.what for row in rows if not row.equal] == [what]
    row = by_name(rows)[what]
    assert row.different == 1
    assert row.first_difference is not None
    assert row.first_difference["where"] == "step 11"
    assert row.first_difference["expected"] != row.first_difference["found"]


def test_changed_replay_is_found_where_the_end_is_equal():
    """A first pass that differs from its replay shows, although the final records agree."""
    interrupted = history((1, 7), (5, 12))
    interrupted[0][5] = replace(interrupted[0][5], loss=4.0)
    rows = by_name(compare_journals(history((1, 12)), interrupted))
    assert rows["loss"].equal
    assert rows["replayed steps"].first_difference == {
        "where": "step 6, attempt 1, loss",
        "expected": "0x1.0000000000000p+2",
        "found": "0x1.2800000000000p+2",
    }


def test_missing_step_is_different():
    """A step the resumed run left out differs from one that was trained."""
    row = by_name(compare_journals(history((1, 12)), history((1, 7), (9, 12))))["loss"]
    assert (row.compared, row.different) == (12, 1)
    assert row.first_difference is not None
    assert (row.first_difference["where"], row.first_difference["found"]) == ("step 8", "no record")


def test_loss_scale_is_compared_where_there_is_one():
    """The loss scale has a row only in a run that has a scaler."""
    assert "loss scale" not in by_name(compare_journals(history((1, 2)), history((1, 2))))
    scaled = {0: [record(0, 1, loss_scale=4096.0)]}
    rows = by_name(compare_journals(scaled, {0: [record(0, 1, loss_scale=8192.0)]}))
    assert not rows["loss scale"].equal


def test_nothing_compared_is_not_equal():
    """Two empty runs prove nothing; only replays may be none."""
    rows = compare_journals({}, {})
    assert [row.what for row in rows if row.equal] == ["replayed steps"]
    assert not compare_values("anything", "steps", []).equal


def test_tensors_equal_in_bytes():
    """Equal tensors are equal element for element, NaN, scalars and bfloat16 included."""
    tensors = {
        "a": torch.tensor([1.0, float("nan")]),
        "b": torch.ones(2, 3, dtype=torch.bfloat16),
        "c": torch.tensor(7),
    }
    row = compare_tensors("parameters", tensors, {k: v.clone() for k, v in tensors.items()})
    assert row.equal
    assert (row.compared, row.unit) == (9, "elements")


def test_one_flipped_bit_in_a_tensor():
    """One flipped bit is one different element, named by tensor and index; -0.0 is not 0.0."""
    expected = {"weights/w": torch.zeros(3, 4)}
    found = {"weights/w": expected["weights/w"].clone()}
    found["weights/w"].view(torch.int32)[1, 2] ^= -(2**31)
    row = compare_tensors("parameters", expected, found)
    assert not row.equal
    assert (row.compared, row.different) == (12, 1)
    assert row.first_difference == {
        "where": "weights/w[6]", "expected": "0x0.0p+0", "found": "-0x0.0p+0",
    }  # fmt: skip


def test_tensor_of_another_kind():
    """Another shape, another dtype and an absent tensor are differences even where values agree."""
    expected = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    found = {"a": torch.ones(2, 1), "b": torch.ones(2, dtype=torch.float64)}
    row = compare_tensors("parameters", expected, found)
    assert row.different == 6
    assert row.first_difference == {
        "where": "a", "expected": "torch.float32 [2]", "found": "torch.float32 [2, 1]",
    }  # fmt: skip


def test_no_tensors_is_not_equal():
    """Checkpoints without a parameter prove nothing."""
    assert not compare_tensors("parameters", {}, {}).equal
