# SPDX-License-Identifier: Apache-2.0
"""What a file says it holds, believed only where it can be true."""

import hashlib
import json
import os

import pytest
import torch

from mprecipes.checkpoint.headers import read_headers
from mprecipes.checkpoint.storage import DamagedFile, FileEntry, put

NAME = "tensors-rank00000-000.safetensors"


def test_names_shapes_and_dtypes_without_memory(tmp_path):
    """In the order of the file; the text is kept for the digest."""
    tensors = {"b": torch.zeros(2, 3), "a": torch.zeros((), dtype=torch.bfloat16)}
    entries = put(tensors, tmp_path, rank=0, world_size=1)
    (header,) = read_headers(tmp_path, entries)
    assert list(header.tensors) == ["b", "a"]
    assert [(t.shape, t.dtype, t.device.type) for t in header.tensors.values()] == [
        ((2, 3), torch.float32, "meta"),
        ((), torch.bfloat16, "meta"),
    ]
    assert (tmp_path / NAME).read_bytes().startswith(header.text)


def hostile(tmp_path, fields, data=b"\0" * 8):
    text = json.dumps(fields).encode() if not isinstance(fields, bytes) else fields
    content = len(text).to_bytes(8, "little") + text + data
    (tmp_path / NAME).write_bytes(content)
    return [FileEntry(NAME, len(content), hashlib.sha256(content).hexdigest(), 0)]


@pytest.mark.parametrize(
    "fields",
    [
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2**62, 2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": 1},
        [1],
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, fields):
    """Wrong sizes, gaps, unknown types and text that is none, even under the right digest."""
    with pytest.raises(DamagedFile, match="not a safetensors file"):
        read_headers(tmp_path, hostile(tmp_path, fields))


def test_a_header_longer_than_its_file_is_refused(tmp_path):
    """A length of 2^63 asks for no memory."""
    (tmp_path / NAME).write_bytes(b"\xff" * 16)
    digest = hashlib.sha256(b"\xff" * 16).hexdigest()
    with pytest.raises(DamagedFile, match="not a safetensors file"):
        read_headers(tmp_path, [FileEntry(NAME, 16, digest, 0)])


def test_links_and_pipes_are_not_followed(tmp_path):
    """What stands in a file's place is damage, and nothing waits for it."""
    entries = put({"a": torch.zeros(4)}, tmp_path, rank=0, world_size=1)
    path = tmp_path / entries[0].path
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedFile, match="unreadable"):
        read_headers(tmp_path, entries)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedFile, match="0 bytes"):
        read_headers(tmp_path, entries)
