# SPDX-License-Identifier: Apache-2.0
"""Which record lets FP8 run, and which does not."""

import json

import pytest

from mprecipes.compute.validation import record_path, require_validation, subject, write_record
from mprecipes.errors import ConfigError
from tests.toy_model import tiny_llama


def about(version="1.0.0", fp8_recipe="rowwise", **changed):
    config = tiny_llama(**changed).config.to_dict()
    return subject(config, recipe="r", version=version, fp8_recipe=fp8_recipe)


def test_a_small_model_vouches_for_a_large_one():
    """Sizes are not architecture; the activation, tying, version and FP8 recipe are."""
    base = about()
    assert base == about(hidden_size=64, num_hidden_layers=3, vocab_size=300)
    others = [about(hidden_act="gelu"), about(tie_word_embeddings=False), about("1.0.1"),
              about(fp8_recipe="tensorwise")]  # fmt: skip
    assert all(other != base for other in others)


def test_a_passing_record_is_found(tmp_path):
    """The record is one file beside the recipe, named by its digest."""
    path = write_record(tmp_path, about(), {"passed": True, "reason": "as good", "gap": 0.001})
    assert path == record_path(tmp_path, about()) and path.parent.name == "validations"
    assert require_validation(tmp_path, about())["gap"] == 0.001


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (None, "not validated"),
        ("{", "cannot be read"),
        ({"subject": "its own", "passed": False, "reason": "loss gap 3 %"}, "loss gap 3 %"),
        ({"subject": "its own"}, "no reason is given"),
        ({"subject": {}, "passed": True}, "something else"),
    ],
)
def test_anything_else_is_refused(tmp_path, planted, found):
    """Absent, torn, failed, silent, or of another subject."""
    path = record_path(tmp_path, about())
    if planted is not None:
        path.parent.mkdir()
        if isinstance(planted, dict) and planted["subject"] == "its own":
            planted = {**planted, "subject": about()}
        path.write_text(planted if isinstance(planted, str) else json.dumps(planted))
    with pytest.raises(ConfigError) as caught:
        require_validation(tmp_path, about())
    error = caught.value
    assert found in error.found and "r 1.0.0 in which FP8 passed" in error.expected
    assert path.name in error.where and "--allow_unvalidated_fp8" in error.action
