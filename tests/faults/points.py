# SPDX-License-Identifier: Apache-2.0
"""Every named point of the product at which a process can be killed, and how the matrix gets there.

A house rule compares this file with the source: a point that is named there stands here, and the
other way round.
"""

# What every rank passes before the checkpoint of the step has its name.
ALL_BEFORE = (
    "save.reserved", "save.before_copy", "save.in_copy", "save.after_copy", "save.begin",
    "save.before_digest", "save.after_digest", "save.after_check", "save.before_file",
    "save.in_file", "save.before_sync", "save.after_file", "save.before_rank_state",
    "save.after_rank_state", "save.after_gather",
)  # fmt: skip
# What rank 0 alone passes before that.
MAIN_BEFORE = (
    "metrics.before_write", "save.after_begin", "save.before_sums", "save.before_manifest",
    "save.after_manifest", "save.before_publish",
)  # fmt: skip
ALL_AFTER = ("save.after_commit",)
MAIN_AFTER = (
    "save.after_rename", "save.after_publish", "aftercare.begin", "aftercare.before_note",
    "files.before_replace", "files.after_replace", "aftercare.after_note", "aftercare.end",
    "milestone.before_copy", "milestone.in_copy", "milestone.after_copy",
    "milestone.before_publish", "milestone.after_rename",
    "retention.before_delete", "retention.after_rename", "retention.after_delete",
    "mirror.before_file", "mirror.after_file", "mirror.before_manifest", "mirror.after_manifest",
    "mirror.before_delete", "mirror.in_delete",
)  # fmt: skip
ALL_RESTORE = ("restore.begin", "restore.after_headers", "restore.after_read", "restore.end")
# The run then has something to throw away, a damaged newest checkpoint, or only its mirror.
SWEEP = ("sweep.before_remove", "sweep.after_remove")
QUARANTINE = ("quarantine.before_move", "quarantine.after_move")
FETCH = ("fetch.after_file", "fetch.before_publish", "fetch.after_publish", "mirror.before_claim")

# Points outside of checkpoints, and the tests that kill there.
ELSEWHERE = {
    "step": "tests/cases/conftest.py",
    "eval.batch": "tests/resume/test_preemption.py",
    "rollback.begin": "tests/resume/test_rollback.py",
    "rollback.recorded": "tests/resume/test_rollback.py",
    "exchange.in_file": "tests/faults/test_node_folders.py",
    "supply.before_publish": "tests/faults/test_node_folders.py",
    "run.after_lease": "tests/unit/identity/test_run.py",
    "run.before_outcome": "tests/unit/identity/test_run.py",
    "data.before_manifest": "tests/unit/data/test_packing.py",
    "data.before_publish": "tests/unit/data/test_packing.py",
}
