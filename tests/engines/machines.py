# SPDX-License-Identifier: Apache-2.0
"""Two launchers on loopback as two machines of one process each."""

import contextlib
import socket
import sys
from collections.abc import Mapping, Sequence

from tests.fix64 import RECIPE, ROOT
from tests.launching import Launched, Running, environment


def launch_machines(
    configs: Sequence[str],
    words: Sequence[Sequence[str]],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 150,
) -> list[Launched]:
    """Starts machine 0 and machine 1 and waits for both; each has its config and command line."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(Running(command(rank, port, config, line), environment(env), ROOT))
            for rank, (config, line) in enumerate(zip(configs, words, strict=True))
        ]
        return [each.finish(timeout=timeout) for each in running]


def free_port() -> int:
    """Gives a port that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def command(rank: int, port: int, config: str, words: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(ROOT / f"accelerate_configs/{config}.yaml")),
        *("--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank)),
        *("--main_process_ip", "127.0.0.1", "--main_process_port", str(port)),
        str(RECIPE),
        *words,
    ]
