# SPDX-License-Identifier: Apache-2.0
"""Which recipe a file is, in which version, and which recipe it descends from.

`RECIPE = Recipe(...)` in the file is the only thing a copy must keep; the rest is found out from
the file's bytes and from the official recipes, those in the `recipes/` folder beside this package.
A file is read here, never imported.
"""

import ast
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mprecipes.errors import ConfigError
from mprecipes.identity.files import sha256_file

OFFICIAL_FOLDER = Path(__file__).resolve().parents[2] / "recipes"

_NAME = r"[A-Za-z][A-Za-z0-9_]*"
_VERSION = r"(?:0|[1-9][0-9]*)\.(?:0|[1-9][0-9]*)\.(?:0|[1-9][0-9]*)"


@dataclass(frozen=True)
class Recipe:
    """A recipe's name, version and ancestor; the first statement of the file after its imports.

    Args:
        name: letters, digits and underscores.
        version: MAJOR.MINOR.PATCH; MAJOR changes when the same config and seed give another trace.
        based_on: the ancestor of a changed copy, like "pretrain_causal_lm@1.2.0#9f3c21ab" (name,
            version, first 8 hex digits of its SHA-256), or None.

    Raises:
        ConfigError: one of the three is not written like that.
    """

    name: str
    version: str
    based_on: str | None = None

    def __post_init__(self) -> None:
        rules = {
            "name": (_NAME, "letters, digits and underscores, a letter first", "my_recipe"),
            "version": (_VERSION, "MAJOR.MINOR.PATCH", "1.0.0"),
            "based_on": (
                rf"{_NAME}@{_VERSION}#[0-9a-f]{{8}}",
                "name@MAJOR.MINOR.PATCH#8 hex digits of its SHA-256, or None",
                "pretrain_causal_lm@1.0.0#9f3c21ab",
            ),
        }
        for field, (pattern, expected, example) in rules.items():
            value = getattr(self, field)
            if value is None and field == "based_on":
                continue
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise ConfigError(
                    f"{field} is {value!r}",
                    expected=expected,
                    where=f"RECIPE = Recipe(..., {field}=...)",
                    action=f"write it like {example!r}",
                )

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class RecipeIdentity:
    """Who a recipe file is.

    Attributes:
        based_on: what the file says, or what a plain copy is a copy of.
        sha256: of the file's bytes.
        status: "official" (lies in the official folder), "copy" (same bytes elsewhere), "modified
            copy" (an official name or a `based_on`, other bytes), "own" (anything else).
        parent: the recipe it descends from, with as much of name@version#hash as is known.
    """

    name: str
    version: str
    based_on: str | None
    sha256: str
    status: Literal["official", "copy", "modified copy", "own"]
    parent: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class RecipeRow:
    """One official recipe, as `mprecipes list` shows it; `path` is relative to the checkout."""

    name: str
    version: str
    based_on: str | None
    sha256: str
    path: str
    summary: str

    @property
    def reference(self) -> str:
        """The recipe as a `based_on` line names it."""
        return f"{self.name}@{self.version}#{self.sha256[:8]}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def identify(recipe: Recipe, source: Path, *, official: Path = OFFICIAL_FOLDER) -> RecipeIdentity:
    """Gives the identity of the recipe file at `source`; reads it and the official recipes."""
    sha256 = sha256_file(source)

    def identity(status: Any, based_on: str | None, parent: str | None) -> RecipeIdentity:
        return RecipeIdentity(recipe.name, recipe.version, based_on, sha256, status, parent)

    if source.resolve().parent == official.resolve():
        return identity("official", recipe.based_on, recipe.based_on)
    known = {row.name: row for row in list_recipes(official)}
    ancestor = known.get(recipe.name)
    if ancestor and ancestor.sha256 == sha256:
        return identity("copy", recipe.based_on or ancestor.reference, ancestor.reference)
    if recipe.based_on:
        return identity("modified copy", recipe.based_on, recipe.based_on)
    if ancestor:  # only the same version says which bytes it once was
        same = ancestor.version == recipe.version
        parent = ancestor.reference if same else f"{recipe.name}@{recipe.version}"
        return identity("modified copy", None, parent)
    return identity("own", None, None)


def list_recipes(official: Path = OFFICIAL_FOLDER) -> list[RecipeRow]:
    """Gives the official recipes by name; none where the package is installed without them."""
    rows = []
    for path in sorted(official.glob("*.py")):
        recipe, tree = read_recipe(path), ast.parse(path.read_bytes())
        summary = (ast.get_docstring(tree) or "").split("\n", 1)[0]
        where = f"{official.name}/{path.name}"
        sha256 = sha256_file(path)
        row = RecipeRow(recipe.name, recipe.version, recipe.based_on, sha256, where, summary)
        rows.append(row)
    return sorted(rows, key=lambda row: row.name)


def read_recipe(path: Path) -> Recipe:
    """Gives the `RECIPE` of a recipe file without running any of it.

    Raises:
        ConfigError: no such file, not Python, or no `RECIPE = Recipe(...)` of plain values.
    """
    line: int | None = None
    try:
        tree = ast.parse(path.read_bytes(), filename=path.name)
        for statement in tree.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id == "RECIPE" for target in targets):
                assert isinstance(statement, ast.Assign)
                line = statement.lineno
                return _from_call(statement.value)
        found = "no RECIPE"
    except OSError as error:
        found = f"the file cannot be read ({error.strerror})"
    except SyntaxError as error:
        found, line = f"not Python: {error.msg}", error.lineno
    except (TypeError, ValueError) as error:
        found = error.found if isinstance(error, ConfigError) else f"RECIPE: {error}"
    raise ConfigError(
        found,
        expected='RECIPE = Recipe(name="...", version="MAJOR.MINOR.PATCH") of plain text values',
        where=f"{path}:{line}" if line else str(path),
        action="write that line as the first statement after the imports",
    ) from None


def _from_call(call: ast.expr) -> Recipe:
    """Gives the Recipe that a call expression would make; only literals are evaluated."""
    if not isinstance(call, ast.Call) or ast.unparse(call.func).split(".")[-1] != "Recipe":
        raise ValueError("it is not a call of Recipe")
    words = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    return Recipe(*[ast.literal_eval(value) for value in call.args], **words)
