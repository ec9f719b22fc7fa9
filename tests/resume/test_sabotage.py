# SPDX-License-Identifier: Apache-2.0
"""Every fault planted in a resume is found by the check that owns it, by name, and ends the run.

Real processes of the recipe (tests/recipe_server.py) go on from a run that was killed; the faults
are in tests/resume/plants.py; a loss scale that was reset is found in
tests/unit/resume/test_probation.py. `python -m tests.resume.sabotage_table` prints what a
comparison of losses alone makes of them.
"""

import json
import shutil

import pytest

from tests.fix64 import options, write_rows
from tests.reading import assert_released, checkpoint_steps, outcomes, resume_report, run_json
from tests.recipe_server import run_recipe
from tests.resume.plants import PLANTS

pytestmark = pytest.mark.faults
SLOW = {"max_steps": 40, "save_steps": 18, "logging_steps": 50}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Gives the words of a run, and a function that makes its folder as a SIGKILL left it."""
    folder = tmp_path_factory.mktemp("sabotage")
    data, made = write_rows(folder / "rows.jsonl"), {}

    def words(run, **changed):
        values = {"save_steps": 3, "max_steps": 14, **changed}
        return options(data, run, **values)

    def make(path, *, world_size=1, paced=False, **changed):
        key = (world_size, paced, json.dumps(changed, sort_keys=True))
        if key not in made:
            run = folder / f"base-{len(made)}"
            step = 19 if paced else 8
            ended = run_recipe(
                words(run, **changed),
                world_size=world_size,
                plant="paced" if paced else None,
                env={"MPRECIPES_FAULT": f"kill@step:{step}"},
            )
            assert ended.codes == [-9] * world_size, ended.output
            made[key] = run
        shutil.copytree(made[key], path)
        return words(path, **changed)

    return make


def owners(report):
    """Gives the checks that did not pass, by verdict."""
    return {
        check["name"]: check["verdict"]
        for check in report["checks"]
        if check["verdict"] in ("failed", "warned") and check["name"] != "replay"
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_clean_resume_passes(killed, tmp_path, world_size):
    """Without a fault the same launch is released and finishes: the faults are what is found."""
    run = tmp_path / "run"
    ended = run_recipe(killed(run, world_size=world_size, precision="fp32"), world_size=world_size)
    assert ended.codes == [0] * world_size, ended.output
    report = resume_report(run, 1)
    assert_released(report)
    assert [check["name"] for check in report["checks"]] == [
        "bytes", "contract", "weights", "optimizer", "data_order", "communication", "throughput",
        "replay",
    ]  # fmt: skip
    assert owners(report).keys() <= {"throughput"}
    assert (report["step"], report["replayed_steps"], report["observed_steps"]) == (6, 2, 5)


HALTING = [p for p in PLANTS if p.name not in ("rank_one_slow", "collective_hangs")]


@pytest.mark.parametrize("plant", HALTING, ids=lambda plant: plant.name)
def test_a_fault_is_found_by_its_owner(killed, tmp_path, plant):
    """Exit 4, and the report names the check; nothing was deleted and nothing was saved as good."""
    run = tmp_path / "run"
    words = killed(run, world_size=plant.world_size, precision=plant.precision)
    ended = run_recipe(words, world_size=plant.world_size, plant=plant.name)
    assert ended.codes == [4] * plant.world_size, ended.output
    report = resume_report(run, 1)
    assert report["verdict"] == "halted"
    assert owners(report)[plant.owner] == "failed", owners(report)
    assert plant.owner in run_json(run)["attempts"][-1]["error"]
    assert outcomes(run)[-1] == "halted"
    assert checkpoint_steps(run) == [3, 6]


def test_a_slow_rank_is_found_and_named(killed, tmp_path):
    """Steps take 30 % longer because of rank 1: a warning that names it, and the run goes on."""
    run = tmp_path / "run"
    words = killed(run, world_size=2, paced=True, precision="fp32", **SLOW)
    ended = run_recipe([*words, "--max_steps", "40"], world_size=2, plant="rank_one_slow")
    assert ended.codes == [0, 0], ended.output
    report = resume_report(run, 1)
    assert (report["verdict"], owners(report)) == (
        "released_with_warnings", {"throughput": "warned"},
    )  # fmt: skip
    (row,) = (check for check in report["checks"] if check["name"] == "throughput")
    found = row["found"]["tokens_per_second"]
    assert 0.1 < found["slower by"] < 0.4
    (slow,) = found["slow ranks"]
    assert slow.startswith("rank 1: ")


def test_a_collective_that_hangs_ends_the_others(killed, tmp_path):
    """Rank 1 never comes: rank 0 gives up after the limit, with exit 4, and says so."""
    run = tmp_path / "run"
    words = killed(run, world_size=2, precision="fp32")
    words += ["--probation", json.dumps({"communication_seconds": 2.0})]
    ended = run_recipe(words, world_size=2, plant="collective_hangs", grace=2)
    assert ended.codes == [4, -9], ended.output
    assert ended.seconds < 55  # its own limit, not the 60 s that are the default
    assert "rank 0 asked the others: communication: all_reduce is" in ended.output
    assert "expected: known answers within 2 s" in ended.output
    report = resume_report(run, 1)
    assert (report["verdict"], owners(report)) == ("halted", {"communication": "failed"})
