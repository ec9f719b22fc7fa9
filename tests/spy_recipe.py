# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe file and records, independently of the product, which rows its model trained on.

Usage under accelerate launch: spy_recipe.py RECIPE.py OPTIONS...; `SPY_FILE` names the JSONL file,
to which every rank appends {"rank", "rows", "loss"} per micro-batch; rows are read from the tokens
themselves: each text of the FIX-64 data set begins with `rNN`. Probes, whose gradients are thrown
away, are not training and are left out.
"""

import importlib.util
import json
import os
import sys

import mprecipes as mp


def main() -> None:
    path = sys.argv.pop(1)
    spec = importlib.util.spec_from_file_location("recipe", path)
    recipe = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = recipe  # dataclasses look their module up
    spec.loader.exec_module(recipe)
    compute_loss, measure = recipe.compute_loss, recipe.measure
    probes = []

    def measured(*args):
        probes.append(args[0])
        try:
            return measure(*args)
        finally:
            probes.pop()

    def recorded(model, batch):
        loss = compute_loss(model, batch)
        if probes:
            return loss
        rows = [int(bytes(ids[1:3]).decode()) for ids in batch["input_ids"].tolist()]
        line = json.dumps(
            {"rank": int(os.environ.get("RANK", "0")), "rows": rows, "loss": loss.item()}
        )
        with open(os.environ["SPY_FILE"], "a", encoding="utf-8") as file:
            file.write(line + "\n")
        return loss

    recipe.compute_loss, recipe.measure = recorded, measured
    with mp.exit_codes():
        recipe.main()


if __name__ == "__main__":
    main()
