# SPDX-License-Identifier: Apache-2.0
"""Bytes of a step, counted from what the flight recorder holds."""

import pytest

from mprecipes.compute import traffic
from mprecipes.compute.traffic import METRIC, Traffic, sent_bytes


def entry(number, name, given, taken=None, dtype="Float"):
    return {
        "record_id": number,
        "profiling_name": f"gloo:{name}",
        "input_sizes": given,
        "input_dtypes": [dtype] * len(given),
        "output_sizes": given if taken is None else taken,
        "output_dtypes": [dtype] * len(given if taken is None else taken),
    }


@pytest.mark.parametrize(
    ("call", "sent"),
    [
        (entry(1, "all_reduce", [[100]]), 600),  # 2 x 3/4 x 400
        (entry(1, "all_reduce", [[100]], dtype="BFloat16"), 300),  # 16 bit halve it
        (entry(1, "_all_gather_base", [[25]], [[100]]), 300),
        (entry(1, "_reduce_scatter_base", [[100]], [[25]]), 300),
        (entry(1, "broadcast", [[100]]), 400),
        (entry(1, "barrier", [[1]]), 0),
        (entry(1, "all_gather", [[25]], [[25], [25], [25], [25]]), 300),
    ],
)
def test_a_collective_counts_as_a_ring(call, sent):
    """Of 400 bytes over four ranks; an all-reduce is a reduce-scatter and an all-gather."""
    assert sent_bytes([call], 4) == sent


def test_the_third_step_is_measured_and_told_once(monkeypatch):
    """What came before it, and what comes later, does not count."""
    recorded = [entry(0, "broadcast", [[9999]])]
    monkeypatch.setattr(traffic, "_recorded", lambda: recorded)
    meter = Traffic(2)
    for number in range(1, 6):
        recorded.append(entry(number, "all_reduce", [[number * 10]]))
        meter.step_ended()
        assert meter.news() == ({METRIC: 120} if number == 3 else {})


def test_a_step_longer_than_the_recorder_is_not_guessed(monkeypatch):
    """Where the oldest records of the step are gone, nothing is told; nor with one process."""
    recorded = [entry(1, "broadcast", [[1]])]
    monkeypatch.setattr(traffic, "_recorded", lambda: recorded)
    for meter in (Traffic(2), Traffic(1)):
        for _ in range(2):
            meter.step_ended()
        recorded[:] = [entry(9, "all_reduce", [[5]])]
        meter.step_ended()
        assert meter.news() == {}
        recorded[:] = [entry(1, "broadcast", [[1]])]
