"""Serve with `explore`, estimate two policies from that log, really serve both: on the real engine.

    python benchmarks/exploration_served.py --out DIR [--llm DIR] [--link BYTES_PER_S,LATENCY_S] [--blocks N]
                                            [--requests N] [--budget BUDGET] [--seed N] [--json FILE]

1. An engine short of memory serves under a coin and records: a production log, one option seen per preemption. A cost
   model is trained from it, as by `kvpolicy train LOG`.
2. Another engine serves blocks, each the same requests once under `explore` by that model, once under always-recompute
   and once under always-swap, in an order that is drawn: all in one process, which changes policy in between.
3. From the explored part of the record both policies' mean cost per preemption is estimated, as by
   `kvpolicy evaluate --trace LOG`, and held against what their own parts of the record cost. Costs of all parts are
   attributed alike, from the steps of the whole record. Intervals are 95%; what was served is resampled by block.

Recordings stay in DIR: engines that have finished are not started again, and the figures can be printed again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from fidelity_record import (
    BLOCK_SIZE,
    CONTEXT_TOKENS,
    DEVICE_BLOCKS,
    HOST_GIB,
    KINDS,
    RUNNING,
    STEP_TOKENS,
    RecordedArm,
)
from rich.console import Console
from rich.table import Table

from kvpolicy import policy
from kvpolicy.datasets.logs import with_attributed_costs
from kvpolicy.evaluation.decision_log import Log, log_from_traces
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.evaluation.offpolicy import Estimate, judge
from kvpolicy.trace import Trace, read
from kvpolicy.training.log_fits import train_logged
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.overload import Arms, Settings
from kvpolicy_vllm.bench.progress import Bar
from kvpolicy_vllm.bench.run_characterize import SHAPE

FIXED = ("always-recompute", "always-swap")
COIN = "random:0.5"
ESTIMATORS = ("cross-fitted-dr", "snips", "dm")
KIND = KINDS[0]
"""Reasoning, all at once: what grows most while it is served."""
DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Part:
    """One block under one policy."""

    policy: str
    block: int
    begin_s: float
    """On the machine's monotonic clock, which the record's times are on too."""
    end_s: float
    throughput_tok_s: float


@dataclass(frozen=True, slots=True)
class Mean:
    """Seconds per preemption, with its bootstrap interval over blocks."""

    value_s: float
    low_s: float
    high_s: float
    preemptions: int
    unknown: int
    """Of these, those without a known cost."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--llm", type=Path, metavar="DIR", help="a model's folder; default: a small model is generated")
    parser.add_argument("--link", help="a simulated link, BYTES_PER_S[,LATENCY_S]; native without it")
    parser.add_argument("--blocks", type=_at_least_one, default=12)
    parser.add_argument("--requests", type=_at_least_one, default=40, help="of each block")
    parser.add_argument("--budget", help="of explore's predicted regret, as 5%% or seconds; none without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)

    llm = prepare(options.out, options.llm)
    taught = options.out / "taught"
    record(taught, llm, options, [COIN], options.seed)
    report = train_logged([taught / "trace"], options.out / "model", "analytic", options.seed, False)
    print(report.text(), end="\n\n")
    budget = f",budget={options.budget}" if options.budget else ""
    exploring = f"explore:{options.out / 'model'}{budget}"
    served = options.out / "served"
    record(served, llm, options, [exploring, *FIXED], options.seed + 1)
    rows = compare(served, exploring, options.seed)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({"trained": report.to_dict(), "rows": rows}, indent=2) + "\n")
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}, should be a whole number, 2 or more")
    return int(text)


def prepare(out: Path, llm: Path | None) -> str:
    with EngineProcess("kvpolicy_vllm.bench.inspect_model", out / "preparing.log") as process:
        answer = process.ask({"llm": llm and str(llm), "make": str(out / "llm"), "seed": 0, "shape": SHAPE})
    return json.dumps(answer)


def record(folder: Path, llm: str, options: argparse.Namespace, policies: Sequence[str], seed: int) -> None:
    """Serve every block under every policy in one engine that records, unless that is done."""
    if (folder / "parts.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)  # an engine that was cut off
    llm_facts = json.loads(llm)
    settings = Settings(
        llm_facts["llm"], not llm_facts["device"], DEVICE_BLOCKS, BLOCK_SIZE, CONTEXT_TOKENS, RUNNING, STEP_TOKENS
    )
    arms = [RecordedArm(name, name, options.link, HOST_GIB, seed, trace=str(folder / "trace")) for name in policies]
    parts = []
    with Arms(settings, folder) as engines, Bar("runs") as bar:
        engines.start(*arms)
        engines.serve(policies[0], KIND.draw(8, 0), -1)  # warm up
        jobs = list(_jobs(options.blocks, policies, seed))
        for number, (name, block) in enumerate(jobs):
            bar.tell(f"block {block}, {name.split(':')[0]}", number, len(jobs))
            work = KIND.draw(options.requests, 1000 * (seed + 1) + block)
            begin_s = time.monotonic()
            run = engines.serve(name, work, block)
            parts.append(Part(name, block, begin_s, time.monotonic(), run.throughput_tok_s))
    (folder / "parts.json").write_text(json.dumps([asdict(part) for part in parts]))


def _jobs(blocks: int, policies: Sequence[str], seed: int) -> Iterator[tuple[str, int]]:
    rng = random.Random(f"order {seed}")
    for block in range(blocks):
        for name in rng.sample(list(policies), len(policies)):
            yield name, block


def compare(folder: Path, exploring: str, seed: int) -> list[dict[str, Any]]:
    parts = [Part(**values) for values in json.loads((folder / "parts.json").read_text())]
    whole = with_attributed_costs(_without_costs(read(folder / "trace")))
    log, _ = _part_of(whole, parts, exploring)
    report = judge(log, {name: log.targets(policy.load(name)) for name in FIXED}, seed, Estimation(ESTIMATORS))
    rng = np.random.default_rng(seed)
    explored = {
        "preemptions": len(log),
        "unknown": int((~log.known).sum()),
        "left_to_chance": float((log.probability.max(axis=1) < 1).mean()),
        "mean_cost_s": float(log.cost_s[log.known].mean()),
        "throughput_tok_s": _rate(parts, exploring),
    }
    rows = []
    for judgement in report.policies:
        served = _served_mean(*_part_of(whole, parts, judgement.policy), rng)
        rows.append(
            {
                "policy": judgement.policy,
                "explored": explored,
                "estimates": [_estimate_row(estimate, served) for estimate in judgement.estimates],
                "refused": list(judgement.refused),
                "served": asdict(served) | {"throughput_tok_s": _rate(parts, judgement.policy)},
            }
        )
    return rows


def _without_costs(trace: Trace) -> Trace:
    """What was explored was priced while serving, by the model's undisturbed step; the rest was not: one yardstick."""
    outcomes = trace.table("outcomes")
    at = outcomes.schema.get_field_index("engine_s")
    unknown = pa.nulls(outcomes.num_rows, outcomes.schema.field(at).type)
    outcomes = outcomes.set_column(at, outcomes.schema.field(at), unknown)
    return Trace(trace.headers, dict(trace.tables) | {"outcomes": outcomes})


def _part_of(trace: Trace, parts: Sequence[Part], name: str) -> tuple[Log, list[int]]:
    """The log of a policy's blocks alone, and the block of each record."""
    decisions = trace.table("decisions")
    policy_parts = [part for part in parts if part.policy == name]
    block = [
        next((part.block for part in policy_parts if part.begin_s <= at <= part.end_s), None)
        for at in decisions["time_s"].to_pylist()
    ]
    block_decisions = decisions.filter(pa.array([block_number is not None for block_number in block]))
    log = log_from_traces({name: Trace(trace.headers, dict(trace.tables) | {"decisions": block_decisions})})
    assert len(log) == block_decisions.num_rows, "a reset or a profile in a record that has neither"
    return log, [block_number for block_number in block if block_number is not None]


def _served_mean(log: Log, block: Sequence[int], rng: np.random.Generator) -> Mean:
    known = log.known
    _, number = np.unique(np.asarray(block), return_inverse=True)
    sums, counts = np.bincount(number[known], log.cost_s[known]), np.bincount(number[known])
    resampled = rng.integers(len(sums), size=(DRAWS, len(sums)))
    means = sums[resampled].sum(axis=1) / counts[resampled].sum(axis=1)
    low_s, high_s = np.quantile(means, (0.025, 0.975))
    return Mean(float(sums.sum() / counts.sum()), float(low_s), float(high_s), len(log), int((~known).sum()))


def _estimate_row(estimate: Estimate, served: Mean) -> dict[str, Any]:
    """An estimate, and by how much it is off what was served; both are uncertain, and so is the difference."""
    assert estimate.low_s is not None and estimate.high_s is not None
    spread_s = float(np.hypot(estimate.high_s - estimate.low_s, served.high_s - served.low_s)) / 2
    gap_s = estimate.value_s - served.value_s
    return {
        "estimator": estimate.estimator, "value_s": estimate.value_s,
        "low_s": estimate.low_s, "high_s": estimate.high_s,
        "holds": bool(estimate.low_s <= served.value_s <= estimate.high_s), "gap_s": gap_s,
        "gap_low_s": gap_s - spread_s, "gap_high_s": gap_s + spread_s,
    }  # fmt: skip


def _rate(parts: Sequence[Part], name: str) -> float:
    return float(np.mean([part.throughput_tok_s for part in parts if part.policy == name]))


def show(rows: Sequence[dict[str, Any]]) -> None:
    explored = rows[0]["explored"]
    print(
        f"explored: {explored['preemptions']} preemptions, {explored['left_to_chance']:.0%} of them left to chance, "
        f"{1e3 * explored['mean_cost_s']:.2f} ms each; {explored['unknown']} without a known cost"
    )
    table = Table(title="mean cost per preemption, ms: estimated from the explored log, and really served")
    for name in ("policy", "estimator", "estimated", "served", "preemptions", "estimate less served", "holds it"):
        table.add_column(name)
    for row in rows:
        served = row["served"]
        for estimate in row["estimates"]:
            gap = _ms(estimate["gap_s"], estimate["gap_low_s"], estimate["gap_high_s"])
            interval_text = _ms(estimate["value_s"], estimate["low_s"], estimate["high_s"])
            table.add_row(
                row["policy"], estimate["estimator"], interval_text,
                _ms(served["value_s"], served["low_s"], served["high_s"]),
                str(served["preemptions"]), gap, "yes" if estimate["holds"] else "no",
            )  # fmt: skip
    Console(width=160).print(table)
    for row in rows:
        for why in row["refused"]:
            print(f"{row['policy']}: refused: {why}")
    rates = {row["policy"]: row["served"]["throughput_tok_s"] for row in rows}
    for name, rate in ({"explored": explored["throughput_tok_s"]} | rates).items():
        print(f"{name}: {rate:.0f} tokens/s, mean of blocks")


def _ms(value_s: float, low_s: float, high_s: float) -> str:
    return f"{1e3 * value_s:.2f} [{1e3 * low_s:.2f}, {1e3 * high_s:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
