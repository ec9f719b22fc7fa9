# SPDX-License-Identifier: Apache-2.0
"""Every way to end has its outcome, its exit code and a readable text."""

import io
import sys

import pytest
import torch

from mprecipes import errors
from mprecipes.identity.outcome import exit_codes, judge, out_of_memory, without_paths

PARTS = {"expected": "b", "where": "c", "action": "d"}


@pytest.mark.parametrize(
    ("error", "outcome", "exit_code"),
    [
        (None, "finished", 0),
        (errors.Preempted("a", **PARTS), "preempted", 75),
        (errors.NumericsError("a", **PARTS), "numerics", 5),
        (errors.ResumeHalted("a", **PARTS), "halted", 4),
        (errors.ContractRefused("a", **PARTS), "refused", 3),
        (errors.ConfigError("a", **PARTS), "refused", 2),
        (errors.CheckpointError("a", **PARTS), "failed", 1),
        (errors.OutOfMemory("a", **PARTS), "out_of_memory", 1),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory", 1),
        (MemoryError(), "out_of_memory", 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: ..."), "out_of_memory", 1),
        (RuntimeError("shapes differ"), "crashed", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (SystemExit(7), "exited", 7),
        (SystemExit(None), "exited", 0),
        (SystemExit("a message"), "exited", 1),
    ],
)
def test_outcome_of_every_end(error, outcome, exit_code):
    """Each exception is recorded with the outcome and code that users' scripts rely on."""
    found = judge(error, 2)
    assert (found["outcome"], found["exit_code"]) == (outcome, exit_code)
    assert found["error"] == (error and f"rank 2: {type(error).__name__}: {error}")


def test_real_cpu_out_of_memory_is_known():
    """What torch really raises for an impossible allocation is an out-of-memory."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert judge(caught.value, 0)["outcome"] == "out_of_memory"


def test_out_of_memory_says_what_to_try():
    """The advice halves this run's micro-batch, or names the other ways where it is 1."""
    config = {"per_device_train_batch_size": 8}
    error = out_of_memory(RuntimeError("CUDA out of memory. Tried 2 GiB\nmore"), 1, 40, config)
    assert error.found == "CUDA out of memory. Tried 2 GiB"
    assert error.expected.startswith("memory for parameters, optimizer state")
    assert error.where == "rank 1, after step 40"
    assert error.action.startswith("launch again with --per_device_train_batch_size 4; or take")
    smallest = out_of_memory(MemoryError(), 0, 0, {"per_device_train_batch_size": 1})
    assert smallest.found == "MemoryError"
    assert smallest.action.startswith("take shorter sequences, a smaller model, activation")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ConfigError, 2),
        (errors.VerificationError, 3),
        (errors.ResumeHalted, 4),
        (errors.NumericsError, 5),
        (errors.Preempted, 75),
        (errors.RunFinished, 0),
    ],
)
def test_exit_code_and_message_of_our_errors(monkeypatch, capsys, kind, code):
    """One process prints the whole message once, without traceback, and exits with its code."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as caught, exit_codes():
        raise kind("found 7", **PARTS)
    assert caught.value.code == code
    printed = capsys.readouterr()
    assert printed.err == f"{kind.__name__}: c: found 7\n  expected: b\n  next: d\n"
    assert printed.out == ""


def test_other_ranks_print_one_line(monkeypatch, capsys):
    """With several processes rank 0 prints the whole message, the others its first line."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    waited = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught, exit_codes(wait=waited.append):
            raise errors.NumericsError("loss is nan", **PARTS)
        assert caught.value.code == 5
    assert waited == [5.0]  # rank 1, so that the launcher does not end rank 0 in its sentence
    assert capsys.readouterr().err == (
        "[rank 0] NumericsError: c: loss is nan\n  expected: b\n  next: d\n"
        "[rank 1] NumericsError: c: loss is nan\n"
    )


def test_each_machines_first_rank_prints_the_whole_message(monkeypatch, capsys):
    """Rank 8 is local rank 0 of a second machine, whose console shows no rank 0."""
    for name, value in (("WORLD_SIZE", "16"), ("RANK", "8"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit), exit_codes():
        raise errors.NumericsError("loss is nan", **PARTS)
    printed = capsys.readouterr().err
    assert printed == "[rank 8] NumericsError: c: loss is nan\n  expected: b\n  next: d\n"


def test_out_of_memory_is_told_whole_by_any_rank(monkeypatch, capsys):
    """No other rank has the same error, so its advice stands nowhere else on the console."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit), exit_codes():
        raise errors.OutOfMemory("no memory", **PARTS)
    printed = capsys.readouterr().err
    assert printed == "[rank 1] OutOfMemory: c: no memory\n  expected: b\n  next: d\n"


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(9), KeyboardInterrupt()])
def test_other_exceptions_pass(error):
    """What is not ours keeps its traceback and its own exit code."""
    with pytest.raises(type(error)) as caught, exit_codes():
        raise error
    assert caught.value is error


def test_a_broken_console_changes_no_exit_code(monkeypatch):
    """When stderr is gone the exit code still tells."""

    class Broken:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    monkeypatch.setattr(sys, "stderr", Broken())
    with pytest.raises(SystemExit) as caught, exit_codes():
        raise errors.Preempted("a", **PARTS)
    assert caught.value.code == 75


def test_a_character_the_console_lacks_ends_no_run(monkeypatch):
    """A run folder of another alphabet on a console of ASCII: a question mark."""
    console = io.TextIOWrapper(written := io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    with exit_codes():
        print("runs/\u00e9", flush=True)
    assert written.getvalue() == b"runs/?\n"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/srv/a/run/lease.json: busy", ".../lease.json: busy"),
        ("where=/a/b/c.yaml:3", "where=.../c.yaml:3"),
        ("config:/a/b.yaml", "config:.../b.yaml"),
        ('File "/usr/lib/x.py", line 3', 'File ".../x.py", line 3'),
        ("runs/a/b.json ./c/d ../e/f", "runs/a/b.json ./c/d ../e/f"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("12 tokens/s, 1/2", "12 tokens/s, 1/2"),
    ],
)
def test_absolute_paths_are_shortened(text, kept):
    """Absolute paths lose their folders; relative ones, addresses and units stay."""
    assert without_paths({"a": [text, 1, None]}) == {"a": [kept, 1, None]}
