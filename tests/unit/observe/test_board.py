# SPDX-License-Identifier: Apache-2.0
"""What a recipe tells the board reaches the console and the metrics file."""

from types import SimpleNamespace

import pytest

from mprecipes import Board, read_metrics


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(path=tmp_path, attempt=1, is_main=True)


CONFIG = SimpleNamespace(max_steps=5, logging_steps=2, watch=None)


class Clock:
    """Seconds that pass only when a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


def record(step):
    return SimpleNamespace(
        step=step, tokens=60, loss=2.5, grad_norm=0.5, learning_rate=1e-3, loss_scale=None,
        updates=step, skipped=False, step_seconds=0.5,
    )  # fmt: skip


def test_steps_are_logged_every_logging_steps_and_at_the_end(run, capsys):
    """Of steps 1 to 5, steps 2, 4 and 5 are in the file and on the console."""
    with Board(run, CONFIG, 0) as board:
        for step in range(1, 6):
            board.step(record(step))
    lines, _ = read_metrics(run.path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert (lines[0]["attempt"], lines[0]["train/loss"], lines[0]["train/grad_norm"]) == (
        1,
        2.5,
        0.5,
    )
    assert [line.get("perf/tokens_per_second") for line in lines] == [120.0, 120.0, 120.0]
    assert lines[1]["perf/step_seconds"] == 0.5
    assert capsys.readouterr().out.count("loss 2.5000") == 3


def test_the_loss_scale_and_skipped_steps_are_logged_and_told(run, capsys):
    """A record with a loss scale logs it and the updates left out; notes are told at once."""
    skipped = SimpleNamespace(**{**vars(record(2)), "loss_scale": 32768.0, "updates": 1})
    with Board(run, CONFIG, 0) as board:
        board.step(skipped, notes=["loss scale 65536 -> 32768, step 2 skipped"])
    line = read_metrics(run.path / "metrics.jsonl")[0][0]
    assert (line["precision/loss_scale"], line["precision/skipped_steps"]) == (32768.0, 1)
    assert "loss scale 65536 -> 32768, step 2 skipped" in capsys.readouterr().out


def test_what_one_step_alone_measured_is_logged_at_once(run, capsys):
    """Communicated bytes of step 1 are in the file and shown, though no log line is due."""
    with Board(run, CONFIG, 0) as board:
        board.step(record(1), {"perf/communicated_bytes": 115456})
    assert read_metrics(run.path / "metrics.jsonl")[0][0]["perf/communicated_bytes"] == 115456
    assert "step 1  perf: communicated_bytes 115456" in capsys.readouterr().out


def test_an_evaluation_is_a_line_of_its_own(run, capsys):
    """The group is told once, and the values without it."""
    with Board(run, CONFIG, 0) as board:
        board.log(4, {"eval/loss": 1.25, "eval/perplexity": 3.5})
    assert "step 4  eval: loss 1.2500  perplexity 3.5000" in capsys.readouterr().out
    assert read_metrics(run.path / "metrics.jsonl")[0][0]["eval/loss"] == 1.25


def saved(step, **changes):
    values = {"bytes": 4096, "seconds": 0.5, "blocked_seconds": 0.25, "waited_seconds": 0.125}
    return SimpleNamespace(
        **{"step": step, "kept": False, "error": None, "note": None, **values, **changes}
    )


def test_the_newest_checkpoint_is_shown(run, capsys):
    """A save of this attempt is logged with its size; one found published is only shown."""
    with Board(run, CONFIG, 0) as board:
        board.saved([saved(2)])
        board.saved([saved(4, kept=True)])
        board.step(record(4))
    lines, _ = read_metrics(run.path / "metrics.jsonl")
    assert [line["step"] for line in lines if "checkpoint/bytes" in line] == [2]
    assert lines[0]["checkpoint/stall_seconds"] == 0.25
    assert lines[0]["checkpoint/wait_seconds"] == 0.125
    assert "checkpoint 4" in capsys.readouterr().out


def test_what_a_save_has_to_tell_is_a_line_of_its_own(run, capsys):
    """The note of a report is shown."""
    with Board(run, CONFIG, 0) as board:
        board.saved([saved(2, note="a stop needs up to 3.0 s")])
    assert capsys.readouterr().out == "a stop needs up to 3.0 s\n"


def test_a_failed_save_is_shown_and_counted(run, capsys):
    """Step and reason are on the console; the last good checkpoint stays the one shown."""
    with Board(run, CONFIG, 0) as board:
        board.saved([saved(2)])
        board.saved([saved(4, error="no space")])
        board.step(record(4))
    lines, _ = read_metrics(run.path / "metrics.jsonl")
    assert [line.get("checkpoint/failed_saves") for line in lines] == [None, 1, None]
    out = capsys.readouterr().out
    assert "step 4  not saved: no space" in out
    assert "checkpoint 2" in out


def test_pauses_do_not_count_as_steps(run):
    """Of 7 seconds between two laps, 4 were an evaluation: the step took 3."""
    clock = Clock()
    board = Board(run, CONFIG, 0, clock=clock)
    board.lap()
    clock.now = 1.0
    with board.paused():
        clock.now = 5.0
    clock.now = 7.0
    assert board.lap() == 3.0
    with pytest.raises(OSError, match="disk"), board.paused():
        clock.now = 107.0
        raise OSError("disk")
    clock.now = 109.0
    assert board.lap() == 2.0


def test_other_ranks_show_and_write_nothing(run, capsys):
    """A rank that is not the main one leaves no file and no line."""
    run.is_main = False
    with Board(run, CONFIG, 0) as board:
        board.step(record(5))
        board.log(5, {"eval/loss": 1.0})
    assert capsys.readouterr().out == ""
    assert not (run.path / "metrics.jsonl").exists()


class Tracked:
    """A tracking that writes down what it is told, and has news."""

    def __init__(self):
        self.told, self.lines = [], ["W&B: offline"]

    def log(self, step, values):
        self.told.append((step, dict(values)))

    def reference(self, name, kind, files):
        self.told.append((name, kind, files))

    def news(self):
        lines, self.lines = self.lines, []
        return lines


def test_the_tracking_gets_what_the_file_gets_and_a_reference_to_the_manifest(run, capsys):
    """Rows as in metrics.jsonl, in order; of a save its manifest; its news on the console."""
    run.run_id = "r1"
    tracked = Tracked()
    with Board(run, CONFIG, 0, tracking=tracked) as board:
        board.step(record(1))
        board.step(record(2))
        board.log(2, {"eval/loss": 1.25})
        board.saved([saved(2)])
    manifest = run.path / "checkpoints" / "step-00000002" / "manifest.json"
    lines, _ = read_metrics(run.path / "metrics.jsonl")
    rows = [({"step": told[0], "attempt": 1} | told[1]) for told in tracked.told[:3]]
    assert rows == lines
    assert tracked.told[3] == (
        "checkpoints-r1",
        "checkpoint",
        {"step-00000002/manifest.json": manifest},
    )
    assert "W&B: offline" in capsys.readouterr().out


class Told:
    """A tracker that remembers alerts."""

    def __init__(self):
        self.alerts = []

    def alert(self, title, text):
        self.alerts.append((title, text))

    def log(self, step, values): ...

    def news(self):
        return []


def test_alerts_are_counted_shown_and_sent(run, capsys):
    """What a step's numbers give rise to, and what the recipe's guard tells."""
    config = SimpleNamespace(max_steps=99, logging_steps=50, watch={"spike_window": 8})
    told = Told()
    with Board(run, config, 0, tracking=told) as board:
        for step in range(1, 20):
            board.step(record(step))
        for step in (20, 21, 22):
            values = vars(record(step)) | {"grad_norm": 50.0}
            board.step(SimpleNamespace(**values))
        board.alert(22, "rolled back", "to step 9")
    output = capsys.readouterr().out
    assert "step 22  alert: gradient spike: gradient norm 50, the median of 8 updates" in output
    assert "step 22  alert: rolled back: to step 9" in output
    lines, _ = read_metrics(run.path / "metrics.jsonl")
    assert [line["train/alerts"] for line in lines if "train/alerts" in line] == [1, 2]
    assert [title for title, _ in told.alerts] == [
        f"gradient spike: {run.path.name}",
        f"rolled back: {run.path.name}",
    ]
    assert told.alerts[1][1] == "step 22: to step 9"


def test_what_follows_saves_is_logged_when_it_changes(run, capsys):
    """Errors are shown too; counts without a metric of their own are not logged."""
    with Board(run, CONFIG, 0) as board:
        board.saved([], 1, {"saves": 1, "mirrored": 1})
        board.saved([], 2, {"saves": 2, "mirrored": 1, "mirror_errors": 0})
        board.saved([], 3, {"saves": 2, "mirrored": 2, "mirror_errors": 1})
        board.saved([], 4, {"saves": 2, "mirrored": 2, "mirror_errors": 1})
    lines, _ = read_metrics(run.path / "metrics.jsonl")
    values = [{k: v for k, v in line.items() if "/" in k} for line in lines]
    assert values == [
        {"checkpoint/mirrored": 1},
        {"checkpoint/mirrored": 2, "checkpoint/mirror_errors": 1},
    ]
    assert [line["step"] for line in lines] == [1, 3]
    assert "step 3  after saves: mirror_errors 1; see the log" in capsys.readouterr().out
