# SPDX-License-Identifier: Apache-2.0
"""The rows every launch here trains on, and a run without dropout on one engine."""

import json

import pytest

from tests.fix64 import MODEL, RECIPE, options, write_rows
from tests.launching import launch


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("fix64") / "rows.jsonl")


@pytest.fixture(scope="session")
def train(rows):
    """Launches 10 steps of 8 rows in FP32 without dropout, or what is changed of that."""

    def train(run, config, num_processes, *, env=None, accept=None, **changed):
        values = {
            "precision": "fp32",
            "model_config": json.dumps({**MODEL, "attention_dropout": 0.0}),
            "per_device_train_batch_size": 2,
            "global_batch_size": 8,
            **changed,
        }
        words = options(rows, run, **values)
        words += ["--accept", accept] if accept else []
        return launch(
            RECIPE,
            words,
            config=f"accelerate_configs/{config}.yaml",
            num_processes=num_processes,
            env=env,
        )

    return train
