# SPDX-License-Identifier: Apache-2.0
"""Each benchmark can be started as its own docstring says, from the repository's folder."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)


def test_there_are_benchmarks():
    """All but what others share."""
    assert len(SCRIPTS) >= 12 and "load" in SCRIPTS and "states" not in SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_documented_command_answers_help(name, monkeypatch, capsys):
    """`python -m benchmarks.NAME` stands in its docstring, and takes --help."""
    text = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
    assert re.search(rf"python -m benchmarks\.{name}\b", text.split('"""')[1])
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_no_page_names_a_file_to_run():
    """`python benchmarks/NAME.py` would not find its own package."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*"), ROOT / "Makefile"]
    pages += [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "recipes").glob("*.py")]
    text = {page.name: page.read_text(encoding="utf-8") for page in pages if page.suffix != ".png"}
    assert [name for name in text if "python benchmarks/" in text[name]] == []
