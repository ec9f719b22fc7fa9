# SPDX-License-Identifier: Apache-2.0
"""A recipe file's identity follows from its RECIPE line, its bytes and where it lies."""

import dataclasses
import hashlib
import shutil

import pytest

from mprecipes.errors import ConfigError
from mprecipes.identity.recipe import (
    OFFICIAL_FOLDER,
    Recipe,
    RecipeIdentity,
    identify,
    list_recipes,
    read_recipe,
)

SOURCE = '''# SPDX-License-Identifier: Apache-2.0
"""Trains a thing in one minute.

More words.
"""

import os

RECIPE = Recipe(name="train_thing", version="1.2.3")

os.write(9999, b"a recipe is never run by those who read it")
'''
HASH = hashlib.sha256(SOURCE.encode()).hexdigest()


@pytest.fixture
def official(tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "train_thing.py").write_text(SOURCE)
    return folder


def test_recipe_knows_its_major_version():
    """MAJOR is what decides whether old checkpoints may be continued."""
    assert Recipe("a", "12.0.3").major == 12
    assert Recipe(name="a", version="0.1.0", based_on="b@1.2.0#9f3c21ab").major == 0


@pytest.mark.parametrize(
    ("facts", "found", "expected", "action"),
    [
        (
            ("my recipe", "1.0.0"),
            "name is 'my recipe'",
            "letters, digits and underscores",
            "write it like 'my_",
        ),
        (("a", "1.0"), "version is '1.0'", "MAJOR.MINOR.PATCH", "write it like '1.0.0'"),
        (("a", "01.0.0"), "version is '01.0.0'", "MAJOR.MINOR.PATCH", "write it like '1.0.0'"),
        (("a", 1.0), "version is 1.0", "MAJOR.MINOR.PATCH", "write it like '1.0.0'"),
        (("a", "1.0.0", "b"), "based_on is 'b'", "8 hex digits", "write it like 'pretrain_causal"),
        (("a", "1.0.0", "b@1.0.0#XYZ"), "based_on is", "8 hex digits", "write it like 'pretrain"),
    ],
)
def test_malformed_recipe_is_refused(facts, found, expected, action):
    """Name, version and ancestor are refused unless written as documented."""
    with pytest.raises(ConfigError) as caught:
        Recipe(*facts)
    assert caught.value.found.startswith(found)
    assert expected in caught.value.expected
    field = found.split()[0]
    assert caught.value.where == f"RECIPE = Recipe(..., {field}=...)"
    assert caught.value.action.startswith(action)


def test_recipe_cannot_be_changed():
    """An identity is a fact, not a variable."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe("a", "1.0.0").version = "2.0.0"


def test_official_recipe(official):
    """A file in the official folder is official and has no parent."""
    found = identify(Recipe("train_thing", "1.2.3"), official / "train_thing.py", official=official)
    assert found == RecipeIdentity("train_thing", "1.2.3", None, HASH, "official", None)
    assert found.major == 1


def test_plain_copy(official, tmp_path):
    """The same bytes elsewhere, under any file name, are a copy and name their ancestor."""
    source = tmp_path / "mine.py"
    shutil.copy(official / "train_thing.py", source)
    found = identify(Recipe("train_thing", "1.2.3"), source, official=official)
    parent = f"train_thing@1.2.3#{HASH[:8]}"
    assert found.to_dict() == {
        "name": "train_thing",
        "version": "1.2.3",
        "based_on": parent,
        "sha256": HASH,
        "status": "copy",
        "parent": parent,
    }


def test_changed_copy_that_kept_its_name(official, tmp_path):
    """An official name with other bytes is a modified copy of that version."""
    source = tmp_path / "mine.py"
    source.write_text(SOURCE + "# changed\n")
    same = identify(Recipe("train_thing", "1.2.3"), source, official=official)
    assert (same.status, same.parent) == ("modified copy", f"train_thing@1.2.3#{HASH[:8]}")
    older = identify(Recipe("train_thing", "1.0.0"), source, official=official)
    assert (older.status, older.parent) == ("modified copy", "train_thing@1.0.0")


def test_renamed_copy_remembers_its_ancestor(official, tmp_path):
    """A `based_on` line makes any file a modified copy of what it names."""
    source = tmp_path / "mine.py"
    source.write_text("other\n")
    recipe = Recipe("my_thing", "1.0.0", based_on="train_thing@1.2.3#9f3c21ab")
    found = identify(recipe, source, official=official)
    assert (found.status, found.parent) == ("modified copy", "train_thing@1.2.3#9f3c21ab")
    assert found.based_on == "train_thing@1.2.3#9f3c21ab"


def test_own_recipe(official, tmp_path):
    """A name nobody knows and no ancestor is the user's own recipe."""
    source = tmp_path / "mine.py"
    source.write_text("other\n")
    found = identify(Recipe("my_thing", "1.0.0"), source, official=official)
    assert (found.status, found.based_on, found.parent) == ("own", None, None)


def test_list_shows_official_recipes_without_running_them(official):
    """Each row has name, version, relative path, hash and the docstring's first line."""
    (official / "another.py").write_text(
        '"""Trains more."""\nRECIPE = mp.Recipe("another", "0.1.0", based_on="b@1.0.0#9f3c21ab")\n'
    )
    another, thing = list_recipes(official)
    assert (another.name, another.based_on) == ("another", "b@1.0.0#9f3c21ab")
    assert thing.to_dict() == {
        "name": "train_thing",
        "version": "1.2.3",
        "based_on": None,
        "sha256": HASH,
        "path": "recipes/train_thing.py",
        "summary": "Trains a thing in one minute.",
    }
    assert thing.reference == f"train_thing@1.2.3#{HASH[:8]}"


def test_list_without_official_recipes_is_empty(tmp_path):
    """A package installed without the recipes folder lists none."""
    assert list_recipes(tmp_path / "recipes") == []
    assert OFFICIAL_FOLDER.name == "recipes"
    assert (OFFICIAL_FOLDER.parent / "mprecipes").is_dir()


@pytest.mark.parametrize(
    ("text", "found", "line"),
    [
        ("x = 1\n", "no RECIPE", None),
        ("x = 1\nRECIPE = make()\n", "RECIPE: it is not a call of Recipe", 2),
        ("RECIPE = Recipe\n", "RECIPE: it is not a call of Recipe", 1),
        ("RECIPE = Recipe(name=NAME, version='1.0.0')\n", "RECIPE: malformed node or string", 1),
        ("RECIPE = Recipe(name='a')\n", "RECIPE: Recipe.__init__() missing 1 required", 1),
        ("RECIPE = Recipe(name='a', version='1')\n", "version is '1'", 1),
        ("def broken(:\n", "not Python: invalid syntax", 1),
    ],
)
def test_unreadable_recipe_is_refused(tmp_path, text, found, line):
    """A file without a readable RECIPE line is refused with file and line."""
    path = tmp_path / "r.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert caught.value.found.startswith(found)
    assert caught.value.expected.startswith('RECIPE = Recipe(name="...", version=')
    assert caught.value.where == (f"{path}:{line}" if line else str(path))
    assert caught.value.action == "write that line as the first statement after the imports"


def test_missing_recipe_file_is_refused(tmp_path):
    """A path that leads nowhere is refused by name."""
    with pytest.raises(ConfigError) as caught:
        read_recipe(tmp_path / "none.py")
    assert caught.value.found == "the file cannot be read (No such file or directory)"
    assert caught.value.where == str(tmp_path / "none.py")
