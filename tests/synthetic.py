"""Profile traces made up under a known cost law, seeded: for tests that need a trace and no engine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pyarrow as pa

from kvpolicy import trace as traces
from kvpolicy.attribution.step_time import HeldOutError, StepTimeModel
from kvpolicy.cost.model import FittedModel
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.events import KINDS, Decision, Kind, Option, Outcome, Preemption
from kvpolicy.features import Features, features_of
from kvpolicy.hardware import Geometry
from kvpolicy.trace import Header, Trace
from kvpolicy.training import provenance_of, split
from kvpolicy.training.family import FAMILIES
from kvpolicy.training.fit import fit

GEOMETRY = Geometry(
    layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=688, vocab=2048, weight_bytes=4, kv_bytes=4,
    dtype="float32",
)  # fmt: skip
HARDWARE = {"device": "cpu", "processor": "made up", "cores": 2, "memory_bytes": 1 << 33, "system": "Linux x86_64"}
NATIVE = {"kind": "native"}


@dataclass(frozen=True)
class CostLaw:
    """True extra engine seconds of either option; ``bend`` is what no roofline knows of."""

    fixed_s: float = 0.4e-3
    alone_s: float = 1.5e-3
    s_per_token: float = 3.0e-5
    s_per_pair: float = 4.0e-9
    copy_latency_s: float = 2.0e-3
    s_per_byte: float = 2.0e-9
    s_per_segment: float = 3.0e-6
    overlap: float = 0.5
    """How much of a load the engine feels while others run."""
    bend: float = 0.0

    def copy_s(self, size_bytes: float, segments: float) -> float:
        return self.copy_latency_s + self.s_per_byte * size_bytes + self.s_per_segment * segments

    def engine_s(self, kind: Kind, x: Features) -> float:
        bent = math.exp(self.bend * math.tanh(x.batch_tokens / 1000.0))
        if kind == "recompute":
            again = self.fixed_s + self.s_per_token * x.recomputed_tokens + self.s_per_pair * x.recomputed_pairs
            return bent * (again + (0.0 if x.running_requests else self.alone_s))
        felt = self.overlap if x.running_requests else 1.0
        load = felt * self.copy_s(x.load_bytes, x.load_segments)
        return bent * (self.copy_s(x.save_bytes, x.save_segments) + load)


@dataclass(frozen=True)
class Plan:
    """What to make up."""

    states: int = 120
    repeats: int = 4
    block_sizes: tuple[int, ...] = (32, 64)
    noise: float = 0.03
    """Standard deviation of log cost between repeats."""
    additive_noise_s: float = 0.0
    natural_share: float = 0.6
    tokens: tuple[int, int] = (32, 2048)
    law: CostLaw = field(default_factory=CostLaw)
    link: dict[str, Any] = field(default_factory=lambda: dict(NATIVE))
    hardware: dict[str, Any] = field(default_factory=lambda: dict(HARDWARE))
    arms: tuple[Kind, ...] = KINDS
    pinned: bool = False
    """Whether host memory is page-locked."""
    variation: float = 0.03
    name: str = "made"
    """Cores are named after it: no two traces that are read together may share it."""


def situation(computed_tokens: int = 500, block_size: int = 32, running_requests: int = 3, **more: Any) -> Preemption:
    """A plausible situation; ``more`` replaces single fields."""
    held = -(-computed_tokens // block_size)
    block_bytes = block_size * GEOMETRY.kv_bytes_per_token
    preemption = Preemption(
        time_s=1000.0, computed_tokens=computed_tokens, prompt_tokens=max(1, computed_tokens - 8), output_tokens=8,
        block_size=block_size, block_bytes=block_bytes, segment_bytes=block_bytes // GEOMETRY.layers,
        held_blocks=held, shared_blocks=0, hashed_blocks=max(0, held - 1), hit_blocks=0.0, save_blocks=float(held),
        device_blocks=4096, free_blocks=0, short_blocks=1, host_blocks=4096, free_host_blocks=4096,
        running_requests=running_requests, waiting_requests=0, batch_tokens=running_requests * 300,
        queued_save_bytes=0, queued_load_bytes=0, earlier_preemptions=0, priority=0, cause="memory",
    )  # fmt: skip
    given = replace(preemption, **more)
    return given if "save_blocks" in more else replace(given, save_blocks=float(given.held_blocks))


def swap_of(one: Preemption) -> Option:
    return Option("swap", one.computed_tokens, "host")


def options_for(one: Preemption) -> tuple[Option, Option]:
    return Option("recompute"), swap_of(one)


def true_cost_s(law: CostLaw, kind: Kind, one: Preemption) -> float:
    return law.engine_s(kind, features_of(one, Option("recompute") if kind == "recompute" else swap_of(one)))


def make_trace(seed: int = 0, plan: Plan | None = None, **changes: Any) -> Trace:
    """A trace as `kvpolicy profile` writes it, one core per block size. ``changes`` replace fields of the plan."""
    plan = replace(plan or Plan(), **changes)
    rng = random.Random(seed)
    tables: dict[str, list[pa.Table]] = {}
    headers = {}
    for number, block_size in enumerate(plan.block_sizes):
        core = f"core-{plan.name}-{block_size}"
        headers[core] = _header(plan, core, block_size, seed)
        count = len(range(number, plan.states, len(plan.block_sizes)))
        for name, rows in _rows(plan, core, block_size, count, rng).items():
            tables.setdefault(name, []).append(traces.with_core(traces.from_rows(name, rows), core))
    return Trace(headers, {name: pa.concat_tables(some) for name, some in tables.items()})


def _header(plan: Plan, core: str, block_size: int, seed: int) -> Header:
    return Header(
        run_id=core, source="profile", created="2024-01-01T00:00:00Z", engine="synthetic 1", hardware=plan.hardware,
        geometry=GEOMETRY.to_dict(), block_size=block_size, block_bytes=block_size * GEOMETRY.kv_bytes_per_token,
        device_blocks=4096, host_blocks=4096, policy="pinned", link=plan.link, seed=seed,
        noise={"variation": plan.variation},
    )  # fmt: skip


def _rows(plan: Plan, core: str, block_size: int, states: int, rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    by_name: dict[str, list[dict[str, Any]]] = {name: [] for name in ("decisions", "outcomes", "windows", "transfers")}
    for number in range(states):
        state_id = f"b{block_size}-{number:03d}"
        one = _state(plan, block_size, (number + rng.random()) / states, rng)
        for repeat in range(plan.repeats):
            by_name["windows"].append(_window(state_id, "none", repeat, one, None))
            for arm in rng.sample(plan.arms, len(plan.arms)):
                _add_window(by_name, plan, core, state_id, arm, repeat, one, rng)
    return by_name


def _state(plan: Plan, block_size: int, place: float, rng: random.Random) -> Preemption:
    low, high = map(math.log, plan.tokens)
    natural = rng.random() < plan.natural_share
    running = rng.randrange(6)
    return situation(
        computed_tokens=round(math.exp(low + place * (high - low))),
        block_size=block_size,
        running_requests=running,
        batch_tokens=sum(rng.randrange(50, 800) for _ in range(running)),
        free_blocks=0 if natural else rng.randrange(2, 40),
        short_blocks=1 if natural else 0,
        waiting_requests=rng.choice((0, 0, 1, 4)),
        cause="memory" if natural else "forced",
    )


def _add_window(
    made: dict[str, list[dict[str, Any]]], plan: Plan, core: str, state_id: str, arm: Kind, repeat: int,
    one: Preemption, rng: random.Random,
) -> None:  # fmt: skip
    preemption_id = f"{core}-{len(made['decisions'])}"
    engine_s = true_cost_s(plan.law, arm, one) * math.exp(rng.gauss(0.0, plan.noise) if plan.noise else 0.0)
    engine_s += rng.gauss(0.0, plan.additive_noise_s) if plan.additive_noise_s else 0.0
    chosen = KINDS.index(arm)
    decision = Decision(options_for(one), tuple(float(i == chosen) for i in range(2)), chosen, (), "pinned", "{}", arm)
    made["decisions"].append(
        traces.decision_row(
            one, decision, preemption_id=preemption_id, decision_id=f"{preemption_id}-0", request=preemption_id,
            generation=0, step=repeat, overflow_id=preemption_id, state_id=state_id, arm=arm, repeat=repeat,
        )
    )  # fmt: skip
    swapped = arm == "swap"
    lost = one.computed_tokens
    outcome = Outcome(
        preemption_id, "resumed", 1002.0, engine_s if engine_s > 0 else 0.0, 0.0, 0, lost * swapped,
        lost * (not swapped), 0, 1, engine_s, max(0.0, engine_s) * one.running_requests,
    )  # fmt: skip
    made["outcomes"].append(traces.outcome_row(outcome))
    made["windows"].append(_window(state_id, arm, repeat, one, preemption_id))
    if swapped:
        made["transfers"] += [_transfer(plan, preemption_id, way, one, rng) for way in ("save", "load")]


def _window(state_id: str, arm: str, repeat: int, one: Preemption, preemption_id: str | None) -> dict[str, Any]:
    return {
        "state_id": state_id, "arm": arm, "repeat": repeat, "cause": one.cause, "first_step": 0, "last_step": 1,
        "duration_s": 0.1, "preemption_id": preemption_id, "discarded": "",
    }  # fmt: skip


def _transfer(plan: Plan, preemption_id: str, direction: str, one: Preemption, rng: random.Random) -> dict[str, Any]:
    took = plan.law.copy_s(one.copy_bytes, one.copy_segments) * math.exp(rng.gauss(0.0, plan.noise / 2))
    return {
        "preemption_id": preemption_id, "generation": 0, "step": 0, "direction": direction, "tier": "host",
        "bytes": one.copy_bytes, "segments": one.copy_segments, "segment_bytes": one.segment_bytes,
        "pinned": plan.pinned, "queued_bytes": 0,
        "submit_s": 1000.0, "start_s": 1000.0, "end_s": 1000.0 + took, "ok": True,
    }  # fmt: skip


def without(trace: Trace, table: str) -> Trace:
    """The trace as if ``table`` had never been recorded."""
    return Trace(trace.headers, {name: rows for name, rows in trace.tables.items() if name != table})


def changed(trace: Trace, table: str, rows: Sequence[dict[str, Any]]) -> Trace:
    """The trace with ``table`` replaced by ``rows`` (with their ``core``)."""
    cores = sorted({row["core"] for row in rows})
    parts = [
        traces.with_core(traces.from_rows(table, [row for row in rows if row["core"] == core]), core) for core in cores
    ]
    return Trace(trace.headers, dict(trace.tables) | {table: pa.concat_tables(parts)})


STEP_TIME = StepTimeModel(2e-3, (3e-5, 1e-4, 1e-7, 2e-9, 1e-3, 4e-4), "core a", 100, HeldOutError(0.0, 0.0, 0.0))
"""Made up: these traces hold no steps."""


@cache
def fitted_model(family: str, states: int = 160, bend: float = 0.4) -> FittedModel:
    """A model fitted to a made-up trace, in memory."""
    dataset = dataset_of({"made": make_trace(seed=1, states=states, law=CostLaw(bend=bend))})
    training, _ = split(dataset.states, 0)
    model = fit(FAMILIES[family], training, dataset, provenance_of(family, dataset, training, 0.03), 0).model
    return replace(model, step_time=STEP_TIME)
