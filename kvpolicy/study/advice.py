"""The answer of `kvpolicy recommend`: which policy to deploy, and how much better than vLLM's own it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvpolicy.study.kept import Result
from kvpolicy.study.paired import LEVEL, Ratio
from kvpolicy.study.report import aligned, written

DEFAULT = "always-recompute"
"""What vLLM does by itself."""
JUDGED: Mapping[str, tuple[str, str | None]] = {
    "e2e": ("e2e_s", "mean"),
    "ttft": ("ttft_s", "mean"),
    "itl": ("itl_s", "mean"),
    "throughput": ("throughput_tok_s", None),
}
"""What policies can be judged by: field of a result, and which of its figures."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy beside vLLM's own, over the same runs."""

    policy: str
    gain: Ratio
    """How many times better than vLLM's own behaviour, by what it is judged by; above 1 is better."""
    to_best: Ratio
    """The best policy over this one: how many times better the best was."""
    throughput: Ratio
    e2e_p99: Ratio
    ttft_p99: Ratio
    choices: int
    """Preemptions at which swap was feasible, in all runs."""
    extrapolated: int
    figures: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Advice:
    """What to deploy, and why."""

    workload: str
    hardware: str
    kv_blocks: int
    server: str
    """What it may take at a time."""
    judge_by: str
    least_gain: float
    """The share by which a policy has to be better to be worth a change."""
    seeds_differ: bool
    """Whether every seed of a part was a pair of its own, or all of them one."""
    best: str
    """The best in the mean of those told to be better by more than ``least_gain``, or of all where none is."""
    deploy: str
    """``best``, where it is told to be better by more than ``least_gain``; else ``always-recompute``."""
    reason: str
    config_line: str
    """The command that prints the flags; empty where nothing is to be changed."""
    compared: tuple[Compared, ...]
    warnings: tuple[str, ...]
    whole: str = ""
    """What the workload as one run came to; empty where the parts are the whole."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        pairs = self.compared[0].gain.pairs
        rows = [["policy", f"{self.judge_by} gain", "throughput", "e2e p99", "ttft p99", *SHOWN]]
        for one in self.compared:
            ratios = (one.gain, one.throughput, one.e2e_p99, one.ttft_p99)
            shown = (written(name, one.figures) for name in SHOWN)
            rows.append([one.policy, *(ratio.text() for ratio in ratios), *shown])
        once = "" if self.seeds_differ else "; seeds do not change the requests: the runs of a part are one"
        lines = [
            f"{self.workload} on {self.hardware}, {self.kv_blocks} KV blocks: {pairs} pairs of runs per policy{once}",
            f"ratios against {DEFAULT}: {self.judge_by} gain above 1 is better; throughput above 1, p99 below 1",
            f"server: {self.server}",
            f"all intervals shown together at {LEVEL:.0%}; a change is advised where all of the gain's interval lies "
            f"above {1.0 + self.least_gain:g}",
            *aligned(rows),
            "",
            f"deploy this: {self.deploy}: {self.reason}",
        ]
        if self.config_line:
            lines.append(f"  {self.config_line}")
        if self.whole:
            lines.append(f"the whole workload as one run, without an interval: {self.whole}")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


SHOWN = ("e2e s", "recompute", "swap", "again tok")


def figure_of(result: Result, name: str, which: str | None) -> float:
    """That figure of a run. Raises ValueError where the run has none, as no inter-token time of single tokens."""
    value = result[name] if which is None else result[name][which]
    if value is None:
        said = name if which is None else f"{name}.{which}"
        raise ValueError(f"workload {result['inputs']['workload']}: its runs have no {said}, so nothing compares them")
    return float(value)


def extrapolation_warning(one: Compared) -> str | None:
    """Where a policy's cost model was beyond its training in some of its decisions."""
    if not one.extrapolated:
        return None
    share = one.extrapolated / one.choices
    return (
        f"{one.policy}: its cost model was asked beyond what it was trained on in {one.extrapolated} of {one.choices} "
        f"decisions ({share:.0%}); `kvpolicy profile` and `kvpolicy train` on the serving machine measure there"
    )
