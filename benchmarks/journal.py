# SPDX-License-Identifier: Apache-2.0
"""What the journal costs a step: one line, formatted and written, on this disk.

    python -m benchmarks.journal [STEPS]

Prints the median and the mean of one `append`, and the mean's share of a step of 200 ms.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from mprecipes.resume.journal import Journal, StepRecord

STEP_SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=5000)
    num_steps = parser.parse_args().steps
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), 0, True)
        for step in range(1, num_steps + 1):
            record = StepRecord(
                attempt=0, step=step, updates=step, samples_seen=8 * step, tokens=2040,
                batch_digest=f"{step * 0x9E3779B97F4A7C15 % (1 << 64):016x}", loss=5.0 / step,
                grad_norm=1.0 / step, learning_rate=2e-3 / step, loss_scale=None, skipped=False,
                step_seconds=0.2,
            )  # fmt: skip
            began = time.perf_counter()
            journal.append(record)
            seconds.append(time.perf_counter() - began)
        journal.close()
    mean, median = statistics.fmean(seconds), statistics.median(seconds)
    print(f"{num_steps} lines: median {median * 1e6:.1f} us, mean {mean * 1e6:.1f} us a step")
    print(f"share of a step of 200 ms: {mean / STEP_SECONDS:.4%} (limit 0.5 %)")


if __name__ == "__main__":
    main()
