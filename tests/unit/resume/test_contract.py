# SPDX-License-Identifier: Apache-2.0
"""What may differ between two launches of one run, and how a refusal reads."""

import pytest

from mprecipes.errors import ConfigError, ContractRefused
from mprecipes.resume.contract import Difference, check_accepted, check_contract, compare

PARAMS = {"params": {"wte": "float32"}, "shapes": {"wte": [64, 32]}}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"recipe__name": "big"}, "recipe: tiny -> big   cannot be changed"),
        ({"recipe__version": "2.0.0"}, "recipe_version: 1.0.0 -> 2.0.0   changed_recipe_version"),
        ({"data__fingerprint": "beef"}, "data: f00d -> beef   changed_data"),
        ({"data__num_sequences": 65}, "data_rows: 64 -> 65   changed_data"),
        ({"data__seed": 2}, "seed: 1 -> 2   changed_seed"),
        ({"data__global_batch": 16}, "global_batch: 8 -> 16   changed_global_batch"),
        ({"data__micro_batch": 2}, "micro_batch: 4 -> 2   changed_micro_batch"),
        ({"precision__mode": "bf16"}, "precision: fp32 -> bf16   changed_precision"),
        ({"topology__sharding": "zero2"}, "engine: ddp -> zero2   changed_engine"),
        (
            {"config__learning_rate": 0.01},
            "learning_rate: 0.001 -> 0.01   changed_learning_rate",
        ),
        ({"config__weight_decay": 0.0}, "weight_decay: 0.1 -> 0.0   changed_weight_decay"),
        ({"config__torch_compile": True}, "torch_compile: False -> True   changed_torch_compile"),
        (
            {"config__model_config": {"hidden_size": 64}},
            "model_config: hidden_size 32 -> hidden_size 64   cannot be changed",
        ),
    ],
)
def test_each_field_is_refused_by_name_and_allowed_only_by_its_flag(facts, classes, change, line):
    """One difference is one line with old, new and the way out; only its own flag lets it by."""
    text, _, flag = line.rpartition("   ")
    way_out = (
        f"allow with --accept {flag}"
        if flag.startswith("changed_")
        else "cannot be changed: start a new --output_dir"
    )
    with pytest.raises(ContractRefused) as error:
        check_contract(facts(), facts(**change), classes, [], where="manifest.json")
    assert error.value.found.splitlines()[1:] == [f"    {text}   {way_out}"]
    assert error.value.expected == "the settings the run was interrupted with"
    assert error.value.where == "manifest.json"
    assert error.value.exit_code == 3
    if not flag.startswith("changed_"):
        assert error.value.action == (
            "undo the changes, or start a new run with another --output_dir"
        )
        return
    assert error.value.action == f"undo the changes, or add --accept {flag} to mean them"
    allowed = check_contract(facts(), facts(**change), classes, [flag], where="manifest.json")
    assert [difference.flag for difference in allowed] == [flag]
    other = "changed_seed" if flag != "changed_seed" else "changed_data"
    with pytest.raises(ContractRefused):
        check_contract(facts(), facts(**change), classes, [other], where="manifest.json")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"topology__world_size": 1}, "topology.world_size"),
        ({"environment__torch": "2.14.0"}, "environment.torch"),
        ({"config__save_steps": 3}, "save_steps"),
        ({"config__gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"config__dataset": "moved/a.txt"}, "dataset"),
        ({"config__precision": "fp32"}, "precision"),
        ({"recipe__version": "1.1.0"}, "recipe_version"),
        ({"recipe__sha256": "bb"}, "recipe_sha256"),
    ],
)
def test_what_does_not_change_training_is_noted_and_needs_no_flag(facts, classes, change, field):
    """World size, environment, free options, and options that produced the same fact go through."""
    differences = check_contract(facts(), facts(**change), classes, [], where="")
    assert [(d.field, d.kind, d.flag) for d in differences] == [(field, "free", None)]


def test_all_differences_are_listed_at_once(facts, classes):
    """The user fixes everything in one go; the action repeats flags already given."""
    new = facts(
        data__seed=2, config__seed=2, config__learning_rate=0.01, data__micro_batch=2,
        data__global_batch=16,
    )  # fmt: skip
    with pytest.raises(ContractRefused) as error:
        check_contract(facts(), new, classes, ["changed_micro_batch"], where="manifest.json")
    assert error.value.found.splitlines()[1:] == [
        "    seed: 1 -> 2   allow with --accept changed_seed",
        "    global_batch: 8 -> 16   allow with --accept changed_global_batch",
        "    learning_rate: 0.001 -> 0.01   allow with --accept changed_learning_rate",
    ]
    assert error.value.action == (
        "undo the changes, or add --accept changed_micro_batch changed_seed changed_global_batch "
        "changed_learning_rate to mean them"
    )


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        (
            {"config__dataset": "b.txt", "config__seq_length": 32, "data__fingerprint": "beef"}
            | {"data__num_sequences": 32},
            ["changed_data"],
        ),
        (
            {"config__per_device_train_batch_size": 2, "config__gradient_accumulation_steps": 2}
            | {"data__micro_batch": 2},
            ["changed_micro_batch"],
        ),
        ({"config__precision": "bf16", "precision__mode": "bf16"}, ["changed_precision"]),
        ({"config__seed": 2, "data__seed": 2}, ["changed_seed"]),
        ({"config__seed": 2}, ["changed_seed"]),
    ],
)
def test_one_change_never_needs_two_flags(facts, classes, change, flags):
    """An option and the fact it produces are one difference under the fact's flag."""
    differences = compare(facts(), facts(**change), classes)
    assert [d.flag for d in differences if d.flag] == flags
    assert len({d.field for d in differences}) == len(differences)


def test_an_option_the_recipe_fixed_is_refused_even_where_the_fact_has_a_flag(facts, classes):
    """must_match is the recipe's word, and the flag that could not help is not offered."""
    new = facts(config__seq_length=32, data__fingerprint="beef")
    differences = compare(facts(), new, {**classes, "seq_length": "must_match"})
    assert differences == [Difference("seq_length", "must_match", 16, 32)]


def test_options_that_came_or_went_with_a_version_are_noted(facts, classes):
    """A minor version may add an option; its absence in the manifest is no refusal."""
    old, new = facts(), facts()
    del old["config"]["torch_compile"]
    del new["config"]["seq_length"]
    assert compare(old, new, classes) == [
        Difference("torch_compile", "free", "(absent)", False),
        Difference("seq_length", "free", 16, "(absent)"),
    ]


def test_a_fact_missing_in_the_manifest_is_a_difference(facts, classes):
    """What was not stored cannot be shown equal."""
    old = facts()
    del old["data"]["fingerprint"]
    with pytest.raises(ContractRefused) as error:
        check_contract(old, facts(), classes, [], where="")
    assert "data: (absent) -> f00d   allow with --accept changed_data" in error.value.found


def test_a_tuple_is_the_list_it_was_stored_as(facts, classes):
    """What JSON does to a value is no difference."""
    stored = facts(config__model_config={"sizes": [1, 2]})
    assert compare(stored, facts(config__model_config={"sizes": (1, 2)}), classes) == []


def test_parameters_that_differ_are_named(facts, classes):
    """Names, shapes and dtypes must match; a missing one is (absent)."""
    old = {**facts(), **PARAMS}
    new = {**facts(), "params": {"wte": "bfloat16", "b": "float32"}}
    new["shapes"] = {"wte": [64, 16], "b": [3]}
    with pytest.raises(ContractRefused) as error:
        check_contract(old, new, classes, [], where="manifest.json")
    assert error.value.found.splitlines()[1] == (
        "    params: wte float32 [64, 32], b (absent) -> wte bfloat16 [64, 16], b float32 [3]   "
        "cannot be changed: start a new --output_dir"
    )
    assert compare(old, {**facts(), **PARAMS}, classes) == []


def test_of_many_parameters_ten_are_named_and_all_are_counted(facts, classes):
    """A wholly different model does not fill the screen."""
    names = [f"layer{number}" for number in range(12)]
    sides = [
        {**facts(), "params": dict.fromkeys(names, dtype), "shapes": {name: [1] for name in names}}
        for dtype in ("float32", "float16")
    ]
    (difference,) = compare(*sides, classes)
    assert difference.field == "params (10 of 12 shown)"
    assert list(difference.old) == names[:10]


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("changed_lerning_rate", "changed_learning_rate"),
        ("changed_dataset", "changed_data"),
        ("changed_per_device_train_batch_size", "changed_global_batch or changed_micro_batch"),
        ("changed_save_steps", "changed_seed"),
    ],
)
def test_an_unknown_flag_is_refused_with_one_that_exists(classes, name, better):
    """A typing error is told, and an option judged by its fact leads to the fact's flag."""
    with pytest.raises(ConfigError) as error:
        check_accepted(["changed_seed", name], classes)
    assert error.value.found == f"--accept does not know '{name}'"
    assert "changed_recipe_version" in error.value.expected
    assert "changed_model_config" not in error.value.expected
    assert error.value.where == "accept"
    assert error.value.action == f"use --accept {better}"
    assert error.value.exit_code == 2


def test_a_difference_is_a_plain_row_for_the_report(facts, classes):
    """The report holds the same words as the console."""
    (difference,) = compare(facts(), facts(topology__world_size=1), classes)
    assert str(difference) == "topology.world_size: 2 -> 1"
    assert difference.to_dict() == {
        "field": "topology.world_size",
        "kind": "free",
        "old": 2,
        "new": 1,
        "flag": None,
    }


def test_other_frozen_weights_are_another_run(facts, classes):
    """Adapters on another base cannot go on; where nothing is frozen, nothing is compared."""
    adapted = {**facts(), "frozen": {"digest": "aa"}}
    assert compare(adapted, adapted, classes) == compare(facts(), facts(), classes) == []
    with pytest.raises(ContractRefused) as error:
        check_contract(
            adapted, {**facts(), "frozen": {"digest": "bb"}}, classes, [], where="manifest.json"
        )
    assert "frozen_weights: aa -> bb   cannot be changed" in error.value.found
    [lost] = compare(adapted, facts(), classes)
    assert (lost.field, lost.kind, lost.old, lost.new) == (
        "frozen_weights",
        "must_match",
        "aa",
        "none",
    )
