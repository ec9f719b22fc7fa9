# SPDX-License-Identifier: Apache-2.0
"""Where a model starts from: a folder, a hub id, a GGUF file, or a checkpoint of another run.

Weights are loaded as FP32 masters whatever they were stored as. What a run started from goes into
its manifests: `started_from` with a state digest of the weights as loaded (the same wherever they
lie) and the ancestry, for a checkpoint or milestone of this project the run, step and root digest;
`frozen` with the digest of the weights that are not trained, which no checkpoint holds.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mprecipes.checkpoint import manifest as manifests
from mprecipes.checkpoint.adapter_file import CONFIG
from mprecipes.checkpoint.digests import state_digests
from mprecipes.checkpoint.pretrained import ancestry_of, read_pretrained
from mprecipes.checkpoint.snapshot import unwrap
from mprecipes.checkpoint.weights import Piece, each_piece
from mprecipes.compute.architecture import new_model_config
from mprecipes.compute.tuning import TuningOptions
from mprecipes.errors import ConfigError, VerificationError

SUFFIX = ".gguf"


class Options(Protocol):
    """The options of a recipe's config that `start_model` reads."""

    @property
    def model_name_or_path(self) -> str | None: ...
    @property
    def model_config(self) -> dict[str, Any] | None: ...


def start_model(config: Options, tuning: TuningOptions | None = None) -> PreTrainedModel:
    """Gives the FP32 model that a config names, or a new one of its `model_config`.

    Args:
        tuning: of `tuning_options`, with the attention and whether a model's own code may run;
            None is what transformers chooses, and none.

    Raises:
        ConfigError, VerificationError: see `load_causal_lm` and `new_model_config`; or the config
            both names and describes a model.
    """
    attention = {"attn_implementation": tuning.attn_implementation} if tuning else {}
    if config.model_name_or_path is None:
        fresh = new_model_config(config.model_config)
        try:
            return AutoModelForCausalLM.from_config(fresh, **attention).float()
        except ImportError as error:  # of the package that an attention needs
            raise ConfigError(
                str(error).splitlines()[0],
                expected="an attention that is installed",
                where=f"attn_implementation {attention['attn_implementation']} in option tuning",
                action="tuning: {attn_implementation: sdpa}, or install what is missing",
            ) from error
    if config.model_config is not None:
        raise ConfigError(
            f"model_name_or_path {config.model_name_or_path} and model_config",
            expected="one of the two: a model that is loaded has the config it was saved with",
            where="model_config",
            action="add --model_config none, or leave out --model_name_or_path",
        )
    trusted = tuning is not None and tuning.trust_remote_code
    return load_causal_lm(config.model_name_or_path, trust_remote_code=trusted, **attention)


def load_causal_lm(
    name: str, *, trust_remote_code: bool = False, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Gives the model of a name in FP32, every weight of it from the files of that name.

    transformers would fill a weight that the files lack, or hold under another name, with random
    numbers and a line in the log.

    Args:
        name: a folder that `from_pretrained` loads, a hub id, a `.gguf` file (dequantised), or a
            checkpoint or milestone folder, every byte of which is verified as it is read.
        trust_remote_code: let code that comes with the model run.
        attn_implementation: of transformers; None is what it chooses for the model.

    Raises:
        ConfigError: there is no such model, or its files lack weights.
        VerificationError: a checkpoint's bytes are not what its manifest says.
    """
    path = Path(name)
    options: dict[str, Any] = {"dtype": torch.float32}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if (path / manifests.NAME).is_file():
        return _from_checkpoint(path, options)
    place: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name.endswith(SUFFIX):
        from transformers import GgufConfig  # its module loads every quantisation library

        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        options["quantization_config"] = GgufConfig(dequantize=True)  # else it cannot be saved
    loaded: Any
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            **place, **options, trust_remote_code=trust_remote_code,
            output_loading_info=True, ignore_mismatched_sizes=True,  # refused below, by name
        )  # fmt: skip
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"no model could be loaded: {str(error).splitlines()[0]}",
            expected="a folder with a saved model, a hub id that can be reached, a .gguf file or a "
            "checkpoint",
            where=f"model_name_or_path {name}",
            action="correct it; without a network, name a local path; code that comes with a model "
            "runs only where a recipe has the option tuning: {trust_remote_code: true}",
        ) from error
    model, found = loaded
    lost = sorted(found["missing_keys"]) + [str(each) for each in found["mismatched_keys"]]
    if lost:
        others = ", ".join(sorted(found["unexpected_keys"])[:3]) or "none"
        raise ConfigError(
            f"{len(lost)} weights are not in its files: {', '.join(lost[:3])}; unknown: {others}",
            expected="every weight of the model, under its own name and in its own shape",
            where=f"model_name_or_path {name}",
            action="save the whole model with save_pretrained, bare of wrappers whose names begin "
            "with module. or _orig_mod., and with the config it was trained with",
        )
    whole: PreTrainedModel = model.float()
    return whole


def model_facts(model: torch.nn.Module, name: str | None) -> dict[str, Any]:
    """Gives `started_from` and `frozen` of the manifest; call it before anything is restored.

    Args:
        model: as built, also wrapped.
        name: what it was loaded from; None for a new one.
    """
    bare = unwrap(model)
    parameters = {id(each): (key, each) for key, each in bare.named_parameters()}.values()
    frozen = {f"weights/{key}": each for key, each in parameters if not each.requires_grad}
    facts: dict[str, Any] = {}
    if name is not None:
        weights = frozen or {f"weights/{key}": each for key, each in parameters}
        place = f".../{Path(name).name}" if Path(name).is_absolute() else name
        digest = state_digests(weights)["weights"]
        ancestry = ancestry_of(name)
        facts["started_from"] = {"model": place, "weights_digest": digest, "ancestry": ancestry}
    if frozen:
        facts["frozen"] = {
            "digest": state_digests(frozen)["weights"],
            "tensors": len(frozen),
            "parameters": sum(each.numel() for each in frozen.values()),
        }
    return facts


def _from_checkpoint(folder: Path, options: dict[str, Any]) -> PreTrainedModel:
    found = manifests.read_manifest(folder)
    pretrained = read_pretrained(found)
    if CONFIG in pretrained["texts"]:
        raise ConfigError(
            "a checkpoint of adapters, which holds no weights of their base",
            expected="a checkpoint with all weights, or a folder that from_pretrained loads",
            where=f"model_name_or_path {folder.name}",
            action="name the folder model/ that its run wrote at its end, with the adapters merged",
        )
    fields = json.loads(pretrained["texts"]["config.json"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, **options).float()
    live = {name: each.detach() for name, each in model.state_dict(keep_vars=True).items()}
    kept = {live[name].data_ptr() for name in found.params if name in live}
    unknown = [name for name in found.params if name not in live]
    missing = [name for name, each in live.items() if each.data_ptr() not in kept]
    if unknown or missing:
        raise VerificationError(
            f"tensors that do not fit: {', '.join([*unknown, *missing][:6])}",
            expected=f"all weights of a {pretrained['architecture']}",
            where=folder.name,
            action="start from another checkpoint, or from a folder that was exported",
        )

    def put(piece: Piece) -> None:
        place = live[piece.name].view(-1)[piece.start : piece.start + piece.values.numel()]
        place.copy_(piece.values)

    each_piece(found, put)
    model.config.name_or_path = str(folder)  # for the ancestry
    return model
