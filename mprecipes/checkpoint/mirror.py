# SPDX-License-Identifier: Apache-2.0
"""A second home of a run's checkpoints, on another file system or object store, by fsspec URL.

There: `<url>/<name of the run folder>/checkpoints/step-.../` and `.../milestones/<name>/`, the same
files as on the local disk. An object store has no rename, so `manifest.json` is written last and a
folder without it is no checkpoint; when one is deleted, it goes first. Every file is read again and
hashed after it was written: a copy costs one write and one read of its bytes. `mirror.json` names
the run that writes there (`writer`) and those whose checkpoints lie there (`run_ids`), so that two
runs of one name do not mix, and the root digests of checkpoints that nobody is to go on from
(`abandoned`, of the `cuts` that were noted there; see `abandoned.py`).
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprecipes.checkpoint.contents import SUFFIX, names_in
from mprecipes.checkpoint.manifest import (
    NAME,
    Manifest,
    Problem,
    files_of,
    read_manifest,
    write_sums,
)
from mprecipes.checkpoint.storage import FileEntry
from mprecipes.errors import ConfigError, VerificationError
from mprecipes.faults import fault_point
from mprecipes.identity.files import fsync_directory, fsync_file

KINDS = ("checkpoints", "milestones")
OWNER = "mirror.json"
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Mirrored:
    """A checkpoint at the mirror.

    Attributes:
        kind: "checkpoints" or "milestones".
        name: of its folder there.
        manifest: what its manifest says; its `folder` means nothing. None when it cannot be read.
        problem: why it cannot.
        abandoned: it is of a branch that was given up.
    """

    kind: str
    name: str
    manifest: Manifest | None
    problem: Problem | None = None
    abandoned: bool = False

    @property
    def place(self) -> str:
        return f"{self.kind}/{self.name}"


class Mirror:
    """The files of one run's mirror; every method blocks, and raises what the file system raises.

    Args:
        url: as in the policy.
        run: the run's folder; its name is the name there.

    Attributes:
        home: URL of this run's part.

    Raises:
        ConfigError: the URL's protocol is unknown, or the package for it is not installed.
    """

    def __init__(self, url: str, run: Path) -> None:
        import fsspec  # slow, and needed only where there is a mirror

        name = run.resolve().name
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"{url}: {error}",
                expected="an fsspec URL whose file system is installed here",
                where="mirror in option checkpoint",
                action="install the package named above, or correct the URL",
            ) from error
        self._home = f"{root.rstrip('/')}/{name}"
        self.home = f"{url.rstrip('/')}/{name}"

    def owner(self) -> dict[str, Any] | None:
        """Gives who writes there and whose checkpoints lie there; None before the first."""
        facts = self._facts()
        return facts and {"writer": facts["writer"], "run_ids": facts["run_ids"]}

    def claim(self, run_id: str, earlier: Iterable[str] = ()) -> None:
        """Makes this run the one that writes here; whose checkpoints lie there stays known."""
        facts = self._facts() or {"run_ids": [], "abandoned": [], "cuts": []}
        run_ids = list(dict.fromkeys([*facts["run_ids"], *earlier, run_id]))
        self._fs.makedirs(self._home, exist_ok=True)
        fault_point("mirror.before_claim")
        self._write({**facts, "writer": run_id, "run_ids": run_ids})

    def abandoned(self) -> tuple[frozenset[str], frozenset[str]]:
        """Gives the root digests that are abandoned there, and the ids of the cuts it knows."""
        facts = self._facts() or {"abandoned": [], "cuts": []}
        return frozenset(facts["abandoned"]), frozenset(facts["cuts"])

    def abandon(self, roots: Iterable[str], cuts: Iterable[str]) -> None:
        """Writes down what `abandoned` gives, at a mirror that has a writer."""
        facts = self._facts()
        assert facts is not None
        self._write({**facts, "abandoned": sorted(roots), "cuts": sorted(cuts)})

    def published(self, kinds: Iterable[str] = KINDS) -> list[Mirrored]:
        """Gives what is complete there, newest first; unreadable ones stand before all others."""
        self._fs.invalidate_cache()
        found = []
        for kind in kinds:
            for name in self._names(f"{self._home}/{kind}"):
                if name.startswith(".") or not self._fs.exists(self._at(kind, name, NAME)):
                    continue  # no manifest: a copy that was not finished
                found.append(self._read(kind, name))
        return sorted(found, key=lambda each: -each.manifest.step if each.manifest else -1e18)

    def push(self, source: Manifest, kind: str, name: str, go_on: Callable[[int], None]) -> int:
        """Copies a published checkpoint there, its manifest last; gives the bytes that were sent.

        Files that are there already, and are the right ones, are not sent again. Those that it does
        not list, left by another one of this name, are deleted.

        Args:
            go_on: called with the bytes read since the last call; raises to give up.
        """
        self._fs.makedirs(self._at(kind, name), exist_ok=True)
        if self._size(self._at(kind, name, NAME)) is not None:  # another one of this name: no more
            self._fs.rm_file(self._at(kind, name, NAME))
        sent, entries = 0, files_of(source)
        self._clear(kind, name, {entry.path for entry in entries})
        for entry in entries:
            go_on(0)
            fault_point("mirror.before_file", source.step)
            remote = self._at(kind, name, entry.path)
            if self._size(remote) != entry.bytes or self._hash(remote, go_on) != entry.sha256:
                sent += self._send(source.folder / entry.path, remote, entry, go_on)
            fault_point("mirror.after_file", source.step)
        data = (source.folder / NAME).read_bytes()
        fault_point("mirror.before_manifest", source.step)
        whole = FileEntry(NAME, len(data), hashlib.sha256(data).hexdigest(), 0)
        sent += self._send(source.folder / NAME, self._at(kind, name, NAME), whole, go_on)
        fault_point("mirror.after_manifest", source.step)
        return sent

    def verify(self, there: Mirrored, go_on: Callable[[int], None]) -> list[Problem]:
        """Reads every byte of a mirrored checkpoint and gives what does not agree."""
        if there.manifest is None:
            assert there.problem is not None
            return [there.problem]
        entries = files_of(there.manifest)
        known = {entry.path for entry in entries} | {NAME}
        problems = [
            Problem(name, "a file the manifest does not list", "no such file")
            for name in self._names(self._at(there.kind, there.name))
            if name not in known
        ]
        for entry in entries:
            remote = self._at(there.kind, there.name, entry.path)
            if (size := self._size(remote)) is None:
                problems.append(Problem(entry.path, "missing", f"{entry.bytes} bytes"))
            elif size != entry.bytes:
                found, expected = f"{size} bytes", f"{entry.bytes} bytes"
                problems.append(Problem(entry.path, found, expected, self._tensors(remote, size)))
            elif (digest := self._hash(remote, go_on)) != entry.sha256:
                found, expected = f"sha256 {digest}", f"sha256 {entry.sha256}"
                problems.append(Problem(entry.path, found, expected, self._tensors(remote, size)))
        return problems

    def delete(self, there: Mirrored) -> None:
        """Deletes a mirrored checkpoint; from the first moment on it is none any more."""
        assert there.kind == "checkpoints", there  # milestones are permanent here too
        fault_point("mirror.before_delete")
        self._fs.rm_file(self._at(there.kind, there.name, NAME))
        fault_point("mirror.in_delete")
        self._fs.rm(self._at(there.kind, there.name), recursive=True)

    def fetch(self, there: Mirrored, folder: Path) -> None:
        """Copies a mirrored checkpoint durably into an empty local folder, its manifest last."""
        assert there.manifest is not None
        entries = there.manifest.files
        for entry in entries:
            remote = self._at(there.kind, there.name, entry.path)
            if (size := self._size(remote)) != entry.bytes:
                raise OSError(f"{entry.path} has {size} bytes there, not {entry.bytes}")
            self._fs.get_file(remote, str(folder / entry.path))
            fsync_file(folder / entry.path)
            fault_point("fetch.after_file", there.manifest.step)
        write_sums(folder, entries)
        self._fs.get_file(self._at(there.kind, there.name, NAME), str(folder / NAME))
        fsync_file(folder / NAME)
        fsync_directory(folder)

    def _clear(self, kind: str, name: str, wanted: set[str]) -> None:
        """Deletes the files of a folder without a manifest that are not wanted there."""
        self._fs.invalidate_cache()
        for left in self._names(self._at(kind, name)):
            if left not in wanted and not left.startswith("."):  # hidden: the file system's own
                self._fs.rm(self._at(kind, name, left), recursive=True)

    def _facts(self) -> dict[str, Any] | None:
        self._fs.invalidate_cache()
        try:
            facts = json.loads(self._fs.cat_file(f"{self._home}/{OWNER}"))
            lists = {name: list(map(str, facts.get(name, []))) for name in ("abandoned", "cuts")}
            run_ids = list(map(str, facts["run_ids"]))
            return {"writer": str(facts["writer"]), "run_ids": run_ids, **lists}
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OSError(f"{self.home}/{OWNER} is damaged ({error})") from error

    def _write(self, facts: dict[str, Any]) -> None:
        data = json.dumps({"schema": 1, **facts}, indent=1).encode("ascii")
        self._fs.pipe_file(f"{self._home}/{OWNER}", data)

    def _at(self, *parts: str) -> str:
        return "/".join((self._home, *parts))

    def _names(self, folder: str) -> list[str]:
        try:
            return sorted(
                path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(folder, detail=False)
            )
        except FileNotFoundError:
            return []

    def _read(self, kind: str, name: str) -> Mirrored:
        data = self._fs.cat_file(self._at(kind, name, NAME))
        with tempfile.TemporaryDirectory(prefix="mprecipes-") as folder:
            (Path(folder) / NAME).write_bytes(data)
            try:
                return Mirrored(kind, name, read_manifest(Path(folder)))
            except VerificationError as error:
                return Mirrored(kind, name, None, Problem(NAME, error.found, error.expected))

    def _send(self, path: Path, remote: str, entry: FileEntry, go_on: Callable[[int], None]) -> int:
        self._fs.put_file(str(path), remote)
        self._fs.invalidate_cache()
        if (found := self._hash(remote, go_on)) != entry.sha256:
            raise OSError(f"{entry.path} reads back with sha256 {found}, not {entry.sha256}")
        return entry.bytes

    def _size(self, remote: str) -> int | None:
        try:
            return int(self._fs.info(remote)["size"])
        except FileNotFoundError:
            return None

    def _tensors(self, remote: str, size: int) -> tuple[str, ...]:
        if not remote.endswith(SUFFIX):
            return ()
        with self._fs.open(remote, "rb") as file:
            return tuple(names_in(file, size))

    def _hash(self, remote: str, go_on: Callable[[int], None]) -> str:
        digest = hashlib.sha256()
        with self._fs.open(remote, "rb", block_size=CHUNK_BYTES) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                go_on(len(chunk))
        return digest.hexdigest()


def foreign(mirror: Mirror, owner: dict[str, Any], run_id: str) -> ConfigError:
    """Gives the refusal of a mirror that another run writes to."""
    return ConfigError(
        f"run {owner['writer']} writes here",
        expected=f"a mirror of this run, {run_id}",
        where=mirror.home,
        action="use another `mirror` URL, or another name for this run's folder",
    )
