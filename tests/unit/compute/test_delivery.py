# SPDX-License-Identifier: Apache-2.0
"""Files sent between the disks of three nodes, in processes forked for it."""

import hashlib
import json
import multiprocessing

import pytest
import torch.distributed as dist

from mprecipes.compute import delivery
from mprecipes.identity.files import Parcel

fork = multiprocessing.get_context("fork")
COUNT = 3


def work(rank, folder, parcels):
    """Spreads on a disk of this rank's own; its answer lies in answer-<rank>.json."""
    delivery.PART_BYTES = 1000
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=COUNT
    )
    try:
        answer = delivery.spread(rank, dist.group.WORLD, parcels, (folder / str(rank)).joinpath)
    except OSError as error:
        answer = f"{type(error).__name__}: {error}"
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))
    dist.barrier()


@pytest.fixture
def spread(tmp_path):
    for rank in range(COUNT):
        (tmp_path / str(rank)).mkdir()

    def spread(*parcels):
        parcels = [Parcel(path, size, source, frozenset(to)) for path, size, source, to in parcels]
        processes = [fork.Process(target=work, args=(r, tmp_path, parcels)) for r in range(COUNT)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        return [json.loads((tmp_path / f"answer-{r}.json").read_text()) for r in range(COUNT)]

    return spread


def test_every_taker_has_the_bytes_and_their_digest(spread, tmp_path):
    """Any source, any takers, several parts, an empty file; the source gets nothing back."""
    data = bytes(range(256)) * 10
    (tmp_path / "1" / "a").write_bytes(data)
    (tmp_path / "2" / "b").write_bytes(b"")
    found = spread(("a", len(data), 1, (0, 2)), ("b", 0, 2, (0,)))
    empty = hashlib.sha256().hexdigest()
    whole = hashlib.sha256(data).hexdigest()
    assert found == [{"a": whole, "b": empty}, {}, {"a": whole}]
    assert (tmp_path / "0" / "a").read_bytes() == (tmp_path / "2" / "a").read_bytes() == data
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["a", "b"]
    assert not (tmp_path / "1" / "b").exists()


def test_a_file_that_is_there_is_replaced(spread, tmp_path):
    """By the longer one, whole."""
    (tmp_path / "0" / "a").write_bytes(b"old")
    (tmp_path / "1" / "a").write_bytes(b"newer")
    spread(("a", 5, 1, (0,)))
    assert (tmp_path / "0" / "a").read_bytes() == b"newer"


def test_what_fails_on_one_is_told_there_and_harms_no_other(spread, tmp_path):
    """A folder that is gone on a taker, a file that is gone or shorter on the source."""
    (tmp_path / "1" / "a").write_bytes(b"x" * 2500)
    (tmp_path / "1" / "short").write_bytes(b"x")
    (tmp_path / "2").rmdir()
    found = spread(("a", 2500, 1, (0, 2)), ("short", 2500, 1, (0,)))
    assert found[0]["a"] == hashlib.sha256(b"x" * 2500).hexdigest()
    assert found[0]["short"] != hashlib.sha256(b"x").hexdigest()
    assert found[1] == "OSError: short became shorter while it was sent"
    assert found[2].startswith("FileNotFoundError")
