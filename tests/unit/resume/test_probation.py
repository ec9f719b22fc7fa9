# SPDX-License-Identifier: Apache-2.0
"""Resuming, layer by layer: what is loaded, what is refused, what is watched, what is reported."""

import json
import math

import pytest
import torch

from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.ranks import Ranks
from mprecipes.compute.scaling import LossScaler
from mprecipes.data.order import Position
from mprecipes.errors import ConfigError, ContractRefused, ResumeHalted
from mprecipes.resume.evidence import Evidence
from mprecipes.resume.journal import Journal
from mprecipes.resume.policy import ProbationPolicy
from mprecipes.resume.probation import resume

KEYS = [
    "verdict", "attempt", "checkpoint", "step", "base", "environment_changes", "contract_changes",
    "torn_journal_lines", "checks", "replayed_steps", "observed_steps",
]  # fmt: skip


@pytest.fixture
def launch(run, state, facts, classes):
    """Resumes as attempt n and gives what a recipe then has in its hands."""

    def go(
        attempt, *, accepted=(), ranks=None, kind=CheckpointManager, tolerance=1e-2,
        run_id="0123456789ab", **changes
    ):  # fmt: skip
        folder, now = run(attempt), state()
        folder.run_id = run_id
        manager = now.manager(folder, ranks, kind)
        resumed = resume(
            run=folder,
            manager=manager,
            ranks=ranks or Ranks(),
            model=now.model,
            optimizer=now.optimizer,
            current=facts(**changes),
            classes=classes,
            accepted=accepted,
            tolerance=tolerance,
            evidence=Evidence(ProbationPolicy(observed_steps=3)),
        )
        return folder, now, manager, resumed

    return go


@pytest.fixture
def journal(run, record):
    """Writes the journal of an attempt for some steps."""

    def write(attempt, steps, **changes):
        kept = Journal(run(attempt).journal, attempt, True)
        for step in steps:
            kept.append(record(step, attempt=attempt, **changes))
        kept.close()

    return write


@pytest.fixture
def interrupted(launch, save, journal):
    """Attempt 0 trained to step 8 and left a checkpoint of step 5; gives the weights of step 5."""
    _, now, manager, _ = launch(0)
    now.train(5)
    save(manager, 5)
    weights = now.weights()
    journal(0, range(1, 9))
    return weights


def test_a_first_attempt_starts_at_zero_and_reports_nothing(launch, facts):
    """There is nothing to compare with; how it computes is noted for the next attempt."""
    folder, _, _, resumed = launch(0)
    assert resumed.position == Position()
    assert (resumed.manifest, resumed.rank_state, resumed.differences) == (None, {}, [])
    assert resumed.probation.verdict == "released"
    assert not folder.resume_reports.exists()
    assert folder.attempts() == [{"attempt": 0, "contract": facts()}]


def test_a_resume_loads_the_checkpoint_and_is_on_probation(launch, interrupted):
    """Weights, position and this rank's state come back; the report names every check."""
    folder, now, _, resumed = launch(1)
    assert now.weights() == interrupted
    assert resumed.position == Position(5, 5, 40, 600)
    assert resumed.rank_state == {"step": 5}
    assert resumed.manifest.step == 5
    assert resumed.probation.on_probation
    report, checks = folder.report(), folder.checks()
    assert list(report) == KEYS
    assert report["verdict"] == "on_probation"
    assert (report["checkpoint"], report["step"]) == ("checkpoints/step-00000005", 5)
    assert {name: check["verdict"] for name, check in checks.items()} == {
        "bytes": "passed",
        "contract": "passed",
        "weights": "pending",
        "optimizer": "pending",
        "data_order": "pending",
        "communication": "pending",
        "throughput": "pending",
        "replay": "pending",
    }
    assert checks["bytes"]["found"]["files"] == 2
    digests = resumed.manifest.state_digests
    assert checks["weights"]["found"]["digest of weights on every rank"] == digests["weights"]
    moments = checks["optimizer"]["found"]
    assert moments["digest of exp_avg on every rank"] == digests["exp_avg"]
    assert list(checks["replay"]) == [
        "name", "verdict", "policy", "expected", "found", "tolerance", "seconds", "meaning",
    ]  # fmt: skip


def test_it_is_released_when_every_step_trained_before_came_out_the_same(
    launch, interrupted, record
):
    """Steps 6 to 8 repeat attempt 0 bit for bit; the verdict is known at step 8 and written."""
    folder, _, _, resumed = launch(1)
    for step in (6, 7):
        resumed.probation.observe(record(step, attempt=1))
        assert resumed.probation.verdict == "on_probation"
    resumed.probation.observe(record(8, attempt=1))
    assert resumed.probation.verdict == folder.report()["verdict"] == "released"
    assert folder.report()["replayed_steps"] == resumed.probation.replayed_steps == 3
    replay = folder.checks()["replay"]
    assert (replay["verdict"], replay["found"]) == ("passed", "3 of 3 steps compared")
    assert replay["tolerance"] == "bitwise: computed as in the first pass"
    assert replay["seconds"] == 1.5
    resumed.probation.observe(record(9, attempt=1, loss=math.nan))
    assert resumed.probation.verdict == "released"


def test_nothing_is_deleted_before_the_verdict(launch, interrupted, record, save):
    """Newer checkpoints do not push out the one resumed from until the run is released."""
    folder, now, manager, resumed = launch(1)
    steps = lambda: sorted(path.name for path in folder.checkpoints.iterdir())  # noqa: E731
    for step in (6, 7):
        now.train(1)
        save(manager, step)
        resumed.probation.observe(record(step, attempt=1))
    assert steps() == ["step-00000005", "step-00000006", "step-00000007"]
    resumed.probation.observe(record(8, attempt=1))
    manager.wait()
    assert steps() == ["step-00000007"]


def test_a_step_that_comes_out_otherwise_halts_the_run(launch, interrupted, record):
    """Found, expected, where, what it usually means and what to try; the report agrees."""
    folder, _, _, resumed = launch(1)
    resumed.probation.observe(record(6, attempt=1))
    with pytest.raises(ResumeHalted) as error:
        resumed.probation.observe(record(7, attempt=1, learning_rate=0.002, loss=3.5))
    assert error.value.exit_code == 4
    assert "step 7: learning_rate is 0.002 (0x1.0624dd2f1a9fcp-9), was 0.001 " in error.value.found
    assert "step 7: loss is 3.5 " in error.value.found
    assert error.value.found.endswith(
        "Usually: the schedule is not a function of `updates` alone, or its settings changed"
    )
    assert error.value.expected == (
        "the values of the first pass (bitwise: computed as in the first pass)"
    )
    assert error.value.where == "step 7, journal/attempt-0000.jsonl"
    assert error.value.action.startswith("compute the learning rate from `position.updates`")
    report, replay = folder.report(), folder.checks()["replay"]
    assert (report["verdict"], report["replayed_steps"]) == ("halted", 2)
    assert (replay["verdict"], replay["policy"]) == ("failed", "halt")
    assert replay["found"].startswith("2 of 3 steps compared; step 7: learning_rate is 0.002")
    assert replay["meaning"].startswith("the schedule is not a function of `updates`")


def test_a_halted_attempt_is_no_measure_for_the_next(launch, interrupted, journal, record):
    """Launching the same wrong run again does not pass by repeating itself."""
    _, _, _, resumed = launch(1)
    journal(1, [6], loss=3.5)
    with pytest.raises(ResumeHalted):
        resumed.probation.observe(record(6, attempt=1, loss=3.5))
    _, _, _, again = launch(2)
    with pytest.raises(ResumeHalted) as error:
        again.probation.observe(record(6, attempt=2, loss=3.5))
    assert error.value.where == "step 6, journal/attempt-0000.jsonl"


def test_with_nothing_to_repeat_the_first_steps_are_observed_all_the_same(
    launch, save, journal, record
):
    """The journal ends where the checkpoint does: three steps, and then the verdict."""
    _, _, manager, _ = launch(0)
    save(manager, 5)
    journal(0, range(1, 6))
    folder, _, _, resumed = launch(1)
    assert resumed.probation.num_observed == 3
    for step in (6, 7, 8):
        assert resumed.probation.verdict == folder.report()["verdict"] == "on_probation"
        resumed.probation.observe(record(step, attempt=1))
    assert resumed.probation.verdict == folder.report()["verdict"] == "released"
    assert (folder.report()["observed_steps"], folder.report()["replayed_steps"]) == (3, 0)
    assert folder.checks()["replay"]["found"] == "no earlier attempt went beyond this step"
    assert folder.checks()["data_order"]["found"]["samples_seen"] == 64


def test_a_run_that_ends_on_probation_is_judged_by_the_steps_it_has(launch, interrupted, record):
    """One of three steps repeated: released, and the report says one of three."""
    folder, _, _, resumed = launch(1)
    resumed.probation.observe(record(6, attempt=1))
    resumed.probation.close()
    assert folder.report()["verdict"] == "released"
    assert folder.checks()["replay"]["found"] == "1 of 3 steps compared"


def test_a_run_that_ends_before_any_step_stays_on_probation(launch, interrupted):
    """Nothing observed, nothing released."""
    folder, _, _, resumed = launch(1)
    resumed.probation.close()
    assert folder.report()["verdict"] == resumed.probation.verdict == "on_probation"


def test_without_a_checkpoint_the_first_steps_are_still_compared(launch, journal, record):
    """Killed before the first save: it starts at step 0 and must repeat step 1."""
    launch(0)
    journal(0, [1, 2])
    folder, _, _, resumed = launch(1)
    assert resumed.position == Position()
    report, checks = folder.report(), folder.checks()
    assert (report["checkpoint"], report["step"]) == (None, 0)
    assert checks["bytes"]["found"] == "no checkpoint was published yet: started at step 0"
    with pytest.raises(ResumeHalted) as error:
        resumed.probation.observe(record(1, attempt=1, batch_digest="00000000000000ff"))
    assert "step 1: batch_digest is '00000000000000ff', was '0000000000000001'" in error.value.found
    assert "the model was fed other tokens" in error.value.found


def test_without_a_checkpoint_the_contract_is_the_attempt_that_trained(launch, journal):
    """A folder is one run even before its first save; who trained nothing binds nobody."""
    launch(0, data__seed=7)
    launch(1)
    journal(1, [1])
    with pytest.raises(ContractRefused) as error:
        launch(2, config__learning_rate=0.01)
    assert error.value.where == "run.json, attempt 1"
    assert "learning_rate: 0.001 -> 0.01   allow with" in error.value.found
    assert "seed" not in error.value.found


def test_a_refused_contract_leaves_the_state_and_the_folder_alone(
    launch, interrupted, run, state, facts, classes
):
    """Nothing is loaded and nothing is noted by a launch that is another run."""
    folder, now = run(1), state()
    before = now.weights()
    with pytest.raises(ContractRefused) as error:
        resume(
            run=folder,
            manager=now.manager(folder),
            ranks=Ranks(),
            model=now.model,
            optimizer=now.optimizer,
            current=facts(data__seed=2),
            classes=classes,
            accepted=[],
            tolerance=0.0,
        )
    assert error.value.where == "checkpoints/step-00000005/manifest.json"
    assert "seed: 1 -> 2   allow with --accept changed_seed" in error.value.found
    assert now.weights() == before
    assert [entry["attempt"] for entry in folder.attempts()] == [0]
    assert not folder.resume_reports.exists()


def test_an_unknown_flag_is_refused_before_a_byte_is_read(launch, interrupted):
    """--accept is checked in every launch, also where it would change nothing."""
    with pytest.raises(ConfigError) as error:
        launch(1, accepted=["changed_sed"])
    assert error.value.action == "use --accept changed_seed"


def test_an_accepted_change_is_reported_and_frees_its_keys(launch, interrupted, record):
    """With another seed the data differs by right; the learning rate still may not."""
    folder, _, _, resumed = launch(1, accepted=["changed_seed"], data__seed=2)
    assert [str(difference) for difference in resumed.differences] == ["seed: 1 -> 2"]
    assert folder.report()["contract_changes"] == [
        {"field": "seed", "kind": "may_change", "old": 1, "new": 2, "flag": "changed_seed"}
    ]
    resumed.probation.observe(record(6, attempt=1, batch_digest="ff", loss=9.0, grad_norm=9.0))
    with pytest.raises(ResumeHalted):
        resumed.probation.observe(record(7, attempt=1, learning_rate=0.002))
    assert folder.checks()["replay"]["tolerance"] == (
        "exact; batch_digest, grad_norm, loss, tokens not compared (changed_seed)"
    )


def test_another_world_size_is_reported_and_compared_within_the_tolerance(
    launch, interrupted, record
):
    """2 -> 1 processes needs no flag; loss and gradient norm get the tolerance of the mode."""
    folder, _, _, resumed = launch(1, topology__world_size=1, environment__torch="2.14.0")
    for step in (6, 7, 8):
        loss = (4.0 - step / 16) * 1.001
        resumed.probation.observe(record(step, attempt=1, loss=loss))
    assert folder.report()["verdict"] == "released"
    assert [d["field"] for d in folder.report()["environment_changes"]] == ["environment.torch"]
    assert [d["field"] for d in folder.report()["contract_changes"]] == ["topology.world_size"]
    assert folder.checks()["replay"]["tolerance"] == (
        "0.01 relative for loss and grad_norm (environment.torch, topology.world_size); "
        "the rest exact"
    )


def test_a_difference_that_only_warns_releases_with_warnings(launch, interrupted, record):
    """Another micro-batch has other dropout masks: shown in the report, and no halt."""
    folder, _, _, resumed = launch(1, accepted=["changed_micro_batch"], data__micro_batch=2)
    for step in (6, 7, 8):
        resumed.probation.observe(record(step, attempt=1, loss=5.0))
    assert folder.report()["verdict"] == resumed.probation.verdict == "released_with_warnings"
    replay = folder.checks()["replay"]
    assert (replay["verdict"], replay["policy"]) == ("warned", "warn")
    assert "step 6: loss is 5.0" in replay["found"]


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    launch, save, journal, record
):
    """One flipped bit: quarantined, the older one restored, the steps since then replayed."""
    folder, now, manager, _ = launch(0)
    manager.freeze_retention()
    now.train(4)
    save(manager, 4)
    weights = now.weights()
    now.train(2)
    newest = save(manager, 6)
    journal(0, range(1, 7))
    file = next(newest.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    folder, now, _, resumed = launch(1)
    assert resumed.position.step == 4
    assert now.weights() == weights
    for step in (5, 6, 7):
        resumed.probation.observe(record(step, attempt=1))
    assert folder.report()["verdict"] == "released_with_warnings"
    check = folder.checks()["bytes"]
    assert (check["verdict"], check["found"]["quarantined"]) == ("warned", ["step-00000006"])


class OneBitOff(CheckpointManager):
    """Loads everything, and one element of it wrong."""

    def restore_newest(self, check):
        manifest, state = super().restore_newest(check)
        weight = next(self.model.parameters()).detach()
        weight[0, 0] = math.nextafter(weight[0, 0].item(), 1e30) * (1 + 2**-22)
        return manifest, state


def test_a_state_that_is_not_what_was_saved_is_found_before_the_first_step(
    launch, interrupted, run
):
    """The digests of the live tensors are compared with the manifest's after loading."""
    with pytest.raises(ResumeHalted) as error:
        launch(1, kind=OneBitOff)
    stored = json.loads((run(1).checkpoints / "step-00000005" / "manifest.json").read_text())
    assert error.value.found.startswith("the state in memory after loading has digests {'rank 0':")
    assert error.value.expected == str(stored["state_digests"])
    assert error.value.where == "checkpoints/step-00000005/manifest.json, state_digests"
    assert error.value.action.startswith("run `mprecipes verify` on the checkpoint")
    assert run(1).report()["verdict"] == "halted"
    assert run(1).checks()["weights"]["verdict"] == "failed"
    assert run(1).checks()["optimizer"]["verdict"] == "passed"


class TwoRanks(Ranks):
    """Two ranks that hold the same; what rank 0 shares is kept for rank 1 to take."""

    def __init__(self, rank, shared):
        super().__init__(rank=rank, world_size=2)
        object.__setattr__(self, "shared", shared)

    def with_own_group(self):
        return self

    def share(self, value):
        if not self.is_main:
            return self.shared.pop(0)
        self.shared.append(value)
        return value

    def gather(self, value):
        return [value, value]


def test_every_rank_comes_to_the_same_verdict_and_only_one_writes(launch, interrupted, record):
    """Rank 1 holds the first pass too and raises the very same error, without a file of its own."""
    shared = []
    folder, _, _, main = launch(1, ranks=TwoRanks(0, shared))
    written = (folder.resume_reports / "attempt-0001.json").read_bytes()
    noted = folder.attempts()
    _, _, _, other = launch(1, ranks=TwoRanks(1, shared))
    assert (other.position, other.probation.verdict) == (main.position, "on_probation")
    with pytest.raises(ResumeHalted) as there:
        other.probation.observe(record(6, attempt=1, tokens=121))
    assert (folder.resume_reports / "attempt-0001.json").read_bytes() == written
    assert folder.attempts() == noted
    with pytest.raises(ResumeHalted) as here:
        main.probation.observe(record(6, attempt=1, tokens=121))
    assert str(here.value) == str(there.value)
    assert folder.report()["verdict"] == "halted"


def test_rank_one_is_refused_with_rank_zero(launch, interrupted):
    """A contract refusal found by the main process ends every rank, none waits."""
    shared = []
    for rank in (0, 1):
        with pytest.raises(ContractRefused) as error:
            launch(1, ranks=TwoRanks(rank, shared), data__seed=2)
        assert "seed: 1 -> 2" in error.value.found


def test_the_attempt_that_reached_a_step_last_is_its_measure(launch, interrupted, journal, record):
    """2 -> 1 -> 2 processes: step 6 is measured by the second of two, within its tolerance."""
    launch(1, topology__world_size=1)
    journal(1, [6], loss=3.626)
    folder, _, _, resumed = launch(2)
    resumed.probation.observe(record(6, attempt=2, loss=3.625))
    with pytest.raises(ResumeHalted) as error:
        resumed.probation.observe(record(7, attempt=2, loss=3.0))
    assert error.value.where == "step 7, journal/attempt-0000.jsonl"
    assert "topology.world_size" in folder.checks()["replay"]["tolerance"]


def test_torn_lines_are_counted_in_the_report(launch, interrupted, run):
    """A line cut by the kill is dropped, and not in silence."""
    with (run(0).journal / "attempt-0000.jsonl").open("ab") as file:
        file.write(b'{"attempt":0,"st')
    folder, _, _, _ = launch(1)
    assert folder.report()["torn_journal_lines"] == 1


class ScaleReset(CheckpointManager):
    """Loads everything, and begins the loss scale anew."""

    def restore_newest(self, check):
        manifest, state = super().restore_newest(check)
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": 65536.0})
        return manifest, state


@pytest.mark.parametrize("kind", [CheckpointManager, ScaleReset])
def test_a_loss_scale_that_was_reset_is_found_before_the_first_step(
    run, state, facts, classes, save, kind
):
    """Saved at 512; data_order owns it, and as it was saved it passes."""

    def scaled(kind, init_scale):
        now = state()
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        scaler.scale(torch.ones(1))
        manager = kind(
            folder=run(0), ranks=Ranks(), model=now.model, optimizer=now.optimizer, scaler=scaler
        )
        return now, manager

    now, manager = scaled(CheckpointManager, 512.0)
    now.train(5)
    save(manager, 5)
    now, manager = scaled(kind, 1.0)

    def go_on():
        return resume(
            run=run(1), manager=manager, ranks=Ranks(), model=now.model, optimizer=now.optimizer,
            current=facts(), classes=classes, accepted=[], tolerance=0.0,
        )  # fmt: skip

    if kind is CheckpointManager:
        assert go_on().probation.on_probation
        assert run(1).checks()["data_order"]["found"] == {"loss scale": 512.0}
        return
    with pytest.raises(ResumeHalted) as error:
        go_on()
    assert "data_order: loss scale is 65536.0" in error.value.found
    assert "expected 512.0" in error.value.found
    assert error.value.where == "checkpoints/step-00000005/manifest.json, check data_order"
    assert run(1).checks()["data_order"]["verdict"] == "failed"


def test_a_static_loss_scale_is_that_of_the_launch(run, state, facts, classes, save):
    """Saved at 512 and launched with 256: what was accepted halts nothing, and is what is found."""

    def scaled(scale):
        now, scaler = state(), LossScaler("cpu", NumericsPolicy(loss_scale=scale))
        scaler.scale(torch.ones(1))
        manager = CheckpointManager(
            folder=run(0), ranks=Ranks(), model=now.model, optimizer=now.optimizer, scaler=scaler
        )
        return now, manager

    now, manager = scaled(512.0)
    now.train(5)
    save(manager, 5)
    now, manager = scaled(256.0)
    resumed = resume(
        run=run(1), manager=manager, ranks=Ranks(), model=now.model, optimizer=now.optimizer,
        current=facts(precision__settings={"loss_scale": 256.0}), classes=classes, accepted=[],
        tolerance=0.0,
    )  # fmt: skip
    assert resumed.probation.on_probation and manager.scaler.get_scale() == 256.0
    assert run(1).checks()["data_order"]["found"] == {"loss scale": 256.0}


def test_a_step_can_be_chosen_and_later_ones_are_set_aside(run, state, facts, classes, save):
    """Steps 3 and 5 are there: it goes on from 3, and 5 is neither deleted nor found again."""
    now = state()
    manager = now.manager(run(0))
    manager.freeze_retention()
    for step in (3, 5):
        now.train(1)
        save(manager, step)

    def go_on(attempt, step):
        here = state()
        return resume(
            run=run(attempt), manager=here.manager(run(attempt)), ranks=Ranks(), model=here.model,
            optimizer=here.optimizer, current=facts(), classes=classes, accepted=[], tolerance=0.0,
            resume_from=step,
        )  # fmt: skip

    assert go_on(1, 3).position.step == 3
    assert run(1).attempts()[0]["resume_from"] == 3
    assert (run(1).path / "set_aside" / "step-00000005").is_dir()
    with pytest.raises(ConfigError) as error:
        go_on(2, 4)
    assert error.value.expected == "the step of a checkpoint or milestone: 3, 5"
    assert go_on(3, 5).position.step == 5


def test_a_checkpoint_of_another_run_is_not_gone_on_from(launch, interrupted):
    """Attempt 0 trained here; what lies in checkpoints/ was saved by a run of another id."""
    with pytest.raises(ConfigError) as error:
        launch(1, run_id="ffffffffffff")
    assert error.value.found == "step-00000005 is a checkpoint of run 0123456789ab"


def test_a_last_step_before_the_checkpoint_is_refused(launch, interrupted):
    """Case D04: nothing would be trained and nothing taken back, and it would exit 0."""
    with pytest.raises(ConfigError) as error:
        launch(1, config__max_steps=4)
    assert error.value.found == "max_steps 4, and the run is at step 5"
    assert error.value.expected == "5 or more"
    assert error.value.where == "max_steps, checkpoints/step-00000005"
    assert error.value.action == "raise --max_steps"
    _, _, _, resumed = launch(2, config__max_steps=5)
    assert resumed.position.step == 5
