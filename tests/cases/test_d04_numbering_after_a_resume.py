# SPDX-License-Identifier: Apache-2.0
"""Case D04: numbering began again at zero after a resume, and the newest was rotated away first.

Reports: huggingface/accelerate#3306, huggingface/accelerate#1601, huggingface/accelerate#1163.
"""

from tests.save_server import run_jobs


def test_d04_rotation_goes_by_step_across_a_resume(tmp_path):
    """Saved every step with 3 kept, cut at 13, resumed for 3 more: 14, 15 and 16 are left."""
    job = {"run": tmp_path, "keep_last": 3}
    (first,) = run_jobs({**job, "action": "train", "steps": list(range(1, 14))})
    assert first["value"]["candidates"] == [13, 12, 11]
    (second,) = run_jobs({**job, "action": "resume", "steps": [14, 15, 16]})
    assert second["value"]["step"] == 13
    assert second["value"]["candidates"] == [16, 15, 14]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000014", "step-00000015", "step-00000016"]


def test_d04_each_resume_of_one_step_deletes_only_the_oldest(tmp_path):
    """Five launches of one step each never delete what was just written."""
    job = {"run": tmp_path, "keep_last": 2}
    run_jobs({**job, "action": "train", "steps": [1]})
    for step in range(2, 6):
        (result,) = run_jobs({**job, "action": "resume", "steps": [step]})
        assert result["value"]["step"] == step - 1
        assert result["value"]["candidates"] == [step, step - 1]
