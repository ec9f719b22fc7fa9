# SPDX-License-Identifier: Apache-2.0
"""Stories made of plain values, for the tests of what draws and writes them."""

from dataclasses import replace

from mprecipes.observe.story import Cell, Judged, ShownRun, Story, Table

STEPS = range(1, 41)


def shown(group: str, seed: int, mode: str | None = None, **changes) -> ShownRun:
    """One run that learns; `changes` replace its curves and totals."""
    run = ShownRun(
        label=f"{group}, seed {seed}", group=group, mode=mode or group, seed=seed,
        train_loss={step: 5.0 / step + 0.01 * seed for step in STEPS},
        heldout={step: 5.1 / max(step, 1) for step in range(0, 41, 10)},
        gap={} if group == "fp32" else {step: 0.001 * step for step in range(0, 41, 10)},
        grad_norm={step: 3.0 / step for step in STEPS}, loss_scale={},
        tokens_per_second=1000.0, tokens_per_second_with_saves=950.0,
        peak_memory_bytes=700 << 20, memory_of="host",
    )  # fmt: skip
    return replace(run, **changes)


def story(**changes) -> Story:
    """FP32 and BF16, two seeds each, with one table and hostile texts."""
    runs = [shown("fp32", 0), shown("fp32", 1), shown("bf16", 0), shown("bf16", 1)]
    rows = [[Cell("fp32"), Cell("2.5000", 2.5)], [Cell("bf16"), Cell("2.5012", 2.50123456789)]]
    made = Story(
        title="Modes <compared>", facts=["a recipe & its data", "4 runs"],
        judged=[
            Judged("fp32", "fp32", "reference", "FP32; finished", ""),
            Judged("bf16", "bf16", "equivalent", "faster | equal", "good", -0.002, 0.001, 0.004),
        ],
        runs=runs, tables=[Table("losses", "Losses", ("arm", "loss"), rows, "in nats", leads=True)],
        method=["Paired by seed."], margin=0.01, data={"schema": 1, "text": "</script>"},
    )  # fmt: skip
    return replace(made, **changes)
