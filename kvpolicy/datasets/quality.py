"""The floor under every figure: what twins said of the attributed costs, and how well d0 tells a step's time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from kvpolicy.attribution.step_time import HeldOutError, StepTimeModel
from kvpolicy.trace import Header, TraceError

VERDICTS = ("agrees", "disagrees", "cannot tell")


@dataclass(frozen=True, slots=True)
class Check:
    """A profile's self-check of one option: costs as attributed beside the time that twins differ by."""

    arm: str
    block_size: int
    pairs: int
    attributed_s: float
    """Mean attributed cost."""
    low_s: float | None
    high_s: float | None
    """95% interval of the mean of (twins' difference - attributed cost); None with too few pairs."""
    verdict: str

    def line(self) -> str:
        what = {"disagrees": "failed", "cannot tell": "undecided", "agrees": "passed"}[self.verdict]
        line = f"self-check of {self.arm}, blocks of {self.block_size}: {what}"
        if self.low_s is None or self.high_s is None:
            return f"{line}, {self.pairs} pairs of twins are too few"
        return (
            f"{line}: costs of {1e3 * self.attributed_s:.3g} ms on average, twins measured {1e3 * self.low_s:+.3g} to "
            f"{1e3 * self.high_s:+.3g} ms beside that (95%, {self.pairs} pairs)"
        )


@dataclass(frozen=True, slots=True)
class Floor:
    """What all costs of some traces rest on."""

    checks: tuple[Check, ...]
    unchecked: tuple[str, ...]
    """Cores of profiles without any self-check."""
    step_error: Mapping[str, HeldOutError]
    """By core: of d0 on steps that it was not fitted on; empty where no trace holds steps enough."""

    def lines(self) -> list[str]:
        """For a person: checks that did not pass, and d0's error."""
        lines = [check.line() for check in self.checks if check.verdict != "agrees"]
        if self.unchecked:
            lines.append(f"self-check: none in {', '.join(self.unchecked)}; no twins were compared with these costs")
        if not self.step_error:
            return [*lines, "step times: not told by these traces, nor how well costs were attributed"]
        worst = max(self.step_error.values(), key=lambda error: error.mean_s)
        return [
            *lines,
            f"step times: d0 misses an undisturbed step by {worst.mean_relative:.1%} or {1e3 * worst.mean_s:.3g} ms, "
            "held out: the floor under the cost of every single preemption",
        ]


def floor_of(headers: Mapping[str, Header], step_times: Mapping[str, StepTimeModel]) -> Floor:
    """Raises TraceError naming core and field for a self-check that cannot be read."""
    found: dict[Check, None] = {}  # each part of a profile repeats what all of its parts said together
    unchecked = []
    for core, header in headers.items():
        if header.source != "profile":
            continue
        given = header.noise.get("self_check")
        checks = [] if given is None else _checks(core, given)
        found |= dict.fromkeys(checks)
        if not checks:
            unchecked.append(core)
    errors = {core: model.error for core, model in step_times.items() if core in headers}
    return Floor(tuple(found), tuple(unchecked), errors)


def _checks(core: str, given: Any) -> list[Check]:
    where = f"core {core}, header.json: noise.self_check"
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise TraceError(f"{where} is {given!r}, should be a list with one entry per option")
    return [_check(f"{where}[{number}]", one) for number, one in enumerate(given)]


def _check(where: str, one: Mapping[str, Any]) -> Check:
    for name in (field.name for field in fields(Check)):
        if name not in one:
            raise TraceError(f"{where}.{name} is missing")
    if one["verdict"] not in VERDICTS:
        raise TraceError(f"{where}.verdict is {one['verdict']!r}, should be one of {', '.join(VERDICTS)}")
    for name in ("pairs", "block_size", "attributed_s", "low_s", "high_s"):
        value = one[name]
        if value is None and name in ("low_s", "high_s"):
            continue
        if type(value) not in (int, float) or not isfinite(value):
            raise TraceError(f"{where}.{name} is {value!r}, should be a number")
    return Check(**{field.name: one[field.name] for field in fields(Check)})
