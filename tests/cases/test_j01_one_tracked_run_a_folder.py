# SPDX-License-Identifier: Apache-2.0
"""Cases J01, J02 and J05: every requeue opened another run, dropped repeated steps, or began twice.

Reports: huggingface/accelerate#2653, huggingface/finetrainers#188 (J01); wandb/wandb#5632,
wandb/wandb#9449 (J02); huggingface/accelerate#3818, wandb/wandb#6480 (J05).
"""

import pytest

from mprecipes import read_metrics
from tests.reading import run_json
from tests.wandb_reading import config, history, records, segments

pytestmark = pytest.mark.launch
SAVE_STEPS = 50


def logged(segment):
    return [row for row in history(segment) if "train/loss" in row]


def local(run):
    lines, torn = read_metrics(run / "metrics.jsonl")
    assert torn == 0
    return [line for line in lines if "train/loss" in line]


def test_j01_every_segment_is_the_same_run(tracked_cut, tracked_two):
    """Cut three times: three segments under the id of run.json; another folder has another id."""
    ids = [records(segment, "run")[0]["run_id"] for segment in segments(tracked_cut)]
    assert ids == [run_json(tracked_cut)["wandb_id"]] * 3
    assert run_json(tracked_two.path)["wandb_id"] not in ids


def test_j02_no_row_goes_back_and_none_is_dropped(tracked_cut):
    """Each attempt has its steps without a gap, repeated ones too; W&B's own step only rises."""
    last = 0
    for attempt, segment in enumerate(segments(tracked_cut)):
        rows = logged(segment)
        steps = [row["train/step"] for row in rows]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        assert steps[0] % SAVE_STEPS == 1
        assert len(steps) >= 30
        assert steps[0] <= last + 1
        last = max(line["step"] for line in local(tracked_cut) if line["attempt"] == attempt)
        # A kill costs W&B's file what was logged in the last second; the end of a run nothing.
        assert attempt < 2 or steps[-1] == last
        assert {row["resume/attempt"] for row in rows} == {attempt}
        own = [row["_step"] for row in history(segment)]
        assert own == sorted(set(own))


def test_j02_the_local_file_has_every_step_once_after_the_last_writer_wins(tracked_cut):
    """No step is missing; those trained twice have equal losses, norms and rates, bit for bit."""
    names = ("train/loss", "train/grad_norm", "train/learning_rate")
    passes: dict[int, list[tuple[float, ...]]] = {}
    for line in local(tracked_cut):
        passes.setdefault(line["step"], []).append(tuple(line[name] for name in names))
    assert sorted(passes) == list(range(1, max(passes) + 1))
    assert any(len(values) == 2 for values in passes.values())
    assert all(len(set(values)) == 1 for values in passes.values())


def test_w_and_b_and_the_local_file_agree_value_by_value(tracked_cut):
    """What W&B holds of an attempt is what metrics.jsonl holds of it."""
    lines = {(line["attempt"], line["step"]): line for line in local(tracked_cut)}
    for segment in segments(tracked_cut):
        for row in logged(segment):
            line = lines[row["resume/attempt"], row["train/step"]]
            names = [name for name in line if "/" in name]
            assert {name: row[name] for name in names} == {name: line[name] for name in names}


def test_j05_one_folder_a_process_start_with_config_and_step_one(tracked_cut):
    """Three starts, three folders, each with the config; the first row of all is step 1."""
    assert len(run_json(tracked_cut)["attempts"]) == len(segments(tracked_cut)) == 3
    assert logged(segments(tracked_cut)[0])[0]["train/step"] == 1
    for segment in segments(tracked_cut):
        known = config(segment)
        assert (known["recipe"], known["precision"]) == ("pretrain_causal_lm", "fp32")
        assert (known["topology.world_size"], known["learning_rate"]) == (1, 0.001)
        assert len(known["data_fingerprint"]) >= 16
        assert "git_commit" in known


def test_a_preempted_run_says_so(tracked_cut):
    """The last process was asked to stop: an alert, exit code 75, and the same in run.json."""
    segment = segments(tracked_cut)[-1]
    (alert,) = records(segment, "alert")
    assert (alert["title"], alert["level"]) == ("preempted: run", "WARN")
    assert "is saved" in alert["text"]
    assert [record["exit_code"] for record in records(segment, "exit")] == [75]
    assert run_json(tracked_cut)["attempts"][-1]["exit_code"] == 75
