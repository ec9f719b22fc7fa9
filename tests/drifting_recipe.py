# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe file in which one rank's copy of a weight drifts by one unit in the last place.

Usage under accelerate launch: drifting_recipe.py RECIPE.py OPTIONS...; `DRIFT="RANK:FORWARD"` says
which rank and before which of the forwards it trains with, counted from 1; those of probes do not
count. It is the last element of the second parameter.
"""

import importlib.util
import os
import sys

import torch

import mprecipes as mp


def main() -> None:
    spec = importlib.util.spec_from_file_location("recipe", sys.argv.pop(1))
    recipe = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = recipe  # dataclasses look their module up
    spec.loader.exec_module(recipe)
    compute_loss, measure, forwards = recipe.compute_loss, recipe.measure, 0
    rank, due = map(int, os.environ["DRIFT"].split(":"))

    def drifting(model, batch):
        nonlocal forwards
        forwards += 1
        if forwards == due and int(os.environ.get("RANK", "0")) == rank:
            with torch.no_grad():
                weight = list(model.parameters())[1].view(-1)
                weight[-1] = torch.nextafter(weight[-1], torch.tensor(9.0))
        return compute_loss(model, batch)

    def measured(*args):
        nonlocal forwards
        before = forwards
        try:
            return measure(*args)
        finally:
            forwards = before

    recipe.compute_loss, recipe.measure = drifting, measured
    with mp.exit_codes():
        recipe.main()


if __name__ == "__main__":
    main()
