# SPDX-License-Identifier: Apache-2.0
"""The training state as named tensors: where they live, their host copies, and back.

Names: `weights/<parameter or persistent buffer>` and `optimizer/<parameter>/<state key>`, without
the prefixes that DDP and `torch.compile` add, tied parameters once, frozen ones not at all. What a
rank alone holds of a sharded tensor goes under a fragment's key (`fragments.py`). Hyperparameters
of the optimizer are not state: they come from the config of each launch and are compared by the
contract.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mprecipes.checkpoint import zero
from mprecipes.checkpoint.finite import not_finite as not_finite
from mprecipes.checkpoint.fragments import fragment_of
from mprecipes.checkpoint.modules import clean, local_parts, unsupported, weights_of
from mprecipes.checkpoint.modules import unwrap as unwrap
from mprecipes.checkpoint.storage import ALIGNMENT, files_of
from mprecipes.errors import VerificationError

_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def live_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Gives references, not copies, to the whole training state.

    A parameter that no update has reached has no optimizer tensors yet. Of what is sharded over
    ranks, this rank's fragments are given; under ZeRO those of the masters.

    Raises:
        ConfigError: the state holds something that is not a tensor, or that is not the model's.
    """
    if (engine := zero.engine_of(model)) is not None:
        return zero.live_tensors(engine)
    weights = weights_of(model)
    live = dict(local_parts((f"weights/{name}", tensor) for name, tensor in weights.items()))
    names = _optimized(weights, optimizer)
    for parameter, name in names.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if not isinstance(value, torch.Tensor):
                raise unsupported(f"optimizer state {key!r} of {name} is a {type(value).__name__}")
            live |= local_parts([(f"optimizer/{name}/{key}", value)])
    return live


def describe_parameters(live: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Gives `params` (name -> dtype, like "float32") and `shapes` (name -> list) of weights."""
    weights = {
        name.removeprefix("weights/"): live[name] for name in live if name.startswith("weights/")
    }
    return {
        "params": {name: _dtype(tensor) for name, tensor in weights.items()},
        "shapes": {name: list(tensor.shape) for name, tensor in weights.items()},
    }


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gives a tensor of full shape and stored dtype per weight, for `describe_parameters`.

    The same on every rank, however the state is sharded; not for its values.
    """
    if (engine := zero.engine_of(model)) is not None:
        return zero.full_weights(engine)
    return {f"weights/{name}": tensor.detach() for name, tensor in weights_of(model).items()}


def refresh_working_copies(model: torch.nn.Module) -> None:
    """Collective: casts the engine's working copies anew from the masters, where it has any."""
    if (engine := zero.engine_of(model)) is not None:
        zero.refresh(engine)


def working_copies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gives what an engine computes with beside the masters, where every rank holds all of it."""
    engine = zero.engine_of(model)
    return {} if engine is None else zero.working_copies(engine)


def stale_working_copies(model: torch.nn.Module) -> list[str] | None:
    """Gives names of parameters whose working copy is not its master's cast; None without any."""
    engine = zero.engine_of(model)
    return None if engine is None else zero.stale_working_copies(engine)


def gradient_parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Gives (parameter, gradient or this rank's part of it, index of its first element)."""
    if (engine := zero.engine_of(model)) is not None:
        yield from zero.gradients(engine)
        return
    for name, parameter in unwrap(model).named_parameters():
        if parameter.grad is not None:
            for key, part in local_parts([(clean(name), parameter.grad)]):
                yield clean(name), part, fragment_of(key, part).start


class HostBuffers:
    """Host memory for copies of tensors, laid out as `storage.put` writes them.

    Allocated once and reused: a copy into memory that was used before is 3.6 times faster than into
    fresh memory (measured). Memory is taken again only when names, shapes or dtypes have changed.

    Args:
        pin: page-locked, for a CUDA device.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self._views: dict[str, torch.Tensor] = {}

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes and touches the memory for such tensors, unless it is there."""
        likes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if likes == {name: (view.shape, view.dtype) for name, view in self._views.items()}:
            return
        self._views = {}  # frees the old before the new is taken
        views = {}
        for names in files_of(tensors):
            size = sum(tensors[name].nbytes for name in names)
            spare = 0 if self._pin else ALIGNMENT  # page-locked memory begins on a page
            buffer = torch.empty(size + spare, dtype=torch.uint8, pin_memory=self._pin).zero_()
            start = -buffer.data_ptr() % ALIGNMENT if spare else 0  # for `storage._write_direct`
            for name in names:
                part = buffer[start : start + tensors[name].nbytes]
                views[name] = part.view(tensors[name].dtype).view(tensors[name].shape)
                start += tensors[name].nbytes
        self._views = {name: views[name] for name in tensors}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gives copies of the tensors; blocks until they are made. The next call overwrites."""
        self.reserve(tensors)
        for name, tensor in tensors.items():
            self._views[name].copy_(tensor, non_blocking=self._pin)
        if self._pin:
            torch.cuda.synchronize()
        return dict(self._views)


def take_snapshot(live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives host copies that share no memory with `live`; blocks until they are made."""
    return HostBuffers().copy(live)


@torch.no_grad()
def restore_in_place(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, torch.Tensor],
    fill: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    """Makes the live state what `fill` writes, or changes nothing and says all that does not fit.

    Weights are filled where they live, optimizer state likewise if it is there, else in the memory
    it will have; it is installed by `load_state_dict` with the live `param_groups`. Parameters
    without stored state have none after. If `fill` raises, everything it could write is made NaN
    before its error is passed on: a half filled state must be useless to whoever goes on with it.

    Args:
        stored: name -> full tensor of the stored shape and dtype; may be without memory ("meta").
        fill: writes all values into the tensors it is given, under the keys of `live_tensors`.
            Working copies are not refreshed (`refresh_working_copies`).

    Raises:
        VerificationError: names, shapes or dtypes differ; the message lists every one.
    """
    if (engine := zero.engine_of(model)) is not None:
        problems = zero.prepare_state(engine, stored)
        if problems:
            raise _unfit(problems)
        _fill(fill, zero.live_tensors(engine))
        return
    weights = weights_of(model)
    names = _optimized(weights, optimizer)
    states = _check_fit(weights, names, optimizer, stored)
    into = dict(local_parts((f"weights/{name}", tensor) for name, tensor in weights.items()))
    for parameter, name in names.items():
        live = optimizer.state.get(parameter, {})
        for key, like in states[name].items():
            if isinstance(live.get(key), torch.Tensor):
                states[name][key] = live[key]
            elif like.shape == parameter.shape:  # sharded like the parameter, and where it is
                states[name][key] = torch.empty_like(parameter.detach(), dtype=like.dtype)
            else:
                states[name][key] = torch.empty_like(like, device="cpu")
            into |= local_parts([(f"optimizer/{name}/{key}", states[name][key])])
    _fill(fill, into)
    groups = optimizer.state_dict()["param_groups"]
    indices = [index for group in groups for index in group["params"]]
    state = {index: states[name] for index, name in zip(indices, names.values()) if states[name]}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, name in names.items():
        for key, tensor in states[name].items():  # load_state_dict casts to the parameter's dtype
            if optimizer.state[parameter][key].dtype != tensor.dtype:
                optimizer.state[parameter][key] = tensor.to(parameter.device)


def _fill(fill: Callable[[dict[str, torch.Tensor]], None], into: dict[str, torch.Tensor]) -> None:
    try:
        fill(into)
    except BaseException:
        for tensor in into.values():
            if tensor.is_floating_point() and tensor.itemsize > 1:
                tensor.fill_(float("nan"))
        raise


def _check_fit(
    weights: Mapping[str, torch.Tensor],
    names: Mapping[torch.Tensor, str],
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, torch.Tensor],
) -> dict[str, dict[str, torch.Tensor]]:
    """Gives the stored optimizer tensors by parameter and key, when everything fits."""
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names.values()}
    for full_name, tensor in stored.items():
        kind, _, rest = full_name.partition("/")
        name, _, key = rest.rpartition("/")
        if kind == "optimizer" and name in states:
            states[name][key] = tensor
    expected: dict[str, torch.Tensor | None] = {
        f"weights/{name}": weights[name] for name in weights
    }
    expected |= _expected_state(optimizer, names, states)
    problems = [f"{name}: unexpected" for name in stored if name not in expected]
    problems += [f"{name}: missing" for name in expected if name not in stored]
    for name, want in expected.items():
        have = stored.get(name)
        if want is not None and have is not None and _describe(want) != _describe(have):
            problems.append(f"{name}: {_describe(have)}, the live one is {_describe(want)}")
    if problems:
        raise _unfit(problems)
    return states


def _unfit(problems: list[str]) -> VerificationError:
    return VerificationError(
        f"{len(problems)} tensors do not fit:\n    " + "\n    ".join(sorted(problems)),
        expected="the names, shapes and dtypes of the live model and optimizer",
        where="the tensors of the checkpoint",
        action="launch with the model and optimizer that wrote it; nothing was restored",
    )


def _optimized(
    weights: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[torch.Tensor, str]:
    """The optimizer's parameters in the order of its groups, with their clean names."""
    names = {id(tensor): name for name, tensor in weights.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if id(parameter) not in names:
            raise unsupported(
                f"the optimizer updates a {_describe(parameter)} the model does not have"
            )
    return {parameter: names[id(parameter)] for parameter in parameters}


def _expected_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    stored: Mapping[str, Mapping[str, torch.Tensor]],
) -> dict[str, torch.Tensor | None]:
    """What each stored optimizer tensor must look like; None where nothing live tells.

    A live state decides; a fresh optimizer has none, so then a parameter has all the keys of its
    group or none, and moments look like their parameter.
    """
    expected: dict[str, torch.Tensor | None] = {}
    for group in optimizer.param_groups:
        keys: set[str] = set().union(*(stored[names[parameter]] for parameter in group["params"]))
        for parameter in group["params"]:
            name, live = names[parameter], optimizer.state.get(parameter, {})
            for key in sorted(live or keys) if stored[name] else ():
                like = parameter if key in _LIKE_PARAMETER else None
                expected[f"optimizer/{name}/{key}"] = live.get(key, like)
    return expected


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe(tensor: torch.Tensor) -> str:
    return f"{_dtype(tensor)} {list(tensor.shape)}"
