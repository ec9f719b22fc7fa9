# SPDX-License-Identifier: Apache-2.0
"""Case L10: a second save began during the first: shared names, dropped saves, growing memory.

Reports: KempnerInstitute/KempnerForge#102, NVIDIA-NeMo/Megatron-Bridge#4820.
"""

from mprecipes.checkpoint.manifest import verify_folder
from tests.save_server import run_jobs

SIZES = {"width": 2048, "num_layers": 1}  # 50 MB of state
SLOW = {"MPRECIPES_FAULT": "delay@save.before_digest,delay@save.before_file"}


def test_l10_thirty_saves_by_a_slow_writer(tmp_path):
    """Each waits for the one before and says so; memory is bounded; the training is as without."""
    job = {"action": "storm", "steps": list(range(1, 32)), "sizes": SIZES}
    (saving,) = run_jobs({**job, "run": tmp_path / "saving", "save": True, "env": SLOW})
    (without,) = run_jobs({**job, "run": tmp_path / "without", "save": False})
    found = saving["value"]
    assert found["saved"] == list(range(2, 32))
    assert found["waited"] > 20
    assert found["counts"]["waits"] >= found["waited"]
    assert found["extra_bytes"] < 3 * found["state_bytes"]
    assert found["digests"] == without["value"]["digests"]
    kept = sorted((tmp_path / "saving" / "checkpoints").glob("*step-*"))
    assert [path.name for path in kept] == ["step-00000030", "step-00000031"]
    assert [verify_folder(path) for path in kept] == [[], []]
