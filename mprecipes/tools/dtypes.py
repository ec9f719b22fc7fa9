# SPDX-License-Identifier: Apache-2.0
"""`mprecipes probe --dtypes`: which operation of which module computed in which dtype, measured.

One forward and backward run under a dispatch mode, which sees every operation after autocast has
cast its inputs. Softmax, normalisation and loss must not compute in 16 bit; casts are counted.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mprecipes.compute.operators import float_dtypes, narrow_part

_CAST = ("_to_copy", "copy_")


@dataclass(frozen=True)
class DtypeAudit:
    """What was seen.

    Attributes:
        rows: (module, operation, dtype of its inputs) -> how often, forward and backward.
        casts: "float32 -> bfloat16" -> how often.
        violations: sensitive operations that computed in 16 bit, with their module.
    """

    rows: Counter[tuple[str, str, str]]
    casts: Counter[str]
    violations: list[str]

    def to_dict(self) -> dict[str, Any]:
        names = ("module", "operation", "dtype")
        rows = [{**dict(zip(names, row, strict=True)), "times": n} for row, n in self.rows.items()]
        return {"rows": rows, "casts": dict(self.casts), "violations": self.violations}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[tuple[str, str, str]] = Counter()
        self.casts: Counter[str] = Counter()
        self.stack: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        module = self.stack[-1] if self.stack else "(backward)"
        kinds = float_dtypes(args)
        if name in _CAST and isinstance(result, torch.Tensor) and kinds:
            made = str(result.dtype).removeprefix("torch.")
            for kind in kinds - {made}:
                self.casts[f"{kind} -> {made}"] += 1
        if kinds:
            self.rows[module, name, "+".join(sorted(kinds))] += 1
        return result


def audit_dtypes(model: torch.nn.Module, run: Any) -> DtypeAudit:
    """Gives what `run`, a forward and backward of the model, computed.

    Args:
        run: a function without arguments; it makes the loss and calls its backward.
    """
    recorder, hooks = _Recorder(), []
    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(_enter(recorder, name)))
            hooks.append(module.register_forward_hook(_leave(recorder)))
    try:
        with recorder:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    violations = sorted(
        f"{module}: {what} ({operation}) in {kind}"
        for module, operation, kind in recorder.rows
        if (what := narrow_part(operation, {*kind.split("+")})) is not None
    )
    return DtypeAudit(recorder.rows, recorder.casts, violations)


def _enter(recorder: _Recorder, name: str) -> Any:
    def enter(module: torch.nn.Module, inputs: Any) -> None:
        recorder.stack.append(name)

    return enter


def _leave(recorder: _Recorder) -> Any:
    def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        recorder.stack.pop()

    return leave
