# SPDX-License-Identifier: Apache-2.0
"""A run that moves between engines and numbers of processes: same state, same samples, same loss.

Everything is compared with one process of plain data parallel in FP32 without dropout.
"""

import pytest
from transformers import AutoModelForCausalLM

from tests.reading import journal, manifest, outcomes, resume_report

pytestmark = pytest.mark.launch
ENGINES = ("fsdp2", "zero1", "zero2", "zero3", "zero3_offload")


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    run = tmp_path_factory.mktemp("reference") / "run"
    done = train(run, "cpu", 1)
    assert done.returncode == 0, done.output
    return journal(run)


def check(run, reference, steps):
    found = journal(run)
    assert list(found) == list(steps)
    for step, line in found.items():
        wanted = reference[step]
        for key in ("batch_digest", "samples_seen", "learning_rate", "tokens"):
            assert line[key] == wanted[key], (step, key)
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-6), step
        assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5), step


@pytest.mark.parametrize(
    "engine", ["zero3", *(pytest.param(e, marks=pytest.mark.slow) for e in ENGINES if e != "zero3")]
)
def test_first_five_losses_are_those_of_one_process(train, reference, tmp_path, engine):
    """Token-exact loss, clipping (it bites in every step) and norm are equal on every engine."""
    run = tmp_path / "run"
    done = train(run, engine, 2, env={"MPRECIPES_FAULT": "terminate@step:4"})
    assert outcomes(run)[-1] == "preempted", done.output
    check(run, reference, range(1, 6))  # asked in step 4, stopped after 5
    assert min(line["grad_norm"] for line in reference.values()) > 1.0


def moved(run, number):
    """Checks that attempt `number` took over the state as it was saved, digests equal."""
    report = resume_report(run, number)
    rows = {check["name"]: check for check in report["checks"]}
    saved = manifest(run, report["step"])["state_digests"]
    assert sorted(saved) == ["exp_avg", "exp_avg_sq", "step", "weights"]
    for kind, digest in saved.items():
        row = rows["weights" if kind == "weights" else "optimizer"]
        assert row["verdict"] == "passed"
        fact = f"digest of {kind} on every rank"
        assert row["expected"][fact] == row["found"][fact] == digest
    changes = {change["field"]: change for change in report["contract_changes"]}
    return changes, rows["weights"]["found"]


def test_zero2_to_fsdp2_to_ddp(train, reference, tmp_path):
    """Each takes over weights and moments, digests equal; the loss goes on as on one process."""
    run = tmp_path / "run"
    done = train(run, "zero2", 2, env={"MPRECIPES_FAULT": "terminate@step:4"})
    assert outcomes(run)[-1] == "preempted", done.output
    refused = train(run, "fsdp2", 2)
    assert "engine: zero2 -> fsdp2" in refused.output, refused.output
    assert "--accept changed_engine" in refused.output
    stop = {"MPRECIPES_FAULT": "terminate@step:7"}
    done = train(run, "fsdp2", 2, accept="changed_engine", env=stop)
    assert outcomes(run)[-1] == "preempted", done.output
    assert moved(run, 2)[0]["engine"]["old"] == "zero2"
    done = train(run, "cpu", 1, accept="changed_engine")
    assert done.returncode == 0, done.output
    changes, _ = moved(run, 3)
    assert (changes["engine"]["old"], changes["engine"]["new"]) == ("fsdp2", "ddp")
    assert changes["topology.world_size"]["new"] == 1
    check(run, reference, range(1, 11))


def test_one_process_to_two_under_zero3_and_its_export(train, reference, tmp_path):
    """DDP on one process is continued by ZeRO-3 on two; what it exports is whole (case H07)."""
    run = tmp_path / "run"
    done = train(run, "cpu", 1, env={"MPRECIPES_FAULT": "terminate@step:4"})
    assert outcomes(run)[-1] == "preempted", done.output
    done = train(run, "zero3", 2, accept="changed_engine")
    assert done.returncode == 0, done.output
    _, found = moved(run, 1)
    assert found["working copies"] == "the cast of the masters, bit for bit"
    check(run, reference, range(1, 11))
    exported = AutoModelForCausalLM.from_pretrained(run / "model")
    shapes = manifest(run, 10)["shapes"]
    for name, tensor in exported.state_dict().items():
        if name != "lm_head.weight":  # tied
            assert list(tensor.shape) == shapes[name] and tensor.numel(), name
    assert exported.lm_head.weight is exported.model.embed_tokens.weight


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("engine", ENGINES)
def test_another_number_of_processes(train, reference, tmp_path, engine, before, after):
    """2 -> 1 and 1 -> 2 on each engine, no conversion and no flag."""
    run = tmp_path / "run"
    done = train(run, engine, before, env={"MPRECIPES_FAULT": "terminate@step:4"})
    assert outcomes(run)[-1] == "preempted", done.output
    done = train(run, engine, after)
    assert done.returncode == 0, done.output
    assert moved(run, 1)[0]["topology.world_size"]["new"] == after
    check(run, reference, range(1, 11))
