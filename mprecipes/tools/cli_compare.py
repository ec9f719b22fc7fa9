# SPDX-License-Identifier: Apache-2.0
"""The commands `report` and `compare` of the command line; `cli` adds them to its own."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mprecipes.observe.report import Written
from mprecipes.tools.console import Json, out, print_json, table_with


class Ways(str, Enum):
    """How a report goes to W&B."""

    draft = "draft"
    publish = "publish"
    json = "json"


class Batch(str, Enum):
    """Whose batch per device an arm has."""

    equal = "equal"
    largest = "largest"


WandbReport = Annotated[
    Ways | None,
    typer.Option("--wandb_report", help="Also as a W&B Report; json: only write what would be sent"
                 ", to wandb_report.json."),
]  # fmt: skip
Runs = Annotated[list[Path], typer.Argument(help="Run folders, or the folder of a comparison.")]


def report(
    runs: Runs,
    output_dir: Annotated[
        Path, typer.Option("--output_dir", help="Where the report is written.")
    ] = Path("report"),
    title: Annotated[
        str | None, typer.Option("--title", help="Its heading.  [default: what it is about]")
    ] = None,
    wandb_report: WandbReport = None,
    as_json: Json = False,
) -> None:
    """Write a report of runs: one HTML page that needs no network, Markdown with PNGs, and JSON.

    Runs with the seed of a run in FP32 are judged against it, as `compare` does.
    """
    from mprecipes.tools.report import make_report

    written, place = make_report(
        runs, output_dir, title, None if wandb_report is None else wandb_report.value
    )
    _show(written, as_json, place)


def compare(
    context: typer.Context,
    output_dir: Annotated[
        Path, typer.Option("--output_dir", help="The comparison's folder; the same one goes on.")
    ],
    config: Annotated[
        Path | None, typer.Option("--config", help="Options of the recipe, the same for all runs.")
    ] = None,
    precisions: Annotated[
        str, typer.Option("--precisions", help="Arms, fp32 among them: fp32,bf16,fp16:scale=1024")
    ] = "fp32,bf16",
    seeds: Annotated[str, typer.Option("--seeds", help="One gives no verdict.")] = "0,1,2",
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Of every run.  [default: max_steps of the config]", min=1),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", help="Any recipe file.  [default: the config's own]"),
    ] = None,
    num_processes: Annotated[int, typer.Option("--num_processes", help="A run.", min=1)] = 1,
    accelerate_config: Annotated[
        Path | None,
        typer.Option("--accelerate_config", help="Silent about precision.  [default: accelerate_"
                     "configs/cpu.yaml, or ddp.yaml where there is a GPU]"),
    ] = None,
    devices: Annotated[
        str, typer.Option("--devices", help="GPUs with a run each at a time: 0,1,2,3")
    ] = "",
    batch: Annotated[
        Batch,
        typer.Option("--batch", help="largest: per device, the most that fits of each arm, at the "
                     "same global batch: equal memory instead of equal batches."),
    ] = Batch.equal,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds per run.", min=1)] = 86_400.0,
    title: Annotated[
        str | None, typer.Option("--title", help="The report's heading.")
    ] = None,
    wandb_report: WandbReport = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train in several precision modes with several seeds, and say which one to use, and why.

    All runs have the same initial weights, batches, learning rates and length, which is checked by
    digest. The same command again goes on after an interruption; arms and seeds may be added.
    Options it does not know go to the recipe unchanged. Exits 0 when every arm has a verdict, 1
    when one could not be judged, 75 when interrupted.
    """
    from rich.console import Console

    from mprecipes.tools.compare import run_compare
    from mprecipes.tools.report import send_report

    done = run_compare(
        output_dir, precisions=precisions, seeds=seeds, config=config, recipe=recipe, steps=steps,
        arguments=context.args, num_processes=num_processes, accelerate_config=accelerate_config,
        devices=[word for word in devices.split(",") if word], timeout=timeout, title=title,
        batch=batch.value,
        console=Console(stderr=True, highlight=False),
    )  # fmt: skip
    place = None
    if wandb_report is not None:
        place = send_report(done.story, done.runs, wandb_report.value, done.written.html.parent)
    _show(done.written, as_json, place)
    raise typer.Exit(0 if done.is_whole else 1)


def _show(written: Written, as_json: bool, place: str | None) -> None:
    """Prints what a report says: its JSON, or its verdicts and where it is, in W&B too."""
    data = json.loads(written.data.read_text(encoding="ascii"))
    if as_json:
        return print_json(data)
    table = table_with("arm", "seeds", "verdict", "why")
    for arm in data["arms"]:
        seeds = ", ".join(map(str, arm["seeds"]))
        texts = (arm["arm"], seeds, arm["verdict"]["word"], arm["verdict"]["reason"])
        table.add_row(*map(escape, texts))
    console = out()
    if data["arms"]:
        console.print(table)
    console.print(f"written: {written.html}, {written.markdown}, {written.data}", markup=False)
    if place is not None:
        console.print(f"W&B report: {place}", markup=False)


def register(app: typer.Typer) -> None:
    """Adds the commands to an application."""
    app.command(
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        epilog="Example: mprecipes compare --config recipes/configs/pretrain_causal_lm/"
        "tiny-cpu.yaml --precisions fp32,bf16 --seeds 0,1,2 --steps 60 --output_dir runs/compare",
    )(compare)
    app.command(epilog="Example: mprecipes report runs/fp32 runs/bf16 --output_dir runs/report")(
        report
    )
