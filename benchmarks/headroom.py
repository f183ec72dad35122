"""What was said beforehand to be won by choosing better, and what was won: in virtual time, over the matrix's places.

    python benchmarks/headroom.py [--requests N] [--repeats N] [--machine M] [--shipped W] [--share S] [--caching C]
        [--jobs N] [--json FILE]

Places are those of ``matrix_places.py`` with the workloads that ship, each with and without prefix caching. A run
under ``always-recompute`` gives the bound and the forecast (:mod:`kvpolicy.headroom`). ``always-swap`` and
``cheapest:analytic`` on the same requests give what was reached, and the better of the two (over all repeats of the
place) is compared with the bound. Times are computed, so that every figure is the same each time.

Two bars: no place reaches significantly more than its bound, and every place with a bound above 2% reaches at least
60% of it. Exits 1 where one is missed or a run fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from matrix_places import (
    LEARNED,
    MACHINES,
    RECOMPUTE,
    SWAP,
    Place,
    Runs,
    add_arguments,
    parsed,
    places_of,
    short,
    simulated,
)
from overflow_matrix import constants

from kvpolicy.stats import CONFIDENCE, Ratio, student_interval, student_ratio
from kvpolicy.study.report import aligned

POLICIES = (RECOMPUTE, SWAP, LEARNED)
CACHING = {"on": True, "off": False}
LARGE_BOUND = 0.02
"""Bounds above it are to be reached in part; below it, one run's chaos of half a percent says too little."""
MIN_SHARE = 0.6
"""Of such a bound."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One place; shares of throughput, one per repeat."""

    machine: str
    workload: str
    memory_share: float
    prefix_caching: bool
    preemptions: float
    tax: float
    price_ratio: float
    bounds: list[float]
    forecasts: list[float]
    reached: dict[str, list[float]] = field(default_factory=dict)
    """By policy."""

    @property
    def best(self) -> str:
        return max(self.reached, key=lambda policy: fmean(self.reached[policy]))

    @property
    def bound(self) -> float:
        return fmean(self.bounds)

    @property
    def forecast(self) -> float:
        return fmean(self.forecasts)

    @property
    def over_bound(self) -> Ratio:
        """Throughput that was reached over that of the bound, in the same repeats."""
        reached = [1 + share for share in self.reached[self.best]]
        return student_ratio(reached, [1 + share for share in self.bounds])

    @property
    def share_of_bound(self) -> tuple[float, float, float] | None:
        """Mean over the repeats, with its interval; None where there is nothing to win."""
        if not all(self.bounds):
            return None
        return student_interval([won / most for won, most in zip(self.reached[self.best], self.bounds, strict=True)])

    def missed(self) -> list[str]:
        """The bars that the place misses, in words."""
        share, over = self.share_of_bound, self.over_bound
        missed = []
        if over.significant and over.value > 1:
            missed.append(
                f"{self.best} reached {fmean(self.reached[self.best]):.2%}, above the bound of {self.bound:.2%}"
            )
        if self.bound > LARGE_BOUND:
            # A repeat without a bound has no share: then the means are compared.
            reached = fmean(self.reached[self.best]) / self.bound if share is None else share[0]
            if reached < MIN_SHARE:
                missed.append(
                    f"{self.best} reached {reached:.0%} of the bound of {self.bound:.2%}, at least {MIN_SHARE:.0%}"
                )
        return missed


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    places = _places(options)
    found = [figures_of(place, runs) for place, runs in zip(places, simulated(places, POLICIES, options), strict=True)]
    print("\n".join([*constants(options.machine or tuple(MACHINES)), *table(found), "", *summary(found)]))
    if options.json:
        values = [asdict(one) | {"best": one.best, "over_bound": one.over_bound.to_dict()} for one in found]
        options.json.write_text(json.dumps({"places": values}, indent=2, allow_nan=False) + "\n")
    missed = [f"bar missed: {' '.join(row_of(one)[:4])}: {what}" for one in found for what in one.missed()]
    print("\n".join(missed))
    return 1 if missed else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caching", choices=CACHING, action="append", help="only with prefix caching on, or off")
    add_arguments(parser)
    return parsed(parser, arguments)


def _places(options: argparse.Namespace) -> list[Place]:
    """The matrix's places on the workloads that ship, first with prefix caching, then without."""
    return [place for caching in options.caching or CACHING for place in places_of(options, CACHING[caching])]


def figures_of(place: Place, runs: Runs) -> Figures:
    base = runs[RECOMPUTE]
    said = [result["headroom"] for result in base]
    return Figures(
        machine=place.machine,
        workload=short(place.workload),
        memory_share=place.share,
        prefix_caching=place.serving.prefix_caching,
        preemptions=fmean(result["preemptions"]["recompute"] for result in base),
        tax=fmean(one["tax"] for one in said),
        price_ratio=fmean(one["price_ratio"] or 0.0 for one in said),
        bounds=[one["bound"] for one in said],
        forecasts=[one["forecast"] for one in said],
        reached={
            policy: [
                result["throughput_tok_s"] / other["throughput_tok_s"] - 1
                for result, other in zip(runs[policy], base, strict=True)
            ]
            for policy in POLICIES[1:]
        },
    )


# ---- for a person ----

HEAD = [
    "machine", "workload", "memory", "caching", "preempted", "tax", "p/d", "bound", "forecast", "always-swap",
    "cheapest", "better, 95%", "of the bound, 95%",
]  # fmt: skip


def table(found: Sequence[Figures]) -> list[str]:
    return aligned([HEAD, *map(row_of, found)])


def row_of(one: Figures) -> list[str]:
    share = one.share_of_bound
    won = [100 * (value - 1) for value in _interval([1 + share for share in one.reached[one.best]])]
    return [
        one.machine.partition("-")[0],
        one.workload,
        f"{one.memory_share:g}",
        "on" if one.prefix_caching else "off",
        f"{one.preemptions:.0f}",
        f"{one.tax:.3f}",
        f"{one.price_ratio:.3f}",
        f"{one.bound:.2%}",
        f"{one.forecast:.2%}",
        *(f"{fmean(one.reached[policy]):.2%}" for policy in POLICIES[1:]),
        f"{won[0]:.2f}% ({won[1]:.2f} to {won[2]:.2f})",
        "-" if share is None else f"{share[0]:.0%} ({share[1]:.0%} to {share[2]:.0%})",
    ]


def _interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    ratio = student_ratio(ratios, [1.0] * len(ratios))
    assert ratio.low is not None and ratio.high is not None
    return ratio.value, ratio.low, ratio.high


def summary(found: Sequence[Figures]) -> list[str]:
    large = [one for one in found if one.bound > LARGE_BOUND]
    shares = [one.share_of_bound[0] for one in large if one.share_of_bound is not None]
    errors = [100 * (one.forecast - fmean(one.reached[one.best])) for one in found]
    above = [one for one in found if fmean(one.reached[one.best]) > one.bound]
    lines = [
        f"{len(found)} places; intervals: {CONFIDENCE:.0%}, over {len(found[0].bounds)} repeats, for each figure alone",
        f"forecast less reached: mean {fmean(errors):+.2f} points of throughput, from {min(errors):+.2f} to "
        f"{max(errors):+.2f}, mean size {fmean(map(abs, errors)):.2f}",
        f"reached above the bound by its mean: {len(above)} places, significantly: "
        f"{sum(one.over_bound.significant and one.over_bound.value > 1 for one in found)}",
    ]
    if shares:
        lines.append(
            f"{len(large)} places with a bound above {LARGE_BOUND:.0%}: {min(shares):.0%} to {max(shares):.0%} of it "
            f"reached, mean {fmean(shares):.0%}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
