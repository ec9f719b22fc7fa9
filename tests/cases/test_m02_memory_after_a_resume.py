# SPDX-License-Identifier: Apache-2.0
"""Case M02: a resumed run needed much more memory than a fresh one and failed.

Reports: karpathy/nanoGPT#158, pytorch/pytorch#138253, huggingface/transformers#22123.
"""

import pytest

from tests.save_server import run_jobs

SIZES = {"width": 1024, "num_layers": 16}  # 200 MB of state


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a fresh run and a resumed one hold after three steps."""
    job = {"run": tmp_path_factory.mktemp("m02"), "sizes": SIZES}
    run_jobs({**job, "action": "train", "steps": [1]})
    job |= {"action": "remember", "steps": [2, 3, 4]}
    (fresh,) = run_jobs({**job, "restore": False})
    (resumed,) = run_jobs({**job, "restore": True, "more": 5})
    return fresh["value"], resumed["value"]


def test_m02_a_resumed_run_is_as_large_as_a_fresh_one(found):
    """Resident and peak memory exceed the fresh run's by less than 0.3 of the state."""
    fresh, resumed = found
    assert fresh["state_bytes"] > 200e6
    for key in ("resident", "peak"):
        assert resumed[key] < fresh[key] + 0.3 * fresh["state_bytes"], key


def test_m02_five_resumes_in_one_process_do_not_grow(found):
    """None of them leaves more than 5 % above the first."""
    sizes = found[1]["after_restores"]
    assert len(sizes) == 5
    assert max(sizes) < 1.05 * sizes[0]
