"""Finishes a profile: each core once its engine has measured, and the whole profile at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute, common_step_time, step_time_models
from kvpolicy.attribution.step_time_fit import StepTimeModel
from kvpolicy.attribution.step_work import BatchPrices, batch_prices, batches_of
from kvpolicy.events import situation_of
from kvpolicy.trace import Header
from kvpolicy_vllm.bench.selfcheck import SelfCheck, self_checks

LABELS = ("state_id", "arm", "repeat")
SHOWN = 3
"""Names in a line about what was left out; the trace's folder lists them all."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a profile's time was too short for; another call goes on with it."""

    left_out: Mapping[str, int] = field(default_factory=dict)
    """Repeats, or pairs of the self-check, by state, of the parts that were begun."""
    not_begun: tuple[str, ...] = ()
    """Names of parts, each a block size and a pass."""

    def lines(self, measured: Collection[str]) -> list[str]:
        """In words. ``measured``: states of which anything is measured."""
        if not self.left_out and not self.not_begun:
            return []
        states = [state_id for state_id in self.left_out if state_id not in measured]
        repeats = sum(self.left_out[state_id] for state_id in self.left_out if state_id in measured)
        parts = (
            f"states not measured at all: {_some(states)}" if states else "",
            f"{repeats} repeats of measured states" if repeats else "",
            f"parts not begun: {_some(self.not_begun)}" if self.not_begun else "",
        )
        return [f"  left out: {'; '.join(filter(None, parts))}; the same command goes on with them"]


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Summary of a finished profile."""

    out: Path
    states: int
    natural_states: int
    windows: int
    discarded: Mapping[str, int]
    """Discarded windows by reason."""
    noise: Mapping[str, Mapping[str, Any]]
    """Noise by core; see ``Header.noise``."""
    step_times: Mapping[str, StepTimeModel]
    checks: Sequence[SelfCheck]
    prices: BatchPrices
    """What a recomputed token costs beside the measured batches, over a decoded one."""
    dtype: str
    """What the model was computed in."""
    missing: LeftOut = LeftOut()
    measured: Collection[str] = ()
    """Ids of all states, those of the self-check included."""

    def text(self) -> str:
        """The summary in words."""
        lines = [
            f"{self.out}: {self.states} states ({self.natural_states} natural), {self.windows} valid windows, "
            f"{sum(self.discarded.values())} discarded, in {self.dtype}"
        ]
        lines += [f"  discarded: {count} x {reason}" for reason, count in self.discarded.items()]
        for core, noise in self.noise.items():
            model = self.step_times[core]
            repeats = f"{noise['repeats']} repeats instead of {noise['asked_repeats']}"
            if noise["repeats"] == noise["asked_repeats"]:
                repeats = f"repeats are limited to {noise['repeats']} here"
            warning = f", above {100 * noise['limit']:.0f}%: {repeats}"
            lines.append(
                f"  {noise['part']}: identical windows vary by {100 * noise['variation']:.1f}%"
                f"{warning if noise['above_limit'] else ''}; step times (fitted on {model.fitted_on}) are missed by "
                f"{100 * model.error.mean_relative:.1f}% or {1e3 * model.error.mean_s:.3f} ms, held out"
            )
        lines += [f"  self-check: {check.line()}" for check in self.checks]
        lines += self.missing.lines(self.measured)
        return "\n".join([*lines, self.prices.sentence()])


def finish_core(core: Path, seed: int, noise: Mapping[str, Any], notes: str = "") -> None:
    """Write the noise into the header, and remove the labels of decisions whose window is discarded."""
    header = Header.read(core / "header.json")
    replace(header, seed=seed, noise=dict(noise), notes=notes).write(core)
    windows = pa.concat_tables(list(traces.iter_parts(core, "windows")))
    counted_ids = windows.filter(pc.equal(windows["discarded"], ""))["preemption_id"].drop_null()
    parts = [traces.read_part(path, "decisions") for path in sorted((core / "decisions").glob("part-*.parquet"))]
    # A window names one victim; further victims of the same step share its overflow.
    counted_overflows = [
        part.filter(pc.is_in(part["preemption_id"], value_set=counted_ids))["overflow_id"] for part in parts
    ]
    overflows = pa.chunked_array([chunk for column in counted_overflows for chunk in column.chunks], pa.string())
    for number, part in enumerate(parts):
        traces.write_part(core, "decisions", number, _unlabelled(part, overflows))


def _unlabelled(decisions: pa.Table, overflows: pa.ChunkedArray) -> pa.Table:
    """``decisions`` with the labels set to null where the overflow is not in ``overflows``."""
    is_kept = pc.is_in(decisions["overflow_id"], value_set=overflows)
    for name in LABELS:
        index = decisions.schema.get_field_index(name)
        field = decisions.schema.field(index)
        decisions = decisions.set_column(
            index, field, pc.if_else(is_kept, decisions[name], pa.scalar(None, field.type))
        )
    return decisions


def finish_profile(out: Path, cores: Sequence[str], missing: LeftOut = LeftOut()) -> ProfileReport:
    """Run the self-check on the whole profile, write its result into every header, and return the report."""
    trace = traces.read(out)
    models = step_time_models(trace)
    checks = self_checks(attribute(trace))
    for core in cores:
        header = trace.headers[core]
        core_checks = [asdict(check) for check in checks if check.block_size == header.block_size]
        replace(header, noise=dict(header.noise) | {"self_check": core_checks}).write(out / core)
    windows = trace.rows("windows")
    counted = [window for window in windows if not window["discarded"]]
    labelled = [row for row in trace.rows("decisions") if row["state_id"] is not None]
    causes = {window["state_id"]: window["cause"] for window in counted}
    reasons = Counter(window["discarded"] for window in windows) - Counter(("", "warm-up", "noise") * len(windows))
    return ProfileReport(
        out=out,
        states=len(causes),
        natural_states=sum(cause == "memory" for cause in causes.values()),
        windows=len(counted),
        discarded=dict(reasons),
        noise={core: trace.headers[core].noise for core in cores},
        step_times=models,
        checks=checks,
        prices=batch_prices(common_step_time([trace]), batches_of(map(situation_of, labelled))),
        dtype=", ".join(sorted({header.geometry["dtype"] for header in trace.headers.values()})),
        missing=missing,
        measured=frozenset(causes),
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join([*names[:SHOWN], *([f"and {more} more"] if more > 0 else [])])
