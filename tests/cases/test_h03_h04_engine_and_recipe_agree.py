# SPDX-License-Identifier: Apache-2.0
"""Cases H03 and H04 in process: DeepSpeed gets the recipe's clipping, accumulation and batch.

Source: huggingface/accelerate#3807, #2791, #3369, #2298. Launched: `tests/engines/test_refusals.py`
and, with real updates of norm 5, 0.5 and 1, `tests/engines/test_updates.py`.
"""

import pytest

from mprecipes.compute.engines import ENGINES, Engine, deepspeed_settings
from mprecipes.compute.precision import MODES
from mprecipes.compute.ranks import Ranks, plan_batches
from mprecipes.errors import ConfigError


def settings(said, max_grad_norm=1.0):
    plan = plan_batches(Ranks(), micro_batch=4, accumulation=4, global_batch=None)
    row = ENGINES["zero2"]
    engine = Engine("zero2", row.distributed_types, {}, "ds.json", said)
    return deepspeed_settings(engine, MODES["fp32"], plan, max_grad_norm)


@pytest.mark.parametrize(("asked", "written"), [(None, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_h03_clipping_is_the_recipes(asked, written):
    """None is off, which is 0 for DeepSpeed; "auto" is never left for accelerate to fill in."""
    assert settings({"gradient_clipping": "auto"}, asked)["gradient_clipping"] == written


def test_h04_auto_is_resolved_and_a_mismatch_is_an_error():
    """Accumulation 4: 16 rows a step, so 64 rows are 4 steps; a file that says 2 is refused."""
    found = settings({"gradient_accumulation_steps": "auto"})
    assert found["gradient_accumulation_steps"] == 4
    assert 64 // found["train_batch_size"] == 4
    with pytest.raises(ConfigError) as caught:
        settings({"gradient_accumulation_steps": 2})
    assert caught.value.found == "gradient_accumulation_steps 2 (ds.json)"
    assert caught.value.expected == "gradient_accumulation_steps 4, as the recipe says"
