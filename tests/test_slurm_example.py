# SPDX-License-Identifier: Apache-2.0
"""docs/slurm.sh and slurm_nodes.sh: requeueing with stubs for every tool, then the real ones."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.engines.machines import free_port
from tests.fix64 import RECIPE, options, write_rows
from tests.launching import ROOT, environment, start
from tests.reading import attempt_lines, outcomes, run_json

SCRIPT, NODES_SCRIPT = ROOT / "docs" / "slurm.sh", ROOT / "docs" / "slurm_nodes.sh"
# The launcher and one rank; the launcher dies of SIGUSR1 as the real one does.
ACCELERATE = """\
#!/bin/bash
echo "$@" >> "$HOME/words"
[ "$STUB" = wrong-option ] && exit 1
rank() {
  trap 'echo SIGUSR1 >> "$HOME/signals"; exit 75' USR1
  touch "$HOME/ready"
  for _ in $(seq 600); do [ -e "$RUN/STOP" ] && exit 75; sleep 0.05; done
}
[ "${SLURM_NODEID:-0}" = 0 ] && echo '"attempt": 0' >> "$RUN/run.json"
if [ "$STUB" = "" ]; then exit 1; fi
trap 'exit 1' TERM
rank &
[ "$STUB" = starting ] || echo "{\\"host\\": \\"here\\", \\"pid\\": $!}" > "$RUN/lease.json"
wait $!
exit 1
"""
# Runs the command on each node, here side by side, and passes a failure on.
SRUN = """\
#!/bin/bash
shift
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$node "$@" & done
trap 'kill $(jobs -p)' TERM
for job in $(jobs -p); do wait "$job" || code=1; done
exit "${code:-0}"
"""
SCONTROL = """\
#!/bin/bash
[ "$1" = show ] && exec printf '%s\\n' 127.0.0.1 other-node
echo "$@" >> "$HOME/requeued"
"""
STUBS = {
    "srun": SRUN,
    "accelerate": ACCELERATE,
    "mprecipes": '#!/bin/bash\necho "$@" >> "$HOME/asked"\nexit "$STATUS"\n',
    "scontrol": SCONTROL,
}


class Job:
    """The script with stubs in the place of every tool."""

    def __init__(self, home):
        self.home, self.run = home, home / "run"
        self.run.mkdir()
        (home / "bin").mkdir()
        for name, text in STUBS.items():
            (home / "bin" / name).write_text(text)
            (home / "bin" / name).chmod(0o755)

    def start(self, status, stub="", script=SCRIPT):
        env = {
            "PATH": f"{self.home}/bin:/usr/bin:/bin", "HOME": str(self.home), "RUN": str(self.run),
            "STATUS": str(status), "STUB": stub, "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[0-1]",
        }  # fmt: skip
        command = ["bash", str(script), str(self.run), "--max_steps", "3"]
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def wrote(self, name):
        path = self.home / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


@pytest.mark.parametrize(("number", "script"), [(0, SCRIPT), (1, NODES_SCRIPT)])
def test_the_script_is_bash(number, script):
    """Its syntax, and the blocks of the page around it."""
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    page = (ROOT / "docs" / "slurm.md").read_text()
    block = [part.split("```")[0] for part in page.split("```bash\n")[1:]][number]
    assert subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode == 0
    assert shlex.split(block)[:2] == ["sbatch", f"docs/{script.name}"]
    directives = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --signal=B:USR1@300" in directives
    assert "#SBATCH --requeue" in directives


@pytest.mark.parametrize(("status", "requeued"), [(0, 0), (75, 1), (3, 0)])
def test_on_several_nodes_each_has_a_launcher(job, status, requeued):
    """With its own rank and the first node's address; one record, one requeue."""
    process = job.start(status, script=NODES_SCRIPT)
    assert process.wait(60) == status
    assert job.wrote("requeued") == ["requeue 4711"] * requeued
    assert job.wrote("asked") == [f"status {job.run}"]
    assert sorted(job.wrote("words")) == [
        f"launch --config_file accelerate_configs/ddp_bf16.yaml --num_machines 2 --machine_rank "
        f"{rank} --num_processes 16 --main_process_ip 127.0.0.1 --main_process_port 24711 "
        f"recipes/pretrain_causal_lm.py --output_dir {job.run} --max_steps 3"
        for rank in (0, 1)
    ]


def test_on_several_nodes_a_file_asks_to_stop(job):
    """SIGUSR1 to the script becomes STOP in the run folder, and the job is requeued."""
    process = job.start(75, "running", NODES_SCRIPT)
    until(lambda: (job.home / "ready").exists() and (job.run / "run.json").exists())
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75
    assert (job.run / "STOP").exists()
    assert job.wrote("signals") == []
    assert job.wrote("requeued") == ["requeue 4711"]


def test_on_several_nodes_nothing_is_repeated_that_did_not_begin(job):
    """As on one node."""
    (job.run / "run.json").write_text('"attempt": 0\n')
    process = job.start(75, "wrong-option", NODES_SCRIPT)
    assert process.wait(60) == 1
    assert job.wrote("requeued") == []


@pytest.mark.parametrize(("status", "requeued"), [(0, 0), (75, 1), (1, 0), (3, 0), (4, 0)])
def test_it_requeues_on_75_alone(job, status, requeued):
    """By the run's own record, since the launcher says 1 each time; other codes are its own."""
    process = job.start(status)
    assert process.wait(60) == status
    assert job.wrote("requeued") == ["requeue 4711"] * requeued
    assert job.wrote("asked") == [f"status {job.run}"]
    (words,) = job.wrote("words")
    assert words == (
        "launch --config_file accelerate_configs/ddp_bf16.yaml recipes/pretrain_causal_lm.py "
        f"--output_dir {job.run} --max_steps 3"
    )


def test_a_launch_that_began_nothing_is_not_repeated(job):
    """The record still says 75, of the attempt before: a wrong option would loop for ever."""
    (job.run / "run.json").write_text('"attempt": 0\n')
    process = job.start(75, "wrong-option")
    assert process.wait(60) == 1
    assert job.wrote("requeued") == []
    assert "did not begin an attempt" in process.stdout.read()


def test_the_signal_reaches_the_rank(job):
    """SIGUSR1 to the script goes to the process of the lease, and the job is requeued."""
    process = job.start(75, "running")
    until(lambda: (job.home / "ready").exists() and (job.run / "lease.json").exists())
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75
    assert job.wrote("signals") == ["SIGUSR1"]
    assert job.wrote("requeued") == ["requeue 4711"]


def test_a_lease_of_somebody_else_is_not_signalled(job):
    """A dead run's lease may name a pid that now is another's: a file STOP is used instead."""
    other = subprocess.Popen(["sleep", "60"])
    (job.run / "lease.json").write_text(json.dumps({"pid": other.pid}))
    process = job.start(75, "starting")
    until(lambda: (job.home / "ready").exists())
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75
    assert (job.run / "STOP").exists()
    assert job.wrote("signals") == []
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.launch
@pytest.mark.parametrize(
    "script", [SCRIPT, pytest.param(NODES_SCRIPT, marks=pytest.mark.slow)], ids=lambda s: s.stem
)
def test_the_real_tools(tmp_path, script):
    """SIGUSR1 stops a real run with 75, the job is requeued, and the next job finishes it."""
    run, bin = tmp_path / "run", tmp_path / "bin"
    bin.mkdir()
    modules = {"accelerate": "accelerate.commands.accelerate_cli", "mprecipes": "mprecipes"}
    for name, module in modules.items():
        (bin / name).write_text(f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n')
    for name in ("srun", "scontrol"):
        (bin / name).write_text(STUBS[name].replace("$HOME", str(tmp_path)))
    for path in bin.iterdir():
        path.chmod(0o755)
    words = options(
        write_rows(tmp_path / "rows.jsonl"), run, max_steps=150, save_steps=150, checkpoint=None
    )
    place = words.index("--output_dir")
    env = {
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "4711",
        "RECIPE": str(RECIPE), "ACCELERATE_CONFIG": str(ROOT / "accelerate_configs" / "cpu.yaml"),
        "NUM_PROCESSES": "2", "PROCESSES_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[0-1]", "PORT": str(free_port()),
    }  # fmt: skip
    command = ["bash", str(script), str(run), *words[:place], *words[place + 2 :]]

    def begin():
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=environment(env), stdout=pipe, stderr=subprocess.STDOUT
        )

    process = begin()
    journal = run / "journal" / "attempt-0000.jsonl"
    until(lambda: journal.exists() and len(attempt_lines(run, 0)) > 2)
    process.send_signal(signal.SIGUSR1)
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 75, output
    told, reason = ("SIGUSR1 to rank 0", "SIGUSR1")
    if script == NODES_SCRIPT:
        told, reason = (f"the run is asked to stop by {run}/STOP", "a file STOP")
    assert told in output
    assert f"asked to stop ({reason})" in run_json(run)["attempts"][0]["error"]
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    process = begin()
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 0, output
    assert outcomes(run) == ["preempted", "finished"]
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"


@pytest.mark.launch
def test_the_launcher_does_not_pass_sigusr1_on(tmp_path):
    """It dies of it, with no rank signalled; the ranks see its death, save, and end with 75."""
    run = tmp_path / "run"
    words = options(write_rows(tmp_path / "rows.jsonl"), run, max_steps=300, save_steps=300)
    with start(RECIPE, words, num_processes=2) as running:
        journal = run / "journal" / "attempt-0000.jsonl"
        running.wait_until(lambda: journal.exists() and len(attempt_lines(run, 0)) > 0)
        running.process.send_signal(signal.SIGUSR1)
        assert running.finish().returncode == -signal.SIGUSR1
        until(lambda: running.processes() == [])
    (entry,) = run_json(run)["attempts"]
    assert (entry["outcome"], entry["exit_code"]) == ("preempted", 75)
    assert "asked to stop (the launcher died" in entry["error"]
