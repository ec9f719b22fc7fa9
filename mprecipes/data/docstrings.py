# SPDX-License-Identifier: Apache-2.0
"""The embedded conversations: functions of Python's standard library, asked for by their docstring.

Read from the interpreter that runs, so nothing is redistributed and no network is needed. The user
gives a docstring, the assistant the function without it; functions that are too short, too long or
there twice are left out.
"""

import ast
from collections.abc import Iterator

from mprecipes.data.corpus import Document

DOCSTRINGS = "docstrings"
_DOC_CHARACTERS, _CODE_CHARACTERS, _MIN_LINES = (20, 600), (60, 2000), 3


def docstring_pairs(documents: Iterator[Document]) -> Iterator[tuple[str, str, str]]:
    """Gives (docstring, source of the function without it, `file:line`) in the documents' order."""
    seen: set[str] = set()
    for document in documents:
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        lines = [f"{line}\n" for line in document.text.split("\n")]  # as the parser counts them
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc, code = ast.get_docstring(node), _without_docstring(node, lines)
            if doc is None or code is None or code in seen:
                continue
            seen.add(code)
            yield doc, code, f"{document.where.rpartition(':')[0]}:{node.lineno}"


def _without_docstring(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> str | None:
    """Gives the function's dedented source with its docstring cut out, where it is usable."""
    doc = ast.get_docstring(node)
    if doc is None or len(node.body) < 2 or not _within(len(doc), _DOC_CHARACTERS):
        return None
    first, next_one = node.body[0], node.body[1]
    begin = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
    if next_one.lineno <= (first.end_lineno or 0) or first.lineno == node.lineno:
        return None  # the docstring shares a line with code
    kept = lines[begin : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
    indent = lines[begin][: len(lines[begin]) - len(lines[begin].lstrip())]
    code = "".join(line.removeprefix(indent) for line in kept).rstrip()
    if not _within(len(code), _CODE_CHARACTERS) or code.count("\n") + 1 < _MIN_LINES:
        return None
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return None
    return code


def _within(count: int, limits: tuple[int, int]) -> bool:
    return limits[0] <= count <= limits[1]
