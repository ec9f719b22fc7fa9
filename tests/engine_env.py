# SPDX-License-Identifier: Apache-2.0
"""What `accelerate launch` exports for one of accelerate_configs/, for ranks that are forked."""

import functools

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from tests.fix64 import ROOT


@functools.cache
def engine_env(config: str) -> dict[str, str]:
    """Gives the variables of `accelerate_configs/CONFIG.yaml`, as accelerate's launcher makes them.

    Used with `tests.recipe_server.run_recipe(..., env=engine_env("zero2"))`.
    """
    path = ROOT / "accelerate_configs" / f"{config}.yaml"
    words = ["--config_file", str(path), "--num_processes", "2", "recipe.py"]
    asked, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    if asked.use_deepspeed:
        asked.deepspeed_fields_from_accelerate_config = ""
        _, found = prepare_deepspeed_cmd_env(asked)
    else:
        found = prepare_multi_gpu_env(asked)
    kept = {key: text for key, text in found.items() if key.startswith(("ACCELERATE_", "FSDP_"))}
    if asked.use_deepspeed:  # a path of the repository; and "true" would drop DeepSpeed
        said = kept["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
        kept["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(ROOT / said)
    return {**kept, "ACCELERATE_USE_CPU": "false"}
