# SPDX-License-Identifier: Apache-2.0
"""Where the W&B client keeps things, whether somebody is logged in, and its helper process."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mprecipes.observe.client import end_helper, set_defaults, why_offline

OFFLINE = "no login: no WANDB_API_KEY, and no entry in a netrc file"


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """An environment without W&B, and an empty home."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def settings(**changes):
    values = {
        "mode": "online", "api_key": None, "identity_token_file": None,
        "base_url": "https://api.wandb.ai",
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_without_a_login_it_is_offline():
    """No key, no token, no netrc."""
    assert why_offline(settings()) == OFFLINE


@pytest.mark.parametrize("login", [{"api_key": "k"}, {"identity_token_file": "f"}])
def test_a_key_or_a_token_is_a_login(login):
    """What the client's own settings know is enough."""
    assert why_offline(settings(**login)) is None


def test_the_variable_is_a_login(monkeypatch):
    """WANDB_API_KEY."""
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert why_offline(settings()) is None


def test_a_netrc_entry_counts_for_its_own_server_only(tmp_path, monkeypatch):
    """An entry for api.wandb.ai logs in there and not at another server; a broken file nowhere."""
    file = tmp_path / ".netrc"
    file.write_text("machine api.wandb.ai\n  login user\n  password k\n")
    file.chmod(0o600)
    assert why_offline(settings()) is None
    assert why_offline(settings(base_url="https://wandb.example.com")) == OFFLINE
    file.write_text("this is no netrc")
    assert why_offline(settings()) == OFFLINE
    other = tmp_path / "elsewhere"
    other.write_text("machine wandb.example.com login user password k\n")
    monkeypatch.setenv("NETRC", str(other))
    assert why_offline(settings(base_url="https://wandb.example.com")) is None


@pytest.mark.parametrize("mode", ["offline", "disabled", "dryrun"])
def test_a_mode_that_never_goes_online_is_left_alone(mode):
    """WANDB_MODE is the user's word; no login is needed for it."""
    assert why_offline(settings(mode=mode)) is None


def test_defaults_give_way_to_the_user(tmp_path, monkeypatch):
    """Folders lie under the run, limits are set, and a variable that is there stays."""
    for name in ("DATA_DIR", "CACHE_DIR", "INIT_TIMEOUT", "FINISH_TIMEOUT_RAISES"):
        monkeypatch.setenv(f"WANDB_{name}", "")  # so that it is put back
        monkeypatch.delenv(f"WANDB_{name}")
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "77")
    monkeypatch.setenv("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "3")
    set_defaults(tmp_path)
    assert os.environ["WANDB_DATA_DIR"] == str(tmp_path / "wandb")
    assert os.environ["WANDB_CACHE_DIR"] == str(tmp_path / "wandb" / "cache")
    assert os.environ["WANDB_INIT_TIMEOUT"] == "30"
    assert os.environ["WANDB_FINISH_TIMEOUT"] == "77"


def test_only_the_clients_helper_is_ended():
    """Of two children, the one named wandb-core is killed."""
    script = (
        "import ctypes, sys\n"
        "ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)\n"  # PR_SET_NAME
        "print('named', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    names = ("wandb-core", "bystander")
    children = [subprocess.Popen([sys.executable, "-c", script, n], **pipes) for n in names]
    try:
        assert [child.stdout.readline() for child in children] == [b"named\n"] * 2
        end_helper()
        assert children[0].wait(60) == -9
        assert children[1].poll() is None
    finally:
        for child in children:
            child.kill()
            child.communicate()
