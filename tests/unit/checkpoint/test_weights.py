# SPDX-License-Identifier: Apache-2.0
"""Weights come out of a checkpoint in pieces, each value once, and nothing damaged goes unseen."""

from collections import Counter

import pytest
import torch

from mprecipes.checkpoint.manifest import read_manifest
from mprecipes.checkpoint.storage import DamagedFile
from mprecipes.checkpoint.weights import each_piece
from tests.kept import RANK, TENSORS, Folder, flip
from tests.reading import same_bits
from tests.toys import Run


def joined(manifest, **options):
    """Every parameter flat, and the number of pieces it came in."""
    found = {}
    counts = Counter()

    def keep(piece):
        found.setdefault(piece.name, {})[piece.start] = piece.values.clone()  # it is overwritten
        counts[piece.name] += 1

    each_piece(manifest, keep, **options)
    return {
        name: torch.cat([parts[start] for start in sorted(parts)]) for name, parts in found.items()
    }, counts


@pytest.mark.parametrize(("chunk", "pieces"), [(8 << 20, 1), (16, 8)])
def test_every_value_of_every_parameter_once(tmp_path, chunk, pieces):
    """Tied, half-width, boolean and scalar ones, in one piece or in eight; no optimizer state."""
    run = Run(tmp_path)
    run.train([1])
    (manifest,) = [read_manifest(path) for path in run.folder.checkpoints.glob("step-*")]
    found, counts = joined(manifest, chunk_bytes=chunk)
    expected = {name: t for name, t in run.model.state_dict().items() if name != "head.weight"}
    assert found.keys() | {"empty"} == expected.keys() == manifest.params.keys()
    for name, values in found.items():
        assert same_bits(values, expected[name].reshape(-1)), name
    assert counts["embed.weight"] == pieces


@pytest.mark.parametrize("name", [TENSORS, RANK])
def test_a_flipped_bit_ends_the_reading(tmp_path, name):
    """In a tensor or in a file of another kind: the error has the file and both digests."""
    manifest = Folder(tmp_path).save(2)
    flip(manifest.folder / name)
    with pytest.raises(DamagedFile) as caught:
        each_piece(manifest, lambda piece: None)
    error = caught.value
    entry = next(entry for entry in manifest.files if entry.path == name)
    assert error.found.startswith("sha256 ") and entry.sha256 not in error.found
    assert error.expected == f"sha256 {entry.sha256}, as when rank 0 wrote it"
    assert error.where == f"step-00000002/{name}" and "do not use" in error.action


def test_a_file_of_another_size_is_refused(tmp_path):
    """The size differs before a value is read."""
    manifest = Folder(tmp_path).save(2)
    with open(manifest.folder / RANK, "ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedFile) as caught:
        each_piece(manifest, lambda piece: None)
    assert (caught.value.found, caught.value.where) == ("26 bytes", f"step-00000002/{RANK}")


def test_an_error_of_the_work_ends_the_reading(tmp_path):
    """What the caller raises on one piece comes out, and no piece follows it."""
    run = Run(tmp_path)
    run.train([1])
    (manifest,) = [read_manifest(path) for path in run.folder.checkpoints.glob("step-*")]
    seen = []

    def work(piece):
        seen.append(piece.name)
        raise KeyError(piece.name)

    with pytest.raises(KeyError):
        each_piece(manifest, work, readers=1)
    assert len(seen) == 1
