"""Figures of a run through an overload, and their summary over runs: by limit and arm, with ratios."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.intervals import interval_text, ratio_of
from benchmarks.gpu.place import Place
from kvpolicy.stats import mean_and_percentiles
from kvpolicy_vllm.bench.overload import STOCK, Run

TARGETS = "targets"
SIMPLE = "vllm-simple-offload"
UNCOUNTED = (SIMPLE,)
"""Arms whose moved bytes are not counted."""
ROUNDED_S = 1e-4


def run_figures(run: Run) -> dict[str, Any]:
    """A run without its tokens. Times between tokens are counted by tenths of a millisecond: there are very many."""
    gaps = [gap for request in run.itl_s for gap in request]
    return {
        "makespan_s": run.makespan_s,
        "output_tokens": run.output_tokens,
        "ttft_s": [round(wait_s, 6) for wait_s in run.ttft_s],
        "mean_itl_s": [round(sum(request) / len(request), 6) if request else 0.0 for request in run.itl_s],
        "itl_counts": dict(sorted(Counter(round(gap / ROUNDED_S) for gap in gaps).items())),
        "itl_p99_s": mean_and_percentiles(gaps)["p99"],
        "preemptions": dict(run.preemptions),
        "recomputed_tokens": run.recomputed_tokens,
        "moved_bytes": None if run.arm in UNCOUNTED else run.moved_bytes,
    }


def goodput(run: dict[str, Any], targets: dict[str, Any]) -> float:
    """Requests a second that met both targets."""
    pairs = zip(run["ttft_s"], run["mean_itl_s"], strict=True)
    return sum(a <= targets["ttft_s"] and b <= targets["itl_s"] for a, b in pairs) / run["makespan_s"]


def figures(run: dict[str, Any], targets: dict[str, Any]) -> dict[str, float]:
    return {
        "throughput_tok_s": run["output_tokens"] / run["makespan_s"],
        "goodput_req_s": goodput(run, targets),
        "ttft_mean_s": sum(run["ttft_s"]) / len(run["ttft_s"]),
        "itl_p99_s": run["itl_p99_s"],
    }


def summary_of(results: dict[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    """By limit and arm: means over blocks, sums of what was counted, and the ratios of every arm to every other one.

    Raises ValueError where parts of one limit were measured with different policies.
    """
    targets = results[TARGETS]
    cells: dict[float, list[dict[str, Any]]] = {}
    for name, result in results.items():
        if name != TARGETS:
            cells.setdefault(result["share"], []).append(result)
    summary: dict[str, Any] = {}
    for share, share_cells in sorted(cells.items()):
        policies = [cell["policies"] for cell in share_cells]
        if any(cell != policies[0] for cell in policies):
            raise ValueError(f"parts at limit {share:g} are of different policies, under the same names: {policies}")
        names = sorted(
            set.intersection(*(set(cell["arms"]) for cell in share_cells)), key=lambda name: (name != STOCK, name)
        )
        by_arm = {name: [figures(cell["arms"][name], targets) for cell in share_cells] for name in names}
        summary[f"{share:g}"] = {
            "blocks": len(share_cells),
            "device_blocks": share_cells[0]["device_blocks"],
            "arms": {name: _arm(by_arm[name], [cell["arms"][name] for cell in share_cells]) for name in names},
            "ratios": _ratios(by_arm, random.Random(f"{seed}/bootstrap/{share}")),
        }
    return summary


def _arm(rows: list[dict[str, float]], runs: list[dict[str, Any]]) -> dict[str, Any]:
    means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    moved = [run["moved_bytes"] for run in runs]
    return means | {
        "swapped": sum(run["preemptions"]["swap"] for run in runs),
        "recomputed": sum(run["preemptions"]["recompute"] for run in runs),
        "recomputed_tokens": sum(run["recomputed_tokens"] for run in runs),
        "moved_bytes": None if None in moved else sum(moved),
    }


def _ratios(by_arm: dict[str, list[dict[str, float]]], rng: random.Random) -> dict[str, Any]:
    """Of one arm over another; only where both are above 0 in every block."""
    ratios: dict[str, Any] = {}
    for above in by_arm:
        for below in by_arm:
            for key in by_arm[above][0]:
                pair = [[row[key] for row in by_arm[name]] for name in (above, below)]
                if above != below and min(map(min, pair)) > 0:
                    ratios[f"{key} {above} / {below}"] = ratio_of(pair[0], pair[1], rng)
    return ratios


def show(console: Console, place: Place, summary: dict[str, Any]) -> None:
    table = Table(title=f"gpu-overload on {place.text()}")
    for name in ("limit", "arm", "tok/s", "goodput", "ttft s", "itl p99 s", "swapped", "recomp.", "tokens again", "MB"):
        table.add_column(name)
    table.add_column("throughput over vllm")
    for share, share_summary in summary.items():
        for name, arm in share_summary["arms"].items():
            ratio = share_summary["ratios"].get(f"throughput_tok_s {name} / {STOCK}")
            table.add_row(
                share, name, f"{arm['throughput_tok_s']:.1f}", f"{arm['goodput_req_s']:.2f}",
                f"{arm['ttft_mean_s']:.3f}", f"{arm['itl_p99_s']:.4f}", str(arm["swapped"]), str(arm["recomputed"]),
                str(arm["recomputed_tokens"]), "?" if arm["moved_bytes"] is None else f"{arm['moved_bytes'] / 1e6:.0f}",
                "" if ratio is None else f"{ratio['value']:.3f} ({interval_text(ratio)})",
            )  # fmt: skip
    console.print(table)
