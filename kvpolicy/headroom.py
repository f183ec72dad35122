"""How much throughput a better choice between recompute and swap can win, said before anything is changed.

With, over the steps of a run,

    U  decoded tokens (useful ones: computed for the first time, one per request and step)
    R  recomputed tokens
    D  seconds that the steps take with their decodes alone; d = D / U is the price of a decoded token
    P  seconds that the recomputed tokens add to the steps; p = P / R is the *marginal* price of one of them, in a step
       that decodes anyway
    W  seconds that executed swaps cost the engine, with what their copies add to steps; D and P are without that
    T  seconds that the engine was busy

the *tax* is R / U, and

    bound = tax * p / d + W / D = (P + W) / D.

**Why it is a bound.** Had every preemption been free, with the same steps otherwise, the run would have taken
T - P - W, so that throughput would be T / (T - P - W) times as high: (P + W) / (T - P - W) more. What is left of the
steps decodes at least, T - P - W >= D, so that this is at most (P + W) / D. What it leaves out is that other choices
lead to other steps: a swap holds blocks while it is loaded, and victims come back at another time.

**The forecast** puts the prices of the preemptions seen in the place of free ones. A preemption cost c seconds and
would have cost a under its other option; the cheaper one saves max(0, c - a), never below 0, because a better choice
may also be to change nothing. With S the sum over all preemptions, at most P + W,

    forecast = S / (T - S), where T - S is at least D,

which is never above the bound.

All of it is about the time that an engine is busy: a server that waits for requests has the throughput of its arrivals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from math import fsum, isfinite, isnan
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.fields import AMOUNT, WrongValue, refuse_non_integer
from kvpolicy.json_values import finite

NO_DECODES = "no token was decoded"
NO_STEP_TIMES = "no step-time model says how long steps take"
NO_PRICES = "no cost model says what the other option would have cost"
MIN_GAIN = 0.01
"""Share of throughput from which on a change is worth it, unless the user says otherwise."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the steps of a run computed, and how long that took; seconds are None where they are not known.

    Raises WrongValue, naming the field, for a number that is negative or not finite.
    """

    decoded_tokens: int = 0
    """U"""
    recomputed_tokens: int = 0
    """R"""
    decode_s: float | None = 0.0
    """D"""
    recompute_s: float | None = 0.0
    """P"""
    busy_s: float | None = 0.0
    """T"""
    swap_s: float | None = 0.0
    """W"""

    def __post_init__(self) -> None:
        for name in ("decoded_tokens", "recomputed_tokens"):
            refuse_non_integer(name, getattr(self, name), AMOUNT)
        for name in ("decode_s", "recompute_s", "busy_s", "swap_s"):
            if getattr(self, name) is not None:
                AMOUNT.refuse(name, getattr(self, name))


def total(works: Iterable[Work]) -> Work:
    """The work of several cores or runs together; a number that one of them does not know is unknown."""
    numbers: list[tuple[Any, ...]] = [tuple(getattr(work, f.name) for f in fields(Work)) for work in works]
    sums: list[Any] = [None if None in column else sum(column) for column in zip(*numbers, strict=True)]
    return Work(*sums)


def saving_s(spent_s: Sequence[float], other_s: Sequence[float]) -> float:
    """S: seconds that the cheaper option of every preemption saves over what was executed.

    ``spent_s``: what each preemption cost. ``other_s``: what its other option would have cost; infinite where there
    was none. Raises InputError for columns of different lengths, WrongValue, naming the row, for a cost that is no
    number.
    """
    if len(spent_s) != len(other_s):
        raise InputError(f"{len(spent_s)} costs and {len(other_s)} of the other options: should be as many of both")
    for number, (spent, other) in enumerate(zip(spent_s, other_s, strict=True)):
        if not isfinite(spent):
            raise WrongValue(f"spent_s[{number}]", f"is {spent}, should be a finite number")
        if isnan(other):
            raise WrongValue(f"other_s[{number}]", "is nan, should be a number, or infinite without another option")
    return fsum(max(0.0, spent - other) for spent, other in zip(spent_s, other_s, strict=True))


@dataclass(frozen=True, slots=True)
class Headroom:
    """What there is to win, as shares of throughput; None where it is not known."""

    decoded_tokens: int
    recomputed_tokens: int
    tax: float | None
    """Recomputed tokens per decoded token."""
    recompute_token_s: float | None
    """p; None where nothing was recomputed, too."""
    decode_token_s: float | None
    """d"""
    price_ratio: float | None
    """p / d"""
    bound: float | None
    """Highest share of throughput that choosing better can win."""
    forecast: float | None
    """Share that is likely to be won."""
    unknown: str
    """Why the bound or the forecast is not known; empty where both are."""

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = finite(asdict(self))
        return values

    def sentence(self) -> str:
        """What there is to win, in one sentence."""
        if self.bound is None:
            taxed = "" if self.tax is None else f"{share_text(self.tax)} of the decoded tokens were computed again; "
            return f"{taxed}how much of throughput is to be won here by choosing better is not known: {self.unknown}."
        most = f"at most {share_text(self.bound)} of throughput at saturation is to be won here by choosing better"
        if self.forecast is None:
            return f"{most}; how much of it is likely is not known: {self.unknown}."
        return f"{most}; about {share_text(self.forecast)} is likely."


def headroom(work: Work, saved_s: float | None, unknown: str = "") -> Headroom:
    """What there is to win in a run; the module's docstring has the formulas.

    ``saved_s``: S, see :func:`saving_s`; None where the other option's costs are not known. ``unknown``: why seconds
    are not known; without it, the usual reason. Raises WrongValue for a ``saved_s`` that is negative or not finite.
    """
    if saved_s is not None:
        AMOUNT.refuse("saved_s", saved_s)
    bound, forecast = _bound(work), None
    if bound is None:
        unknown = unknown or (NO_STEP_TIMES if work.decoded_tokens else NO_DECODES)
    elif bound == 0.0:
        forecast, unknown = 0.0, ""
    elif saved_s is None or work.busy_s is None:
        unknown = unknown or NO_PRICES
    else:
        assert work.recompute_s is not None and work.swap_s is not None and work.decode_s is not None
        saved = min(saved_s, work.recompute_s + work.swap_s)
        forecast, unknown = saved / max(work.busy_s - saved, work.decode_s), ""
    p, d = _per_token(work.recompute_s, work.recomputed_tokens), _per_token(work.decode_s, work.decoded_tokens)
    return Headroom(
        decoded_tokens=work.decoded_tokens,
        recomputed_tokens=work.recomputed_tokens,
        tax=work.recomputed_tokens / work.decoded_tokens if work.decoded_tokens else None,
        recompute_token_s=p,
        decode_token_s=d,
        price_ratio=None if p is None or not d else p / d,
        bound=bound,
        forecast=forecast,
        unknown=unknown,
    )


def mean(runs: Sequence[Headroom]) -> Headroom:
    """The mean bound and forecast of several runs, and sums of tokens; what one of them does not know is unknown.

    Prices are means over the tokens. Raises InputError without runs.
    """
    if not runs:
        raise InputError("no runs: what there is to win is a mean over one at least")
    decoded, recomputed = (
        sum(column) for column in zip(*((r.decoded_tokens, r.recomputed_tokens) for r in runs), strict=True)
    )
    p = _mean_price([(run.recompute_token_s, run.recomputed_tokens) for run in runs])
    d = _mean_price([(run.decode_token_s, run.decoded_tokens) for run in runs])
    bounds, forecasts = [run.bound for run in runs], [run.forecast for run in runs]
    return Headroom(
        decoded_tokens=decoded,
        recomputed_tokens=recomputed,
        tax=recomputed / decoded if decoded else None,
        recompute_token_s=p,
        decode_token_s=d,
        price_ratio=None if p is None or not d else p / d,
        bound=_mean(bounds),
        forecast=_mean(forecasts),
        unknown=next((run.unknown for run in runs if run.unknown), ""),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if len(known) == len(values) else None


def _mean_price(prices: Sequence[tuple[float | None, int]]) -> float | None:
    """Seconds per token over all tokens; None where there are none, or the price of some is not known."""
    priced = [(seconds, tokens) for seconds, tokens in prices if tokens]
    known = [seconds * tokens for seconds, tokens in priced if seconds is not None]
    return fsum(known) / sum(tokens for _, tokens in priced) if priced and len(known) == len(priced) else None


def _bound(work: Work) -> float | None:
    """(P + W) / D; 0 where nothing was spent on preemptions."""
    if work.recompute_s is None or work.swap_s is None:
        return None
    spent_s = work.recompute_s + work.swap_s
    if spent_s == 0.0:
        return 0.0
    return spent_s / work.decode_s if work.decode_s else None


def _per_token(seconds: float | None, tokens: int) -> float | None:
    return None if seconds is None or not tokens else seconds / tokens


def share_text(share: float) -> str:
    """A share in percent, with two significant digits, or whole from 10% on."""
    percent = 100 * share
    return f"{percent:.0f}%" if percent >= 10 else f"{Decimal(f'{percent:.2g}'):f}%"
