# SPDX-License-Identifier: Apache-2.0
"""The exported model is whole or absent, and loads as it was."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from mprecipes import export_newest
from mprecipes.checkpoint import export as exporting
from mprecipes.checkpoint.export import export_checkpoint
from mprecipes.checkpoint.loading import get
from mprecipes.checkpoint.manifest import COUNTERS, build_manifest, write_manifest, write_sums
from mprecipes.checkpoint.storage import put, put_json
from mprecipes.errors import CheckpointError, ConfigError, VerificationError
from tests.exporting import anonymous_memory, save, tiny
from tests.kept import Folder, flip
from tests.reading import same_bits


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Tied: a model after its update, and the manifest of its checkpoint; nobody changes them."""
    model = tiny(tied=True)
    run = tmp_path_factory.mktemp("run")
    return SimpleNamespace(model=model, manifest=save(run, model, template="{{ messages }}"))


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of the checkpoint that a test may damage."""
    return shutil.copytree(saved.manifest.folder, tmp_path / "copy")


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_the_tie_survive(tmp_path, tied):
    """Every FP32 weight comes back bit for bit; a tied head is still tied, an untied one is not."""
    model = tiny(tied=tied)
    folder = export_checkpoint(save(tmp_path / "run", model).folder, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in model.state_dict().items():
        assert same_bits(weight, loaded.state_dict()[name]), name
        assert loaded.state_dict()[name].dtype == torch.float32
    pointers = [module.weight.data_ptr() for module in (loaded.lm_head, loaded.model.embed_tokens)]
    assert (pointers[0] == pointers[1]) == tied


@pytest.mark.parametrize("kind", ["gpt2", "bert", "mixtral"])
def test_other_architectures_load_as_they_were(tmp_path, kind):
    """Tied decoders with biases, a masked LM, experts in one tensor: all names, same class."""
    sizes = {"vocab_size": 257, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"hidden_size": 16, "intermediate_size": 24}
    if kind == "mixtral":
        sizes |= {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    if kind == "gpt2":
        sizes = {"vocab_size": 257, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(kind, **sizes))
    folder = export_checkpoint(save(tmp_path / "run", model).folder, tmp_path / "model")
    loaded = auto.from_pretrained(folder)
    assert type(loaded) is type(model)
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_the_tokenizer_comes_along(saved, tmp_path):
    """`AutoTokenizer` loads from the same folder, with its template; a byte is its own number."""
    folder = export_checkpoint(saved.manifest.folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("AB")["input_ids"] == [65, 66]
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bits_are_the_cast_of_the_masters(saved, tmp_path, name, dtype):
    """Each value is the master rounded by torch; the config and the loaded model say the dtype."""
    folder = export_checkpoint(saved.manifest.folder, tmp_path / "model", dtype=name)
    said = json.loads((folder / "config.json").read_text())["dtype"]
    assert said == str(dtype).removeprefix("torch.")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for weight_name, weight in saved.model.state_dict().items():
        assert same_bits(weight.to(dtype), loaded.state_dict()[weight_name]), weight_name


def test_fp16_never_makes_an_infinity(tmp_path):
    """A weight of 70,000 is named and refused, where FP16 ends at 65,504."""
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight[3] = 70_000.0
    manifest = save(tmp_path / "run", model)
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(manifest.folder, tmp_path / "model", dtype="fp16")
    error = caught.value
    assert error.found.startswith("model.norm.weight holds 69") and "65504" in error.expected
    assert error.where == "--dtype fp16" and "--dtype bf16" in error.action
    assert not (tmp_path / "model").exists()


def test_shards_of_ranks_come_together(saved, tmp_path):
    """A checkpoint of parts of parameters, by two ranks, exports to the same bytes."""
    folder = in_shards(saved.manifest, tmp_path / "step-00000007")
    whole = export_checkpoint(saved.manifest.folder, tmp_path / "whole")
    parts = export_checkpoint(folder, tmp_path / "parts")
    weights = [path / "model.safetensors" for path in (whole, parts)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    lost = in_shards(saved.manifest, tmp_path / "step-00000008", lose="model.norm.weight")
    with pytest.raises(VerificationError) as caught:
        export_checkpoint(lost, tmp_path / "lost")
    assert caught.value.found == "not every value once of model.norm.weight"
    assert caught.value.where == "step-00000008" and "mprecipes verify" in caught.value.action
    assert caught.value.expected == "the parameters of the manifest, each value once"


def in_shards(manifest, folder, *, lose=None):
    """Writes the checkpoint again with each weight cut in two for two ranks, odd lengths too."""
    folder.mkdir()
    stored = get(manifest.folder, manifest.files)
    files = []
    for rank in (0, 1):
        parts = {}
        for name, tensor in stored.items():
            flat, cut = tensor.reshape(-1), tensor.numel() // 3
            first, last = (0, cut) if rank == 0 else (cut, tensor.numel())
            lengths = "x".join(map(str, tensor.shape))
            if name.startswith("weights/") and not (rank == 1 and name == f"weights/{lose}"):
                parts[f"{name}[{first}:{last} of {lengths}]"] = flat[first:last].clone()
        files += put(parts, folder, rank=rank, world_size=1)
    pretrained = json.loads((manifest.folder / "pretrained.json").read_text())
    files.append(put_json(pretrained, folder, "pretrained.json", rank=0))
    raw = manifest.raw
    values = build_manifest(
        run_id=manifest.run_id, position={name: raw[name] for name in COUNTERS}, facts={},
        files=files, params=manifest.params, shapes=manifest.shapes,
        state_digests=manifest.state_digests,
    )  # fmt: skip
    write_sums(folder, files)
    write_manifest(folder, values)
    return folder


def test_shards_have_an_index_and_the_size_that_was_asked(saved, tmp_path):
    """Files of at most 20 kB where a tensor allows it, all named in the index, all values there."""
    folder = export_checkpoint(saved.manifest.folder, tmp_path / "model", max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) == 2 and sorted(set(index["weight_map"].values())) == files
    assert index["metadata"] == {
        "total_parameters": sum(p.numel() for p in saved.model.parameters()),
        "total_size": 4 * sum(p.numel() for p in saved.model.parameters()),
    }
    for name, file in index["weight_map"].items():
        assert same_bits(load_file(folder / file)[name], saved.model.state_dict()[name])


def test_the_card_and_the_lineage_say_where_it_comes_from(saved, tmp_path):
    """Recipe, version, source, data, precision, run, step, digest and metrics are in the folder."""
    folder = export_checkpoint(saved.manifest.folder, tmp_path / "model", dtype="bf16")
    card = (folder / "README.md").read_text()
    for text in (
        "toy_lm@1.2.3", "a" * 64, "f" * 16, "| trained in | bf16 |", "0123456789ab", "| step | 7 |",
        saved.manifest.root_sha256, "| eval/loss | 2.5 |",
    ):  # fmt: skip
        assert text in card
    lineage = json.loads((folder / "mprecipes.json").read_text())
    assert lineage["root_sha256"] == saved.manifest.root_sha256
    assert (lineage["run_id"], lineage["step"], lineage["dtype"]) == ("0123456789ab", 7, "bf16")


def test_ancestry_is_handed_on(saved, tmp_path):
    """A run that begins from an export names it in its own, with run, step and digest."""
    first = export_checkpoint(saved.manifest.folder, tmp_path / "first")
    second = AutoModelForCausalLM.from_pretrained(first)
    third = export_checkpoint(save(tmp_path / "run", second).folder, tmp_path / "third")
    (ancestor,) = json.loads((third / "mprecipes.json").read_text())["ancestry"]
    assert ancestor["root_sha256"] == saved.manifest.root_sha256
    assert (
        f"1. toy_lm@1.2.3, run 0123456789ab, step 7, checkpoint {saved.manifest.root_sha256}"
        in (third / "README.md").read_text()
    )


def test_a_milestone_elsewhere_is_enough(saved, tmp_path):
    """A bare copy of the folder exports to the same files as the checkpoint in its run."""
    elsewhere = shutil.copytree(saved.manifest.folder, tmp_path / "far" / "named")
    here = export_checkpoint(saved.manifest.folder, tmp_path / "here")
    there = export_checkpoint(elsewhere, tmp_path / "there")
    assert {p.name: p.read_bytes() for p in here.iterdir()} == {
        p.name: p.read_bytes() for p in there.iterdir()
    }


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Peak below 1.3 of the largest tensor (16 MiB) and one shard (8 MiB), of 44 MiB of weights."""
    model = tiny(tied=True, hidden_size=512, intermediate_size=4096, vocab_size=8192)
    largest = max(parameter.nbytes for parameter in model.parameters())
    total = sum(parameter.nbytes for parameter in model.parameters())
    manifest = save(tmp_path / "run", model)
    del model
    limit = 1.3 * largest + (8 << 20)
    assert (largest, total > 1.5 * limit) == (16 << 20, True)
    with anonymous_memory() as peak:
        export_checkpoint(manifest.folder, tmp_path / "model", max_shard_size="8MiB")
    assert peak.num_bytes < limit
    with anonymous_memory() as whole:  # the measure sees a model that is held
        kept = get(manifest.folder, manifest.files)
    assert whole.num_bytes > total and kept


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_is_found(copied, tmp_path, number):
    """In a tensor file, the rank's file or the model's: refused by name, nothing left behind."""
    name = ("tensors-rank00000-000.safetensors", "rank-00000.json", "pretrained.json")[number]
    flip(copied / name)
    with pytest.raises(VerificationError) as caught:
        export_checkpoint(copied, tmp_path / "model")
    error = caught.value
    assert "sha256" in error.found and "as when rank 0 wrote it" in error.expected
    assert error.where == f"copy/{name}" and "do not use this checkpoint" in error.action
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_a_checkpoint_without_a_config_is_refused(tmp_path):
    """One whose manager was told no tokenizer says what to do for the next."""
    manifest = Folder(tmp_path / "run").save(3)
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(manifest.folder, tmp_path / "model")
    error = caught.value
    assert (error.found, error.where) == ("absent", "step-00000003/pretrained.json")
    assert "config and tokenizer" in error.expected and "tokenizer_dir" in error.action


def test_what_is_there_is_not_overwritten(saved, tmp_path):
    """A folder with a file in it, and a file, are refused; an empty folder is filled."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, found in (("taken", "a folder that is not empty"), ("file", "something that is no")):
        with pytest.raises(ConfigError) as caught:
            export_checkpoint(saved.manifest.folder, tmp_path / name)
        assert found in caught.value.found and str(tmp_path / name) == caught.value.where
        assert "empty" in caught.value.expected and "another DEST" in caught.value.action
    (tmp_path / "empty").mkdir()
    assert (export_checkpoint(saved.manifest.folder, tmp_path / "empty") / "README.md").exists()


def test_an_unknown_dtype_is_refused(saved, tmp_path):
    """What may be asked for is named."""
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(saved.manifest.folder, tmp_path / "model", dtype="fp8")
    error = caught.value
    assert (error.found, error.expected) == ("dtype 'fp8'", "one of bf16, fp16, fp32")
    assert (error.where, error.action) == ("--dtype", "write for example --dtype bf16")


def test_an_older_export_is_replaced_whole(saved, tmp_path):
    """Files of an earlier export and of a killed one do not stay beside the new ones."""
    run = SimpleNamespace(
        path=tmp_path, run_id="0123456789ab", checkpoints=saved.manifest.folder.parent,
        quarantine=tmp_path / "quarantine", milestones=tmp_path / "milestones",
    )  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "stale.bin").write_bytes(b"x")
    (tmp_path / ".model.staging").mkdir()
    (tmp_path / ".model.staging" / "half.bin").write_bytes(b"x")
    folder = export_newest(run)
    assert folder == tmp_path / "model"
    assert not (folder / "stale.bin").exists() and not (folder / "half.bin").exists()
    assert (folder / "model.safetensors").exists()
    assert not (tmp_path / ".model.staging").exists()


def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path):
    """It is said what would be there."""
    with pytest.raises(ConfigError) as caught:
        export_newest(Folder(tmp_path))
    error = caught.value
    assert (error.found, error.where) == ("no checkpoint", "checkpoints/")
    assert error.expected == "a run that has saved" and "launch the run again" in error.action


@pytest.mark.parametrize("fault", ["value", "name"])
def test_what_does_not_load_as_it_was_is_not_exported(saved, tmp_path, monkeypatch, fault):
    """A value changed on its way to the disk, or a name the model does not have, is found."""
    original = exporting.plan_shards

    def sabotage(dtypes, shapes, max_bytes):
        shards = original(dtypes, shapes, max_bytes)
        if fault == "name":
            header = shards[0].header.replace(b"model.norm.weight", b"model.nrom.weight")
            return [type(shards[0])(shards[0].path, header, shards[0].offsets, shards[0].num_bytes)]
        offsets = dict(shards[0].offsets)
        names = [f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qk"]
        offsets[names[0]], offsets[names[1]] = offsets[names[1]], offsets[names[0]]
        return [type(shards[0])(shards[0].path, shards[0].header, offsets, shards[0].num_bytes)]

    monkeypatch.setattr(exporting, "plan_shards", sabotage)
    with pytest.raises(VerificationError) as caught:
        export_checkpoint(saved.manifest.folder, tmp_path / "model")
    wrong = "model.norm.weight" if fault == "name" else "q_proj.weight has other values"
    assert wrong in caught.value.found and "each value as it was written" in caught.value.expected
    assert "from_pretrained" in caught.value.where and "nothing was exported" in caught.value.action
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_written(saved, tmp_path, monkeypatch):
    """The need is compared with what is free; nothing stays behind."""
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(saved.manifest.folder, tmp_path / "model")
    assert caught.value.found == "0.00 GB are free" and "0.07 GB" in caught.value.expected
    assert caught.value.where == str(tmp_path) and "free space" in caught.value.action
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_leaves_nothing(saved, tmp_path, monkeypatch):
    """An error of the operating system becomes ours, with its reason."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_files", fail)
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(saved.manifest.folder, tmp_path / "model")
    assert caught.value.found == "OSError: No space left on device"
    assert "nothing was left behind" in caught.value.expected
    assert caught.value.where == str(tmp_path / "model") and "free space" in caught.value.action
    assert list(tmp_path.iterdir()) == []
