# SPDX-License-Identifier: Apache-2.0
"""A drill of a stand-in recipe, in real processes: equal where it resumes exactly, and only there.

The elastic launcher is left out (`launcher`) to save its seconds; tests/resume drills real recipes
through it.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest

from mprecipes.errors import ConfigError, RecipeError
from mprecipes.tools.drill import run_drill

RECIPE = Path(__file__).parent / "stand_in_recipe.py"


def drill(folder: Path, *arguments: str, recipe: Path = RECIPE, **options):
    return run_drill(
        recipe, folder, arguments=arguments, launcher=[sys.executable], timeout=120.0, **options
    )


@pytest.mark.launch
def test_killed_twice_and_equal(tmp_path):
    """Killed at steps 7 and 9, a copy of the recipe ends bit for bit as the uninterrupted run."""
    recipe = Path(shutil.copy(RECIPE, tmp_path / "my_recipe.py"))
    result = drill(tmp_path / "d", "--max_steps", "12", recipe=recipe, kill_at_steps=[7, 9])
    assert result.equal, [row for row in result.rows if not row.equal]
    assert [(kill.attempt, kill.step, kill.resumed_from) for kill in result.kills] == [
        (0, 7, 4), (1, 9, 8),
    ]  # fmt: skip
    counts = {row.what: row.compared for row in result.rows}
    assert counts["loss"] == counts["samples (batch digest)"] == 12
    assert counts["replayed steps"] == 4  # 5, 6, 7 and 9
    assert counts["parameters"] == 8
    assert counts["optimizer state"] == 18
    assert result.precision == "fp32"
    assert (result.recipe, result.status, result.last_step) == ("stand_in@1.0.0", "own", 12)
    written = json.loads((tmp_path / "d" / "drill.json").read_text())
    assert written["equal"] is True
    assert written["kills"][1]["step"] == 9
    assert (tmp_path / "d" / "drill.png").read_bytes()[:4] == b"\x89PNG"
    assert list(result.seconds) == ["reference", "killed", "killed 2", "resumed"]


@pytest.mark.launch
def test_killed_inside_a_save_after_a_drawn_step(tmp_path):
    """Seed 3 draws step 4; the next save is that of step 6, which is then not published."""
    result = drill(tmp_path, "--save_steps", "3", kill_seed=3, kill_during="save")
    assert result.equal, [row for row in result.rows if not row.equal]
    assert result.kill_seed == 3
    (kill,) = result.kills
    assert (kill.step, kill.during, kill.resumed_from) == (6, "save", 3)


@pytest.mark.launch
def test_forgotten_optimizer_state_is_found(tmp_path):
    """A resume that drops the optimizer's state is DIFFERENT from step 6 on, though it finishes."""
    result = drill(tmp_path, "--sabotage", "forget", kill_at_steps=[7])
    assert not result.equal
    rows = {row.what: row for row in result.rows}
    assert rows["samples (batch digest)"].equal
    assert rows["loss"].first_difference["where"] == "step 6"
    assert not rows["parameters"].equal
    assert not rows["optimizer state"].equal
    assert not rows["replayed steps"].equal
    assert json.loads((tmp_path / "drill.json").read_text())["equal"] is False


@pytest.mark.launch
@pytest.mark.parametrize(
    ("arguments", "options", "found", "where"),
    [
        (["--sabotage", "fail"], {}, "exit code 1, 2 journaled steps", "uninterrupted"),
        (["--sabotage", "deaf"], {"kill_at_steps": [7]}, "exit code 0, last", "--kill_at_step 7"),
        ([], {"kill_at_steps": [13]}, "step 13, in a run of 12 steps", "--kill_at_step"),
    ],
)
def test_what_cannot_be_drilled_is_refused(tmp_path, arguments, options, found, where):
    """A recipe that fails by itself, never dies or never gets there is refused with its reason."""
    with pytest.raises(ConfigError) as caught:
        drill(tmp_path, *arguments, **options)
    assert found in caught.value.found
    assert where in caught.value.where
    assert caught.value.expected
    assert caught.value.exit_code == 2
    if "fail" in arguments:
        assert "the stand-in fails by itself" in caught.value.action
    assert not (tmp_path / "drill.json").exists()


@pytest.mark.parametrize(
    ("recipe", "found"), [("absent.py", "no such file"), ("", "a folder"), ("x.py", "no RECIPE")]
)
def test_files_that_are_no_recipe(tmp_path, recipe, found):
    """A path that is no recipe is refused before anything is launched."""
    (tmp_path / "x.py").write_text("print('hello')\n")
    with pytest.raises(ConfigError) as caught:
        drill(tmp_path / "d", recipe=tmp_path / recipe)
    assert caught.value.found == found
    assert str(tmp_path) in caught.value.where
    assert caught.value.expected
    assert caught.value.action
    assert not list((tmp_path / "d").glob("*"))


def test_earlier_drill_is_not_overwritten(tmp_path):
    """A folder that holds an earlier drill is refused and left as it is."""
    (tmp_path / "interrupted").mkdir()
    with pytest.raises(ConfigError) as caught:
        drill(tmp_path)
    assert caught.value.found == "interrupted/ of an earlier drill"
    assert "stale run" in caught.value.expected
    assert caught.value.where == f"--output_dir {tmp_path}"
    assert "new folder" in caught.value.action
    assert [path.name for path in tmp_path.iterdir()] == ["interrupted"]


def test_an_output_dir_that_is_a_file_is_refused(tmp_path):
    """A path that cannot be a folder is named, and nothing is launched."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError) as caught:
        drill(tmp_path / "file")
    assert caught.value.found == "no folder can be made here (File exists)"
    assert caught.value.where == f"--output_dir {tmp_path / 'file'}"
    assert "another --output_dir" in caught.value.action and caught.value.expected
    assert (tmp_path / "file").read_text() == "x"


def test_time_limit(tmp_path):
    """A run that does not end is ended, and the message says where its output is."""
    recipe = tmp_path / "endless.py"
    recipe.write_text(
        "import signal\nfrom mprecipes.identity.recipe import Recipe\n"
        'RECIPE = Recipe(name="endless", version="1.0.0")\nsignal.pause()\n'
    )
    with pytest.raises(RecipeError) as caught:
        run_drill(recipe, tmp_path / "d", launcher=[sys.executable], timeout=0.5)
    assert "after 0.5 s" in caught.value.found
    assert "--timeout" in caught.value.expected
    assert caught.value.where.endswith("reference.log")
    assert "raise --timeout" in caught.value.action
    assert caught.value.exit_code == 1
