# SPDX-License-Identifier: Apache-2.0
"""Documents of text from files, folders and `datasets`, each with the file and line it stands at.

Promises: canonical order (by relative path); a content digest over the source's bytes that no
path, name or time enters; a file that changed after the corpus was opened is noticed; a row without
a text is refused with `file:line`, or with `on_bad_rows="skip"` left out and counted by reason. Not
offered: streams and shuffle buffers, whose position cannot be restored.
"""

import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mprecipes.data.rows import BadRow, read_rows
from mprecipes.errors import ConfigError, DataError
from mprecipes.identity.files import sha256_file, write_json_atomically

STDLIB = "stdlib"
FILE_TYPES = (".txt", ".jsonl", ".parquet")
_STDLIB_LEFT_OUT = {
    *("test", "tests", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "lib2to3", "turtledemo", "ensurepip"),
}
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
_SMALL_BYTES = 1 << 20  # smaller files are hashed at every start
_SETTLED_SECONDS = 2.0  # younger files may change again within one tick of the file system's clock

_File = tuple[str, Path, str]  # the name to show, the path, the format
_Stamp = tuple[int, int, int, int] | None  # bytes, both times, inode; None where there is no file


@dataclass(frozen=True)
class Document:
    """One text and where it stands: `file:line`, or `file:row` (from 1) in columnar files."""

    text: str
    where: str


@dataclass
class Corpus:
    """The documents of one source; each iteration starts anew and counts `skipped` afresh.

    Attributes:
        name: the source as it was given. kind: what it was found to be.
        files: in canonical order.
        skipped: rows left out in the latest iteration, by reason.
        digest_cache: a JSON file that remembers the digests of large unchanged files, or None; a
            damaged one is replaced.
    """

    name: str
    kind: str
    files: list[_File]
    text_field: str
    on_bad_rows: str
    digest_cache: Path | None = None
    skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._opened = [_stamp(path) for _, path, _ in self.files]  # before any of them is read

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        for shown, path, format in self.files:
            for row in read_rows(path, format, self.text_field):
                if isinstance(row, BadRow):
                    self._refuse_or_count(row, shown)
                else:
                    yield Document(row[0], f"{shown}:{row[1]}")

    def _refuse_or_count(self, row: BadRow, shown: str) -> None:
        if self.on_bad_rows == "refuse":
            raise DataError(
                f"{row.reason}: {row.found}",
                expected=f"a string of valid UTF-8 as the row's {self.text_field!r}",
                where=f"{shown}:{row.line}",
                action="correct the row, or have bad rows left out and counted: --on_bad_rows skip",
            ) from row
        self.skipped[row.reason] += 1

    def require_unchanged(self) -> None:
        """Compares every file's size, times and inode with those when the corpus was opened.

        After a pass without an error, what was read is what `content_digest` stands for.

        Raises:
            DataError: a file changed, came or went since.
        """
        changed = [
            shown
            for (shown, path, _), opened in zip(self.files, self._opened)
            if _stamp(path) != opened
        ]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise DataError(
                "files that changed while they were read",
                expected="a source that stays as it is during preparation",
                where=changed[0] + more,
                action="launch again once the files are complete",
            )

    @cached_property
    def content_digest(self) -> str:
        """SHA-256 over format, size and SHA-256 of each file, in order; blocks on reading them."""
        remembered = _remembered(self.digest_cache) if self.digest_cache else {}
        known, total = dict(remembered or {}), hashlib.sha256()
        for _, path, format in self.files:
            total.update(f"{format} {_size_and_digest(path, known)}\n".encode("ascii"))
        if self.digest_cache and known != remembered:
            self.digest_cache.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomically(self.digest_cache, known)
        return total.hexdigest()


def open_corpus(
    source: str | Path,
    *,
    text_field: str = "text",
    on_bad_rows: str = "refuse",
    digest_cache: Path | None = None,
) -> Corpus:
    """Finds out what `source` is; its documents are read when the corpus is iterated.

    Args:
        source: `stdlib` (the text of Python's own standard library), a .txt (one document), .jsonl
            or .parquet file, a folder of such files (others are left alone), a folder written by
            `datasets.save_to_disk`, or a hub id `owner/name[:config]` (its split `train`).
        text_field: the key or column that holds the text.
        on_bad_rows: `refuse` or `skip`; for `stdlib` always `skip`.

    Raises:
        DataError: there is no such source, it holds no data file, or it is a stream.
    """
    if on_bad_rows not in ("refuse", "skip"):
        raise ConfigError(
            f"on_bad_rows {on_bad_rows!r}",
            expected="refuse or skip",
            where="on_bad_rows",
            action="set --on_bad_rows refuse, or --on_bad_rows skip",
        )
    if not isinstance(source, (str, Path)):
        raise DataError(
            f"a {type(source).__name__} object; a stream or shuffle buffer has no exact position",
            expected="an indexed source: stdlib, a file, a folder, a saved data set or a hub id",
            where="source",
            action="save the rows once (Dataset.save_to_disk, .jsonl, .parquet) and name that path",
        )
    name, path = str(source), Path(source).expanduser()
    if name == STDLIB:
        kind = f"Python {platform.python_version()}"
        return Corpus(name, kind, _stdlib(), "text", "skip", digest_cache)
    if path.is_dir():
        kind, files = _folder(path)
    elif path.exists() or path.suffix in FILE_TYPES or not _HUB_ID.fullmatch(name):
        kind, files = "file", [_file(name, path)]
    else:
        kind, files = "hub", _hub(name)
    return Corpus(name, kind, files, text_field, on_bad_rows, digest_cache)


def _stdlib() -> list[_File]:
    root, names = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_LEFT_OUT]
        sources = [f for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata")]
        names += [(Path(folder).relative_to(root) / name).as_posix() for name in sources]
    return [(f"{STDLIB}/{name}", root / name, ".txt") for name in sorted(names)]


def _file(name: str, path: Path) -> _File:
    if path.is_file() and path.suffix in FILE_TYPES:
        return name, path, path.suffix
    kind = f"a file of type {path.suffix or 'unknown'!r}" if path.exists() else "no such file"
    raise DataError(
        kind,
        expected=f"{STDLIB}, a {', '.join(FILE_TYPES)} file, a folder, or a hub id",
        where=name,
        action="correct the source, or convert the file to one of these types",
    )


def _folder(root: Path) -> tuple[str, list[_File]]:
    if (root / "dataset_dict.json").is_file():
        root /= _only_split(root, json.loads((root / "dataset_dict.json").read_text())["splits"])
    if (root / "state.json").is_file():
        state = json.loads((root / "state.json").read_text())
        paths = [root / entry["filename"] for entry in state["_data_files"]]
        return "saved data set", [(str(path), path, ".arrow") for path in paths]
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.suffix in FILE_TYPES and path.is_file() and not path.name.startswith(".")
    )
    if not names:
        raise DataError(
            "a folder without data files",
            expected=f"{', '.join(FILE_TYPES)} files, or a data set written by save_to_disk",
            where=str(root),
            action="name another folder, or convert the files to one of these types",
        )
    return "folder", [(str(root / name), root / name, Path(name).suffix) for name in names]


def _only_split(root: Path, splits: list[str]) -> str:
    if "train" in splits or len(splits) == 1:
        return "train" if "train" in splits else splits[0]
    raise DataError(
        f"the splits {', '.join(splits)}",
        expected="a split named train, or only one split",
        where=str(root),
        action=f"name the folder of one split, for example {root / splits[0]}",
    )


def _hub(name: str) -> list[_File]:
    import datasets

    repository, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, config or None, split="train")
    except (OSError, ValueError) as error:
        raise DataError(
            f"no such path here, and the hub did not give it: {error}",
            expected=f"{STDLIB}, an existing path, or a data set of the hub with a split train",
            where=f"source {name}",
            action="correct the source; without a network, name a local path",
        ) from error
    paths = [Path(entry["filename"]) for entry in loaded.cache_files]
    return [(f"{name}/{path.name}", path, ".arrow") for path in paths]


def _stamp(path: Path) -> _Stamp:
    try:
        stat = path.stat()
    except OSError:
        return None  # reading the rows refuses or counts it
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _remembered(path: Path) -> dict[str, str] | None:
    """Gives the digests in a file, none where there is no file, and None where it is damaged."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text())
        problem = "" if isinstance(value, dict) else f"a {type(value).__name__}, not an object"
    except (OSError, ValueError) as error:
        problem = str(error)
    if not problem and not all(isinstance(digest, str) for digest in value.values()):
        problem = "values that are not text"
    if problem:
        print(f"hashing large files anew: {path}: {problem}", file=sys.stderr)
        return None
    return value


def _size_and_digest(path: Path, known: dict[str, str]) -> str:
    """Gives "<bytes> <sha256>"; a large file is remembered by path, inode, both times and size."""
    try:
        stat = path.stat()
        times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
        stamp = f"{path.resolve()} {stat.st_ino} {times} {stat.st_size}"
        if stamp not in known:
            digest = f"{stat.st_size} {sha256_file(path)}"
            is_settled = time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED_SECONDS
            if stat.st_size < _SMALL_BYTES or not is_settled:
                return digest
            known[stamp] = digest
        return known[stamp]
    except OSError:
        return "unreadable"  # reading the rows refuses or counts it
