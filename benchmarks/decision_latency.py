"""How long a decision takes, from a filled Preemption to a Decision, compared with other ways to evaluate such a model.

    python benchmarks/decision_latency.py [--cost-model M] [--rounds N] [--calls N] [--cpu N] [--json FILE]

One process, every contender in each round, in random order: p50 and p99 of a round's calls, then the median over rounds
with its 95% interval (bootstrap) and the ratio to the compiled decision of the same round. Only those whose name begins
with `decision` do all of it (features, costs, intervals, choice, record), those that learn online with outcomes already
learned from; the others evaluate both options' forests alone, on rows that are ready, and the roofline both laws alone.
The clock's own time is in every figure.

Without --cost-model: the laws of a model that ships with the largest residual there may be, 100 trees of 31 leaves per
option. Ends with status 1 where the bar is missed: 15 us p50, 50 us p99, for each compiled decision; 0.05 us per block
for collecting the state. A bar without a measurement is reported as not measured, and is not missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import isclose
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from latency_rivals import Rivals, rivals_of
from rich.console import Console
from rich.table import Table

from kvpolicy import policy as policies
from kvpolicy.cost import FittedModel, load
from kvpolicy.events import KINDS, Cost, Option, Preemption
from kvpolicy.features import features_of
from kvpolicy.policy import Feedback

BAR_US = {"p50_us": 15.0, "p99_us": 50.0}
BAR_US_PER_BLOCK = 0.05
AIM_US = {"p50_us": 5.0, "p99_us": 15.0}
OURS, PLAIN = "decision", "decision, plain"
LEARNING = {f"decision, {kind}, online": f"{kind}:measured,online=on" for kind in ("cheapest", "explore")}
OUTCOMES = 60
"""Learned from before what learns is measured."""
SHIPPED = "cpu-llama-native"

BUSY_LINK = 0.25
"""Share of situations in which copies out wait already; of others in which copies back do."""

Call = Callable[[int], object]
"""One evaluation, of the situation of that number."""


@dataclass(frozen=True)
class Measured:
    """One contender: a figure per round."""

    p50_us: list[float]
    p99_us: list[float]


def main() -> None:
    options = _options()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    rng = random.Random(options.seed)
    model, rivals, missing = rivals_of(load(options.cost_model or SHIPPED), options.cost_model is None, options.seed)
    situations = [made_up(model, rng) for _ in range(options.situations)]
    calls, compiled = contenders(model, rivals, situations)
    if not compiled:
        missing.append("the compiled decision: numba is not installed")
    elif not calls.keys() >= LEARNING.keys():
        missing.append("decisions that learn online: the model knows no step times")
    times_by_name = measure(calls, len(situations), options.rounds, options.calls, rng)
    summaries = {name: summary(times, times_by_name.get(OURS), rng) for name, times in times_by_name.items()}
    collecting = None
    if not options.no_state:
        collecting, why_not = _collecting(options.rounds, rng)
        missing += [why_not] if why_not else []
    trees = {kind: len(model.residuals[kind].nodes.roots) if kind in model.residuals else 0 for kind in KINDS}
    failed = misses(summaries, collecting)
    unmeasured = [] if collecting else ["collecting the state per block"]
    show(summaries, collecting, missing, trees, verdict(failed, unmeasured))
    if options.json:
        values = {
            "cost_model": options.cost_model or f"{SHIPPED} with the largest residual", "trees": trees,
            "contenders": summaries, "collecting": collecting, "missing": missing, "bar_us": BAR_US,
            "bar_us_per_block": BAR_US_PER_BLOCK, "missed": failed, "bar_not_measured": unmeasured,
        }  # fmt: skip
        options.json.write_text(json.dumps(values, indent=2) + "\n")
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cost-model", help="folder or name of a model; by default the largest residual there may be")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=1000, help="per contender and round")
    parser.add_argument("--situations", type=int, default=500)
    parser.add_argument("--cpu", type=int, help="pin to this processor")
    parser.add_argument("--no-state", action="store_true", help="leave out collecting the state, which needs vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, least in (("rounds", 2), ("calls", 20), ("situations", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}, should be at least {least}")
    if options.cpu is not None and options.cpu not in os.sched_getaffinity(0):
        parser.error(f"--cpu is {options.cpu}, should be one of {sorted(os.sched_getaffinity(0))}")
    return options


# ---- what is measured ----


def made_up(model: FittedModel, rng: random.Random) -> Preemption:
    """A situation within the trained range, as far as single features go; now and then one beyond it."""
    spans = model.ranges["recompute"]
    size = rng.choice(model.provenance.block_sizes)
    block_bytes = round(size * model.provenance.kv_bytes_per_token)

    def draw(name: str, beyond: float = 1.0) -> int:
        low, high = spans[name]
        return round(rng.uniform(low, max(low, high) * beyond))

    tokens = max(1, draw("computed_tokens", 1.2))
    held, running = -(-tokens // size), draw("running_requests")
    queued = [rng.randrange(1, 64) * block_bytes if rng.random() < BUSY_LINK else 0 for _ in range(2)]
    return Preemption(
        time_s=0.0, computed_tokens=tokens, prompt_tokens=tokens, output_tokens=0, block_size=size,
        block_bytes=block_bytes, segment_bytes=_segment(model, block_bytes), held_blocks=held,
        shared_blocks=rng.choice((0, 0, 0, 1)), hashed_blocks=0, hit_blocks=0.0, save_blocks=float(held),
        device_blocks=4096, free_blocks=draw("free_blocks"), short_blocks=1, host_blocks=1 << 20,
        free_host_blocks=1 << 20, running_requests=running, waiting_requests=0,
        batch_tokens=draw("batch_tokens") if running else 0, queued_save_bytes=queued[0],
        queued_load_bytes=queued[1],
        earlier_preemptions=0, priority=0, cause="memory",
    )  # fmt: skip


def _segment(model: FittedModel, block_bytes: int) -> int:
    low, high = model.ranges["swap"]["segment_bytes"]
    layers = model.provenance.geometry.layers
    return next((size for size in (block_bytes // layers, block_bytes) if low <= size <= high), round(high) or 1)


def contenders(model: FittedModel, rivals: Rivals, situations: Sequence[Preemption]) -> tuple[dict[str, Call], bool]:
    """What is measured, by name; and whether ours could be compiled. Raises ValueError where paths disagree."""
    plain, fast = replace(model), replace(model)
    compiled = fast.warm()
    options = [policies.feasible_options(situation) for situation in situations]
    for situation, situation_options in zip(situations, options, strict=True):
        _refuse_difference(plain, fast, situation, situation_options)
    rows = [
        [features_of(situation, option) for option in situation_options]
        for situation, situation_options in zip(situations, options, strict=True)
    ]
    calls: dict[str, Call] = {OURS: _decision(fast, situations, options)} if compiled else {}
    calls[PLAIN] = _decision(plain, situations, options)
    if compiled and model.step_time is not None:
        calls |= {name: _decision(fast, situations, options, spec) for name, spec in LEARNING.items()}
    calls |= {name: make(rows) for name, make in rivals.items()}
    laws = [model.laws[kind] for kind in KINDS]
    calls["roofline alone, plain"] = lambda i: [law.parts(x) for law, x in zip(laws, rows[i], strict=True)]
    return calls, compiled


def _decision(
    model: FittedModel,
    situations: Sequence[Preemption],
    options: Sequence[Sequence[Option]],
    spec: str = "cheapest:measured",
) -> Call:
    """By a policy of that name that has learned, where it does, that all takes a tenth longer than predicted."""
    policy = policies.load(spec, lambda _: model)
    state, rng = policy.initial_state(), random.Random(0)
    decide = policies.decide
    for i in range(OUTCOMES if isinstance(policy, policies.LearningPolicy) else 0):
        situation, option = situations[i % len(situations)], rng.choice(options[i % len(situations)])
        (cost,) = model.predict(situation, (option,))
        state = policy.observe(state, Feedback(situation, option, 1.1 * cost.engine_s, None))

    def call(i: int) -> object:
        return decide(policy, situations[i], options[i], state, rng)

    return call


def _refuse_difference(plain: FittedModel, fast: FittedModel, situation: Preemption, options: Sequence[Option]) -> None:
    """All of a cost is compared, bounds and delays too; seconds to a picosecond."""
    for compiled_cost, plain_cost in zip(
        fast.predict(situation, options), plain.predict(situation, options), strict=True
    ):
        for name in (field.name for field in fields(Cost)):
            compiled_value, plain_value = getattr(compiled_cost, name), getattr(plain_cost, name)
            if compiled_value != plain_value and (
                None in (compiled_value, plain_value)
                or not isclose(compiled_value, plain_value, rel_tol=1e-9, abs_tol=1e-12)
            ):
                raise ValueError(f"compiled {name} {compiled_value}, plain {plain_value} for {situation}")


# ---- measuring ----


def measure(
    calls: dict[str, Call], situations: int, rounds: int, count: int, rng: random.Random
) -> dict[str, Measured]:
    """Rounds of ``count`` calls of each, in random order, with new situations in each."""
    for call in calls.values():
        for i in range(min(20, situations)):
            call(i)
    times = {name: Measured([], []) for name in calls}
    for _ in range(rounds):
        which = [rng.randrange(situations) for _ in range(count)]
        for name in rng.sample(list(calls), len(calls)):
            spans = _spans_ns(calls[name], which)
            times[name].p50_us.append(spans[len(spans) // 2] / 1e3)
            times[name].p99_us.append(spans[min(len(spans) - 1, int(len(spans) * 0.99))] / 1e3)
    return times


def _spans_ns(call: Call, which: Sequence[int]) -> list[int]:
    spans = []
    for i in which:
        begun = perf_counter_ns()
        call(i)
        spans.append(perf_counter_ns() - begun)
    return sorted(spans)


def summary(times: Measured, ours: Measured | None, rng: random.Random) -> dict[str, Any]:
    """Median over rounds and its interval, and of the ratios to ours."""
    values_by_name: dict[str, Any] = {}
    for name in ("p50_us", "p99_us"):
        values = getattr(times, name)
        values_by_name[name] = _with_interval(values, rng)
        if ours is not None:
            ratios = [value / base for value, base in zip(values, getattr(ours, name), strict=True)]
            values_by_name[name.replace("_us", "_ratio")] = _with_interval(ratios, rng)
    return values_by_name


def _with_interval(values: Sequence[float], rng: random.Random, samples: int = 2000) -> dict[str, float]:
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(samples))
    return {"value": median(values), "low": medians[samples // 40], "high": medians[-samples // 40]}


def _collecting(rounds: int, rng: random.Random) -> tuple[dict[str, Any] | None, str]:
    """Collecting the state on vLLM's own objects; why not, where that cannot be."""
    try:
        from latency_state import collecting  # here: it needs vllm, and this script does without
    except ImportError as error:
        return None, f"collecting the state: {error}"
    return collecting(rounds, rng, _with_interval), ""


# ---- telling ----


def misses(contenders: dict[str, Any], collecting: dict[str, Any] | None) -> list[str]:
    """What is over the bar."""
    if OURS not in contenders:
        return ["no compiled decision was measured"]
    lines = [
        f"{contender} {name} {contenders[contender][name]['value']:.1f}, the bar is {bar:g}"
        for contender in (OURS, *LEARNING) if contender in contenders for name, bar in BAR_US.items()
        if contenders[contender][name]["value"] > bar
    ]  # fmt: skip
    per_block = collecting and collecting["us_per_block"]["value"]
    if per_block and per_block > BAR_US_PER_BLOCK:
        lines.append(f"collecting the state takes {per_block:.3f} us per block, the bar is {BAR_US_PER_BLOCK}")
    return lines


def verdict(failed: Sequence[str], unmeasured: Sequence[str]) -> str:
    text = f"missed: {'; '.join(failed)}" if failed else "met"
    return text if not unmeasured else f"{text}; not measured: {'; '.join(unmeasured)}"


def show(
    summaries: dict[str, Any], collecting: dict[str, Any] | None, missing: Sequence[str], trees: dict[Any, int],
    verdict_text: str,
) -> None:  # fmt: skip
    console = Console(width=120)
    forests = ", ".join(f"{count} for {kind}" for kind, count in trees.items())
    table = Table("", "p50 us", "p99 us", "p50 over ours", "p99 over ours", title=f"one decision; trees: {forests}")
    for name, values in summaries.items():
        cells = [_cell(values[key]) if key in values else "" for key in ("p50_us", "p99_us", "p50_ratio", "p99_ratio")]
        table.add_row(name, *cells)
    console.print(table)
    if collecting:
        console.print(
            f"collecting the state: {_cell(collecting['us_per_block'], 4)} us per block held, "
            f"{_cell(collecting['us_per_running'], 3)} us per running request, {_cell(collecting['min_us'])} us for "
            "one block and none running"
        )
    for what in missing:
        console.print(f"not measured: {what}", highlight=False)
    bar = f"bar {BAR_US['p50_us']:g} / {BAR_US['p99_us']:g} us, aim {AIM_US['p50_us']:g} / {AIM_US['p99_us']:g}"
    console.print(f"{bar}: {verdict_text}", highlight=False)


def _cell(interval: dict[str, float], digits: int = 2) -> str:
    return f"{interval['value']:.{digits}f} [{interval['low']:.{digits}f}, {interval['high']:.{digits}f}]".replace(
        "[", r"\["
    )


if __name__ == "__main__":
    main()
