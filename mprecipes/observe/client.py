# SPDX-License-Identifier: Apache-2.0
"""The W&B client's surroundings: its folders, whether somebody is logged in, its helper process."""

import contextlib
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil


def set_defaults(folder: Path) -> None:
    """Sets variables the client reads once, at `wandb.setup`, where the user did not set them.

    It then stages and caches beside its runs in `folder`, waits for a server only so long, and
    writes a row to its file within a second, so that a kill costs no more (source: wandb 0.31,
    sdk/wandb_settings.py). As variables, a client that does not know one ignores it.
    """
    home = folder.absolute() / "wandb"
    values = {
        "WANDB_DATA_DIR": str(home),
        "WANDB_CACHE_DIR": str(home / "cache"),
        "WANDB_INIT_TIMEOUT": "30",
        "WANDB_FINISH_TIMEOUT": "10",
        "WANDB_FINISH_TIMEOUT_RAISES": "true",
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",
    }
    for name, value in values.items():
        os.environ.setdefault(name, value)


def why_offline(settings: Any) -> str | None:
    """Gives why W&B may not be asked to go online, or None where it decides itself."""
    if settings.mode not in ("online", "run", "shared"):
        return None
    if settings.api_key or settings.identity_token_file or os.environ.get("WANDB_API_KEY"):
        return None
    host = urlsplit(settings.base_url).netloc
    files = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for file in [Path(name).expanduser() for name in files if name]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(file)).authenticators(host):
                return None
    return "no login: no WANDB_API_KEY, and no entry in a netrc file"


def end_helper() -> None:
    """Kills the client's own helper process: what waits for it, at the exit too, then goes on.

    Every row that reached it is in its file, for `wandb sync`.
    """
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name() == "wandb-core":
                child.kill()
