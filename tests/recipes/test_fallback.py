# SPDX-License-Identifier: Apache-2.0
"""A run whose numbers keep failing goes down rung by rung, in this process, and says so."""

import json

import pytest
import torch

from mprecipes.errors import FellBack, NumericsError
from tests.fix64 import options, write_rows
from tests.inprocess import Probing, train
from tests.reading import journal, manifest, run_json

PLACE = "model.layers.1.mlp.down_proj"


def broken(works, after=3):
    """Gives a change that makes PLACE overflow after so many forwards, unless `works` says so."""

    def change(recipe):
        build_model, calls, probing = recipe.build_model, [], Probing(recipe)

        def build(config):
            model = build_model(config)

            def hook(module, inputs, output):
                if probing.now:
                    return
                calls.append(1)
                if len(calls) > after and not works(output):
                    output.register_hook(lambda gradient: gradient * float("inf"))

            model.get_submodule(PLACE.rpartition(".")[0]).register_forward_hook(hook)
            return model

        recipe.build_model = build

    return change


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


def words(rows, run, precision="fp16", **numerics):
    policy = {"on_numeric_failure": "fallback", "max_consecutive_skips": 2, **numerics}
    return [
        *options(rows, run, precision=precision, max_steps=8, save_steps=2,
                 numerics=json.dumps(policy)),
        "--allow_unvalidated_fp8",
    ]  # fmt: skip


def test_one_rung_is_enough(rows, tmp_path, capsys):
    """FP16 overflows in one module; held in FP32 the run goes on and ends, with it on record."""
    run = tmp_path / "run"
    first = train(words(rows, run), broken(lambda output: output.dtype == torch.float32))
    assert isinstance(first.error, FellBack) and first.error.exit_code == 75
    (attempt,) = run_json(run)["attempts"]
    rung = attempt["fallback"]
    assert (rung["rung"], rung["modules"], rung["step"]) == ("keep_in_fp32", [PLACE], 5)
    again = train(words(rows, run), broken(lambda output: output.dtype == torch.float32))
    assert again.error is None
    assert f"fallback since step 5: {PLACE} held in FP32" in capsys.readouterr().out
    facts = manifest(run, 8)["precision"]
    assert facts["mode"] == "fp16" and facts["kept_in_fp32"] == [PLACE]
    assert facts["fallback"] == [rung]
    assert max(journal(run)) == 8 and [a["outcome"] for a in run_json(run)["attempts"]] == [
        "fell_back", "finished",
    ]  # fmt: skip


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_every_rung_and_the_bottom(rows, tmp_path, precision):
    """A failure that nothing helps: four launches, a rung each, then exit 5."""
    run, errors = tmp_path / "run", []
    for launch in range(5):
        done = train(
            words(rows, run, precision), broken(lambda output: False, after=0 if launch else 3)
        )
        errors.append(done.error)
    assert [type(error) for error in errors] == [FellBack] * 4 + [NumericsError]
    rungs = [attempt["fallback"] for attempt in run_json(run)["attempts"][:4]]
    assert [rung["rung"] for rung in rungs] == [
        "keep_in_fp32", "precision", "learning_rate", "precision",
    ]  # fmt: skip
    assert [rung.get("mode") for rung in rungs] == [None, "bf16", None, "fp32"]
    assert "every rung of the fallback was taken" in errors[-1].found
