# SPDX-License-Identifier: Apache-2.0
"""The commands about precision, `env --modes` and `probe`; `cli` adds them to its own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mprecipes.errors import ConfigError
from mprecipes.tools.console import Json, out, print_json, table_with

if TYPE_CHECKING:
    import torch

    from mprecipes.compute.policy import NumericsPolicy


def show_modes(as_json: bool, engines: bool = False) -> None:
    """Prints the table of precision modes, measured on this machine, and that of the engines."""
    from mprecipes.tools.engine_modes import measure_engines
    from mprecipes.tools.modes import describe_modes

    rows, by_engine = describe_modes(), measure_engines() if engines else []
    if as_json:
        modes = [row.to_dict() for row in rows]
        both = {"modes": modes, "engines": [row.to_dict() for row in by_engine]}
        return print_json(both if engines else modes)
    table = table_with("mode", "here", "product", "weight", "gradient", "accumulated", "reduced",
                       "moments", "exp+man bits", "loss scale", "to know")  # fmt: skip
    for row in rows:
        here = f"{row.runs}: {row.why}" if row.why else row.runs
        dtypes = [row.product, row.weight, row.gradient, row.accumulation, row.reduce, row.moment]
        table.add_row(row.mode, here, *map(_short, dtypes),
                      f"{row.exponent_bits}+{row.mantissa_bits}", row.scaler or "-",
                      row.limitation)  # fmt: skip
    out().print(table)
    if engines:
        table = table_with("engine", "mode", "product", "weight", "gradient", "accumulated",
                           "reduced", "moments", "why not")  # fmt: skip
        for found in by_engine:
            dtypes = [found.product, found.weight, found.gradient, found.accumulation,
                      found.reduce, found.moment]  # fmt: skip
            table.add_row(found.engine, found.mode, *map(_short, dtypes), found.why)
        out().print(table)


def _short(dtype: str) -> str:
    return dtype.replace("float", "fp").replace("bfp", "bf")


def probe(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="Any recipe file; before the recipe's options.")],
    modes: Annotated[str, typer.Option("--modes", help="Compared with fp32.")] = "bf16,fp16,fp8",
    steps: Annotated[int, typer.Option("--steps", help="Trained in each mode.", min=4)] = 24,
    dtypes: Annotated[
        bool, typer.Option("--dtypes", help="Only show which operation computes in which dtype.")
    ] = False,
    output_dir: Annotated[
        Path | None, typer.Option("--output_dir", help="Where probe.json and probe.png go.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare precision modes with FP32: gradients at the same weights, losses, and a verdict.

    Exits 1 when a mode does not pass. A verdict on fp8 is kept in validations/ beside the recipe,
    where a run in FP8 looks for it. Options it does not know go to the recipe unchanged.
    """
    import torch

    from mprecipes.compute.policy import numerics_policy
    from mprecipes.compute.precision import MODES
    from mprecipes.identity.config import parse_config
    from mprecipes.tools import probe as probing
    from mprecipes.tools.probe_report import report_verdicts, track_probe

    names = [name.strip() for name in modes.split(",")]
    if unknown := [name for name in names if name not in MODES]:
        raise ConfigError(
            f"mode {unknown[0]!r}",
            expected=f"of {', '.join(MODES)}, with commas",
            where="--modes",
            action="correct it",
        )
    module = probing.load_recipe(recipe)
    words = [*context.args, "--output_dir", str(output_dir or "unused")]
    config, _ = parse_config(module.Config, words)
    policy = numerics_policy(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = _rows(config)
    if dtypes:
        return _show_dtypes(probing, module, config, data, names, policy, device, as_json)
    identity = {"recipe": module.RECIPE.name, "version": module.RECIPE.version, "steps": steps}
    with track_probe(output_dir, config) as tracking:
        tracking.begin({**identity, **vars(config)})
        found = probing.probe_recipe(
            module, config, data, names, steps=steps, policy=policy, device=device
        )
        _report(recipe, module, config, policy.fp8_recipe, found, steps, output_dir, as_json)
        report_verdicts(tracking, found, output_dir)
    raise typer.Exit(0 if all(findings.passed for findings in found) else 1)


def _rows(config: Any) -> Any:
    """The training rows of a recipe's config: packed text, or chats."""
    from mprecipes.compute.ranks import Ranks
    from mprecipes.data.chats import read_chats
    from mprecipes.data.reading import read_data

    read: Any = read_data if "text_field" in vars(config) else read_chats
    return read(config, Ranks(), should_stop=lambda: False).train


def _report(
    recipe: Path, module: Any, config: Any, fp8_recipe: str, found: list[Any], steps: int,
    output_dir: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from mprecipes.tools.probe import size_warnings
    from mprecipes.tools.probe_report import keep_record, write_findings

    model_config = module.build_model(config).config
    record = keep_record(recipe, module.RECIPE, model_config.to_dict(), fp8_recipe, found, steps)
    if output_dir is not None:
        write_findings(output_dir, found)
    if as_json:
        return print_json(
            {
                "modes": [findings.to_dict() for findings in found],
                "record": record.name if record else None,
                "sizes": size_warnings(model_config),
            }
        )
    table = table_with("mode", "verdict", "why", "loss", "gap", "skipped", "underflow", "tokens/s")
    for findings in found:
        verdict = "passes" if findings.passed else "DOES NOT PASS"
        why = f"{findings.reason}; {findings.cause}" if findings.cause else findings.reason
        last = f"{findings.losses[-1]:.4f}" if findings.losses else "-"
        table.add_row(findings.mode, verdict, why, last, f"{100 * findings.loss_gap:+.3f} %",
                      str(findings.skipped_steps), f"{100 * findings.gradient_underflow:.2f} %",
                      f"{findings.tokens_per_second:,.0f}")  # fmt: skip
    out().print(table)
    for line in size_warnings(model_config):
        out().print(line, markup=False)
    if record is not None:
        out().print(f"FP8 record: validations/{record.name} beside the recipe", markup=False)


def _show_dtypes(
    probing: Any, module: Any, config: Any, data: Any, names: list[str], policy: "NumericsPolicy",
    device: "torch.device", as_json: bool,
) -> None:  # fmt: skip
    from mprecipes.compute.precision import MODES
    from mprecipes.tools.dtypes import audit_dtypes

    prober = probing.Prober(module, config, data, steps=1, device=device)
    found = {}
    for name in names:
        run = prober.one_step(MODES[name], policy)
        found[name] = audit_dtypes(run.model, run)
    if as_json:
        print_json({name: audit.to_dict() for name, audit in found.items()})
    for name, audit in found.items() if not as_json else ():
        table = table_with("module", "operation", "input dtype", "times", title=name)
        for (where, operation, kind), count in audit.rows.items():
            table.add_row(where, operation, kind, str(count))
        out().print(table)
        casts = ", ".join(f"{kind} {count}" for kind, count in audit.casts.most_common())
        out().print(f"{name}: casts {casts or 'none'}", markup=False)
        for line in audit.violations or ["softmax, normalisation and loss compute in FP32"]:
            out().print(f"{name}: {line}", markup=False)
    raise typer.Exit(1 if any(audit.violations for audit in found.values()) else 0)


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command(
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        epilog="Example: mprecipes probe recipes/pretrain_causal_lm.py --config "
        "recipes/configs/pretrain_causal_lm/tiny-cpu.yaml --steps 12",
    )(probe)
