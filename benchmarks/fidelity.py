"""How near the simulators come to what was really served.

    python benchmarks/fidelity.py --real DIR [--record SESSIONS] [--quick] [--llm MODEL] [--json FILE]
    python benchmarks/fidelity.py --e2e DIR --profiles DIR

``--real``: vLLM's CPU engine, short of memory, under several policies. Half of each session's runs shows what steps
and copies take on this machine at this time, the other half is replayed by both simulators and compared: times,
counts, and whether policies that really differ are ranked the same way. ``--record`` first records that many sessions
into DIR, minutes each; those in DIR stay. ``--quick`` records little, to see that it works.

``--e2e``: runs of vLLM 0.19 that others measured, with step times from imported tables; see `fidelity_e2e.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fidelity_e2e
import numpy as np
from fidelity_real import BAR, FIGURES, Judgement, Session, as_dict, differing_pairs, errors, judge
from fidelity_record import KINDS, POLICIES, Extent, record
from fidelity_steps import Stepwise, as_dicts, stepwise
from rich.console import Console
from rich.table import Table

from kvpolicy.simulator.builtin import Builtin
from kvpolicy_vllm.simulator.engine import VllmScheduler

WIDTH = 150
QUICK = Extent(requests=12, blocks=2, kinds=KINDS[:1], policies=POLICIES[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--real", type=Path, help="folder of the recorded sessions")
    parser.add_argument("--record", type=int, default=0, help="sessions to record first")
    parser.add_argument("--quick", action="store_true", help="record little")
    parser.add_argument("--llm", type=Path, help="a model's folder; by default a small Llama made from a seed")
    parser.add_argument("--e2e", type=Path, help="folder of measured runs")
    parser.add_argument("--profiles", type=Path, help="folder of the tables of their GPUs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (options.real is None and options.e2e is None) or (options.e2e is None) != (options.profiles is None):
        parser.error("give --real DIR, or --e2e DIR with --profiles DIR, or all three")
    values: dict[str, Any] = {}
    try:
        if options.real is not None:
            values["real"] = _real(options)
        if options.e2e is not None:
            values["e2e"] = fidelity_e2e.fidelity_e2e(
                options.e2e, options.profiles, fidelity_e2e.CALIBRATE_UNTIL_S, lambda text: print(text, file=sys.stderr)
            )
            fidelity_e2e.show(values["e2e"], Console(width=WIDTH))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.json:
        options.json.write_text(json.dumps(values, indent=2) + "\n")


def _real(options: argparse.Namespace) -> dict[str, Any]:
    there = len(list(options.real.glob("session-*/runs.json")))
    for number in range(there, there + options.record):
        record(options.real, number, QUICK if options.quick else Extent(), options.llm)
    vllm = VllmScheduler()
    sessions, judgements = judge(options.real, (Builtin(), vllm))
    steps = stepwise(sessions, vllm)
    show(sessions, judgements)
    show_steps(Console(width=WIDTH), steps)
    return as_dict(sessions, judgements) | {"step_by_step": as_dicts(steps)}


def show(sessions: Sequence[Session], judgements: Sequence[Judgement]) -> None:
    out = Console(width=WIDTH)
    time_errors = ", ".join(f"{session.times.error:.0%} of {session.times.steps} steps" for session in sessions)
    out.print(f"{len(sessions)} sessions; a step's time is missed by a mean of {time_errors}", highlight=False)
    for judgement in judgements:
        out.rule(f"engine {judgement.engine}")
        _show_cells(out, judgement)
        _show_errors(out, judgement)
        _show_pairs(out, judgement)
        out.print(f"{judgement.real_s:.0f} s served, {judgement.wall_s:.1f} s simulated", highlight=False)


def _show_cells(out: Console, judgement: Judgement) -> None:
    table = Table("workload", "policy", "runs", *FIGURES, title="real and simulated: seconds, tokens/s, counts per run")
    for (workload, name), cell in judgement.cells.items():
        means = (cell.means(figure) for figure in FIGURES)
        table.add_row(
            workload, name, str(len(cell.real)), *(f"{real:.3g}\n{simulated:.3g}" for real, simulated in means)
        )
    out.print(table)


def _show_errors(out: Console, judgement: Judgement) -> None:
    table = Table(
        "figure", "mean |error|", "worst", "mean error", "bar", title="simulated against real, over the cells"
    )
    for figure in FIGURES:
        cell_errors = errors(judgement, figure)
        if cell_errors:
            sizes = np.abs(cell_errors)
            bar = f"{BAR[figure]:.0%}" if figure in BAR else ""
            table.add_row(figure, f"{sizes.mean():.1%}", f"{sizes.max():.1%}", f"{np.mean(cell_errors):+.1%}", bar)
    out.print(table)


def show_steps(out: Console, stepwise_runs: Sequence[Stepwise]) -> None:
    """Whether the schedule is foretold where no time has to be."""
    table = Table(
        "workload", "policy", "runs", "alike throughout", "steps alike", "preemptions", "recomputed tokens",
        title="the schedule alone, each step given its real duration: real and simulated, all runs together",
    )  # fmt: skip
    for workload, name in dict.fromkeys((run.workload, run.policy) for run in stepwise_runs):
        runs = [run for run in stepwise_runs if (run.workload, run.policy) == (workload, name)]
        whole = sum(run.alike == run.steps for run in runs)
        alike, steps = sum(run.alike for run in runs), sum(run.steps for run in runs)
        counted = (
            tuple(sum(getattr(run, quantity)[side] for run in runs) for side in (0, 1))
            for quantity in ("preemptions", "recomputed_tokens")
        )
        shown = (f"{real}, {simulated}" for real, simulated in counted)
        table.add_row(workload, name, str(len(runs)), str(whole), f"{alike} of {steps}", *shown)
    out.print(table)


def _show_pairs(out: Console, judgement: Judgement) -> None:
    pairs = differing_pairs(judgement, random.Random(0))
    right = sum(pair.right for pair in pairs)
    out.print(f"pairs that really differ (95%): {len(pairs)}; ranked the same: {right}", highlight=False)
    for pair in pairs:
        if not pair.right:
            out.print(
                f"  {pair.workload}, {pair.figure}: {' / '.join(pair.policies)} really {pair.real.text()}, "
                f"simulated {pair.simulated:.3f}",
                highlight=False,
            )


if __name__ == "__main__":
    main()
