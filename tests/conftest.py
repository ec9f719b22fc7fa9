# SPDX-License-Identifier: Apache-2.0
"""What every test stands on: no network, a cache of its own, and no process left behind."""

import os
import signal
import uuid

# Before anything imports huggingface_hub, which reads its variable once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("MPRECIPES_FAULT", None)

import psutil
import pytest

from tests.launching import TEST_ID, end_processes, marked_processes

END_SECONDS = 5.0

# As Python handles it, also for the processes of tests: in the background of a shell it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def prepared_data_cache(tmp_path_factory):
    """Prepared data is shared by the tests of one session and by nobody else."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("mprecipes-cache")
        patch.setenv("MPRECIPES_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def no_process_left(request, monkeypatch):
    """A test marked `launch` fails when a process it started outlives it; the process is ended."""
    if request.node.get_closest_marker("launch") is None:
        yield
        return
    test_id = uuid.uuid4().hex
    monkeypatch.setenv(TEST_ID, test_id)
    yield
    left = psutil.wait_procs(marked_processes(TEST_ID, test_id), timeout=END_SECONDS)[1]
    names = [_describe(process) for process in left]
    end_processes(left)
    if names:
        pytest.fail("processes left behind by the test:\n" + "\n".join(names))


@pytest.fixture(autouse=True)
def launcher_variables():
    """What an Accelerator exports (ACCELERATE_USE_FSDP) is not there for the next test."""
    before = {name: text for name, text in os.environ.items() if name.startswith("ACCELERATE_")}
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def fresh_accelerator():
    """Accelerate keeps its state for the life of a process; this test's does not outlive it."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)
