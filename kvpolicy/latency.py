"""The service that requests got: latencies and their tails, goodput under deadlines, fairness, each class by itself.

Both simulators and the live overload count finished requests with :class:`ClassTally`, so that their figures mean the
same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import log, nan
from typing import Any

import numpy as np

from kvpolicy.arrays import Floats, Ints
from kvpolicy.fields import POSITIVE, WrongValue, option, validate
from kvpolicy.json_values import finite
from kvpolicy.prefix_hits import NO_HITS, PrefixHits, PrefixHitTally

MIN_S = 1e-9
MAX_S = 1e7
RATIO = 1.008
"""Ratio of a bin's edges. A quantile is reported as the geometric middle of its bin, within 0.4%."""
MAX_BUFFERED = 4096
"""Entries that are buffered before they are sorted into bins."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Seconds over requests (or, for inter-token times, over tokens after the first); nan where there are none."""

    mean: float
    p50: float
    p99: float


UNKNOWN = Tail(nan, nan, nan)

LENGTH_BINS = 4
"""Bins of requests by prompt length, each with as many requests as equal lengths allow."""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """The service that requests of such prompts got."""

    min_tokens: int
    max_tokens: int
    """Prompt tokens, both ends included."""
    requests: int
    ttft_s: Tail
    e2e_s: Tail


def length_edges(prompt_tokens: Sequence[int]) -> list[int]:
    """The shortest length, and the longest of each bin, which are quantiles of the lengths; empty without requests."""
    if not len(prompt_tokens):
        return []
    levels = np.arange(1, LENGTH_BINS + 1) / LENGTH_BINS
    longest = np.unique(np.quantile(prompt_tokens, levels, method="inverted_cdf"))
    return [int(min(prompt_tokens)), *map(int, longest)]


def by_prompt_length(
    prompt_tokens: Sequence[int], ttft_s: Sequence[float], e2e_s: Sequence[float], edges: Sequence[int] = ()
) -> tuple[LengthBin, ...]:
    """Requests in bins by prompt length. ``edges``: as :func:`length_edges` gives them, of these or of more requests;
    without them, of these."""
    shortest, *highest = list(edges) or length_edges(prompt_tokens) or [0]
    lowest = [shortest, *(edge + 1 for edge in highest)][: len(highest)]
    at = np.searchsorted(highest, np.asarray(prompt_tokens, dtype=np.int64))
    tails = [[_tail(array("d", np.asarray(seconds)[at == number])) for seconds in (ttft_s, e2e_s)]
             for number in range(len(highest))]  # fmt: skip
    counts = np.bincount(at, minlength=len(highest))
    return tuple(
        LengthBin(low, high, int(count), *both)
        for low, high, count, both in zip(lowest, highest, counts, tails, strict=True)
    )


SLO_FORM = "ttft=SECONDS,tpot=SECONDS, or one of them"


@dataclass(frozen=True, slots=True)
class Slo:
    """Deadlines (a service-level objective) for requests that bring none; None sets none."""

    ttft_s: float | None = option("Seconds from its arrival to its first token.", None, POSITIVE)
    tpot_s: float | None = option("Mean seconds per output token after the first.", None, POSITIVE)

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def parse(cls, text: str) -> Slo:
        """``ttft=SECONDS,tpot=SECONDS``, or one of them. Raises WrongValue for anything else."""
        seconds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                number = float(value)
            except ValueError:
                number = nan
            if name not in ("ttft", "tpot") or f"{name}_s" in seconds or not POSITIVE.holds(number):
                raise WrongValue("slo", f"{text!r}: should be {SLO_FORM}, each above 0")
            seconds[f"{name}_s"] = number
        return cls(**seconds)

    @property
    def text(self) -> str:
        """A text that :meth:`parse` accepts for these deadlines; empty without any."""
        given = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return ",".join(f"{name}={seconds:g}" for name, seconds in given.items() if seconds is not None)

    def met(
        self, ttft_s: float, tpot_s: float | None, own_ttft_s: float | None = None, own_tpot_s: float | None = None
    ) -> bool | None:
        """Whether a request met its deadlines; None for a request without any.

        ``tpot_s``: its mean seconds per output token after the first; None for a single token, which meets any.
        ``own_ttft_s``, ``own_tpot_s``: the deadlines that it brings, which go before these here.
        """
        max_ttft_s = self.ttft_s if own_ttft_s is None else own_ttft_s
        max_tpot_s = self.tpot_s if own_tpot_s is None else own_tpot_s
        if max_ttft_s is None and max_tpot_s is None:
            return None
        in_time = max_ttft_s is None or ttft_s <= max_ttft_s
        return in_time and (max_tpot_s is None or tpot_s is None or tpot_s <= max_tpot_s)


NO_SLO = Slo()


class Histogram:
    """Counts of positive numbers in bins of equal ratio. Quantiles are within 0.4%; values below 1e-9 count as 0."""

    def __init__(self) -> None:
        self._counts: Ints = np.zeros(0, dtype=np.int64)
        self._values: list[float] = []
        self._weights: list[int] = []
        self.count = 0

    def add(self, value: float, weight: int = 1) -> None:
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= MAX_BUFFERED:
            self._sort_in()

    def extend(self, values: list[float], weight: int) -> None:
        """Add all ``values``, each ``weight`` times."""
        self._values += values
        self._weights += [weight] * len(values)
        if len(self._values) >= MAX_BUFFERED:
            self._sort_in()

    def include(self, other: Histogram) -> None:
        """Add all values of another one."""
        other._sort_in()
        self._sort_in()
        self._counts = self._counts + other._counts
        self.count += other.count

    def quantile(self, level: float) -> float:
        """The value below which a share ``level`` of the values lies; nan without values."""
        self._sort_in()
        if not self.count:
            return nan
        at = int(np.searchsorted(np.cumsum(self._counts), level * self.count, side="left"))
        return 0.0 if at == 0 else MIN_S * RATIO ** (at - 0.5)

    def _sort_in(self) -> None:
        if not len(self._counts):
            self._counts = np.zeros(int(log(MAX_S / MIN_S) / log(RATIO)) + 2, dtype=np.int64)
        values = np.maximum(np.asarray(self._values), 0.0)
        weights = np.asarray(self._weights, dtype=np.int64)
        with np.errstate(divide="ignore"):
            bins = np.floor(np.log(values / MIN_S) / log(RATIO)) + 1
        at = np.clip(bins, 0, len(self._counts) - 1).astype(np.int64)
        np.add.at(self._counts, at, weights)
        self.count += int(weights.sum())
        self._values, self._weights = [], []


MAX_POINTS = 8192
"""Points of the curve of output tokens that are kept."""
STEADY = (0.25, 0.75)
"""Shares of all output tokens between which the rate is taken."""


class OutputCurve:
    """How many output tokens were out at which time, between the points linear.

    A long run has every second, fourth, ... of its steps as a point, so that memory is bounded and at least half of
    ``MAX_POINTS`` remain.
    """

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._counts: list[int] = []
        self._stride = 1
        self._skipped = 0
        self._last_s = 0.0
        self.tokens = 0

    def add(self, at_s: float, tokens: int) -> None:
        """Count the tokens of a step that ended then. Steps come in the order of their ends."""
        self.tokens += tokens
        self._last_s = at_s
        self._skipped += 1
        if self._skipped == self._stride:
            self._skipped = 0
            self._times_s.append(at_s)
            self._counts.append(self.tokens)
            if len(self._counts) >= MAX_POINTS:
                self._thin_out()

    def extend(self, ends_s: list[float], tokens: int) -> None:
        """Count steps that ended then, each with that many tokens."""
        first = self._stride - 1 - self._skipped
        self._times_s += ends_s[first :: self._stride]
        total = self.tokens + len(ends_s) * tokens
        self._counts += range(self.tokens + (first + 1) * tokens, total + 1, self._stride * tokens)
        self._skipped = (self._skipped + len(ends_s)) % self._stride
        self.tokens, self._last_s = total, ends_s[-1]
        while len(self._counts) >= MAX_POINTS:
            self._thin_out()

    def _thin_out(self) -> None:
        self._skipped += self._stride * (len(self._counts) % 2)
        self._times_s, self._counts = self._times_s[1::2], self._counts[1::2]
        self._stride *= 2

    def steady_tok_s(self, began_s: float) -> float:
        """The rate between the times at which the shares ``STEADY`` of the tokens were out; nan without tokens or time.

        ``began_s``: when the first tokens were asked for.
        """
        times_s = [began_s, *self._times_s, self._last_s]
        counts = [0, *self._counts, self.tokens]
        low, high = (share * self.tokens for share in STEADY)
        low_s, high_s = np.interp((low, high), counts, times_s)
        return float((high - low) / (high_s - low_s)) if high_s > low_s else nan


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The service that the finished requests of one class got."""

    requests: int
    output_tokens: int
    makespan_s: float
    """From the first arrival of the class to its last token."""
    throughput_tok_s: float
    """Its output tokens over its makespan."""
    e2e_s: Tail
    ttft_s: Tail
    itl_s: Tail
    longest_gap_s: Tail
    """Of each request with two or more output tokens, the longest time between two that follow each other."""
    e2e_per_token_s: Tail
    """End-to-end time of each request over its output tokens."""
    fairness: float
    """Jain's index over the requests' rates; see :func:`fairness`. nan without requests."""
    deadline_requests: int
    """Requests with a deadline, of their own or from the run's :class:`Slo`."""
    slo_share: float | None
    """Of the requests with a deadline, the share that met all of theirs; None where there are none."""
    goodput_req_s: float | None
    """Requests with a deadline that met all of theirs, over the makespan; None where there are none."""
    steady_tok_s: float = nan
    """Output tokens of the class per second between the times at which a quarter and three quarters of them were out;
    nan where it was not noted."""
    longest_pause_s: float = nan
    """The longest of all the times of :attr:`longest_gap_s`."""
    prefix_hits: PrefixHits = NO_HITS
    """What was found of the prompts; without a prompt where it was not counted."""
    by_prompt_length: tuple[LengthBin, ...] = ()
    """The requests in bins; none where their lengths were not given."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON: None for nan."""
        values: dict[str, Any] = finite(asdict(self))
        return values


class ClassTally:
    """Accumulates a :class:`ClassSummary`, in 40 bytes per request and nothing per token."""

    def __init__(self, slo: Slo = NO_SLO) -> None:
        """``slo``: deadlines for requests that bring none."""
        self.itl = Histogram()
        """Inter-token times, which are added as they occur."""
        self.first_arrival_s = nan
        self.last_token_s = 0.0
        self.output_tokens = 0
        """Of finished requests."""
        self.tokens = 0
        """Output tokens so far, for :meth:`note`."""
        self.curve = OutputCurve()
        """How many of them were out at which time."""
        self.hits = PrefixHitTally()
        """What was found of the prompts, counted as requests are admitted."""
        self._slo = slo
        self._with_deadline = 0
        self._met = 0
        self._itl_s = 0.0
        self._e2e_s = array("d")
        self._ttft_s = array("d")
        self._longest_gap_s = array("d")
        self._e2e_per_token_s = array("d")
        self._prompt_tokens = array("q")

    def __len__(self) -> int:
        return len(self._e2e_s)

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token; 0 without requests."""
        return self.last_token_s - self.first_arrival_s if len(self) else 0.0

    @classmethod
    def merged(cls, tallies: Iterable[ClassTally]) -> ClassTally:
        """One for the requests of all of these, which stay as they are. Where they are of several runs, the summary
        has to be given the makespan."""
        whole = cls()
        for tally in tallies:
            whole._include(tally)
        return whole

    def note(self, at_s: float) -> None:
        """Take note of the tokens that are out by now, for the rate in the steady part."""
        if self.tokens > self.curve.tokens:
            self.curve.add(at_s, self.tokens - self.curve.tokens)

    def finished(
        self,
        arrival_s: float,
        first_s: float,
        last_s: float,
        output_tokens: int,
        longest_gap_s: float,
        ttft_deadline_s: float | None = None,
        tpot_deadline_s: float | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        """Count a finished request, all of whose times count from one origin. Its inter-token times are added to
        :attr:`itl` as they occur. ``longest_gap_s``: the longest of them, of any value where there is a single token.
        ``prompt_tokens``: of all requests of a tally, or of none.
        """
        ttft_s, e2e_s, gaps = first_s - arrival_s, last_s - arrival_s, output_tokens - 1
        self._e2e_s.append(e2e_s)
        self._ttft_s.append(ttft_s)
        self._e2e_per_token_s.append(e2e_s / output_tokens)
        if prompt_tokens is not None:
            self._prompt_tokens.append(prompt_tokens)
        if gaps:
            self._longest_gap_s.append(longest_gap_s)
        self._itl_s += last_s - first_s
        self.output_tokens += output_tokens
        met = self._slo.met(ttft_s, (last_s - first_s) / gaps if gaps else None, ttft_deadline_s, tpot_deadline_s)
        if met is not None:
            self._with_deadline += 1
            self._met += met
        if not arrival_s >= self.first_arrival_s:  # the first one: nothing is at or above nan
            self.first_arrival_s = arrival_s
        self.last_token_s = max(self.last_token_s, last_s)

    def summary(self, makespan_s: float | None = None) -> ClassSummary:
        """``makespan_s``: where the requests are of several runs, the sum of theirs."""
        if makespan_s is None:
            makespan_s = self.makespan_s
        gaps = self.output_tokens - len(self)
        known = bool(self._with_deadline)
        return ClassSummary(
            requests=len(self),
            output_tokens=self.output_tokens,
            makespan_s=makespan_s,
            throughput_tok_s=self.output_tokens / makespan_s if makespan_s > 0 else nan,
            e2e_s=_tail(self._e2e_s),
            ttft_s=_tail(self._ttft_s),
            itl_s=Tail(self._itl_s / gaps, self.itl.quantile(0.5), self.itl.quantile(0.99)) if gaps else UNKNOWN,
            longest_gap_s=_tail(self._longest_gap_s),
            e2e_per_token_s=_tail(self._e2e_per_token_s),
            fairness=fairness(np.array(self._e2e_per_token_s, dtype=np.float64)),
            deadline_requests=self._with_deadline,
            slo_share=self._met / self._with_deadline if known else None,
            goodput_req_s=self._met / makespan_s if known and makespan_s > 0 else None,
            steady_tok_s=self.curve.steady_tok_s(self.first_arrival_s),
            longest_pause_s=max(self._longest_gap_s, default=nan),
            prefix_hits=self.hits.hits(),
            by_prompt_length=by_prompt_length(self._prompt_tokens, self._ttft_s, self._e2e_s),
        )

    def _include(self, other: ClassTally) -> None:
        if not len(other):
            return
        self.itl.include(other.itl)
        if not other.first_arrival_s >= self.first_arrival_s:
            self.first_arrival_s = other.first_arrival_s
        self.last_token_s = max(self.last_token_s, other.last_token_s)
        self.output_tokens += other.output_tokens
        self._with_deadline += other._with_deadline
        self._met += other._met
        self._itl_s += other._itl_s
        self._e2e_s += other._e2e_s
        self._ttft_s += other._ttft_s
        self._longest_gap_s += other._longest_gap_s
        self._e2e_per_token_s += other._e2e_per_token_s
        self._prompt_tokens += other._prompt_tokens


def fairness(e2e_per_token_s: Floats) -> float:
    """Jain's fairness index of the rates x = output tokens / end-to-end time of requests: (sum x)^2 / (n sum x^2).

    From 1/n, where one request gets everything, to 1, where all are served at the same rate (Jain, Chiu, Hawe: "A
    Quantitative Measure of Fairness and Discrimination", DEC-TR-301, 1984). nan without requests.
    """
    if not len(e2e_per_token_s):
        return nan
    lowest = float(e2e_per_token_s.min())
    # The index has no unit, so rates are taken over the highest one; where that is infinite, only its like count.
    rates = lowest / e2e_per_token_s if lowest > 0 else (e2e_per_token_s == 0).astype(np.float64)
    return float(rates.sum() ** 2 / (len(rates) * (rates**2).sum()))


def _tail(seconds: array[float]) -> Tail:
    if not seconds:
        return UNKNOWN
    values = np.frombuffer(seconds, dtype=np.float64)
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return Tail(float(values.mean()), float(p50), float(p99))
