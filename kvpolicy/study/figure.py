"""A figure of a result by name, of all requests or of one class: what policies are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.study.cache import Result

SECONDS: Mapping[str, str] = {
    "e2e": "e2e_s",
    "ttft": "ttft_s",
    "itl": "itl_s",
    "gap": "longest_gap_s",
    "per-token": "e2e_per_token_s",
}
"""Latencies, of which less is better: field of a result by name."""
RATES: Mapping[str, tuple[str, str]] = {
    "throughput": ("throughput_tok_s", "tokens/s"),
    "goodput": ("goodput_req_s", "requests/s"),
    "slo": ("slo_share", "of the requests"),
    "fairness": ("fairness", "by Jain's index"),
}
"""Figures of which more is better: field of a result, and its unit, by name."""
OF_DEADLINES = ("goodput_req_s", "slo_share")
"""Fields that are undefined where no request has a deadline."""
STATISTICS = ("mean", "p50", "p99")
FORM = (
    f"{', '.join(SECONDS)} (seconds; the mean, or .p50 or .p99 as in ttft.p99), {', '.join(RATES)}; with :CLASS behind "
    "it of one class, as in ttft.p99:urgent"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a result."""

    text: str
    field: str
    """Of a result, or of its class."""
    statistic: str | None
    """Of a latency; None for a rate."""
    class_name: str
    """Empty for all requests."""
    more_is_better: bool
    unit: str

    @classmethod
    def parse(cls, text: str) -> Figure:
        """``NAME[.STATISTIC][:CLASS]``. Raises WrongValue for anything else, listing the names."""
        figure, colon, class_name = text.partition(":")
        name, dot, statistic = figure.partition(".")
        if name in SECONDS and (statistic in STATISTICS or not dot) and bool(colon) == bool(class_name):
            return cls(text, SECONDS[name], statistic or "mean", class_name, False, "s")
        if name in RATES and not dot and bool(colon) == bool(class_name):
            field, unit = RATES[name]
            return cls(text, field, None, class_name, True, unit)
        raise WrongValue("judge_by", f"is {text!r}, should be one of {FORM}")

    @property
    def needs_deadlines(self) -> bool:
        return self.field in OF_DEADLINES

    def of(self, result: Result) -> float:
        """Its value in a run. Raises InputError where it is undefined, as inter-token times of single tokens, or 0, of
        which nothing is a multiple."""
        workload = result["inputs"]["workload"]
        values = result
        if self.class_name:
            classes = result["classes"]
            if self.class_name not in classes:
                raise InputError(
                    f"workload {workload}: has no class {self.class_name!r} to compare by; it has {', '.join(classes)}"
                )
            values = classes[self.class_name]
        value = values[self.field] if self.statistic is None else values[self.field][self.statistic]
        if value is None:
            name = ".".join(part for part in (self.field, self.statistic) if part)
            whose = f"class {self.class_name} has" if self.class_name else "its runs have"
            raise InputError(f"workload {workload}: {whose} no {name}, so that they cannot be compared")
        if value == 0:
            raise WrongValue(
                "judge_by", f"is {self.text}, which is 0 in a run of workload {workload}: nothing is a multiple of it"
            )
        return float(value)


def names_figure(text: str) -> bool:
    """Whether :meth:`Figure.parse` takes it."""
    try:
        Figure.parse(text)
    except WrongValue:
        return False
    return True
