# SPDX-License-Identifier: Apache-2.0
"""What people do to checkpoints by hand, and every command of docs/checkpoints.md."""

import json
import os
import re
import shlex
import socket
import time
from pathlib import Path

import pytest
import typer.testing

from mprecipes.checkpoint.mirror import Mirror
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.errors import ConfigError, RunFolderBusy, VerificationError
from mprecipes.tools import cli
from mprecipes.tools.keeping import (
    Pruned,
    name_milestone,
    pin,
    policy_of_run,
    prune,
    verify_all,
)
from tests.kept import TENSORS, Folder, contents, flip, write_checkpoint

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


@pytest.fixture
def run(tmp_path):
    """A finished run with checkpoints of steps 100 to 400 that keeps two."""
    run = Folder(tmp_path / "demo")
    run.save(100, 200, 300, 400)
    facts = {"schema": 1, "run_id": run.run_id, "wandb_id": run.run_id, "horizon": 400,
             "recipe": {"name": "toy", "version": "1.0.0"}, "created": "2026-11-30T10:00:00+00:00",
             "attempts": [{"attempt": 0, "outcome": "finished", "exit_code": 0}]}  # fmt: skip
    (run.path / "run.json").write_text(json.dumps(facts))
    configure(run, keep_last=2)
    return run


def configure(run, name="config.yaml", **options):
    """Writes the options of an attempt as a run keeps them."""
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in options.items()]
    (run.path / name).write_text("".join(lines) + "learning_rate: 0.001\n")


def lease(run):
    """This process holds the run."""
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": time.time()}
    (run.path / "lease.json").write_text(json.dumps(facts))


def command(*words):
    return typer.testing.CliRunner().invoke(cli.app, [str(word) for word in words])


def test_the_policy_is_the_newest_attempts(run):
    """Attempt 10 comes after attempt 9, and what it does not say is the default."""
    assert policy_of_run(run.path) == CheckpointPolicy(keep_last=2)
    configure(run, "config.attempt-9.yaml", keep_last=5)
    configure(run, "config.attempt-10.yaml", keep_last=4, save_steps=7,
              checkpoint={"keep_every": 100})  # fmt: skip
    policy = policy_of_run(run.path)
    assert policy == CheckpointPolicy(keep_last=4, save_steps=7, keep_every=100)
    assert policy_of_run(run.path / "absent") == CheckpointPolicy()


def test_options_that_were_edited_wrongly_are_refused(run):
    """A hand in the kept options is told what it broke."""
    configure(run, keep_last="many")
    with pytest.raises(ConfigError) as caught:
        policy_of_run(run.path)
    assert "'many'" in caught.value.found
    assert caught.value.where == str(run.path / "config.yaml")
    assert caught.value.expected and caught.value.action


def test_pruning_deletes_what_the_plan_gives_up(run):
    """The two newest stay; the rows say of each what became of it and why."""
    shown = prune(run.path, dry_run=True)
    assert run.steps() == [100, 200, 300, 400]
    rows = prune(run.path, dry_run=False)
    assert run.steps() == [300, 400]
    size = rows[0].num_bytes
    assert rows == [
        Pruned(100, False, "older than the newest 2", size, True),
        Pruned(200, False, "older than the newest 2", size, True),
        Pruned(300, True, "one of the newest 2", size, False),
        Pruned(400, True, "one of the newest 2", size, False),
    ]
    assert [(row.step, row.keep, row.deleted) for row in shown] == [
        (100, False, False), (200, False, False), (300, True, False), (400, True, False),
    ]  # fmt: skip


def test_fewer_can_be_kept_by_hand(run):
    """`keep_last` on the command line wins; none at all is refused."""
    prune(run.path, dry_run=False, keep_last=1)
    assert run.steps() == [400]
    with pytest.raises(ConfigError):
        prune(run.path, dry_run=False, keep_last=0)
    assert run.steps() == [400]


def test_a_damaged_newest_does_not_count(run):
    """Nothing is deleted in favour of what does not verify, nor is the damaged one touched."""
    flip(run.checkpoints / "step-00000400" / TENSORS)
    rows = prune(run.path, dry_run=False, keep_last=1)
    assert [row.step for row in rows if row.deleted] == [100, 200]
    assert "does not verify" in rows[-1].reason
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-00000300", "step-00000400",
    ]  # fmt: skip


def test_when_none_verifies_nothing_is_deleted(run):
    """All damaged: all stay."""
    for step in (100, 200, 300, 400):
        flip(run.checkpoints / f"step-{step:08d}" / TENSORS)
    assert not any(row.deleted for row in prune(run.path, dry_run=False, keep_last=1))


def test_a_live_run_prunes_itself(run):
    """Refused with the process named; the plan may be looked at."""
    lease(run)
    with pytest.raises(RunFolderBusy) as caught:
        prune(run.path, dry_run=False)
    assert f"process {os.getpid()}" in caught.value.found
    assert caught.value.where == str(run.path)
    assert "prunes itself" in caught.value.expected
    assert "--dry_run" in caught.value.action
    assert run.steps() == [100, 200, 300, 400]
    assert len(prune(run.path, dry_run=True)) == 4


@pytest.mark.parametrize(
    ("verdict", "stays"), [("on_probation", True), ("halted", True), ("released", False)]
)
def test_what_a_resume_went_on_from_stays_until_it_is_released(run, verdict, stays):
    """The newest resume report decides."""
    (run.path / "resume").mkdir()
    for attempt, words in ((1, "halted"), (2, verdict)):
        report = {"verdict": words, "step": 100}
        (run.path / "resume" / f"attempt-{attempt:04d}.json").write_text(json.dumps(report))
    prune(run.path, dry_run=False)
    assert run.steps() == ([100, 300, 400] if stays else [300, 400])


@pytest.mark.parametrize("text", ['{"verdict": "rele', "[]", '{"verdict": "released"}', ""])
def test_a_damaged_resume_report_releases_nothing(run, text):
    """What it keeps is unknown: nothing is deleted, and the file is named."""
    (run.path / "resume").mkdir()
    report = run.path / "resume" / "attempt-0001.json"
    report.write_text(text)
    (run.path / "resume" / "attempt-notes.json").write_text("{}")
    for dry_run in (True, False):
        with pytest.raises(ConfigError) as caught:
            prune(run.path, dry_run=dry_run)
        assert caught.value.found.startswith("a resume report that cannot be read")
        assert caught.value.where == str(report)
        assert "put back a copy" in caught.value.action and caught.value.expected
    assert run.steps() == [100, 200, 300, 400]


def test_a_milestone_by_hand(run):
    """A copy that verifies, also while the run is going on; no pin is left behind."""
    lease(run)
    made = name_milestone(run.path, 200, "before-lunch")
    assert contents(made.folder) == contents(run.checkpoints / "step-00000200")
    assert run.steps("milestones") == [200]
    assert not list(run.checkpoints.glob("*.pinned"))


def test_a_milestone_of_a_step_that_is_not_there(run):
    """The steps that are there are named, and no marker stays."""
    with pytest.raises(ConfigError) as caught:
        name_milestone(run.path, 150, "x")
    assert caught.value.found == "no checkpoint of step 150"
    assert caught.value.expected == "one of 400, 300, 200, 100"
    assert caught.value.where == f"{run.path}/checkpoints"
    assert "prune RUN --dry_run" in caught.value.action
    assert not list(run.checkpoints.glob("*.pinned"))
    flip(run.checkpoints / "step-00000200" / TENSORS)
    with pytest.raises(VerificationError):
        name_milestone(run.path, 200, "x")


def test_pins(run):
    """A pinned step stays; released it goes; the answer says whether anything changed."""
    assert pin(run.path, 100, release=False) is True
    assert pin(run.path, 100, release=False) is False
    name_milestone(run.path, 100, "first")  # leaves the pin of a person alone
    prune(run.path, dry_run=False)
    assert run.steps() == [100, 300, 400]
    assert pin(run.path, 100, release=True) is True
    assert pin(run.path, 100, release=True) is False
    prune(run.path, dry_run=False)
    assert run.steps() == [300, 400]
    with pytest.raises(ConfigError):
        pin(run.path, 100, release=False)


@pytest.fixture
def mirrored(run, tmp_path):
    """The same run with step 400 at a mirror; gives the mirror's folder there."""
    url = f"file://{tmp_path}/mirror"
    configure(run, keep_last=2, checkpoint={"mirror": url})
    manifest = run.save(500)
    Mirror(url, run.path).push(manifest, "checkpoints", "step-00000500", lambda _: None)
    return tmp_path / "mirror" / "demo"


def test_everything_is_verified_with_the_mirror(run, mirrored):
    """Checkpoints, milestones and the mirror's; damage there is found by file and tensors."""
    name_milestone(run.path, 100, "first")
    verdicts = verify_all(run.path)
    assert [(each.kind, each.step) for each in verdicts] == [
        ("checkpoint", 500), ("checkpoint", 400), ("checkpoint", 300), ("checkpoint", 200),
        ("checkpoint", 100), ("milestone", 100), ("mirrored checkpoint", 500),
    ]  # fmt: skip
    assert all(each.verifies for each in verdicts)
    flip(mirrored / "checkpoints" / "step-00000500" / TENSORS)
    (bad,) = [each for each in verify_all(run.path) if not each.verifies]
    assert bad.kind == "mirrored checkpoint"
    assert bad.to_dict()["path"] == f"file://{mirrored}/checkpoints/step-00000500"
    assert "weights/layer.weight" in bad.to_dict()["problems"][0]["tensors"]


def test_the_command_verify_all(run, mirrored):
    """Exit 0 when all verify; 1 when only the mirror is damaged: URL, file and tensors named."""
    assert command("verify", run.path, "--all").exit_code == 0
    flip(mirrored / "checkpoints" / "step-00000500" / TENSORS)
    assert command("verify", run.path).exit_code == 0
    result = command("verify", run.path, "--all")
    assert result.exit_code == 1
    text = result.stdout.replace("\n", "")
    assert f"file://{mirrored}/checkpoints/step-00000500/{TENSORS}: sha256" in text
    assert "weights/layer.weight" in text
    result = command("verify", run.path, "--all", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verifies"] is False


def test_the_command_prune(run):
    """A table with the reason a step, JSON on request; --dry_run deletes nothing."""
    result = command("prune", run.path, "--dry_run")
    assert result.exit_code == 0
    assert "would be deleted" in result.stdout and "one of the newest 2" in result.stdout
    assert run.steps() == [100, 200, 300, 400]
    result = command("prune", run.path, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["dry_run"] is False
    assert [row["step"] for row in report["checkpoints"] if row["deleted"]] == [100, 200]
    assert run.steps() == [300, 400]


def test_the_command_prune_says_when_a_deletion_failed(run, monkeypatch):
    """What should be gone and is not makes it exit 1."""
    monkeypatch.setenv("MPRECIPES_FAULT", "eio@retention.before_delete:100")
    result = command("prune", run.path)
    assert result.exit_code == 1
    assert "not deleted" in result.stdout
    assert run.steps() == [100, 300, 400]


def test_the_command_milestone(run):
    """It prints what was made; a taken name is refused with exit code 2."""
    result = command("milestone", run.path, 200, "half", "--json")
    assert json.loads(result.stdout)["step"] == 200
    assert command("milestone", run.path, 200, "half").exit_code == 0
    result = typer.testing.CliRunner().invoke(
        cli.app, ["milestone", str(run.path), "300", "half"], catch_exceptions=True
    )
    assert isinstance(result.exception, ConfigError) and result.exception.exit_code == 2


def test_a_pin_of_no_run_is_not_released(tmp_path):
    """A mistyped path is refused, as when pinning."""
    for release in (True, False):
        with pytest.raises(ConfigError) as caught:
            pin(tmp_path / "nope", 300, release=release)
        assert caught.value.found == "no run.json"
        assert caught.value.where == str(tmp_path / "nope")


def test_the_command_pin(run):
    """Pinned and released, as JSON too."""
    assert json.loads(command("pin", run.path, 100, "--json").stdout) == {
        "step": 100, "pinned": True, "changed": True,
    }  # fmt: skip
    assert "False" in command("pin", run.path, 100, "--release").stdout
    assert not list(run.checkpoints.glob("*.pinned"))


def page_commands():
    """Gives the commands of the page's shell blocks, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    lines = [line.split(" #")[0] for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.strip()]


def test_the_commands_of_the_page(run, mirrored, tmp_path, monkeypatch):
    """Each one, as it stands there and in that order, does what the page says and exits 0."""
    (tmp_path / "runs").mkdir()
    run.path.rename(tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    commands = page_commands()
    assert {tuple(words[:2]) for words in commands} == {
        ("mprecipes", name) for name in ("prune", "milestone", "pin", "verify")
    }
    for words in commands:
        result = command(*words[1:])
        assert result.exit_code == 0, (words, result.output)
    moved = Folder(tmp_path / "runs" / "demo")
    assert moved.steps() == [300, 400, 500]
    assert moved.steps("milestones") == [300]


def test_the_policies_of_the_page():
    """Each YAML block of the page is a policy that a run accepts."""
    import yaml

    from mprecipes.checkpoint.policy import policy_of

    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        values = yaml.safe_load(block)
        policy_of(values.pop("checkpoint"), **values)


def test_prune_keeps_the_newest_from_before_an_open_spike(run):
    """The newest checkpoint was made in a spike that began at step 250: step 200 stays."""
    guard = {"losses": [], "running": 1, "since": [250, 1000]}
    write_checkpoint(run.checkpoints / "step-00000500", 500, guard=guard)
    found = {each.step: each for each in prune(run.path, dry_run=False)}
    assert [step for step, each in found.items() if each.keep] == [200, 400, 500]
    assert found[200].reason == "from before an open loss spike"
