# SPDX-License-Identifier: Apache-2.0
"""How a launch can end otherwise: finished already, a longer horizon, not finite, out of memory."""

import pytest
from safetensors.torch import load_file

from tests.fix64 import RECIPE, options
from tests.launching import launch, run_command
from tests.reading import (
    assert_released,
    attempt_lines,
    checkpoint_steps,
    journal,
    outcomes,
    resume_report,
    run_json,
    same_bits,
    tensors,
)

pytestmark = pytest.mark.launch

# With seed 1234 row 58 is sample 22; where 2 ranks take 4 rows each, that is step 3, rank 1, 20-23.
PLANT = """
_compute_loss, _build_model, _main, _models = compute_loss, build_model, main, []


def compute_loss(model, batch):
    loss = _compute_loss(model, batch)
    if any(bytes(ids[1:3]) == b"58" for ids in batch["input_ids"].tolist()):
        {found}
    return loss


def build_model(config):
    _models.append(_build_model(config))
    return _models[-1]


def main():
    import os
    import signal

    from safetensors.torch import save_file

    try:
        _main()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, once another rank is gone
        weights = {{"weights/" + name: p.detach() for name, p in _models[0].named_parameters()}}
        save_file(weights, os.environ["WEIGHTS"] + os.environ["RANK"])


if __name__ == "__main__":
"""
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


def planted(folder, found):
    """Writes a copy of the recipe that does `found` at row 58 and keeps its last weights."""
    source, main = RECIPE.read_text(), 'if __name__ == "__main__":\n'
    assert source.count(main) == 1
    path = folder / "planted.py"
    path.write_text(source.replace(main, PLANT.format(found=found)))
    return path


def test_finished_and_longer(tmp_path, fix64):
    """A torn journal line is dropped and counted; finished is finished; longer needs its flag."""
    run = tmp_path / "run"
    words = options(fix64, run, max_steps=10)
    launch(RECIPE, words, env={"MPRECIPES_FAULT": "kill@step:8"})
    file = run / "journal" / "attempt-0000.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    done = launch(RECIPE, words)
    assert done.returncode == 0, done.output
    report = resume_report(run, 1)
    assert report["torn_journal_lines"] == 1
    assert (report["step"], report["replayed_steps"]) == (5, 2)
    assert_released(report)
    assert list(journal(run)) == [*range(1, 11)]

    before = run_json(run)
    again = launch(RECIPE, words)
    assert again.returncode == 0
    assert "RunFinished: " in again.output
    assert "this run finished all 10 steps at " in again.output
    assert "next: train longer with a larger --max_steps" in again.output
    assert run_json(run) == before
    assert sorted(path.name for path in (run / "journal").iterdir()) == [
        "attempt-0000.jsonl", "attempt-0001.jsonl",
    ]  # fmt: skip

    longer = options(fix64, run, max_steps=13)
    refused = launch(RECIPE, longer)
    assert refused.returncode != 0
    assert "ContractRefused: " in refused.output
    assert "max_steps: 10 -> 13" in refused.output
    assert "--accept changed_max_steps" in refused.output
    entry = run_json(run)["attempts"][-1]
    assert (entry["outcome"], entry["exit_code"]) == ("refused", 3)
    assert run_command(["mprecipes", "status", run]).returncode == 3

    done = launch(RECIPE, [*longer, "--accept", "changed_max_steps"])
    assert done.returncode == 0, done.output
    assert [line["step"] for line in attempt_lines(run, 3)] == [11, 12, 13]
    assert checkpoint_steps(run)[-1] == 13
    assert outcomes(run) == ["killed", "finished", "refused", "finished"]
    assert run_json(run)["horizon"] == 13
    (change,) = resume_report(run, 3)["contract_changes"]
    assert (change["field"], change["old"], change["new"]) == ("max_steps", 10, 13)


def test_a_loss_that_is_not_finite(tmp_path, fix64):
    """Exit 5 names step, rank and samples; weights are those of the step before, on both ranks."""
    run, recipe = tmp_path / "run", planted(tmp_path, "loss = loss * math.inf")
    words = options(fix64, run, max_steps=6, save_steps=1)
    done = launch(recipe, words, num_processes=2, env={"WEIGHTS": str(tmp_path / "weights-")})
    assert done.returncode != 0
    (entry,) = run_json(run)["attempts"]
    assert (entry["outcome"], entry["exit_code"], entry["step"]) == ("numerics", 5, 2), done.output
    assert entry["error"].startswith(
        "rank 0: NumericsError: step 3: loss inf on rank 1, samples 20-23; "
        "first in model.norm, in precision bf16\n"
    )
    assert "expected: a finite loss and gradient norm; the update was not applied" in done.output
    assert "next: launch again: the run continues before this step" in done.output
    assert list(journal(run)) == checkpoint_steps(run) == [1, 2]
    before = {k: v for k, v in tensors(run, 2).items() if k.startswith("weights/")}
    for rank in "01":
        after = load_file(tmp_path / f"weights-{rank}")
        assert after.keys() == before.keys()
        assert all(same_bits(after[name], before[name]) for name in before)
    assert run_command(["mprecipes", "status", run]).returncode == 5


def test_out_of_memory_on_one_rank(tmp_path, fix64):
    """The outcome is the cause with what to try, not the broken connection it is for rank 0."""
    recipe = planted(tmp_path, f"raise torch.OutOfMemoryError({OUT_OF_MEMORY!r})")
    run = tmp_path / "run"
    words = options(fix64, run, max_steps=6, save_steps=1)
    done = launch(recipe, words, num_processes=2, env={"WEIGHTS": str(tmp_path / "weights-")})
    assert done.returncode != 0
    (entry,) = run_json(run)["attempts"]
    assert (entry["outcome"], entry["exit_code"]) == ("out_of_memory", 1), done.output
    assert f"OutOfMemory: rank 1, after step 2: {OUT_OF_MEMORY}" in entry["error"]
    assert "next: launch again with --per_device_train_batch_size 2; or " in entry["error"]
    assert f"OutOfMemory: rank 1, after step 2: {OUT_OF_MEMORY}" in done.output
    assert checkpoint_steps(run) == [1, 2]
