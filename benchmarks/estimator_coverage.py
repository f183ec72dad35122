"""How often the off-policy estimators' 95% intervals hold the truth, on made-up logs. Exits 1 where a bar is missed.

    python benchmarks/estimator_coverage.py [--seeds N] [--records N] [--resume FILE] [--json FILE]

Per policy, estimator and kind of interval: coverage with its own binomial 95% interval, mean width over the truth, and
the error |estimate / truth - 1| of the median seed. The bar is 93% coverage and 2% error. The direct method alone is
listed, and held to no bar: it promises nothing where its model is wrong, and here it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from made_up_logs import MAX_S, POLICIES, Scenario, make, truth
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import binomtest

from kvpolicy.evaluation.estimation import INTERVALS, Estimation
from kvpolicy.evaluation.offpolicy import judge

COVERAGE, ERROR = 0.93, 0.02
TRUTH_DRAWS = 20_000_000
PARTS = 20

Key = tuple[str, str, str]
Hit = tuple[bool, float, float]
"""Whether an interval held the truth, its width, and the estimate."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1200)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--unknown", type=float, default=0.05, help="share of swaps whose cost is not known")
    parser.add_argument("--truth-draws", type=int, default=TRUTH_DRAWS)
    parser.add_argument("--resume", type=Path, metavar="FILE", help="note each log's intervals there; skip those noted")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.records < 20:
        parser.error("--seeds should be 1 or more, --records 20 or more")
    true_s = mean_truth(options.truth_draws)
    estimates_by_key: dict[Key, list[Hit]] = defaultdict(list)
    refused = 0
    notes = read_notes(options.resume)
    for seed in track(range(options.seeds), "seeds", console=Console(stderr=True)):
        estimates = notes.get(seed) or one_seed(seed, options.records, options.unknown)
        if options.resume and seed not in notes:
            with options.resume.open("a") as file:
                file.write(json.dumps({"seed": seed, "found": estimates}) + "\n")
        for policy, estimator, interval, value_s, low_s, high_s in estimates:
            refused += estimator == ""
            if estimator:
                hit = low_s <= true_s[policy] <= high_s
                estimates_by_key[policy, estimator, interval].append((hit, high_s - low_s, value_s))
    rows = [summed(key, key_estimates, true_s[key[0]]) for key, key_estimates in estimates_by_key.items()]
    show(rows, refused, options.seeds, options.records)
    if options.json:
        options.json.write_text(json.dumps({"truth_s": true_s, "rows": rows, "refused": refused}, indent=2) + "\n")
    return int(any(not row["meets_bar"] for row in rows if row["estimator"] != "dm"))


def mean_truth(draws: int) -> dict[str, float]:
    parts = [truth(max(1, draws // PARTS), np.random.default_rng(10_000_000 + part)) for part in range(PARTS)]
    return {name: float(np.mean([part[name] for part in parts])) for name in POLICIES}


def read_notes(path: Path | None) -> dict[int, list[Any]]:
    if path is None or not path.exists():
        return {}
    return {note["seed"]: note["found"] for note in map(json.loads, path.read_text().splitlines())}


def one_seed(seed: int, records: int, unknown: float) -> list[Any]:
    """Every interval of one log: policy, estimator, kind, value, low and high; one without estimator where refused."""
    log, targets = make(records, np.random.default_rng(seed), Scenario(unknown=unknown))
    estimates: list[Any] = []
    for interval in INTERVALS:
        limit_s = MAX_S if interval == "bernstein" else None
        report = judge(log, targets, seed, Estimation(interval=interval, limit_s=limit_s))
        for judgement in report.policies:
            if judgement.refused and interval == INTERVALS[0]:
                estimates.append((judgement.policy, "", interval, 0.0, 0.0, 0.0))
            estimates += [
                (judgement.policy, estimate.estimator, interval, estimate.value_s, estimate.low_s, estimate.high_s)
                for estimate in judgement.estimates
                if estimate.low_s is not None
            ]
    return estimates


def summed(key: Key, estimates: Sequence[Hit], true_s: float) -> dict[str, object]:
    hits = sum(hit for hit, _, _ in estimates)
    span = binomtest(hits, len(estimates)).proportion_ci(0.95, "exact")
    values = np.array([value for _, _, value in estimates])
    error = float(np.median(np.abs(values / true_s - 1)))
    coverage = hits / len(estimates)
    return {
        "policy": key[0], "estimator": key[1], "interval": key[2], "logs": len(estimates), "coverage": coverage,
        "coverage_low": float(span.low), "coverage_high": float(span.high),
        "mean_width": float(np.mean([width for _, width, _ in estimates])) / true_s, "median_error": error,
        "bias": float(values.mean()) / true_s - 1, "meets_bar": coverage >= COVERAGE and error <= ERROR,
    }  # fmt: skip


def show(rows: Sequence[dict[str, object]], refused: int, seeds: int, records: int) -> None:
    table = Table(title=f"{seeds} logs of {records} records; {refused} estimates refused")
    for name in ("policy", "estimator", "interval", "coverage", "its 95%", "width", "median error", "bias", ""):
        table.add_column(name)
    for row in sorted(rows, key=lambda row: (str(row["interval"]), str(row["policy"]))):
        table.add_row(
            str(row["policy"]), str(row["estimator"]), str(row["interval"]), f"{row['coverage']:.1%}",
            f"{row['coverage_low']:.1%} to {row['coverage_high']:.1%}", f"{row['mean_width']:.1%}",
            f"{row['median_error']:.2%}", f"{row['bias']:+.2%}",
            "" if row["meets_bar"] else ("no bar" if row["estimator"] == "dm" else "below the bar"),
        )  # fmt: skip
    Console(width=130).print(table)
    worst = min((row for row in rows if row["estimator"] != "dm"), key=lambda row: float(str(row["coverage"])))
    print(f"worst coverage: {worst['coverage']:.1%} ({worst['policy']}, {worst['estimator']}, {worst['interval']})")


if __name__ == "__main__":
    sys.exit(main())
