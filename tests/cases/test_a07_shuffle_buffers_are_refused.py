# SPDX-License-Identifier: Apache-2.0
"""Case A07 (huggingface/datasets#7538, #7901): rows that a shuffle buffer had read ahead were lost
on resume."""

import itertools

import datasets
import pytest

from mprecipes.compute.ranks import BatchPlan
from mprecipes.data.corpus import open_corpus
from mprecipes.data.order import SampleOrder, micro_batches
from mprecipes.errors import DataError

PLAN = BatchPlan(1, 1, 1, 0)


@pytest.fixture
def rows():
    return datasets.Dataset.from_dict({"input_ids": [[i] for i in range(24)]}).with_format("torch")


def test_a_shuffled_stream_is_refused_before_training(rows):
    """Neither as a source nor as a data set is the buffer accepted; the message names what is."""
    stream = rows.to_iterable_dataset().shuffle(seed=42, buffer_size=8)
    for use in (open_corpus, lambda s: micro_batches(s, SampleOrder(24, 0), PLAN, start=0)):
        with pytest.raises(DataError) as caught:
            use(stream)
        error = caught.value
        assert error.exit_code == 2
        assert "IterableDataset" in error.found
        assert "exact position" in error.found
        assert "index" in error.expected or "map-style" in error.expected
        assert "Dataset.save_to_disk" in error.action


def test_the_indexed_alternative_is_exact(rows):
    """The same 24 rows by index, cut after 6: each once, in the order of the uncut run."""

    def seen(start, count):
        batches = micro_batches(rows, SampleOrder(24, 42), PLAN, start=start)
        return [b.tensors["input_ids"].item() for b in itertools.islice(batches, count)]

    whole = seen(0, 6) + seen(6, 18)
    assert sorted(whole) == list(range(24))
    assert whole == seen(0, 24)
