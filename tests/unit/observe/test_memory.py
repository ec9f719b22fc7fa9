# SPDX-License-Identifier: Apache-2.0
"""The peak of memory is that of this program, and of this program only."""

import numpy

from mprecipes.observe.memory import peak_host_bytes, peak_memory


def test_a_large_array_raises_the_peak_and_its_end_does_not_lower_it():
    """80 MB that were held once are in the peak for good."""
    before = peak_host_bytes()
    array = numpy.ones(10_000_000)
    during = peak_host_bytes()
    del array
    assert during >= before - (1 << 20)
    slack = 1 << 20  # the kernel adds up its counters of each processor now and then
    assert peak_host_bytes() >= max(during - slack, 80_000_000)


def test_the_kernels_own_count_is_read(tmp_path):
    """VmHWM is in kB."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t 900 kB\nVmHWM:\t  123 kB\nVmRSS:\t  12 kB\n")
    assert peak_host_bytes(status) == 123 * 1024


def test_without_a_proc_file_system_the_usage_of_resources_answers(tmp_path):
    """Where there is no such file the peak is still a plausible one."""
    assert peak_host_bytes(tmp_path / "none") > 10_000_000


def test_a_process_without_a_gpu_tells_the_host_alone():
    """Only names of the table of metrics, and no device that was never used."""
    assert list(peak_memory()) == ["perf/host_memory_bytes"]
