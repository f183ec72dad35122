"""What is done with a profile once an engine has measured its part, and once all have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute, step_time_models
from kvpolicy.attribution.step_time_fit import StepTimeModel
from kvpolicy.trace import Header
from kvpolicy_vllm.bench.selfcheck import SelfCheck, self_checks

LABELS = ("state_id", "arm", "repeat")


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """What a finished profile says about itself."""

    out: Path
    states: int
    natural_states: int
    windows: int
    discarded: Mapping[str, int]
    """Discarded windows by reason."""
    noise: Mapping[str, Mapping[str, Any]]
    """By core; see ``Header.noise``."""
    step_times: Mapping[str, StepTimeModel]
    checks: Sequence[SelfCheck]

    def text(self) -> str:
        """For a person."""
        lines = [
            f"{self.out}: {self.states} states ({self.natural_states} natural), {self.windows} windows that count, "
            f"{sum(self.discarded.values())} discarded"
        ]
        lines += [f"  discarded: {count} x {reason}" for reason, count in self.discarded.items()]
        for core, noise in self.noise.items():
            model = self.step_times[core]
            more = f"{noise['repeats']} repeats instead of {noise['asked_repeats']}"
            if noise["repeats"] == noise["asked_repeats"]:
                more = f"repeats are limited to {noise['repeats']} here"
            loud = f", above {100 * noise['limit']:.0f}%: {more}"
            lines.append(
                f"  {noise['part']}: identical windows vary by {100 * noise['variation']:.1f}%"
                f"{loud if noise['above_limit'] else ''}; step times (fitted on {model.fitted_on}) are missed by "
                f"{100 * model.error.mean_relative:.1f}% or {1e3 * model.error.mean_s:.3f} ms, held out"
            )
        return "\n".join(lines + [f"  self-check: {check.line()}" for check in self.checks])


def finish_core(core: Path, seed: int, noise: Mapping[str, Any], notes: str = "") -> None:
    """Enter what was measured about the measuring, and take the labels off decisions whose window does not count."""
    header = Header.read(core / "header.json")
    replace(header, seed=seed, noise=dict(noise), notes=notes).write(core)
    windows = pa.concat_tables(list(traces.iter_parts(core, "windows")))
    counting = windows.filter(pc.equal(windows["discarded"], ""))["preemption_id"].drop_null()
    parts = [traces.read_part(path, "decisions") for path in sorted((core / "decisions").glob("part-*.parquet"))]
    # A window names one victim; those that went with it share its overflow.
    mine = [part.filter(pc.is_in(part["preemption_id"], value_set=counting))["overflow_id"] for part in parts]
    overflows = pa.chunked_array([chunk for one in mine for chunk in one.chunks], pa.string())
    for number, part in enumerate(parts):
        traces.write_part(core, "decisions", number, _unlabelled(part, overflows))


def _unlabelled(decisions: pa.Table, overflows: pa.ChunkedArray) -> pa.Table:
    """``decisions`` with empty labels where the overflow is not in ``overflows``."""
    keep = pc.is_in(decisions["overflow_id"], value_set=overflows)
    for name in LABELS:
        at = decisions.schema.get_field_index(name)
        field = decisions.schema.field(at)
        decisions = decisions.set_column(at, field, pc.if_else(keep, decisions[name], pa.scalar(None, field.type)))
    return decisions


def finish_profile(out: Path, cores: Sequence[str]) -> ProfileReport:
    """Check the whole profile against its twins, enter the result in every header, and report."""
    trace = traces.read(out)
    models = step_time_models(trace)
    found = self_checks(attribute(trace))
    for core in cores:
        header = trace.headers[core]
        mine = [asdict(check) for check in found if check.block_size == header.block_size]
        replace(header, noise=dict(header.noise) | {"self_check": mine}).write(out / core)
    windows = trace.rows("windows")
    count = [window for window in windows if not window["discarded"]]
    causes = {window["state_id"]: window["cause"] for window in count}
    reasons = Counter(window["discarded"] for window in windows) - Counter(("", "warm-up", "noise") * len(windows))
    return ProfileReport(
        out=out,
        states=len(causes),
        natural_states=sum(cause == "memory" for cause in causes.values()),
        windows=len(count),
        discarded=dict(reasons),
        noise={core: trace.headers[core].noise for core in cores},
        step_times=models,
        checks=found,
    )
