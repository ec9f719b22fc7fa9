# SPDX-License-Identifier: Apache-2.0
"""The helpers that launch: what they promise about output, limits and processes left behind."""

import os
import signal
import sys
import textwrap

import psutil
import pytest

from tests.launching import TEST_ID, launch, marked_processes, run_command, start

pytestmark = pytest.mark.launch

SPAWNER = """\
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "child", child.pid, *sys.argv[1:])
if sys.argv[1] == "stay":
    time.sleep(600)
child.kill()
child.wait()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SPAWNER)
    return path


def test_a_launch_gives_code_output_and_time(script):
    """Two processes under one config print with their rank, and the launcher's code comes back."""
    done = launch(script, ["go", 0], config="accelerate_configs/cpu.yaml", num_processes=2)
    assert done.returncode == 0
    assert "rank 0 of 2" in done.output
    assert "rank 1 of 2" in done.output
    assert done.seconds > 0


def test_a_failing_script_gives_its_launchers_code(script):
    """The launcher turns every failure into 1."""
    assert launch(script, ["go", 7]).returncode == 1


def test_a_time_limit_ends_every_process_and_shows_the_output(script):
    """At the limit the workers and their children die, and the failure holds what was printed."""
    with pytest.raises(pytest.fail.Exception, match="no end within 15 s") as caught:
        launch(script, ["stay"], timeout=15)
    assert "rank 0 of 1" in str(caught.value)
    assert marked_processes(TEST_ID, os.environ[TEST_ID]) == []


def test_workers_can_be_found_by_rank_and_signalled(script):
    """A test reaches one rank's process; the launcher notices its death."""
    with start(script, ["stay"], num_processes=2) as running:
        running.wait_until(lambda: running.output().count("child") == 2)
        assert sorted(running.workers()) == [0, 1]
        os.kill(running.workers()[1].pid, signal.SIGKILL)
        done = running.finish(timeout=60)
    assert done.returncode == 1
    assert marked_processes(TEST_ID, os.environ[TEST_ID]) == []


def test_other_commands_run_with_the_same_interpreter():
    """`accelerate env` runs from the tests' own environment, wherever PATH points."""
    done = run_command(["accelerate", "env"], env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.output
    assert "Accelerate" in done.output


def test_a_process_left_behind_fails_the_test_that_left_it(tmp_path):
    """Sabotage: a test that leaves a process is red, and the process is ended."""
    (tmp_path / "test_leaving.py").write_text(
        textwrap.dedent(
            """
            import subprocess, sys
            import pytest
            from tests.conftest import no_process_left, prepared_data_cache  # noqa: F401

            @pytest.mark.launch
            def test_leaving(tmp_path):
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                print("child", child.pid)
            """
        )
    )
    done = run_command(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rP", "-c", os.devnull]
        + ["--rootdir", tmp_path, "-o", "markers=launch", tmp_path / "test_leaving.py"],
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.output
    assert "processes left behind by the test" in done.output
    assert "1 passed, 1 error" in done.output
    pid = int(done.output.split("child ")[1].split()[0])
    assert not psutil.pid_exists(pid)
