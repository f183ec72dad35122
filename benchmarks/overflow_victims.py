"""Whether costs depend on how many victims the same overflow had before: read from a profile.

`python benchmarks/overflow_victims.py --trace PROFILE`. Laws are fitted to five folds of the states and judged on the
sixth: as they are, and times a factor per victim before, fitted to the same five folds.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from pathlib import Path

import numpy as np

from kvpolicy import trace as traces
from kvpolicy.datasets.examples import examples_of, log_miss
from kvpolicy.datasets.profiles import Dataset, read_dataset
from kvpolicy.events import KINDS, Kind
from kvpolicy.training.law_fits import fit_analytic

FOLDS = 6
FLOOR_S = 2e-3
"""Costs below it count as much: on a CPU they cannot be told from none."""


def victims_before(folder: Path) -> dict[str, int]:
    """Victims that the overflow had before the one that is measured, by state. A profile measures the last one."""
    trace = traces.read(folder)
    rows = [row for row in trace.rows("decisions") if row["state_id"] is not None]
    of_overflow = Counter(row["overflow_id"] for row in rows)
    return {row["state_id"]: of_overflow[row["overflow_id"]] - 1 for row in rows}


def misses(data: Dataset, kind: Kind, before: np.ndarray, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """log(measured / predicted) of each state, held out: without and with the factor."""
    examples = examples_of(data.states)
    order = rng.sample(range(len(before)), len(before))
    fold = np.empty(len(before), np.int64)
    fold[order] = np.arange(len(before)) % FOLDS
    without, with_factor = np.zeros(len(before)), np.zeros(len(before))
    for number in range(FOLDS):
        fitting = np.flatnonzero(fold != number)
        chosen = {name: tuple(some[at] for at in fitting) for name, some in examples.items()}
        transfers = data.transfers_of(data.states[at] for at in fitting)
        law = fit_analytic(chosen, transfers, dict.fromkeys(KINDS, FLOOR_S), data.budget_tokens)[kind]
        errors = np.array([log_miss(one.engine_s, sum(law.parts(one.x)), FLOOR_S) for one in examples[kind]])
        several = fitting[before[fitting] > 0]
        alone = float(np.median(errors[fitting[before[fitting] == 0]]))
        factor = float(np.median((errors[several] - alone) / before[several]))
        held_out = fold == number
        without[held_out], with_factor[held_out] = errors[held_out], (errors - factor * before)[held_out]
    return without, with_factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    folder = parser.parse_args().trace
    data, before_of = read_dataset([folder]), victims_before(folder)
    before = np.array([before_of[state.name] for state in data.states])
    print(f"{len(before)} states; victims before: {dict(sorted(Counter(before.tolist()).items()))}")
    if not before.any():
        raise SystemExit("no overflow of this profile had several victims")
    for kind in KINDS:
        without, with_factor = misses(data, kind, before, random.Random(0))
        change = (np.abs(with_factor) - np.abs(without))[before > 0]
        error = float(change.std(ddof=1)) / len(change) ** 0.5
        print(
            f"{kind}: mean |log(measured / predicted)| {np.abs(without).mean():.3f}, with the factor "
            f"{np.abs(with_factor).mean():.3f}; where there were some before, changed by {change.mean():+.3f} "
            f"(standard error {error:.3f})"
        )


if __name__ == "__main__":
    main()
