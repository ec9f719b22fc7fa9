# SPDX-License-Identifier: Apache-2.0
"""Case I06: each resume added tensors; checkpoints grew and the wrong part was trained.

Reports: huggingface/diffusers#6366, huggingface/peft#353.
"""

from safetensors import safe_open

from tests.save_server import run_jobs


def contents(folder):
    """Gives name -> (dtype, shape) of every tensor on disk."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                piece = file.get_slice(name)
                found[name] = (piece.get_dtype(), tuple(piece.get_shape()))
    return found


def test_i06_three_resumes_in_a_row(tmp_path):
    """Names, dtypes and shapes are those of the first checkpoint; the size differs below 1 %."""
    job = {"run": tmp_path, "keep_last": 9}
    run_jobs({**job, "action": "train", "steps": [1, 2]})
    for step in (3, 4, 5):
        (result,) = run_jobs({**job, "action": "resume", "steps": [step]})
        assert result["value"]["step"] == step - 1
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert len(folders) == 5
    first = contents(folders[0])
    assert first["weights/embed.weight"] == ("F32", (8, 4))
    assert len(first) == 6 + 3 * 3
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in folders]
    for folder, size in zip(folders, sizes, strict=True):
        assert contents(folder) == first
        assert abs(size - sizes[0]) < 0.01 * sizes[0]
