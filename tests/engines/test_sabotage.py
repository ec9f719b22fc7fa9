# SPDX-License-Identifier: Apache-2.0
"""Ten faults planted in a resume under sharding: each is found by the check that owns it.

The faults and their owners are those of tests/resume; here two forked ranks hold parts of masters
and moments. Three of them are planted in an SFT run too: padded rows in which few positions are
targets. `make test` has one row an engine, `make test-full` the whole table.
"""

import itertools
import shutil

import pytest

from tests import sft
from tests.engine_env import engine_env
from tests.fix64 import options, write_rows
from tests.reading import assert_released, checkpoint_steps, outcomes, resume_report
from tests.recipe_server import run_recipe
from tests.resume.plants import PLANTS

pytestmark = pytest.mark.faults
ENGINES = ("fsdp2", "zero2", "zero3")
TEN = [
    "weight_off_by_one_ulp", "moments_zeroed", "step_count_reset", "schedule_shifted",
    "position_off_by_one", "seed_changed", "other_data", "streams_swapped", "rank_one_is_behind",
    "dropout_off",
]  # fmt: skip
ON_SFT = ["weight_off_by_one_ulp", "moments_zeroed", "schedule_shifted"]
COVERING = [
    ("fsdp2", "pretrain_causal_lm", "rank_one_is_behind"),
    ("zero2", "pretrain_causal_lm", "moments_zeroed"),
    ("zero3", "pretrain_causal_lm", "weight_off_by_one_ulp"),
]
REST = [
    case
    for case in (
        *itertools.product(ENGINES, ["pretrain_causal_lm"], ["nothing", *TEN]),
        *itertools.product(ENGINES, ["sft_chat"], ["nothing", *ON_SFT]),
    )
    if case not in COVERING
]
OWNERS = {plant.name: plant.owner for plant in PLANTS}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Gives a function that makes the folder of a run as a SIGKILL at step 8 left it."""
    folder, made = tmp_path_factory.mktemp("sabotage"), {}
    data = write_rows(folder / "rows.jsonl")
    chats = sft.write_chats(folder / "chats.jsonl")

    def words(recipe, run):
        common = {"save_steps": 3, "max_steps": 14, "precision": "fp32"}
        if recipe == "sft_chat":
            return sft.options(chats, run, chat={"batching": "plain"}, **common)
        return options(data, run, per_device_train_batch_size=2, global_batch_size=8, **common)

    def make(engine, recipe, path):
        if (engine, recipe) not in made:
            run = made[engine, recipe] = folder / f"{engine}-{recipe}"
            env = {**engine_env(engine), "MPRECIPES_FAULT": "kill@step:8"}
            ended = run_recipe(words(recipe, run), recipe=recipe, world_size=2, env=env)
            assert ended.codes == [-9, -9], ended.output
        shutil.copytree(made[engine, recipe], path)
        return words(recipe, path)

    return make


def check(killed, run, engine, recipe, plant):
    words = killed(engine, recipe, run)
    ended = run_recipe(
        words, recipe=recipe, world_size=2, plant=plant, env=engine_env(engine), timeout=200
    )
    report = resume_report(run, 1)
    bad = {
        check["name"]: check["verdict"]
        for check in report["checks"]
        if check["verdict"] in ("failed", "warned") and check["name"] != "replay"
    }
    if plant == "nothing":
        assert ended.codes == [0, 0], ended.output
        assert_released(report)
        assert (report["step"], report["replayed_steps"]) == (6, 2)
        return
    assert ended.codes == [4, 4], ended.output
    assert report["verdict"] == "halted"
    assert bad[OWNERS[plant]] == "failed", bad
    assert outcomes(run)[-1] == "halted"
    assert checkpoint_steps(run) == [3, 6]


@pytest.mark.parametrize(("engine", "recipe", "plant"), COVERING)
def test_a_fault_under_sharding_is_found(killed, tmp_path, engine, recipe, plant):
    """One rank behind under FSDP2, moments under ZeRO-2, one bit of a weight under ZeRO-3."""
    check(killed, tmp_path / "run", engine, recipe, plant)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "recipe", "plant"), REST)
def test_the_rest_of_the_table(killed, tmp_path, engine, recipe, plant):
    """Ten faults, and none, on each engine; three and none in an SFT run."""
    check(killed, tmp_path / "run", engine, recipe, plant)


def test_ranks_that_built_other_weights_are_refused_under_fsdp2(tmp_path):
    """Each would shard a model of its own: refused before that, naming rank and tensor."""
    data = write_rows(tmp_path / "rows.jsonl")
    words = options(data, tmp_path / "run", precision="fp32", per_device_train_batch_size=2)
    ended = run_recipe(
        words, world_size=2, plant="rank_one_built_otherwise", env=engine_env("fsdp2")
    )
    assert ended.codes == [2, 2], ended.output
    assert "initial weights differ from rank 0's: rank 1 in model.embed_tokens.w" in ended.output
    assert not (tmp_path / "run" / "checkpoints").exists() or not checkpoint_steps(tmp_path / "run")
