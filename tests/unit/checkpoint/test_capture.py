# SPDX-License-Identifier: Apache-2.0
"""The copy for which the training stands still."""

import torch

from mprecipes.checkpoint.capture import Camera
from mprecipes.checkpoint.snapshot import live_tensors
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from tests.toys import Run, toy, train_step


def take(camera, model, optimizer, **changed):
    about = {"facts": {"config": {}}, "rank_state": {"draws": [1]}, "milestone": None, **changed}
    return camera(model, optimizer, None, Position(7, 7, 14, 70), **about)


def test_a_rank_copies_its_share_and_describes_the_whole():
    """Two ranks hold each tensor once between them; sizes, names and shapes are of all."""
    model, optimizer = toy()
    train_step(model, optimizer, 1)
    live = live_tensors(model, optimizer)
    captures = [take(Camera(Ranks(rank, 2), pin=False), model, optimizer) for rank in (0, 1)]
    names = [name for capture in captures for name in capture.tensors]
    assert sorted(names) == sorted(live)
    for capture in captures:
        assert (capture.step, capture.error) == (7, None)
        assert capture.state_bytes == sum(tensor.nbytes for tensor in live.values())
        assert capture.parameters["shapes"]["embed.weight"] == [8, 4]
        assert capture.about["position"]["samples_seen"] == 14
        for name, tensor in capture.tensors.items():
            assert torch.equal(tensor, live[name])
            assert not tensor.numel() or tensor.data_ptr() != live[name].data_ptr()
    assert captures[0].replicas() == captures[1].replicas()


def test_nothing_of_the_caller_is_kept():
    """What is changed after the copy does not reach the checkpoint."""
    model, optimizer = toy()
    facts, state = {"config": {"x": 1}}, {"draws": [1]}
    capture = take(Camera(Ranks(), pin=False), model, optimizer, facts=facts, rank_state=state)
    facts["config"]["x"] = 2
    state["draws"].append(2)
    assert capture.about["facts"] == {"config": {"x": 1}}
    assert capture.rank_state == {"draws": [1]}


def test_a_copy_that_fails_is_told_and_not_raised(monkeypatch):
    """The other ranks wait for this one in the background, where they must hear of it."""
    camera = Camera(Ranks(), pin=False)

    def fail(tensors):
        raise MemoryError("no memory")

    monkeypatch.setattr(camera._buffers, "copy", fail)
    capture = take(camera, *toy())
    assert isinstance(capture.error, MemoryError)


def test_buffers_are_taken_once(tmp_path):
    """They are reserved beside the training before the first save, and reused by every save."""
    run = Run(tmp_path)
    assert not run.manager.wants_save(1)
    run.train([1], save=False)
    run.manager.wants_save(2)
    seen = set()
    for step in (2, 3):
        run.train([step])
        views = run.manager._camera._buffers._views
        seen.add(views["weights/embed.weight"].data_ptr())
    assert len(seen) == 1
