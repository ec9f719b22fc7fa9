# SPDX-License-Identifier: Apache-2.0
"""What is sent between the run folders of several nodes, and what is refused."""

import json
import threading
from dataclasses import dataclass, field

import pytest

from mprecipes.errors import ConfigError, RunFolderBusy
from mprecipes.identity.files import Parcel
from mprecipes.identity.lease import Lease
from mprecipes.identity.nodes import Held, make_alike, plan_parcels


def held(attempts=0, run_id="r", **files):
    files = {name.replace("__", "/"): size for name, size in files.items()}
    return Held("t", run_id if attempts else None, attempts, files)


def parcels(*nodes):
    return [
        (each.path, each.source, sorted(each.takers))
        for each in plan_parcels(dict(zip((0, 8, 16), nodes)))
    ]


def test_an_empty_node_is_sent_everything():
    """`run.json` first: a folder with other files and without it is nobody's."""
    full = Held("t", "r", 2, {"config.yaml": 5, "run.json": 9, "journal/attempt-0000.jsonl": 70})
    assert parcels(full, held()) == [
        ("run.json", 0, [8]),
        ("config.yaml", 0, [8]),
        ("journal/attempt-0000.jsonl", 0, [8]),
    ]


def test_the_most_attempts_and_the_longest_journal_count():
    """Whichever nodes have them; what all have alike is not sent."""
    one = Held("t", "r", 2, {"run.json": 90, "journal/a": 70, "resume/b": 5, "journal/c": 7})
    two = Held("t", "r", 3, {"run.json": 80, "journal/a": 90, "resume/b": 6, "journal/c": 7})
    assert parcels(one, two) == [("run.json", 8, [0]), ("journal/a", 8, [0])]
    assert parcels(one, one) == []
    assert parcels(held(), held()) == []


@dataclass
class Nodes:
    """Two writers as threads of this process; `spread` copies the files."""

    rank: int
    shared: dict
    writers: tuple[int, ...] = (0, 1)
    world_size: int = 2
    sent: list[Parcel] = field(default_factory=list)

    writes_here = True

    @property
    def is_main(self):
        return self.rank == 0

    def gather(self, value):
        barrier, box = self.shared["barrier"], self.shared["box"]
        box[self.rank] = value
        barrier.wait(10)
        values = [box[0], box[1]]
        barrier.wait(10)
        return values

    def spread(self, files, place):
        for parcel in files:
            if self.rank in parcel.takers:
                source = self.shared["paths"][parcel.source] / parcel.path
                place(parcel.path).write_bytes(source.read_bytes())
        self.sent += files
        return {}


def alike(*paths):
    """Gives what each node was given or raised, and what was sent."""
    shared = {"barrier": threading.Barrier(2), "box": {}, "paths": paths}
    nodes, found = [Nodes(rank, shared) for rank in (0, 1)], [None, None]

    def run(rank):
        try:
            found[rank] = make_alike(paths[rank], nodes[rank])
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found, [parcel.path for parcel in nodes[0].sent]


def write_run(path, run_id="0123456789ab", attempts=1, lines=3):
    (path / "journal").mkdir(parents=True)
    facts = {"schema": 1, "run_id": run_id, "wandb_id": run_id, "recipe": {}, "horizon": 100,
             "created": "2026-11-30T10:00:00+00:00",
             "attempts": [{"attempt": n, "outcome": None} for n in range(attempts)]}  # fmt: skip
    (path / "run.json").write_text(json.dumps(facts))
    (path / "journal" / "attempt-0000.jsonl").write_text("{}\n" * lines)


def test_a_new_run_has_one_name(tmp_path):
    """Both nodes are given the same, and the folders are made and empty."""
    found, sent = alike(tmp_path / "a", tmp_path / "b")
    assert found[0] == found[1] and len(found[0]) == 12
    assert sent == [] == [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


@pytest.mark.parametrize("emptied", [0, 1])
def test_records_come_to_the_node_that_lacks_them(tmp_path, emptied, caplog):
    """The folder of rank 0 is no more than any other."""
    paths = [tmp_path / "a", tmp_path / "b"]
    write_run(paths[1 - emptied])
    found, sent = alike(*paths)
    assert isinstance(found[0], str)
    assert sent == ["run.json", "journal/attempt-0000.jsonl"]
    assert (paths[emptied] / "journal" / "attempt-0000.jsonl").read_text() == "{}\n" * 3
    assert f"the node of rank {emptied} lacked 2 records of this run" in caplog.text


def test_one_folder_for_both_is_refused(tmp_path):
    """And left as it was."""
    found, _ = alike(tmp_path / "a", tmp_path / "a")
    for error in found:
        assert isinstance(error, ConfigError)
        assert error.found == "the nodes of ranks 0, 1 see the same folder"
    assert list((tmp_path / "a").iterdir()) == []


def test_two_runs_are_refused(tmp_path):
    """Each is named with its node, and nothing is sent."""
    write_run(tmp_path / "a", run_id="one")
    write_run(tmp_path / "b", run_id="two")
    found, sent = alike(tmp_path / "a", tmp_path / "b")
    assert found[1].found == "the nodes hold different runs: one (rank 0), two (rank 1)"
    assert sent == []


def test_other_files_and_a_live_process_are_refused_everywhere(tmp_path):
    """What is wrong on one node ends the launch on all."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").touch()
    found, _ = alike(tmp_path / "a", tmp_path / "b")
    assert "1 other files and no run.json: thesis.tex" in found[1].found
    write_run(tmp_path / "c")
    lease = Lease.acquire(tmp_path / "c")
    found, _ = alike(tmp_path / "d", tmp_path / "c")
    lease.release()
    assert [type(each) for each in found] == [RunFolderBusy, RunFolderBusy]
    assert not (tmp_path / "d" / "run.json").exists()
