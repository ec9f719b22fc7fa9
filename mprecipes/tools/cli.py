# SPDX-License-Identifier: Apache-2.0
"""The command line `mprecipes`, also `python -m mprecipes`: what people run beside a training.

Tables go to stdout, progress and errors to stderr; with `--json` stdout holds one JSON text and
nothing else. Exit codes: 0 what was asked holds, 1 it does not, 2 the command line or a path is
refused; `status` gives the exit code of the run's last attempt.
"""

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mprecipes.errors import RecipeError
from mprecipes.tools import cli_compare, cli_precision
from mprecipes.tools.console import Json, facts_table, out, print_json, size, table_with
from mprecipes.tools.export import export
from mprecipes.tools.plan import plan_command
from mprecipes.tools.preview import preview_command

app = typer.Typer(
    name="mprecipes",
    help="Recipes for training in mixed precision that recover, and show the proof.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={
        "max_content_width": 100,
        "token_normalize_func": lambda name: name.replace("-", "_"),  # --dry-run is --dry_run
    },
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
RunPath = Annotated[Path, typer.Argument(help="A run's output_dir.")]


class KillDuring(str, Enum):
    """Where a drill kills."""

    step = "step"
    save = "save"


def main() -> None:
    """Runs the command line; a `RecipeError` is printed once and decides the exit code.

    Another error of a disk or a path is one line, too, and exits with 1.
    """
    try:
        app()
    except RecipeError as error:
        print(f"mprecipes: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"mprecipes: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


@app.command("list", epilog="Example: mprecipes list")
def list_command(as_json: Json = False) -> None:
    """List the recipes of this checkout."""
    from mprecipes.identity.recipe import list_recipes

    rows = [row.to_dict() for row in list_recipes()]
    if as_json:
        return print_json(rows)
    table = table_with("recipe", "version", "file", "what it does")
    for row in rows:
        table.add_row(*(escape(row[name]) for name in ("name", "version", "path", "summary")))
    out().print(table)


@app.command(epilog="Example: mprecipes env --modes")
def env(
    modes: Annotated[
        bool, typer.Option("--modes", help="Show the precision modes, measured on this machine.")
    ] = False,
    engines: Annotated[
        bool,
        typer.Option("--engines", help="With --modes: on each engine; a launch each, minutes."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show versions and devices: what a bug report needs."""
    if modes or engines:
        return cli_precision.show_modes(as_json, engines)
    from mprecipes.identity.environment import describe_environment

    facts = describe_environment(Path(__file__))
    print_json(facts) if as_json else out().print(facts_table("environment", facts))


@app.command(epilog="Example: mprecipes status runs/demo; echo $?")
def status(run: RunPath, as_json: Json = False) -> None:
    """Show what became of a run; exits with the code of its last attempt (75: launch it again).

    A run that is going on, or was killed before it could say why it ended, exits with 1.
    """
    from mprecipes.tools.status import describe_run

    facts = describe_run(run)
    code = facts["exit_code"]
    if as_json:
        print_json(facts)
    else:
        attempts = facts.pop("attempts")
        out().print(facts_table(str(run), facts))
        columns = ("attempt", "started", "ended", "outcome", "exit code", "processes", "last step")
        table = table_with(*columns, "error")
        for attempt in attempts:
            error = (attempt["error"] or "-").splitlines()[0].rstrip(":")
            times = {n: str(attempt[n] or "-").removesuffix("+00:00") for n in columns[1:3]}
            row = {**attempt, **times, "error": error}
            table.add_row(*("-" if value is None else escape(str(value)) for value in row.values()))
        out().print(table)
        if attempts[-1]["error"]:
            out().print(f"attempt {attempts[-1]['attempt']}, {attempts[-1]['error']}", markup=False)
    raise typer.Exit(code)


@app.command(epilog="Example: mprecipes verify runs/demo --all")
def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a run folder for all of its.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Of a run: also all that is at its mirror.")
    ] = False,
    resume_report: Annotated[
        int | None, typer.Option("--resume_report", help="Of a run: show this attempt's report.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare every byte of checkpoints with their manifests; exits 1 on anything that differs.

    With --resume_report N: what attempt N checked when it resumed; exits 1 unless it was released.
    """
    if resume_report is not None:
        return _show_report(path, resume_report, as_json)
    from mprecipes.tools.keeping import verify_all
    from mprecipes.tools.verify import verify_path

    verdicts = verify_all(path) if everything else verify_path(path)
    verified = bool(verdicts) and all(verdict.verifies for verdict in verdicts)
    if as_json:
        rows = [verdict.to_dict() for verdict in verdicts]
        print_json({"verifies": verified, "checkpoints": rows})
        raise typer.Exit(0 if verified else 1)
    table = table_with("checkpoint", "kind", "step", "files", "size", "result")
    for verdict in verdicts:
        result = "verifies" if verdict.verifies else f"{len(verdict.problems)} problems"
        step = "unknown" if verdict.step is None else str(verdict.step)
        table.add_row(escape(verdict.path.name), verdict.kind, step, str(verdict.num_files),
                      size(verdict.num_bytes), result)  # fmt: skip
    console = out()
    console.print(table if verdicts else escape(f"{path}: no checkpoint to verify"))
    for verdict in verdicts:
        for problem in verdict.problems:
            console.print(f"{verdict.place}/{problem}", markup=False)
    raise typer.Exit(0 if verified else 1)


def _show_report(run: Path, attempt: int, as_json: bool) -> None:
    from mprecipes.resume.showing import render
    from mprecipes.tools.resume_report import concluded_well, read_report

    report, checks = read_report(run, attempt)
    if as_json:
        print_json(report)
    else:
        print(render(report, checks), end="")
    raise typer.Exit(0 if concluded_well(report) else 1)


@app.command(epilog="Example: mprecipes prune runs/demo --dry_run")
def prune(
    run: RunPath,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="Delete nothing; also while the run is going on.")
    ] = False,
    keep_last: Annotated[
        int | None,
        typer.Option("--keep_last", help="Newest to keep.  [default: the run's own]", min=1),
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete the checkpoints that the run's own rules give up; show of each why it stays or goes.

    Milestones, quarantine and the mirror are not touched.
    """
    from mprecipes.tools.keeping import prune as prune_run

    rows = prune_run(run, dry_run=dry_run, keep_last=keep_last)
    if as_json:
        return print_json({"dry_run": dry_run, "checkpoints": [row.to_dict() for row in rows]})
    table = table_with("step", "size", "what becomes of it", "why")
    for row in rows:
        gone = "would be deleted" if dry_run else "deleted" if row.deleted else "not deleted"
        verdict = "stays" if row.keep else gone
        table.add_row(str(row.step), size(row.num_bytes), verdict, escape(row.reason))
    out().print(table if rows else escape(f"{run}: no checkpoints"))
    raise typer.Exit(0 if dry_run or all(row.keep or row.deleted for row in rows) else 1)


@app.command(epilog="Example: mprecipes milestone runs/demo 300 before-lunch")
def milestone(
    run: RunPath,
    step: Annotated[int, typer.Argument(help="The step of a checkpoint that is there.")],
    name: Annotated[str, typer.Argument(help="Letters, digits, '.', '_' and '-'.")],
    as_json: Json = False,
) -> None:
    """Copy a checkpoint to the run's milestones, where nothing is ever deleted, and verify it."""
    from mprecipes.tools.keeping import name_milestone

    made = name_milestone(run, step, name)
    facts = {"path": str(made.folder), "step": made.step, "root_sha256": made.root_sha256}
    print_json(facts) if as_json else out().print(facts_table(f"milestone {name}", facts))


@app.command(epilog="Example: mprecipes pin runs/demo 300")
def pin(
    run: RunPath,
    step: Annotated[int, typer.Argument(help="The step of a checkpoint that is there.")],
    release: Annotated[
        bool, typer.Option("--release", help="Let the run's rules decide again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Keep a checkpoint where it is until it is released; a running run obeys at its next save."""
    from mprecipes.tools.keeping import pin as pin_step

    changed = pin_step(run, step, release=release)
    facts = {"step": step, "pinned": not release, "changed": changed}
    print_json(facts) if as_json else out().print(facts_table(str(run), facts))


@app.command(epilog="Example: mprecipes inspect runs/demo/checkpoints/step-00000300")
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of one checkpoint.")],
    as_json: Json = False,
) -> None:
    """Show what a checkpoint's manifest says; its files are not read, `verify` does that."""
    from mprecipes.tools.status import describe_checkpoint

    summary, whole = describe_checkpoint(checkpoint)
    if as_json:
        return print_json(whole)
    files = summary.pop("files")
    out().print(facts_table(str(checkpoint), summary))
    table = table_with("file", "rank", "size", "sha256")
    for file in files:
        table.add_row(escape(file["path"]), str(file["rank"]), size(file["bytes"]), file["sha256"])
    out().print(table)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog="Example: mprecipes drill recipes/pretrain_causal_lm.py --output_dir runs/drill "
    "--config recipes/configs/pretrain_causal_lm/tiny-cpu.yaml --max_steps 12 --save_steps 4 "
    "--kill_at_step 7",
)
def drill(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="Any recipe file; before the recipe's options.")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Where both runs go.")],
    kill_at_step: Annotated[
        list[int] | None,
        typer.Option("--kill_at_step", help="Step to kill after; again to kill several times."
                     "  [default: random, in the middle]"),
    ] = None,
    kill_during: Annotated[
        KillDuring,
        typer.Option("--kill_during", help="save: inside the first save at or after the step."),
    ] = KillDuring.step,
    kill_seed: Annotated[
        int | None, typer.Option("--kill_seed", help="Seed of the random step.  [default: drawn]")
    ] = None,
    num_processes: Annotated[int, typer.Option("--num_processes", help="Processes.", min=1)] = 1,
    accelerate_config: Annotated[
        Path | None,
        typer.Option("--accelerate_config", help="Launcher config.  [default: accelerate_configs/"
                     "cpu.yaml, or ddp.yaml where there is a GPU]"),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds per run.", min=1)] = 1800.0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train, kill with SIGKILL, resume, and compare every step and every weight.

    Runs the recipe uninterrupted, then again with a kill, then resumes that one, and exits 0 only
    if both ended bit for bit equal. Options it does not know go to the recipe unchanged.
    """
    from mprecipes.tools.drill import run_drill
    from mprecipes.tools.drill_report import Watch, summary_of, table_of

    result = run_drill(
        recipe, output_dir, arguments=context.args, kill_at_steps=kill_at_step or [],
        kill_during=kill_during.value, kill_seed=kill_seed, num_processes=num_processes,
        accelerate_config=accelerate_config, timeout=timeout,
        watch=Watch(Console(stderr=True, highlight=False)),
    )  # fmt: skip
    if as_json:
        print_json(result.to_dict())
    else:
        out().print(table_of(result))
        out().print(summary_of(result), markup=False)
    raise typer.Exit(0 if result.equal else 1)


app.command(
    epilog="Example: mprecipes export runs/demo/milestones/pretrain-end models/demo --dtype bf16"
)(export)
app.command(
    "plan", epilog="Example: mprecipes plan --parameters 7e9 --ranks 64 --ranks 512 --disk 3"
)(plan_command)
app.command(
    "preview",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog="Example: mprecipes preview --config recipes/configs/sft_chat/tiny-cpu.yaml",
)(preview_command)
cli_compare.register(app)
cli_precision.register(app)
