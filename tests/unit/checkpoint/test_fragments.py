# SPDX-License-Identifier: Apache-2.0
"""Parts of flattened tensors: their keys, and what they make up."""

import pytest
import torch

from mprecipes.checkpoint.fragments import (
    Fragment,
    fragment_of,
    full_tensors,
    is_own,
    name_of,
    own_key,
    owned,
    replicated,
)
from mprecipes.errors import VerificationError


def test_a_key_says_which_part_of_which_tensor():
    """A range has a key of its own, also where it is all of the tensor; a whole tensor its name."""
    part = torch.zeros(6)
    assert own_key("weights/a", (4, 3), 3, part) == "weights/a[3:9 of 4x3]"
    found = fragment_of("weights/a[3:9 of 4x3]", part)
    assert found == Fragment("weights/a", (4, 3), 3, 9, is_own=True)
    assert found.key == "weights/a[3:9 of 4x3]"
    whole = fragment_of("weights/a", torch.zeros(4, 3))
    assert (whole.start, whole.stop, whole.is_own, whole.key) == (0, 12, False, "weights/a")
    assert is_own("weights/a[0:12 of 12]") and not is_own("weights/a")
    assert name_of("weights/a[0:12 of 12]") == name_of("weights/a") == "weights/a"


@pytest.mark.parametrize(
    ("key", "shape"),
    [("a[0:6 of 4x3]", (5,)), ("a[9:15 of 4x3]", (6,)), ("a[0:6 of 2x3]", (2, 3))],
)
def test_a_key_that_does_not_fit_its_tensor_is_refused(key, shape):
    """Another length, a range beyond the end, or a part that is not flat."""
    with pytest.raises(ValueError, match="is a tensor of shape"):
        fragment_of(key, torch.zeros(shape))


def test_what_all_hold_and_what_one_holds():
    """Keys alone tell the two apart."""
    live = {"weights/a[0:2 of 4]": torch.zeros(2), "optimizer/a/step": torch.zeros(())}
    assert list(replicated(live)) == ["optimizer/a/step"]
    assert list(owned(live)) == ["weights/a[0:2 of 4]"]


def test_parts_of_any_cut_make_up_the_same_tensor():
    """Whole tensors and cut ones give full shapes, in whatever order the files hold them."""
    cut = [
        ("a[6:12 of 4x3]", torch.zeros(6)),
        ("b", torch.zeros(2)),
        ("a[0:6 of 4x3]", torch.zeros(6)),
    ]
    full = full_tensors(cut)
    assert {name: (list(t.shape), t.device.type) for name, t in full.items()} == {
        "a": ([4, 3], "meta"),
        "b": ([2], "meta"),
    }


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([("a[0:6 of 12]", 6), ("a[5:12 of 12]", 7)], "the parts before it end at 6"),
        ([("a[0:6 of 12]", 6), ("a[7:12 of 12]", 5)], "the parts before it end at 6"),
        ([("a[0:6 of 12]", 6)], "the parts before it end at 6"),
        ([("a[0:6 of 12]", 6), ("a[6:12 of 3x4]", 6)], "[3, 4]"),
    ],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(parts, found):
    """An overlap, a gap, a missing end and two shapes are told, with the tensor's name."""
    with pytest.raises(VerificationError) as caught:
        full_tensors((key, torch.zeros(size)) for key, size in parts)
    error = caught.value
    assert found in error.found and "make up a" in error.expected
    assert error.where == "the tensors of the checkpoint" and "do not use" in error.action
