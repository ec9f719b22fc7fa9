# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself, and what is not believed."""

import hashlib
import json
import math
import subprocess

import pytest
import torch

from mprecipes.checkpoint.manifest import (
    FACTS,
    Problem,
    build_manifest,
    read_manifest,
    verify_folder,
    write_manifest,
    write_sums,
)
from mprecipes.checkpoint.storage import put, put_json
from mprecipes.errors import VerificationError
from mprecipes.identity.files import canonical_json

POSITION = {"step": 4, "updates": 3, "samples_seen": 32, "tokens_seen": 480}
DESIGN_KEYS = {
    "schema", "run_id", "step", "samples_seen", "tokens_seen", "recipe", "precision", "topology",
    "data", "environment", "config", "files", "params", "state_digests", "probe", "throughput",
    "milestone", "root_sha256",
}  # fmt: skip


def build(files=(), **changes):
    values = {
        "run_id": "0123456789ab",
        "position": POSITION,
        "facts": {"data": {"seed": 7}, "config": {"betas": (0.9, 0.95), "lr": 1e-05}},
        "files": files,
        "params": {"w": "float32"},
        "shapes": {"w": [2, 3]},
        "state_digests": {"weights": "0123456789abcdef"},
    }
    return build_manifest(**(values | changes))


@pytest.fixture
def folder(tmp_path):
    """A small complete checkpoint."""
    path = tmp_path / "step-00000004"
    path.mkdir()
    files = put({"weights/w": torch.ones(2, 3)}, path, rank=0, world_size=1)
    files.append(put_json({"rank": 0}, path, "rank-00000.json", rank=0))
    write_sums(path, files)
    write_manifest(path, build(files))
    return path


def rewrite(folder, change, *, seal=True):
    """Changes the manifest's values, with a right root digest unless told otherwise."""
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    if seal:
        rest = {key: value for key, value in values.items() if key != "root_sha256"}
        values["root_sha256"] = hashlib.sha256(canonical_json(rest)).hexdigest()
    path.write_text(json.dumps(values, indent=1) + "\n")


def refusal(folder):
    with pytest.raises(VerificationError) as caught:
        read_manifest(folder)
    assert caught.value.where == "step-00000004/manifest.json"
    assert caught.value.action
    return caught.value


def test_a_manifest_holds_what_the_design_says():
    """All keys are there, absent facts as null, tuples as lists; the digest is over the rest."""
    values = build()
    assert values.keys() >= DESIGN_KEYS
    assert values["schema"] == 1
    assert {key: values[key] for key in POSITION} == POSITION
    assert values["config"] == {"betas": [0.9, 0.95], "lr": 1e-05}
    assert [name for name in FACTS if values[name] is None] == [
        "recipe", "precision", "topology", "environment", "probe", "throughput",
    ]  # fmt: skip
    root = values.pop("root_sha256")
    assert root == hashlib.sha256(canonical_json(values)).hexdigest()
    assert root == "fb3f45e220ce8ff707c757b2f39e40039f22b6a44eec852a3630f5476ca8293f"


def test_further_facts_are_kept_and_names_of_ours_refused():
    """A fact may add a key and may not replace one."""
    assert build(facts={"note": {"a": 1}})["note"] == {"a": 1}
    with pytest.raises(ValueError, match="facts may not be called step"):
        build(facts={"step": 9})


@pytest.mark.parametrize("facts", [{"config": {"lr": math.nan}}, {"config": {"x": {1, 2}}}])
def test_facts_that_are_no_json_are_refused(facts):
    """NaN and Python objects do not reach the disk."""
    with pytest.raises((ValueError, TypeError)):
        build(facts=facts)


def test_what_could_not_be_read_again_is_not_built():
    """A fact of the wrong type is an error at save, not at load."""
    with pytest.raises(ValueError, match="probe is 'text', expected an object or null"):
        build(facts={"probe": "text"})


def test_a_manifest_reads_back(folder):
    """Every value comes back, numbers as numbers."""
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.updates) == (4, 3)
    assert (manifest.samples_seen, manifest.tokens_seen) == (32, 480)
    assert manifest.run_id == "0123456789ab"
    assert manifest.data == {"seed": 7}
    assert manifest.config == {"betas": [0.9, 0.95], "lr": 1e-05}
    assert manifest.params == {"w": "float32"}
    assert manifest.shapes == {"w": [2, 3]}
    assert manifest.state_digests == {"weights": "0123456789abcdef"}
    assert manifest.milestone is None
    assert manifest.folder == folder
    assert [entry.path for entry in manifest.files] == [
        "tensors-rank00000-000.safetensors",
        "rank-00000.json",
    ]
    assert manifest.raw["root_sha256"] == manifest.root_sha256


def test_a_whole_checkpoint_has_no_problems(folder):
    """What was just written verifies, and `sha256sum -c` agrees."""
    assert verify_folder(folder) == []
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "tensors-rank00000-000.safetensors: OK",
        "rank-00000.json: OK",
    ]


def test_the_name_of_the_folder_is_no_fact(folder):
    """A renamed checkpoint is still the checkpoint of its step."""
    moved = folder.rename(folder.with_name("step-00000009"))
    assert read_manifest(moved).step == 4
    assert verify_folder(moved) == []


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../other/file", "sub/file", "..", ".", "", "a\\b", "a\0b", "a\nb", ".hidden",
     "manifest.json", "SHA256SUMS"],
)  # fmt: skip
def test_a_path_that_is_no_plain_name_is_refused(folder, path):
    """Absolute, climbing, nested, hidden and reserved paths are named, whatever the digest."""
    rewrite(folder, lambda values: values["files"][0].update(path=path))
    error = refusal(folder)
    assert error.found == f"the path {path!r}"
    assert error.expected == "a plain name in the folder"
    assert [problem.path for problem in verify_folder(folder)] == ["manifest.json"]


def test_a_link_is_refused(folder):
    """A listed file that is a link is refused before it is read, wherever it points."""
    path = folder / "rank-00000.json"
    path.rename(folder.parent / "elsewhere.json")
    path.symlink_to(folder.parent / "elsewhere.json")
    error = refusal(folder)
    assert error.found == "rank-00000.json is a symbolic link"
    assert error.expected == "a regular file"


def test_a_linked_folder_or_manifest_is_refused(folder):
    """A checkpoint is a real folder with a real manifest."""
    link = folder.with_name("link")
    link.symlink_to(folder)
    with pytest.raises(VerificationError, match="a symbolic link"):
        read_manifest(link)
    (folder / "manifest.json").rename(folder.parent / "m.json")
    (folder / "manifest.json").symlink_to(folder.parent / "m.json")
    assert refusal(folder).found == "a symbolic link"


def test_a_file_listed_twice_is_refused(folder):
    """Doubled entries are named."""
    rewrite(folder, lambda values: values["files"].append(values["files"][1]))
    assert refusal(folder).found == "rank-00000.json listed more than once"


@pytest.mark.parametrize("schema", [0, 2, 1000])
def test_another_schema_is_refused(folder, schema):
    """The number found and the one expected are named, and whom to ask."""
    rewrite(folder, lambda values: values.update(schema=schema))
    error = refusal(folder)
    assert (error.found, error.expected) == (f"schema {schema}", "schema 1")
    assert "version of mprecipes that wrote it" in error.action


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda values: values.pop("schema"), "no schema number"),
        (lambda values: values.update(schema=True), "no schema number"),
        (lambda values: values.update(schema="1"), "no schema number"),
        (lambda values: values.pop("params"), "params is missing"),
        (lambda values: values.update(step="4"), "step is '4'"),
        (lambda values: values.update(step=True), "step is True"),
        (lambda values: values.update(step=4.0), "step is 4.0"),
        (lambda values: values.update(step=-1), "step -1"),
        (lambda values: values.update(files={}), "files is {}"),
        (lambda values: values["files"].append("x"), "a file entry 'x'"),
        (lambda values: values["files"][0].pop("rank"), "a file entry {"),
        (lambda values: values["files"][0].update(bytes="12"), "a file entry {"),
        (lambda values: values["files"][0].update(bytes=-1), "a file entry {"),
        (lambda values: values["files"][0].update(sha256="0" * 63), "a file entry {"),
        (lambda values: values["files"][0].update(sha256="A" * 64), "a file entry {"),
        (lambda values: values["files"][0].update(mode=7), "a file entry {"),
    ],
)
def test_values_of_another_kind_are_refused(folder, change, found):
    """Even under a right root digest a key that is missing or of another type is named."""
    rewrite(folder, change)
    assert refusal(folder).found.startswith(found)


def test_a_change_without_a_new_root_digest_is_refused(folder):
    """The digest in the file and the one computed are both named."""
    old = read_manifest(folder).root_sha256
    rewrite(folder, lambda values: values.update(step=5), seal=False)
    error = refusal(folder)
    assert error.found == f"root_sha256 {old}"
    assert error.expected.endswith("as computed")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"1e-05", b"1E-05"),
        (b'"step": 4', b'"step":  4'),
        (b"\n}\n", b"\n}"),
        (b"1e-05", b"0.00001"),
    ],
)
def test_the_same_values_in_other_bytes_are_refused(folder, old, new):
    """One content has one text, so that no changed byte can hide."""
    path = folder / "manifest.json"
    assert path.read_bytes().count(old) == 1
    path.write_bytes(path.read_bytes().replace(old, new))
    assert refusal(folder).found == "the right values in other bytes"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"schema": NaN}', "not JSON (NaN is not strict JSON)"),
        (b'{"schema": 1, "schema": 1}', "not JSON (a key given twice)"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "no schema number"),
    ],
)
def test_what_is_no_manifest_is_refused(folder, data, found):
    """Damaged text, doubled keys, endless nesting and other JSON are refused by name."""
    (folder / "manifest.json").write_bytes(data)
    assert refusal(folder).found.startswith(found)


def test_numbers_beyond_floats_are_refused(folder):
    """A number that reads as infinity is no fact."""
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"1e-05", b"1e999"))
    assert refusal(folder).found.startswith("not strict JSON")


def test_a_folder_without_manifest_is_refused(folder):
    """What a dead save left is no checkpoint."""
    (folder / "manifest.json").unlink()
    error = refusal(folder)
    assert error.found == "unreadable (No such file or directory)"
    assert error.expected == "a readable file"


def test_verify_names_every_file_that_does_not_agree(folder):
    """A changed, a shortened, a missing and a superfluous file are each listed with both values."""
    tensors, rank = folder / "tensors-rank00000-000.safetensors", folder / "rank-00000.json"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 128
    old = hashlib.sha256(tensors.read_bytes()).hexdigest()
    tensors.write_bytes(data)
    size = rank.stat().st_size
    rank.write_bytes(rank.read_bytes()[:-1])
    (folder / "extra.bin").write_bytes(b"")
    (folder / ".nfs00000000000a").write_bytes(b"")  # of a file system: no reason to lose steps
    (folder / "SHA256SUMS").unlink()
    assert verify_folder(folder) == [
        Problem("extra.bin", "a file the manifest does not list", "no such file"),
        Problem(
            tensors.name,
            f"sha256 {hashlib.sha256(data).hexdigest()}",
            f"sha256 {old}",
            ("weights/w",),
        ),
        Problem(rank.name, f"{size - 1} bytes", f"{size} bytes"),
        Problem("SHA256SUMS", "missing", "a file of 182 bytes"),
    ]
    assert str(verify_folder(folder)[2]) == (
        f"rank-00000.json: {size - 1} bytes, expected {size} bytes"
    )


def test_verify_sees_sums_that_disagree_and_folders_in_place_of_files(folder):
    """SHA256SUMS must be the manifest's own digests; a directory is no file."""
    sums = folder / "SHA256SUMS"
    sums.write_text(sums.read_text().replace("a", "b", 1))
    (folder / "rank-00000.json").unlink()
    (folder / "rank-00000.json").mkdir()
    problems = {problem.path: problem.found for problem in verify_folder(folder)}
    assert problems["rank-00000.json"] == "not a regular file"
    assert problems["SHA256SUMS"].startswith("sha256 ")
    assert len(problems) == 2


def test_nothing_is_written_over(folder):
    """Manifest and sums of a published folder are never replaced."""
    with pytest.raises(FileExistsError):
        write_manifest(folder, build())
    with pytest.raises(FileExistsError):
        write_sums(folder, [])


def test_ranges_that_were_skipped_are_kept(folder):
    """A rollback's ranges read back as pairs; without any the key is absent."""
    values = build(position={**POSITION, "skipped": ((8, 16), (24, 32))})
    assert values["skipped_samples"] == [[8, 16], [24, 32]]
    assert "skipped_samples" not in build(position={**POSITION, "skipped": ()})
    assert read_manifest(folder).skipped_samples == ()


@pytest.mark.parametrize("skipped", [3, [3], [[3]], [[3, 3]], [[-1, 3]], [[1, 2.0]], [[1, True]]])
def test_ranges_that_are_none_are_refused(skipped):
    """Not a list, not pairs, empty, negative, and no whole numbers."""
    with pytest.raises(ValueError, match="skipped_samples .*expected pairs of a sample"):
        build(position={**POSITION, "skipped": skipped})


def test_skipped_samples_are_no_fact():
    """The name is ours."""
    with pytest.raises(ValueError, match="facts may not be called skipped_samples"):
        build(facts={"skipped_samples": []})
