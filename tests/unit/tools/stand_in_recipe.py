# SPDX-License-Identifier: Apache-2.0
"""A recipe small enough to be drilled in a unit test: one linear layer, one process.

Everything on disk is written by the library, as a real recipe has it written. `--sabotage forget`
drops the optimizer state on a resume; `deaf` passes no fault point; `fail` ends the run at step 2
with an error of its own.
"""

import argparse
from pathlib import Path

import torch

from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.faults import fault_point
from mprecipes.identity.outcome import exit_codes
from mprecipes.identity.recipe import Recipe, identify
from mprecipes.identity.run import open_folder
from mprecipes.resume.journal import Journal, StepRecord

RECIPE = Recipe(name="stand_in", version="1.0.0")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=12)
    parser.add_argument("--save_steps", type=int, default=4)
    parser.add_argument("--sabotage", default=None)
    config = vars(parser.parse_args())
    source = Path(__file__)
    identity = identify(RECIPE, source)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {**config, "output_dir": str(config["output_dir"])}
    with open_folder(
        config["output_dir"],
        recipe=identity,
        source=source,
        config=settings,
        origins=dict.fromkeys(settings, "command line"),
        horizon=config["max_steps"],
        ranks=Ranks(),
    ) as run:
        manager = CheckpointManager(folder=run, ranks=Ranks(), model=model, optimizer=optimizer)
        manager.sweep()
        position = Position()
        if (manifest := manager.newest_trusted()) is not None:
            manager.restore(manifest)
            position = Position(
                manifest.step, manifest.updates, manifest.samples_seen, manifest.tokens_seen
            )
            if config["sabotage"] == "forget":
                optimizer.state.clear()
        facts = {"recipe": identity.to_dict(), "precision": {"mode": "fp32"}, "config": settings}
        journal = Journal(run.journal, run.attempt, True)
        while position.step < config["max_steps"]:
            data = torch.randn(4, 3, generator=torch.Generator().manual_seed(position.samples_seen))
            loss = model(data).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            position = position.advance(4, 8)
            journal.append(
                StepRecord(
                    attempt=run.attempt, step=position.step, updates=position.updates,
                    samples_seen=position.samples_seen, tokens=8,
                    batch_digest=f"{abs(hash(float(data.sum()))):016x}"[-16:], loss=loss.item(),
                    grad_norm=norm.item(), learning_rate=1e-2, loss_scale=None, skipped=False,
                    step_seconds=0.001,
                )
            )  # fmt: skip
            if config["sabotage"] == "fail" and position.step == 2:
                raise RuntimeError("the stand-in fails by itself")
            if position.step in (config["max_steps"], *range(0, 99, config["save_steps"])):
                manager.save(position, facts=facts, rank_state={}, wait=True)
            if config["sabotage"] != "deaf":
                fault_point("step", position.step)
        journal.close()
        manager.close()


if __name__ == "__main__":
    with exit_codes():
        main()
