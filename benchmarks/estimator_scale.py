"""Off-policy estimates of a million records: seconds, all estimators and diagnostics. Exits 1 where the bar is missed.

    python benchmarks/estimator_scale.py [--records N] [--seconds S] [--repeats N]

The log is made up and in memory, with as many columns for the direct model as a trace gives. One policy at a time, as
`kvpolicy evaluate` does; reading the trace and asking the policy for its probabilities are not in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from made_up_logs import make

from kvpolicy.evaluation.offpolicy import judge

COLUMNS = 12
"""Of the direct model on a trace, see :func:`kvpolicy.evaluation.decision_log.situation_columns`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=2.0, help="the bar")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    log, targets = make(options.records, rng)
    more = rng.random((options.records, COLUMNS - log.x.shape[1]))
    log, target = replace(log, x=np.column_stack([log.x, more])), {"always-swap": targets["always-swap"]}
    wall_s, processor_s = [], []
    for _ in range(options.repeats):
        began, began_processor = time.perf_counter(), time.process_time()
        report = judge(log, target, 0)
        wall_s.append(time.perf_counter() - began)
        processor_s.append(time.process_time() - began_processor)
    print(
        f"{options.records} records x {COLUMNS} columns, {len(report.policies[0].estimates)} estimators: "
        f"{median(wall_s):.2f} s (of {options.repeats}: {min(wall_s):.2f} to {max(wall_s):.2f}; "
        f"bar {options.seconds:g}), {median(processor_s):.2f} s of processor time"
    )
    return int(median(wall_s) > options.seconds)


if __name__ == "__main__":
    sys.exit(main())
