# SPDX-License-Identifier: Apache-2.0
"""M06: a comparison fixes weights, data and learning rates over the modes, and proves it.

Sources: areal-project/AReaL#1292, meta-pytorch/torchtune#2254.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from mprecipes.tools.compare_plan import parse_arms, plan_jobs, slug_of
from tests.fix64 import ROOT, options, write_rows
from tests.launching import Launched, run_command
from tests.reading import journal, run_json
from tests.recipe_server import run_recipe

pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]
SEEDS = (0, 1)
NUM_STEPS = 50
GOOD = ["bf16", "fp16", "fp16:scale=1", "fp8"]
PLANTED = [
    "bf16:masters=bf16", "bf16:grad_accum=bf16", "bf16:order=1",
    "fp16:scale=1e-7",  # gradients too small for FP16, lost to underflow
]  # fmt: skip
ARMS = ["fp32", "fp32#2", *GOOD, *PLANTED]


class Compared(NamedTuple):
    """A comparison's folder, its report.json, and what the command said."""

    folder: Path
    data: dict
    done: Launched

    def run(self, arm: str, seed: int) -> Path:
        return self.folder / slug_of(arm) / f"seed-{seed}"

    def arm(self, name: str) -> dict:
        return next(arm for arm in self.data["arms"] if arm["arm"] == name)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """50 steps of FIX-64 in FP32, FP32 again, every other mode, and planted faults; two seeds.

    The last run is launched by the command itself; the others, with the very same words, by the
    server of forked recipes, and the command finds them finished.
    """
    home = tmp_path_factory.mktemp("m06")
    words = options(
        write_rows(home / "rows.jsonl"), home / "unused", eval_fraction=0.25, save_steps=50,
        learning_rate=3e-3, logging_steps=10,
    )  # fmt: skip
    for name in ("--output_dir", "--max_steps"):
        at = words.index(name)
        del words[at : at + 2]
    precisions = ",".join(["fp32", "fp32", *PLANTED, *GOOD])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPRECIPES_ALLOW_PLANTED", "1")
        jobs, _ = plan_jobs(
            parse_arms(precisions), SEEDS, folder=home / "out", config=None, arguments=words,
            steps=NUM_STEPS,
        )  # fmt: skip
    for job in jobs[:-1]:
        ended = run_recipe(job.words, plant="of_the_variable", env=job.variables)
        assert ended.code == 0, f"{job.label}: {ended.output}"
    command = [
        "mprecipes", "compare", "--recipe", ROOT / "tests" / "planted_recipe.py",
        "--precisions", precisions, "--seeds", "0,1", "--steps", NUM_STEPS,
        "--output_dir", home / "out", *words,
    ]  # fmt: skip
    done = run_command(command, env={"MPRECIPES_ALLOW_PLANTED": "1"}, timeout=280)
    assert (home / "out" / "report.json").exists(), done.output
    assert f"run {len(jobs)} of {len(jobs)}: {jobs[-1].label}: finished after" in done.output
    return Compared(home / "out", json.loads((home / "out" / "report.json").read_text()), done)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_mode_begins_with_the_same_weights(compared, seed):
    """One digest over all arms of a seed, another one for the other seed."""
    digests = {
        run_json(compared.run(arm, s))["attempts"][0]["initial_weights"]
        for arm in ARMS
        for s in (seed,)
    }
    assert len(digests) == 1
    other = run_json(compared.run("fp32", 1 - seed))["attempts"][0]["initial_weights"]
    assert digests != {other}


@pytest.mark.parametrize("arm", [arm for arm in ARMS[1:] if "order" not in arm])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_mode_sees_the_same_batches_at_the_same_rates(compared, arm, seed):
    """Read from the journals themselves: 50 batch digests, and the rate of each update."""
    sides = [[*journal(compared.run(name, seed)).values()] for name in ("fp32", arm)]
    digests = [[line["batch_digest"] for line in side] for side in sides]
    assert len(digests[0]) == NUM_STEPS
    assert digests[0] == digests[1]
    rates = [
        {line["updates"]: line["learning_rate"] for line in side if not line["skipped"]}
        for side in sides
    ]
    assert len(rates[1]) >= NUM_STEPS - 20  # FP16 begins with steps that it skips
    assert {update: rates[0][update] for update in rates[1]} == rates[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_fp32_against_fp32_is_exactly_zero(compared, seed):
    """The same loss at all 50 steps, to the last bit, and a gap of 0 in the report."""
    sides = [journal(compared.run(arm, seed)) for arm in ("fp32", "fp32#2")]
    assert [line["loss"] for line in sides[0].values()] == [
        line["loss"] for line in sides[1].values()
    ]
    measures = compared.arm("fp32#2")["measures"]
    assert measures["largest_gap"]["value"] == 0.0
    assert measures["loss_difference"]["by_seed"][str(seed)] == 0.0


@pytest.mark.parametrize("arm", [*GOOD, "bf16:masters=bf16"])
def test_the_first_loss_is_close_to_fp32s(compared, arm):
    """Within 2 % before any update, and not the very same number."""
    for seed in SEEDS:
        first = [journal(compared.run(name, seed))[1]["loss"] for name in ("fp32", arm)]
        assert first[1] == pytest.approx(first[0], rel=0.02)
        assert first[1] != first[0]  # else the mode is none


def test_the_report_proves_it_by_digests(compared):
    """Each condition of each pair is in the report, equal, with the digest itself."""
    rows = compared.arm("bf16")["conditions"]
    assert all(row["equal"] for row in rows)
    weights = {row["seed"]: row["expected"] for row in rows if row["what"] == "initial weights"}
    recorded = {s: run_json(compared.run("bf16", s))["attempts"][0]["initial_weights"]
                for s in SEEDS}  # fmt: skip
    assert weights == recorded
    assert len(set(recorded.values())) == len(SEEDS)
    page = (compared.folder / "report.html").read_text()
    assert all(digest in page for digest in recorded.values())


def test_another_data_order_is_refused(compared):
    """The planted arm that read other batches has no verdict, and the command says so: exit 1."""
    arm = compared.arm("bf16:order=1")
    assert arm["verdict"]["word"] == "not comparable"
    assert "batches of 50 steps" in arm["verdict"]["reason"]
    assert compared.done.returncode == 1
    assert "not comparable" in compared.done.output


def test_weights_without_masters_do_not_pass(compared):
    """Updates lost to rounding show in the loss: no arm without masters is called equivalent."""
    assert compared.arm("bf16")["verdict"]["quality"]["word"] in ("equivalent", "undecided")
    arm = compared.arm("bf16:masters=bf16")
    assert arm["verdict"]["word"] not in ("equivalent", "not comparable", "incomplete")
    assert arm["verdict"]["quality"]["word"] in ("worse", "diverges", "undecided")


def test_gradients_rounded_on_the_way_are_compared(compared):
    """The test-only arm trains: the loss of step 1 is BF16's to the bit, later ones are not."""
    for seed in SEEDS:
        sides = [journal(compared.run(arm, seed)) for arm in ("bf16", "bf16:grad_accum=bf16")]
        losses = [[line["loss"] for line in side.values()] for side in sides]
        assert losses[0][0] == losses[1][0]
        assert losses[0][-1] != losses[1][-1]
    arm = compared.arm("bf16:grad_accum=bf16")
    assert all(row["equal"] for row in arm["conditions"])
    assert arm["verdict"]["quality"]["word"] in ("equivalent", "undecided", "worse")


def test_a_static_scale_of_one_is_what_it_says(compared):
    """It stays 1; gradients of this size need no more, and the verdict says so."""
    arm = compared.arm("fp16:scale=1")
    scale = arm["measures"]["loss_scale"]
    assert (scale["lowest"], scale["highest"]) == (1.0, 1.0)
    assert arm["measures"]["skipped_steps"] == 0
    assert arm["verdict"]["quality"]["word"] in ("equivalent", "undecided")


def test_gradients_lost_to_underflow_do_not_pass(compared):
    """A static scale of 1e-7 is a scale of 1 with gradients as tiny: FP16 diverges, step named."""
    arm = compared.arm("fp16:scale=1e-7")
    assert arm["verdict"]["word"] == "diverges"
    assert arm["measures"]["grad_norm_ratio"]["mean"] < 0.9
