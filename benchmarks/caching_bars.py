"""What rows of caching policies come to: gains over ``lru``, shares of the gap to hindsight, and the bars on both.

``caching_policies.py`` makes the rows and prints the bars; ``tools/caching_tables.py`` writes them on docs/caching.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log, sqrt
from statistics import fmean

from scipy.special import stdtrit

RIVALS = ("lru", "arc", "s3fifo")
ROOM, MIN_GAIN, MIN_OF_BEST = 1.3, 1.10, 0.97
TARGET = ("mooncake_", "agentic_")
"""How the names of the traces begin that the bars are of; others stand beside them."""
TARGET_NAME = "Mooncake and agentic sessions"


@dataclass(frozen=True, slots=True)
class Row:
    """One draw of a trace, and a capacity."""

    trace: str
    draw: str
    share: float
    """Capacity over distinct blocks."""
    block_tokens: int
    capacity: int
    blocks: int
    whole_s: float
    """What all prompts take to compute."""
    saved: Mapping[str, float]
    """Share of it, by policy, ``hindsight`` among them."""

    def gain(self, name: str) -> float:
        return self.saved[name] / self.saved["lru"]

    @property
    def of_best(self) -> float:
        return self.saved["cost"] / max(self.saved[name] for name in RIVALS)


def of_target(rows: Sequence[Row]) -> list[Row]:
    return [one for one in rows if one.trace.startswith(TARGET)]


def with_room(rows: Sequence[Row]) -> list[Row]:
    """Where hindsight saves so much that there is something to gain."""
    return [one for one in rows if one.gain("hindsight") >= ROOM]


def below_best(rows: Sequence[Row]) -> list[Row]:
    return [one for one in rows if one.of_best < MIN_OF_BEST]


def mean_gain(rows: Sequence[Row]) -> float:
    """Geometric mean of what ``cost`` saves over ``lru``."""
    return exp(fmean(log(one.gain("cost")) for one in rows))


def gap_share(rows: Sequence[Row]) -> float:
    """Mean over rows of the share that ``cost`` takes of the gap between ``lru`` and hindsight."""
    return fmean((one.gain("cost") - 1) / (one.gain("hindsight") - 1) for one in rows)


def gain_interval(rows: Sequence[Row]) -> tuple[float, float] | None:
    """95% interval of :func:`mean_gain` over draws of the traces, each with all of its rows; None where no trace has
    several.

    Student's, of a mean of several samples: the variance of each trace's draws, which are as many as they are, and
    degrees of freedom by Welch and Satterthwaite. A bootstrap of four draws ends at the least and the largest of them.
    Only what is drawn varies: the parts of a trace say nothing of other traces.
    """
    of_trace: dict[str, dict[str, list[float]]] = {}
    for one in rows:
        of_trace.setdefault(one.trace, {}).setdefault(one.draw, []).append(log(one.gain("cost")))
    variances = [(_variance([*draws.values()]), len(draws) - 1) for draws in of_trace.values() if len(draws) > 1]
    whole = fsum(variance for variance, _ in variances)
    if not variances:
        return None
    freedom = whole**2 / fsum(variance**2 / degrees for variance, degrees in variances) if whole else 1.0
    half = float(stdtrit(freedom, 0.975)) * sqrt(whole) / len(rows)
    middle = log(mean_gain(rows))
    return exp(middle - half), exp(middle + half)


def _variance(draws: Sequence[Sequence[float]]) -> float:
    """Of the sum of all logs of a trace, draws of which may have fewer rows than others: by what each draw's sum is off
    the trace's mean times its rows."""
    mean = fmean(value for draw in draws for value in draw)
    off = fsum((fsum(draw) - mean * len(draw)) ** 2 for draw in draws)
    return off * len(draws) / (len(draws) - 1)


def bars(rows: Sequence[Row]) -> list[str]:
    """Lines about the bars, of the traces that they name and, where there are others, of all; those missed begin with
    ``missed``."""
    target = of_target(rows)
    lines = _bars_of(TARGET_NAME, target) if target else [f"no rows of {TARGET_NAME}, which the bars are of"]
    return lines if len(target) == len(rows) else [*lines, *_bars_of("all traces", rows)]


def _bars_of(name: str, rows: Sequence[Row]) -> list[str]:
    least, below = min(rows, key=lambda one: one.of_best), below_best(rows)
    return [
        _gain_line(name, rows),
        f"{'missed' if below else 'met'}: {name}: the least that cost saves of the best of {', '.join(RIVALS)} is "
        f"{least.of_best:.3f}, at least {MIN_OF_BEST} ({least.trace}, {least.draw}, capacity {least.capacity}); less "
        f"in {len(below)} of {len(rows)} rows",
    ]


def _gain_line(name: str, rows: Sequence[Row]) -> str:
    room = with_room(rows)
    if not room:
        return f"{name}: hindsight saves {ROOM} times what lru does in none of {len(rows)} rows"
    gain, interval = mean_gain(room), gain_interval(room)
    spread = "" if interval is None else f"; {interval[0]:.3f} to {interval[1]:.3f} over draws"
    return (
        f"{'met' if gain >= MIN_GAIN else 'missed'}: {name}: where hindsight saves {ROOM} times what lru does "
        f"({len(room)} of {len(rows)}), cost saves {gain:.3f} times (geometric mean{spread}), at least {MIN_GAIN}; "
        f"{gap_share(room):.0%} of the gap on average"
    )
