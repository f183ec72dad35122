"""Quality of measured costs: the self-check against control runs, and the error of the step-time model.

A control run is a window of the same state in which no request is preempted. The step-time model is what a step would
have taken undisturbed.
"""

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
    """A profile's self-check of one option: attributed costs compared with the difference to control runs."""

    arm: str
    block_size: int
    pairs: int
    attributed_s: float
    """Mean attributed cost."""
    low_s: float | None
    high_s: float | None
    """95% interval of the mean of (difference to the control run - attributed cost); None with too few pairs."""
    verdict: str

    def line(self) -> str:
        result = {"disagrees": "failed", "cannot tell": "undecided", "agrees": "passed"}[self.verdict]
        line = f"self-check of {self.arm}, blocks of {self.block_size}: {result}"
        if self.low_s is None or self.high_s is None:
            return f"{line}, {self.pairs} pairs with control runs are too few"
        if self.verdict == "cannot tell":
            line += " (too noisy to confirm these costs or to refute them)"
        return (
            f"{line}: costs of {1e3 * self.attributed_s:.3g} ms on average, control runs measured "
            f"{1e3 * self.low_s:+.3g} to {1e3 * self.high_s:+.3g} ms more (95%, {self.pairs} pairs)"
        )


@dataclass(frozen=True, slots=True)
class DataQuality:
    """Quality of all costs of some traces."""

    checks: tuple[Check, ...]
    unchecked: tuple[str, ...]
    """Cores of profiles without any self-check."""
    step_error: Mapping[str, HeldOutError]
    """Held-out error of each core's step-time model; empty if no trace holds enough steps."""

    def lines(self) -> list[str]:
        """Report for a person: checks that did not pass, and the step-time model's error."""
        lines = [check.line() for check in self.checks if check.verdict != "agrees"]
        if self.unchecked:
            lines.append(
                f"self-check: none in {', '.join(self.unchecked)}; these costs were not compared with control runs"
            )
        if not self.step_error:
            return [*lines, "step times: too few undisturbed steps to know how well costs were attributed"]
        worst = max(self.step_error.values(), key=lambda error: error.mean_s)
        return [
            *lines,
            f"step times: the step-time model is off by {worst.mean_relative:.1%} or {1e3 * worst.mean_s:.3g} ms on "
            "held-out undisturbed steps: the noise floor of the cost of every single preemption",
        ]


def floor_of(headers: Mapping[str, Header], step_times: Mapping[str, StepTimeModel]) -> DataQuality:
    """Raises TraceError naming core and field for a self-check that cannot be read."""
    checks: dict[Check, None] = {}  # each part of a profile repeats the checks of all its parts
    unchecked = []
    for core, header in headers.items():
        if header.source != "profile":
            continue
        entries = header.noise.get("self_check")
        core_checks = [] if entries is None else _checks(core, entries)
        checks |= dict.fromkeys(core_checks)
        if not core_checks:
            unchecked.append(core)
    errors = {core: model.error for core, model in step_times.items() if core in headers}
    return DataQuality(tuple(checks), tuple(unchecked), errors)


def _checks(core: str, entries: Any) -> list[Check]:
    where = f"core {core}, header.json: noise.self_check"
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TraceError(f"{where} is {entries!r}, should be a list with one entry per option")
    return [_check(f"{where}[{number}]", entry) for number, entry in enumerate(entries)]


def _check(where: str, entry: Mapping[str, Any]) -> Check:
    for name in (field.name for field in fields(Check)):
        if name not in entry:
            raise TraceError(f"{where}.{name} is missing")
    if entry["verdict"] not in VERDICTS:
        raise TraceError(f"{where}.verdict is {entry['verdict']!r}, should be one of {', '.join(VERDICTS)}")
    for name in ("pairs", "block_size", "attributed_s", "low_s", "high_s"):
        value = entry[name]
        if value is None and name in ("low_s", "high_s"):
            continue
        if type(value) not in (int, float) or not isfinite(value):
            raise TraceError(f"{where}.{name} is {value!r}, should be a number")
    return Check(**{field.name: entry[field.name] for field in fields(Check)})
