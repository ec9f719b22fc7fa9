# SPDX-License-Identifier: Apache-2.0
"""The house rules as functions: each takes the root of a checkout and gives its violations.

They read source text and syntax trees, so that a planted tree of a few lines can be judged the same
way as the repository; `tests/test_house_rules.py` does both.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOMS = ("identity", "compute", "data", "checkpoint", "resume", "observe", "tools")
FREE_FOR_ALL = ("errors", "faults")
MAY_IMPORT = {
    "accelerate": {"compute/building", "compute/launch", "checkpoint/manager", "observe/tracking"},
    "deepspeed": {"compute/building", "checkpoint/snapshot"},
    "wandb": {"observe/tracking", "observe/report"},
}
MODULE_LINES, RECIPE_LINES, MAIN_LINES, NUM_OPTIONS = 330, 310, 115, 33
RECIPE_DEFINES = ("RECIPE", "Config", "build_model", "compute_loss", "main")
SPDX = "# SPDX-License-Identifier: Apache-2.0"
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".json", ".lock", ".cfg", ".txt", ".sh", ""}
SKIPPED_FOLDERS = {"runs", "build", "dist", "__pycache__"}
VISIBLE_DOT_FOLDERS = {".ci", ".github"}
COMMAND_WORDS = ("make", "accelerate", "mprecipes", "python", "python3", "pip", "sha256sum", "cp")

Rule = Callable[[Path], list[str]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Adds a rule to the table that the tests go through."""
    RULES[function.__name__] = function
    return function


# What there is


def modules(root: Path) -> dict[str, Path]:
    """Gives the package's modules by their path without suffix, such as `data/order`."""
    package = root / "mprecipes"
    return {
        path.relative_to(package).with_suffix("").as_posix(): path
        for path in sorted(package.rglob("*.py"))
    }


def recipes(root: Path) -> list[Path]:
    return sorted((root / "recipes").glob("*.py"))


def text_files(root: Path) -> Iterator[Path]:
    """Gives every text file of the checkout, nothing that a tool or a run made."""
    for path in sorted(root.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in VISIBLE_DOT_FOLDERS
            if not hidden and path.name not in SKIPPED_FOLDERS and path.suffix != ".egg-info":
                yield from text_files(path)
        elif path.suffix in TEXT_SUFFIXES and not path.name.startswith("."):
            yield path


def python_files(root: Path) -> Iterator[Path]:
    return (path for path in text_files(root) if path.suffix == ".py")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imported(path: Path, package: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Gives every absolute name a file imports anywhere, `a.b` and, of `from a import b`, `a.b`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)


# Layers


@rule
def rooms_import_only_rooms_above(root: Path) -> list[str]:
    """A room imports itself, rooms above it, errors and faults; observe no other; tools all."""
    found = []
    for name, path in modules(root).items():
        room = name.partition("/")[0]
        if "/" not in name and name not in FREE_FOR_ALL:
            continue  # the package's front doors: __init__ and __main__
        if room in ROOMS:
            allowed = set(ROOMS[: ROOMS.index(room) + 1]) | set(FREE_FOR_ALL)
            allowed = {"observe", *FREE_FOR_ALL} if room == "observe" else allowed
        else:
            allowed = set(FREE_FOR_ALL)
        package = ".".join(["mprecipes", *name.split("/")[:-1]])
        for target, node in imported(path, package):
            parts = target.split(".")
            above = (parts[1:2] or [""])[0] in allowed
            if parts[0] == "mprecipes" and room != "tools" and not above:
                found.append(f"{name}:{node.lineno}: imports {target}")
        if room not in ROOMS and "/" in name:
            found.append(f"{name}: {room} is not one of the rooms {', '.join(ROOMS)}")
    return found


@rule
def engines_are_imported_where_they_are_meant_to(root: Path) -> list[str]:
    """accelerate, deepspeed (lazily) and wandb in named modules; torch in identity/environment."""
    found = []
    for name, path in modules(root).items():
        for target, node in imported(path):
            engine = target.partition(".")[0]
            if engine in MAY_IMPORT and name not in MAY_IMPORT[engine]:
                found.append(f"{name}:{node.lineno}: imports {engine}")
            elif engine == "deepspeed" and node.col_offset == 0:
                found.append(f"{name}:{node.lineno}: imports deepspeed when it is imported itself")
            elif engine == "torch" and name.startswith("identity/") and "environment" not in name:
                found.append(f"{name}:{node.lineno}: imports torch")
    return found


@rule
def the_library_never_trains(root: Path) -> list[str]:
    """backward, step and zero_grad of a training are called in recipes; tools drive recipes.

    compute/updates hands the recipe's own calls on to DeepSpeed.
    """
    return [
        f"{name}:{node.lineno}: calls {node.func.attr}"
        for name, path in modules(root).items()
        if not name.startswith("tools/") and name != "compute/updates"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (
            node.func.attr in ("backward", "zero_grad")
            or (node.func.attr == "step" and "optim" in ast.unparse(node.func.value))
        )
    ]


@rule
def nothing_is_pickled(root: Path) -> list[str]:
    """Files are safetensors and JSON: no pickle, torch.save or torch.load in the package."""
    found = []
    for name, path in modules(root).items():
        for target, node in imported(path):
            if target.split(".")[0] in ("pickle", "dill", "cloudpickle", "joblib"):
                found.append(f"{name}:{node.lineno}: imports {target}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "torch.save",
                "torch.load",
            ):
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


# Sizes


@rule
def modules_and_recipes_stay_small(root: Path) -> list[str]:
    """Modules, recipes and a recipe's main() have a length a reader can hold."""
    found = [
        f"mprecipes/{name}.py: {num_lines(path)} lines, at most {MODULE_LINES}"
        for name, path in modules(root).items()
        if num_lines(path) > MODULE_LINES
    ]
    for path in recipes(root):
        if num_lines(path) > RECIPE_LINES:
            found.append(f"{path.name}: {num_lines(path)} lines, at most {RECIPE_LINES}")
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAIN_LINES:
                    found.append(f"{path.name}: main() has {length} lines, at most {MAIN_LINES}")
    return found


# Tests


@rule
def every_module_has_a_unit_test_file(root: Path) -> list[str]:
    """mprecipes/<room>/<module>.py is tested in tests/unit/<room>/test_<module>.py."""
    found = []
    for name in modules(root):
        folder, _, module = name.rpartition("/")
        test = root / "tests" / "unit" / folder / f"test_{module}.py"
        if not module.startswith("__") and not (test.exists() and test_functions(test)):
            found.append(f"mprecipes/{name}.py: no test in {test.relative_to(root)}")
    return found


def test_functions(path: Path) -> list[ast.FunctionDef]:
    """Gives the test functions of a file, also those in classes."""
    return [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


test_functions.__test__ = False  # type: ignore[attr-defined]


@rule
def every_test_says_what_it_shows(root: Path) -> list[str]:
    """A test function has a docstring, and a file of tests begins with one."""
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root)
        if ast.get_docstring(tree(path)) is None:
            found.append(f"{name}: no docstring")
        found += [
            f"{name}:{node.lineno}: {node.name} has no docstring"
            for node in test_functions(path)
            if ast.get_docstring(node) is None
        ]
    return found


@rule
def tests_do_not_sleep(root: Path) -> list[str]:
    """Waiting is done by tests/launching.py, on a condition and with a limit."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: sleeps"
        for path in sorted((root / "tests").rglob("test_*.py"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep")
    ]


@rule
def every_fault_point_is_in_the_crash_matrix(root: Path) -> list[str]:
    """Names given to `fault_point` and the names in tests/faults/points.py are the same.

    A point of its table ELSEWHERE occurs in the test file it is said to be killed at.
    """
    found, named = [], set()
    for path in [*modules(root).values(), *recipes(root)]:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call) or "fault_point" not in ast.unparse(node.func):
                continue
            point = node.args[0] if node.args else None
            if isinstance(point, ast.Constant):
                named.add(str(point.value))
            else:
                found.append(f"{path.name}:{node.lineno}: a fault point without a literal name")
    path = root / "tests" / "faults" / "points.py"
    killed: set[str] = set()
    for node in tree(path).body if path.exists() else []:
        if isinstance(node, ast.Assign):
            value = ast.literal_eval(node.value)
            killed |= set(value)
            for point, file in value.items() if isinstance(value, dict) else ():
                test = root / file
                if not test.exists() or point not in test.read_text(encoding="utf-8"):
                    found.append(f"{point}: not in {file}")
    found += [f"{point}: not in the crash matrix" for point in sorted(named - killed)]
    return found + [f"{point}: in the crash matrix only" for point in sorted(killed - named)]


@rule
def exported_names_exist_and_are_tested(root: Path) -> list[str]:
    """Every name of the package's table of exports is defined at its home and occurs in a test.

    The table is the one dict of `mprecipes/__init__.py`, name -> module; type checkers see the same
    names from the same modules under TYPE_CHECKING.
    """
    path = root / "mprecipes" / "__init__.py"
    if not path.exists():
        return ["mprecipes/__init__.py: absent"]
    homes: dict[str, str] = {}
    typed: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Dict) and not homes:
            keys = [ast.literal_eval(key) for key in node.keys if key is not None]
            homes = dict(zip(keys, map(ast.literal_eval, node.values)))
            found = [f"{name}: exported twice" for name in sorted(homes) if keys.count(name) > 1]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mprecipes."):
            home = str(node.module).removeprefix("mprecipes.")
            typed |= {alias.name: home for alias in node.names}
    if not homes:
        return ["mprecipes/__init__.py: exports nothing"]
    words: set[str] = set()
    for test in (root / "tests").rglob("*.py"):
        if test.name not in ("house_rules.py", "test_house_rules.py"):
            words |= set(re.findall(r"\w+", test.read_text(encoding="utf-8")))
    for name, home in homes.items():
        file = root / "mprecipes" / (home.replace(".", "/") + ".py")
        if not file.exists() or name not in defined(file):
            found.append(f"{name}: exported, not defined in {home}")
        if name not in words:
            found.append(f"{name}: exported, in no test")
    different = sorted(homes.items() ^ typed.items())
    return found + [
        f"{name}: from {home} for the interpreter or the type checker only"
        for name, home in different
    ]


def defined(path: Path) -> set[str]:
    """Gives the names a module defines at its top level, imported ones left out."""
    names: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


# Recipes


@rule
def there_is_a_recipe(root: Path) -> list[str]:
    """The rules about recipes are not met by having none."""
    return [] if recipes(root) else ["recipes/: no recipe"]


@rule
def a_recipe_defines_what_tools_need(root: Path) -> list[str]:
    """RECIPE right after the imports, a keyword-only Config, build_model, compute_loss, main."""
    found = []
    for path in recipes(root):
        body = tree(path).body
        names: dict[str, ast.stmt] = {}
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names[node.name] = node
            elif isinstance(node, ast.Assign):
                names |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
        found += [f"{path.name}: no {name}" for name in RECIPE_DEFINES if name not in names]
        imports = [i for i, n in enumerate(body) if isinstance(n, ast.Import | ast.ImportFrom)]
        if "RECIPE" in names and body.index(names["RECIPE"]) != max(imports, default=0) + 1:
            found.append(f"{path.name}: RECIPE is not the first statement after the imports")
        config = names.get("Config")
        if isinstance(config, ast.ClassDef):
            if "kw_only=True" not in " ".join(map(ast.unparse, config.decorator_list)):
                found.append(f"{path.name}: Config is not a dataclass with kw_only=True")
            options = [node for node in config.body if isinstance(node, ast.AnnAssign)]
            if len(options) > NUM_OPTIONS:
                found.append(f"{path.name}: {len(options)} options, at most {NUM_OPTIONS}")
    return found


@rule
def recipes_import_the_top_level_only(root: Path) -> list[str]:
    """`import mprecipes`, never one of its rooms, another recipe, or the tests."""
    found = []
    siblings = {path.stem for path in recipes(root)} | {"recipes", "tests"}
    for path in recipes(root):
        rooms = {f"mprecipes.{name}" for name in (*ROOMS, *FREE_FOR_ALL)}
        for target, node in imported(path, "recipes"):
            parts = target.split(".")
            if ".".join(parts[:2]) in rooms or parts[0] in siblings:
                found.append(f"{path.name}:{node.lineno}: imports {target}")
    return found


@rule
def marked_regions_are_equal_everywhere(root: Path) -> list[str]:
    """`# region: NAME` ... `# endregion` holds the same lines wherever the name stands."""
    found = []
    first: dict[str, tuple[str, list[str]]] = {}
    for path in recipes(root):
        open_name: str | None = None
        block: list[str] = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            begins = re.fullmatch(r"\s*# region: (\S+)\s*", line)
            if re.match(r"\s*#\s*region", line) and not begins:
                found.append(f"{path.name}:{number}: not of the form `# region: NAME`")
            elif begins:
                if open_name is not None:
                    found.append(f"{path.name}:{number}: a region inside region {open_name}")
                open_name, block = begins[1], [line]
            elif line.strip() == "# endregion":
                if open_name is None:
                    found.append(f"{path.name}:{number}: endregion without region")
                    continue
                where, model = first.setdefault(open_name, (path.name, block))
                if block != model:
                    found.append(f"{path.name}: region {open_name} differs from {where}")
                open_name = None
            elif open_name is not None:  # lines behind a region are none of it
                block.append(line)
        if open_name is not None:
            found.append(f"{path.name}: region {open_name} is not closed")
    return found


@rule
def every_version_has_a_changelog_entry(root: Path) -> list[str]:
    """`## NAME VERSION` stands in recipes/CHANGELOG.md for each recipe, with text under it."""
    changelog = root / "recipes" / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8") if changelog.exists() else ""
    found = []
    for path in recipes(root):
        fields = recipe_fields(path)
        if fields.get("name") != path.stem:
            found.append(f"{path.name}: its RECIPE is named {fields.get('name')!r}")
        heading = f"## {fields.get('name')} {fields.get('version')}"
        entry = re.search(rf"^{re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.M | re.S)
        if entry is None or not entry[1].strip():
            found.append(f"{path.name}: no entry `{heading}` in recipes/CHANGELOG.md")
    return found


def recipe_fields(path: Path) -> dict[str, object]:
    """Gives the keyword arguments of `RECIPE = Recipe(...)`."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECIPE":
            assert isinstance(node.value, ast.Call)
            return {str(k.arg): ast.literal_eval(k.value) for k in node.value.keywords}
    return {}


@rule
def every_yaml_parses_with_its_own_recipe(root: Path) -> list[str]:
    """recipes/configs/<recipe>/*.yaml: at least one a recipe, and each one is accepted by it."""
    from mprecipes.errors import ConfigError
    from mprecipes.identity.config import parse_config

    found = []
    folders = sorted(path for path in (root / "recipes" / "configs").glob("*") if path.is_dir())
    names = {path.stem for path in recipes(root)}
    found += [f"configs/{path.name}: no such recipe" for path in folders if path.name not in names]
    for path in recipes(root):
        files = sorted((root / "recipes" / "configs" / path.stem).glob("*.yaml"))
        if not files:
            found.append(f"{path.name}: no YAML in configs/{path.stem}")
            continue
        config = load_config_class(path)
        for file in files:
            argv = ["--config", str(file)]
            if "output_dir" in config.__dataclass_fields__:
                argv += ["--output_dir", "somewhere"]
            try:
                parse_config(config, argv)
            except ConfigError as error:
                found.append(f"configs/{path.stem}/{file.name}: {error.found}")
    return found


def load_config_class(path: Path):
    """Gives the Config class of a recipe by importing its file."""
    name = f"house_rules_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses resolve their annotations through it
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module.Config


# Text


@rule
def python_files_name_their_licence(root: Path) -> list[str]:
    """The first line (after a shebang) is the SPDX line."""
    found = []
    for path in python_files(root):
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and lines[0].startswith("#!"):
            lines = lines[1:]
        if lines[:1] != [SPDX]:
            found.append(f"{path.relative_to(root)}: first line is not {SPDX}")
    return found


@rule
def text_is_ascii(root: Path) -> list[str]:
    """Every text file is ASCII; tests write other characters as escapes."""
    found = []
    for path in text_files(root):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.isascii():
                found.append(f"{path.relative_to(root)}:{number}: {line[:80]!r}")
    return found


@rule
def nothing_is_left_to_do(root: Path) -> list[str]:
    """No marker for unfinished work, except one that names its issue as in `(#12)`."""
    words = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|XX" + r"X)\b(?!\s*\(#\d+\))")
    return _lines_with(root, words)


@rule
def no_path_of_one_machine(root: Path) -> list[str]:
    """No absolute path into somebody's home, work or temporary folder."""
    folders = "home|root|work|Users|mnt|tmp|scratch|opt"
    return _lines_with(root, re.compile(rf"(?<![\w.:/)}}\]])/(?:{folders})/\w"))


def _lines_with(root: Path, words: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()[:80]}"
        for path in text_files(root)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if words.search(line)
    ]


@rule
def no_error_is_swallowed(root: Path) -> list[str]:
    """No bare except, and no Exception that is caught or suppressed and forgotten."""
    found = []
    for path in python_files(root):
        for node in ast.walk(tree(path)):
            where = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler):
                if node.type is None:
                    found.append(f"{where}: bare except")
                elif "Exception" in ast.unparse(node.type) and all(map(_does_nothing, node.body)):
                    found.append(f"{where}: {ast.unparse(node.type)} is swallowed")
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                names = {ast.unparse(argument) for argument in node.args}
                if names & {"Exception", "BaseException"}:
                    found.append(f"{where}: Exception is suppressed")
    return found


def _does_nothing(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass | ast.Continue)


@rule
def every_module_says_what_it_promises(root: Path) -> list[str]:
    """Every module of the package, and every recipe, begins with a docstring."""
    files = [*modules(root).values(), *recipes(root)]
    return [
        f"{path.relative_to(root)}: no docstring"
        for path in files
        if ast.get_docstring(tree(path)) is None
    ]


# Commands in pages


def bash_commands(page: Path) -> list[str]:
    """Gives the commands in a page's ```bash blocks: continued lines joined, comments cut off."""
    commands = []
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(line.split(" #")[0].split())
            if command and not command.startswith("#"):
                commands.append(command)
    return commands


def readme_commands(root: Path) -> dict[str, str]:
    """Gives the table of tests/readme_commands.py: command -> `file::function`."""
    path = root / "tests" / "readme_commands.py"
    for node in tree(path).body if path.exists() else []:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "README_COMMANDS":
            assert node.value is not None
            return ast.literal_eval(node.value)
    return {}


@rule
def every_command_in_a_page_is_tested(root: Path) -> list[str]:
    """A command of a ```bash block stands in tests/readme_commands.py by its first two words."""
    known = readme_commands(root)
    return [
        f"{page.relative_to(root)}: `{command}` is in no test"
        for page in text_files(root)
        if page.suffix == ".md"
        for command in bash_commands(page)
        if command.split()[0] in COMMAND_WORDS and " ".join(command.split()[:2]) not in known
    ]


@rule
def every_command_names_a_test_that_exists(root: Path) -> list[str]:
    """What tests/readme_commands.py points at is a test function of that file."""
    found = []
    for command, node in readme_commands(root).items():
        file, _, function = node.partition("::")
        path = root / file
        if not path.exists() or function not in {test.name for test in test_functions(path)}:
            found.append(f"`{command}`: no test {node}")
    return found


@rule
def every_make_target_is_real(root: Path) -> list[str]:
    """`make X` in a page names a target, and every target of .PHONY has a line of help."""
    makefile = root / "Makefile"
    text = makefile.read_text(encoding="utf-8") if makefile.exists() else ""
    helped = set(re.findall(r"^([a-z-]+):.*## \S", text, re.M))
    phony = set(re.sub(r"\\\n", " ", "\n".join(re.findall(r"^\.PHONY:(.*)$", text, re.M))).split())
    found = [f"Makefile: {name} has no help" for name in sorted(phony - helped)]
    for page in (page for page in text_files(root) if page.suffix == ".md"):
        for command in bash_commands(page):
            words = [word for word in command.split()[1:] if "=" not in word]
            missing = set(words) - helped if command.split()[0] == "make" else set()
            found += [f"{page.relative_to(root)}: no target {word}" for word in sorted(missing)]
    return found
