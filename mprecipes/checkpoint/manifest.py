# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself, and whether its bytes agree.

On disk: `manifest.json`, written last, one text per content (indented JSON, ASCII), so that any
changed byte shows; `root_sha256` is the SHA-256 over the canonical JSON of everything else.
`SHA256SUMS` lists the other files as `sha256sum -c` reads it. A folder's name is never the source
of a fact the manifest holds. Guards against damage and against paths that leave the folder; a
person who rewrites everything consistently is not found out.
"""

import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mprecipes.checkpoint.contents import doubtful
from mprecipes.checkpoint.problems import Problem
from mprecipes.checkpoint.storage import FileEntry, UnreachableFile, is_unreachable
from mprecipes.errors import VerificationError
from mprecipes.identity.files import canonical_json, fsync_directory, sha256_file

SCHEMA = 1
NAME, SUMS = "manifest.json", "SHA256SUMS"
COUNTERS = ("step", "updates", "samples_seen", "tokens_seen")
SKIPPED = "skipped_samples"  # absent where no rollback took samples out of the order
FACTS = ("recipe", "precision", "topology", "data", "environment", "config", "probe", "throughput")
_KEYS: dict[str, type | tuple[type, ...]] = {
    "schema": int, "run_id": str, **dict.fromkeys(COUNTERS, int),
    **dict.fromkeys(FACTS, (dict, type(None))),
    "files": list, "params": dict, "shapes": dict, "state_digests": dict,
    "scaler": (dict, type(None)), "milestone": (str, type(None)), "root_sha256": str,
}  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read and found consistent; the files it lists may still be damaged.

    Attributes:
        folder: where it was read.
        raw: everything it holds, as JSON.
        files: its `files`, typed.
    """

    folder: Path
    raw: dict[str, Any]
    files: list[FileEntry]
    run_id: str
    step: int
    updates: int
    samples_seen: int
    tokens_seen: int
    data: dict[str, Any] | None
    config: dict[str, Any] | None
    params: dict[str, str]
    shapes: dict[str, list[int]]
    state_digests: dict[str, str]
    milestone: str | None
    root_sha256: str

    @property
    def skipped_samples(self) -> tuple[tuple[int, int], ...]:
        """Ranges (first, end) of the run's order that rollbacks took out before this step."""
        return tuple((first, end) for first, end in self.raw.get(SKIPPED, ()))


def build_manifest(
    *,
    run_id: str,
    position: Mapping[str, Any],
    facts: Mapping[str, Any],
    files: Sequence[FileEntry],
    params: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
    state_digests: Mapping[str, str],
    scaler: Mapping[str, Any] | None = None,
    milestone: str | None = None,
) -> dict[str, Any]:
    """Gives the JSON value of a manifest, `root_sha256` included.

    Args:
        position: the four `COUNTERS`, and the ranges `skipped` where there are any.
        facts: of the names in `FACTS`, each an object or None; absent ones become None. Further
            keys are kept.

    Raises:
        ValueError: a fact uses a name of ours, or holds something strict JSON cannot, such as NaN.
    """
    if taken := sorted(facts.keys() & ({*_KEYS, SKIPPED} - set(FACTS))):
        raise ValueError(f"facts may not be called {', '.join(taken)}")
    values = {
        "schema": SCHEMA,
        "run_id": run_id,
        **{counter: position[counter] for counter in COUNTERS},
        **({SKIPPED: position["skipped"]} if position.get("skipped") else {}),
        **dict.fromkeys(FACTS),
        **facts,
        "files": [asdict(entry) for entry in files],
        "params": params,
        "shapes": shapes,
        "state_digests": state_digests,
        "scaler": scaler,
        "milestone": milestone,
    }
    values = json.loads(json.dumps(values, allow_nan=False))  # so that a tuple is a list
    values["root_sha256"] = _root(values)
    if problem := _misfit(values):
        raise ValueError(f"{problem[0]}, expected {problem[1]}")
    return values


def write_sums(folder: Path, files: Sequence[FileEntry]) -> None:
    """Writes `SHA256SUMS` durably."""
    _write_durably(folder / SUMS, _sums(files))


def write_manifest(folder: Path, values: Mapping[str, Any]) -> None:
    """Writes `manifest.json` durably, and makes the names in the folder durable."""
    _write_durably(folder / NAME, _text(values))
    fsync_directory(folder)


def read_manifest(folder: Path) -> Manifest:
    """Reads a manifest, and no other file; refuses a damaged or hostile one, or another schema.

    Raises:
        VerificationError: it is not a text of ours, its root digest does not agree, or a path in it
            is absolute, leaves the folder, is listed twice, or is a link.
        UnreachableFile: it cannot be read, and that is not its own fault.
    """
    path = folder / NAME
    try:
        if folder.is_symlink() or path.is_symlink():
            raise _refused(folder, "a symbolic link", "a real folder and a real manifest.json")
        data = path.read_bytes()
    except OSError as error:
        kind = UnreachableFile if is_unreachable(error) else VerificationError
        found = f"unreadable ({error.strerror})"
        raise _refused(folder, found, "a readable file", kind=kind) from error
    try:
        values = json.loads(data, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise _refused(folder, f"not JSON ({error})", "the JSON text that a save wrote") from error
    if not isinstance(values, dict) or type(values.get("schema")) is not int:
        raise _refused(folder, "no schema number", f"an object with schema {SCHEMA}")
    if values["schema"] != SCHEMA:
        raise _refused(
            folder, f"schema {values['schema']}", f"schema {SCHEMA}",
            "read it with the version of mprecipes that wrote it",
        )  # fmt: skip
    if problem := _misfit(values):
        raise _refused(folder, *problem)
    try:
        root = _root({key: value for key, value in values.items() if key != "root_sha256"})
        text = _text(values)
    except ValueError as error:  # a number too large for a float reads as infinity
        raise _refused(folder, f"not strict JSON ({error})", "finite numbers") from error
    if root != values["root_sha256"]:
        raise _refused(folder, f"root_sha256 {values['root_sha256']}", f"{root} as computed")
    if text != data:
        raise _refused(folder, "the right values in other bytes", "the text that a save writes")
    names = {field.name for field in fields(Manifest)} - {"folder", "raw", "files"}
    typed = {name: values[name] for name in names}
    return Manifest(folder=folder, raw=values, files=_entries(folder, values["files"]), **typed)


def files_of(manifest: Manifest) -> list[FileEntry]:
    """Gives every file of a checkpoint but `manifest.json`; `SHA256SUMS` is the last."""
    sums = _sums(manifest.files)
    return [*manifest.files, FileEntry(SUMS, len(sums), hashlib.sha256(sums).hexdigest(), 0)]


def verify_folder(folder: Path, digest: Callable[[Path], str] = sha256_file) -> list[Problem]:
    """Reads every byte of a checkpoint and gives what does not agree with its manifest.

    Sizes and SHA-256 of every file, files missing and files too many, links, and `SHA256SUMS`.
    Hidden files are a file system's own (.nfs..., .DS_Store): nothing here writes or reads them.

    Args:
        digest: gives the SHA-256 of a file, at a pace of its own.
    """
    try:
        manifest = read_manifest(folder)
    except VerificationError as error:
        return [Problem.of(error, NAME)]
    known = {entry.path for entry in manifest.files} | {NAME, SUMS}
    problems = [
        Problem(name, "a file the manifest does not list", "no such file")
        for name in sorted(set(os.listdir(folder)) - known)
        if not name.startswith(".")
    ]
    for entry in files_of(manifest):
        if problem := _check(folder / entry.path, entry, digest):
            tensors = doubtful(folder, entry.path, known, manifest.params)
            problems.append(replace(problem, tensors=tuple(tensors)))
    return problems


def _check(path: Path, entry: FileEntry, digest: Callable[[Path], str]) -> Problem | None:
    whole = f"a file of {entry.bytes} bytes"
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return Problem(entry.path, "not a regular file", "a regular file")
        if status.st_size != entry.bytes:
            return Problem(entry.path, f"{status.st_size} bytes", f"{entry.bytes} bytes")
        sha256 = digest(path)
    except FileNotFoundError:
        return Problem(entry.path, "missing", whole)
    except OSError as error:
        found = f"unreadable ({error.strerror})"
        return Problem(entry.path, found, whole, unreachable=is_unreachable(error))
    if sha256 != entry.sha256:
        return Problem(entry.path, f"sha256 {sha256}", f"sha256 {entry.sha256}")
    return None


def _misfit(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is found and expected of the first key that is missing or of the wrong type."""
    for key, kind in _KEYS.items():
        value = values.get(key)
        if key not in values or not isinstance(value, kind) or isinstance(value, bool):
            return f"{key} is {_short(value) if key in values else 'missing'}", _kind(kind)
    if not _are_ranges(values.get(SKIPPED, [])):
        return f"{SKIPPED} {_short(values[SKIPPED])}", "pairs of a sample and the first one after"
    negative = [counter for counter in COUNTERS if values[counter] < 0]
    return (f"{negative[0]} {values[negative[0]]}", "a count from 0 up") if negative else None


def _are_ranges(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and [type(n) for n in each] == [int, int] and 0 <= each[0] < each[1]
        for each in value
    )


def _entries(folder: Path, values: list[Any]) -> list[FileEntry]:
    entries = []
    for value in values:
        types = {key: type(value[key]) for key in value} if isinstance(value, dict) else {}
        if types != {field.name: field.type for field in fields(FileEntry)}:
            raise _refused(folder, f"a file entry {_short(value)}", "path, bytes, sha256 and rank")
        entry = FileEntry(**value)
        if not re.fullmatch(r"\w[\w.-]*", entry.path, re.ASCII) or entry.path in (NAME, SUMS):
            raise _refused(folder, f"the path {_short(entry.path)}", "a plain name in the folder")
        if (folder / entry.path).is_symlink():
            raise _refused(folder, f"{entry.path} is a symbolic link", "a regular file")
        if entry.bytes < 0 or entry.rank < 0 or not re.fullmatch(r"[0-9a-f]{64}", entry.sha256):
            raise _refused(folder, f"a file entry {_short(value)}", "a size, a rank, 64 hex digits")
        entries.append(entry)
    paths = Counter(entry.path for entry in entries)
    if doubled := sorted(path for path, count in paths.items() if count > 1):
        raise _refused(folder, f"{', '.join(doubled)} listed more than once", "each file once")
    return entries


def _root(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(values)).hexdigest()


def _text(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=1, allow_nan=False).encode("ascii") + b"\n"


def _sums(files: Sequence[FileEntry]) -> bytes:
    return "".join(f"{entry.sha256}  {entry.path}\n" for entry in files).encode("ascii")


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key given twice")
    return values


def _constant(text: str) -> None:
    raise ValueError(f"{text} is not strict JSON")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _kind(kind: type | tuple[type, ...]) -> str:
    names = {int: "a number", str: "text", dict: "an object", list: "a list", type(None): "null"}
    return " or ".join(names[each] for each in (kind if isinstance(kind, tuple) else (kind,)))


def _refused(
    folder: Path,
    found: str,
    expected: str,
    action: str | None = None,
    kind: type[VerificationError] = VerificationError,
) -> VerificationError:
    return kind(
        found,
        expected=expected,
        where=f"{folder.name}/{NAME}",
        action=action
        or "do not use this checkpoint; launch again and the newest one that verifies is taken",
    )
