# SPDX-License-Identifier: Apache-2.0
"""The house rules hold for this repository, and each one sees the fault it is there to see."""

import textwrap
from pathlib import Path

import pytest

import mprecipes
from tests.house_rules import RULES, SPDX

ROOT = Path(__file__).resolve().parents[1]

RECIPE = f"""\
{SPDX}
\"\"\"Trains nothing.\"\"\"

from dataclasses import dataclass

import mprecipes as mp

RECIPE = mp.Recipe(name="toy", version="1.0.0", based_on=None)


@dataclass(kw_only=True)
class Config:
    seed: int = mp.option(1, help="of the order", resume="must_match")
    output_dir: str = mp.option(help="the run folder", resume="free")


def build_model(config):
    return None


def compute_loss(model, batch):
    # region: loss
    return 0.0
    # endregion


def main():
    pass
"""
HOUSE = {
    "Makefile": ".PHONY: test\ntest: ## run the tests\n\ttrue\n",
    "README.md": "# Toy\n\n```bash\n# once\nmake test  # all\ncd toy\n```\n",
    "mprecipes/__init__.py": f"""\
{SPDX}
\"\"\"The package.\"\"\"
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mprecipes.data.order import permute as permute

_HOMES = {{"permute": "data.order"}}
""",
    "mprecipes/errors.py": f'{SPDX}\n"""Errors."""\n',
    "mprecipes/data/__init__.py": f'{SPDX}\n"""The data room."""\n',
    "mprecipes/data/order.py": f"""\
{SPDX}
\"\"\"Order.\"\"\"
from mprecipes.errors import DataError
from mprecipes.identity import files


def permute():
    return files, DataError
""",
    "mprecipes/identity/files.py": f'{SPDX}\n"""Files."""\n',
    "mprecipes/observe/metrics.py": f'{SPDX}\n"""Metrics."""\n',
    "mprecipes/tools/drill.py": (
        f'{SPDX}\n"""Drill."""\nimport mprecipes as mp\nfrom mprecipes.observe import metrics\n'
    ),
    "recipes/toy.py": RECIPE,
    "recipes/CHANGELOG.md": "# Changes\n\n## toy 1.0.0\n\nFirst version.\n",
    "recipes/configs/toy/tiny.yaml": "seed: 3\n",
    "tests/readme_commands.py": (
        f"{SPDX}\nREADME_COMMANDS: dict[str, str] = {{\n"
        '    "make test": "tests/test_make.py::test_it",\n}\n'
    ),
    "tests/test_make.py": f'{SPDX}\n"""Make."""\n\n\ndef test_it():\n    """Runs."""\n',
}
for module in ("errors", "data/order", "identity/files", "observe/metrics", "tools/drill"):
    folder, _, name = f"unit/{module}".rpartition("/")
    HOUSE[f"tests/{folder}/test_{name}.py"] = (
        f'{SPDX}\n"""Tests."""\n\n\ndef test_it():\n    """permute works."""\n'
    )


def added(old: str, new: str):
    """Gives a change that puts `new` in the place of `old`, which must be there."""

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


def put(text: str):
    """Gives a change that makes this the file, its first line the licence."""
    return lambda _: f"{SPDX}\n" + textwrap.dedent(text).lstrip("\n")


def after(text: str):
    """Gives a change that adds text at the end."""
    return lambda old: old + textwrap.dedent(text)


ORDER, METRICS, FILES, DRILL = (
    "mprecipes/data/order.py",
    "mprecipes/observe/metrics.py",
    "mprecipes/identity/files.py",
    "mprecipes/tools/drill.py",
)
INIT, TOY, UNIT = "mprecipes/__init__.py", "recipes/toy.py", "tests/unit/data/test_order.py"
UNFINISHED = "TO" + "DO"

# rule, file, change (None removes the file), what the one violation must say
PLANTED = [
    ("rooms_import_only_rooms_above", ORDER, after("from mprecipes.resume import x\n"), "resume.x"),
    ("rooms_import_only_rooms_above", ORDER, after("import mprecipes.tools.cli\n"), "tools.cli"),
    ("rooms_import_only_rooms_above", ORDER, after("from ..tools import cli\n"), "tools.cli"),
    ("rooms_import_only_rooms_above", ORDER, after("import mprecipes\n"), "imports mprecipes"),
    (
        "rooms_import_only_rooms_above",
        ORDER,
        after("def f():\n    from mprecipes.resume import journal\n"),
        "resume.journal",
    ),
    (
        "rooms_import_only_rooms_above",
        METRICS,
        after("from mprecipes.data import order\n"),
        "order",
    ),
    (
        "rooms_import_only_rooms_above",
        "mprecipes/errors.py",
        after("import mprecipes.data\n"),
        "data",
    ),
    (
        "rooms_import_only_rooms_above",
        "mprecipes/extra/x.py",
        put('"""X."""'),
        "not one of the rooms",
    ),
    (
        "engines_are_imported_where_they_are_meant_to",
        ORDER,
        after("import accelerate\n"),
        "accelerate",
    ),
    (
        "engines_are_imported_where_they_are_meant_to",
        ORDER,
        after("def f():\n    from deepspeed.ops import adam\n"),
        "imports deepspeed",
    ),
    (
        "engines_are_imported_where_they_are_meant_to",
        "mprecipes/compute/building.py",
        put('"""L."""\nimport deepspeed\n'),
        "when it is imported itself",
    ),
    (
        "engines_are_imported_where_they_are_meant_to",
        FILES,
        after("import torch\n"),
        "imports torch",
    ),
    ("engines_are_imported_where_they_are_meant_to", METRICS, after("import wandb\n"), "wandb"),
    ("the_library_never_trains", ORDER, after("def f(loss):\n    loss.backward()\n"), "backward"),
    ("the_library_never_trains", ORDER, after("def f(o):\n    o.zero_grad()\n"), "zero_grad"),
    (
        "the_library_never_trains",
        ORDER,
        after("def f(s):\n    s.optimizer.step()\n"),
        "calls step",
    ),
    ("nothing_is_pickled", ORDER, after("import pickle\n"), "pickle"),
    ("nothing_is_pickled", ORDER, after("def f(torch):\n    torch.load(f)\n"), "torch.load"),
    ("modules_and_recipes_stay_small", ORDER, after("x = 1\n" * 330), "at most 330"),
    ("modules_and_recipes_stay_small", TOY, after("x = 1\n" * 290), "at most 310"),
    (
        "modules_and_recipes_stay_small",
        TOY,
        added("def main():\n", "def main():\n" + "    x = 1\n" * 115),
        "main() has 117 lines, at most 115",
    ),
    ("every_module_has_a_unit_test_file", UNIT, None, "data/order.py: no test"),
    ("every_module_has_a_unit_test_file", UNIT, put('"""Empty."""'), "data/order.py: no test"),
    ("every_test_says_what_it_shows", UNIT, after("def test_more():\n    pass\n"), "test_more"),
    (
        "every_test_says_what_it_shows",
        UNIT,
        after("class TestIt:\n    def test_in(self):\n        pass\n"),
        "test_in",
    ),
    ("every_test_says_what_it_shows", UNIT, put("x = 1\n"), "no docstring"),
    ("tests_do_not_sleep", UNIT, after("import time\ntime.sleep(1)\n"), "sleeps"),
    (
        "every_fault_point_is_in_the_crash_matrix",
        ORDER,
        after('def f(mp):\n    mp.fault_point("data.new", 3)\n'),
        "data.new: not in the crash matrix",
    ),
    (
        "every_fault_point_is_in_the_crash_matrix",
        ORDER,
        after("def f(name):\n    fault_point(name)\n"),
        "order.py:10: a fault point without a literal name",
    ),
    (
        "every_fault_point_is_in_the_crash_matrix",
        "tests/faults/points.py",
        put('SAVED = ("save.gone",)\n'),
        "save.gone: in the crash matrix only",
    ),
    (
        "every_fault_point_is_in_the_crash_matrix",
        "tests/faults/points.py",
        put('ELSEWHERE = {"step": "tests/test_make.py"}\n'),
        "step: not in tests/test_make.py",
    ),
    (
        "exported_names_exist_and_are_tested",
        ORDER,
        added("def permute", "def permuted"),
        "permute: exported, not defined in data.order",
    ),
    (
        "exported_names_exist_and_are_tested",
        INIT,
        added('": "data.order"', '": "data.order", "permute": "data.order"'),
        "permute: exported twice",
    ),
    ("exported_names_exist_and_are_tested", INIT, put('"""P."""'), "exports nothing"),
    ("exported_names_exist_and_are_tested", INIT, None, "absent"),
    ("there_is_a_recipe", TOY, None, "no recipe"),
    ("a_recipe_defines_what_tools_need", TOY, added("def main", "def start"), "no main"),
    ("a_recipe_defines_what_tools_need", TOY, added("class Config", "class Options"), "no Config"),
    (
        "a_recipe_defines_what_tools_need",
        TOY,
        added("RECIPE =", "SIZE = 3\nRECIPE ="),
        "not the first statement",
    ),
    ("a_recipe_defines_what_tools_need", TOY, added("(kw_only=True)", ""), "kw_only"),
    (
        "a_recipe_defines_what_tools_need",
        TOY,
        added(
            "    seed: int",
            "".join(f"    o{i}: int = mp.option(1)\n" for i in range(32)) + "    seed: int",
        ),
        "34 options, at most 33",
    ),
    (
        "recipes_import_the_top_level_only",
        TOY,
        added("import mprecipes as mp", "import mprecipes as mp\nimport mprecipes.errors"),
        "mprecipes.errors",
    ),
    (
        "recipes_import_the_top_level_only",
        TOY,
        added("import mprecipes as mp", "import mprecipes as mp\nfrom mprecipes.data import order"),
        "mprecipes.data.order",
    ),
    (
        "recipes_import_the_top_level_only",
        TOY,
        added("import mprecipes as mp", "import mprecipes as mp\nfrom recipes.other import main"),
        "recipes.other",
    ),
    (
        "marked_regions_are_equal_everywhere",
        "recipes/other.py",
        put("    # region: loss\n    return 0.5\n    # endregion\n"),
        "region loss differs from other.py",
    ),
    (
        "marked_regions_are_equal_everywhere",
        TOY,
        after("# region: loss\nreturn 0.0\n# endregion\n"),
        "region loss differs from toy.py",
    ),
    ("marked_regions_are_equal_everywhere", TOY, added("    # endregion\n", ""), "not closed"),
    ("marked_regions_are_equal_everywhere", TOY, after("# endregion\n"), "without region"),
    (
        "marked_regions_are_equal_everywhere",
        TOY,
        added("    return 0.0\n", "    # region: inner\n    return 0.0\n"),
        "inside region loss",
    ),
    ("marked_regions_are_equal_everywhere", TOY, after("#region loss\n"), "not of the form"),
    ("every_version_has_a_changelog_entry", TOY, added('"1.0.0"', '"1.0.1"'), "## toy 1.0.1"),
    ("every_version_has_a_changelog_entry", TOY, added('"toy"', '"toys"'), "is named 'toys'"),
    (
        "every_version_has_a_changelog_entry",
        "recipes/CHANGELOG.md",
        added("First version.", ""),
        "## toy 1.0.0",
    ),
    ("every_version_has_a_changelog_entry", "recipes/CHANGELOG.md", None, "## toy 1.0.0"),
    (
        "every_yaml_parses_with_its_own_recipe",
        "recipes/configs/toy/tiny.yaml",
        after("sed: 4\n"),
        "tiny.yaml: ",
    ),
    (
        "every_yaml_parses_with_its_own_recipe",
        "recipes/configs/toy/tiny.yaml",
        added("3", "many"),
        "tiny.yaml: ",
    ),
    ("every_yaml_parses_with_its_own_recipe", "recipes/configs/toy/tiny.yaml", None, "no YAML"),
    (
        "every_yaml_parses_with_its_own_recipe",
        "recipes/configs/toys/tiny.yaml",
        lambda _: "seed: 3\n",
        "no such recipe",
    ),
    ("python_files_name_their_licence", ORDER, lambda text: "\n" + text, "data/order.py"),
    ("text_is_ascii", "README.md", after("na\u00efve\n"), "README.md:8"),
    ("nothing_is_left_to_do", ORDER, after(f"# {UNFINISHED}: more\n"), UNFINISHED),
    ("no_path_of_one_machine", "README.md", after("See `/" + "home/me/runs`.\n"), "README.md:8"),
    ("no_path_of_one_machine", ORDER, after('x = "/' + 'tmp/x"\n'), "order.py"),
    ("no_error_is_swallowed", ORDER, after("try:\n    pass\nexcept:\n    raise\n"), "bare"),
    (
        "no_error_is_swallowed",
        ORDER,
        after("try:\n    pass\nexcept (OSError, Exception):\n    pass\n"),
        "swallowed",
    ),
    (
        "no_error_is_swallowed",
        ORDER,
        after("with contextlib.suppress(Exception):\n    pass\n"),
        "suppressed",
    ),
    ("every_module_says_what_it_promises", ORDER, added('"""Order."""', ""), "order.py"),
    ("every_module_says_what_it_promises", TOY, added('"""Trains nothing."""', ""), "toy.py"),
    (
        "every_command_in_a_page_is_tested",
        "README.md",
        after("```bash\nmprecipes drill recipes/toy.py \\\n    --max_steps 3\n```\n"),
        "`mprecipes drill recipes/toy.py --max_steps 3` is in no test",
    ),
    (
        "every_command_in_a_page_is_tested",
        "docs/page.md",
        lambda _: "```bash\naccelerate launch x.py\n```\n",
        "docs/page.md: `accelerate launch x.py`",
    ),
    (
        "every_command_names_a_test_that_exists",
        "tests/test_make.py",
        added("test_it", "test_that"),
        "no test tests/test_make.py::test_it",
    ),
    ("every_make_target_is_real", "Makefile", added(" ## run the tests", ""), "test has no help"),
    ("every_make_target_is_real", "README.md", added("make test", "make tests"), "no target tests"),
]


def build(root: Path) -> Path:
    """Writes the house that keeps every rule."""
    for name, text in HOUSE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize("name", RULES)
def test_the_repository_keeps_the_rule(name):
    """This checkout has no violation."""
    assert RULES[name](ROOT) == []


@pytest.mark.parametrize("name", RULES)
def test_a_house_that_keeps_the_rule_passes(tmp_path, name):
    """The small house into which faults are planted has no violation itself."""
    assert RULES[name](build(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "file", "change", "expected"),
    PLANTED,
    ids=[f"{number}-{planted[0]}" for number, planted in enumerate(PLANTED)],
)
def test_a_planted_violation_is_found(tmp_path, name, file, change, expected):
    """Each rule reports the planted fault by its place."""
    path = build(tmp_path) / file
    if change is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(change(old), encoding="utf-8")
    violations = RULES[name](tmp_path)
    assert [text for text in violations if expected in text], violations


def test_every_rule_is_fed_a_violation():
    """No rule is without a planted fault."""
    assert {planted[0] for planted in PLANTED} == set(RULES)


def test_a_name_in_no_test_is_found(tmp_path):
    """An exported name that no test mentions is reported."""
    build(tmp_path)
    for path in (tmp_path / "tests").rglob("*.py"):
        path.write_text(path.read_text().replace("permute works", "works"))
    violations = RULES["exported_names_exist_and_are_tested"](tmp_path)
    assert violations == ["permute: exported, in no test"]


def test_an_issue_number_allows_a_marker(tmp_path):
    """Unfinished work that names its issue is allowed."""
    (build(tmp_path) / ORDER).write_text(f'{SPDX}\n"""Order."""\n# {UNFINISHED} (#12): more\n')
    assert RULES["nothing_is_left_to_do"](tmp_path) == []


@pytest.mark.parametrize("name", mprecipes.__all__)
def test_exported_names_can_be_used(name):
    """Every public name is really there, and `dir` shows it."""
    assert getattr(mprecipes, name) is not None
    assert name in dir(mprecipes)
