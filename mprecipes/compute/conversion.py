# SPDX-License-Identifier: Apache-2.0
"""A model made to compute in its launch's mode, and looked at again after `prepare`."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from mprecipes.compute.digest import sum_digest
from mprecipes.compute.engines import Engine
from mprecipes.compute.float8 import Conversion, convert_to_float8, count_float8
from mprecipes.compute.kept import KeptInFp32, keep_in_fp32
from mprecipes.compute.operators import under_autocast
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import PrecisionMode
from mprecipes.compute.ranks import Ranks
from mprecipes.compute.validation import digest_of, require_validation, subject
from mprecipes.compute.vocabulary import pad_vocabulary
from mprecipes.errors import ConfigError
from mprecipes.identity.recipe import RecipeIdentity

log = logging.getLogger(__name__)
SHOWN = 5


class Started(Protocol):
    """What is used of a Launch."""

    @property
    def is_main(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def precision(self) -> PrecisionMode: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def policy(self) -> NumericsPolicy: ...
    @property
    def kept(self) -> KeptInFp32: ...
    @property
    def measured(self) -> dict[str, Any]: ...
    @property
    def recipe_folder(self) -> Path | None: ...


def convert_model(launch: Started, model: torch.nn.Module, recipe: RecipeIdentity) -> None:
    """Collective, in place: see `Launch.convert`.

    Raises:
        ConfigError: FP8 is not validated or has nothing to convert; a pattern matches no module;
            ranks built other models; the model has no head to pad.
    """
    compare_initial_weights(launch.ranks, model)
    facts = launch.measured["precision"]
    if launch.precision.name == "fp8":
        config = getattr(model, "config", None)  # of transformers, also through peft
        about = subject(
            {} if config is None else config.to_dict(),
            recipe=recipe.name,
            version=recipe.version,
            fp8_recipe=launch.policy.fp8_recipe,
        )
        validation = None
        if launch.recipe_folder is not None:
            record = require_validation(launch.recipe_folder, about)
            validation = digest_of(record)
        conversion = convert_to_float8(model, launch.policy, launch.device)
        facts["fp8"] = {**conversion.to_dict(), "validation": validation}
        if launch.is_main:
            _tell(conversion, validation)
    if (multiple := launch.policy.pad_vocab_to_multiple_of) is not None:
        facts["padded_vocabulary"] = pad_vocabulary(model, multiple)
    if launch.engine.zero_stage and (dtype := launch.precision.autocast_dtype) is not None:
        under_autocast(model, launch.device, dtype)
    kept = keep_in_fp32(model, launch.policy.keep_in_fp32, launch.device)
    launch.kept.names, launch.kept.seen = kept.names, kept.seen
    facts["kept_in_fp32"] = kept.names


def compare_initial_weights(ranks: Ranks, model: torch.nn.Module) -> None:
    """Collective: refuses ranks that did not build the same model, before it is sharded.

    DDP and DeepSpeed would go on with rank 0's without a word, FSDP2 with parts of each. One pass
    over the weights and one small gather; a second pass only where they differ.

    Raises:
        ConfigError: on every rank, naming ranks and tensors.
    """
    if ranks.world_size == 1:
        return
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    whole = ranks.gather(sum_digest((tensor, name, 0) for name, tensor in tensors.items()))
    if len(set(whole)) == 1:
        return
    each = ranks.gather({name: sum_digest([(t, name, 0)]) for name, t in tensors.items()})
    found = []
    for rank, digests in enumerate(each):
        names = [n for n in {**each[0], **digests} if digests.get(n) != each[0].get(n)]
        if names:
            found.append(f"rank {rank} in {listed(names)}")
    raise ConfigError(
        f"initial weights differ from rank 0's: {'; '.join(found)}",
        expected="the same model on every rank",
        where="build_model",
        action="call mp.seed_everything before build_model, draw nothing on one rank alone, and "
        "load the same files on every machine",
    )


def listed(names: Sequence[str]) -> str:
    """Gives the first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def check_masters(model: torch.nn.Module) -> None:
    """Refuses a model whose trainable parameters are not FP32.

    Raises:
        ConfigError: naming the parameters and their dtypes.
    """
    wrong = [
        f"{name} is {str(parameter.dtype).removeprefix('torch.')}"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype != torch.float32
    ]
    if wrong:
        raise ConfigError(
            f"{len(wrong)} trainable parameters are not FP32: {', '.join(wrong[:3])}",
            expected="FP32 master weights in every precision mode; 16 bit only in the compute",
            where="build_model",
            action="end build_model with `return model.float()`, before the optimizer is made",
        )


def check_conversion(measured: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Refuses a prepared model in which not every converted module computes in FP8.

    Raises:
        ConfigError: naming how many do.
    """
    facts = measured.get("precision", {})
    if facts.get("mode") != "fp8":
        return
    found, wanted = count_float8(model), len(facts.get("fp8", {}).get("converted", ()))
    if found != wanted or not found:
        raise ConfigError(
            f"{found} modules compute in FP8 after prepare",
            expected=f"{wanted}, as converted" if wanted else "at least one",
            where="precision fp8",
            action="call `model = launch.convert(model, run.recipe)` before prepare, once",
        )


def _tell(conversion: Conversion, validation: str | None) -> None:
    """Logs the whole list: what is not FP8 is as much worth knowing."""
    how = "emulated" if conversion.emulated else "on hardware"
    log.warning(
        "FP8 (%s, %s, %s): converted %s; not converted %s",
        conversion.recipe,
        how,
        f"validation {validation}" if validation else "NOT VALIDATED for this architecture",
        ", ".join(conversion.converted),
        json.dumps(conversion.skipped),
    )
