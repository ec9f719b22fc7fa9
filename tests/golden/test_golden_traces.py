# SPDX-License-Identifier: Apache-2.0
"""A recipe's numbers do not change unless its major version says so."""

import json

import pytest

from mprecipes.identity.recipe import read_recipe
from tests.fix64 import RECIPE
from tests.golden.regenerate import PRECISIONS, made_with, record, trace_path

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}


def differences(golden, found, *, bitwise):
    """Gives every value that is not what the golden trace holds."""
    wrong = [
        f"step {step}: batch digest {a} -> {b}"
        for step, (a, b) in enumerate(
            zip(golden["batch_digest"], found["batch_digest"], strict=True), 1
        )
        if a != b
    ]
    for key in ("loss", "grad_norm"):
        for step, (a, b) in enumerate(zip(golden[key], found[key], strict=True), start=1):
            was, now = float.fromhex(a), float.fromhex(b)
            allowed = 0.0 if bitwise else TOLERANCES[golden["precision"]] * abs(was)
            if abs(now - was) > allowed:
                wrong.append(f"step {step}: {key} {was!r} -> {now!r}")
    return wrong


@pytest.mark.launch
@pytest.mark.parametrize("precision", PRECISIONS)
def test_trace_is_the_golden_one(precision, tmp_path, capsys):
    """Ten steps: bitwise on the recorded Python, torch and CPU, else within 1e-5 or 1e-2."""
    path = trace_path(precision)
    assert path.exists(), f"{path.name} is missing: a new major version needs `make golden`"
    golden, found = json.loads(path.read_text()), record(precision, tmp_path)
    bitwise = golden["made_with"] == made_with()
    with capsys.disabled():
        how = (
            "bitwise"
            if bitwise
            else f"within {TOLERANCES[precision]:g} (made with {golden['made_with']})"
        )
        print(f"\n{path.name}: compared {how}")
    wrong = differences(golden, found, bitwise=bitwise)
    version = read_recipe(RECIPE).version
    assert not wrong, (
        f"{RECIPE.name} {version} gives another trace; if that is meant, raise MAJOR, add a "
        f"CHANGELOG entry and run `make golden`:\n" + "\n".join(wrong)
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_planted_change_is_seen(precision):
    """Sabotage: one ulp is a bitwise difference; 2 % exceeds every tolerance."""
    golden = json.loads(trace_path(precision).read_text())
    loss = float.fromhex(golden["loss"][4])
    ulp = {
        **golden,
        "loss": [*golden["loss"][:4], (loss * (1 + 2**-52)).hex(), *golden["loss"][5:]],
    }
    assert len(differences(golden, ulp, bitwise=True)) == 1
    assert differences(golden, ulp, bitwise=False) == []
    far = {**golden, "loss": [*golden["loss"][:4], (loss * 1.02).hex(), *golden["loss"][5:]]}
    assert len(differences(golden, far, bitwise=False)) == 1
