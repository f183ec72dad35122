"""What a demo found, as text and as JSON: two scenarios, the headline that was fixed beforehand, where it pays.

The demo on live engines and the one without an engine both fill it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from kvpolicy.headroom import Headroom, share_text
from kvpolicy.json_values import finite
from kvpolicy.stats import Ratio, student_ratio
from kvpolicy.study.report import aligned

TITLES: Mapping[str, str] = {
    "TTFT": "TTFT s",
    "urgent TTFT": "urgent TTFT s",
    "urgent TTFT p99": "its p99 s",
    "e2e per token": "s per output token",
    "e2e": "e2e s",
    "e2e p99": "its p99 s",
    "tok/s": "tokens/s",
    "batch tok/s": "batch tokens/s",
    "batch e2e": "batch e2e s",
}
"""Figures and the heads of their columns."""
WORDS: Mapping[str, str] = {
    "TTFT": "mean time to first token",
    "urgent TTFT": "mean time to first token of the urgent",
    "urgent TTFT p99": "its 99th percentile",
    "e2e per token": "time per output token",
    "e2e": "mean end-to-end time",
    "e2e p99": "99th percentile of the end-to-end time",
    "tok/s": "tokens/s",
    "batch tok/s": "tokens/s of the batch",
    "batch e2e": "mean end-to-end time of the batch",
}
"""The same in sentences."""
MORE_IS_BETTER = ("tok/s", "batch tok/s")
DEMO_JSON = "demo.json"
STOCK_ORDERS = ("fcfs", "priority")
"""Stock vLLM's own, for one class and for two."""
BETTER, WORSE, OPEN = "better", "worse", "open"


@dataclass(frozen=True, slots=True)
class ScenarioReport:
    """One load, served by several arms in alternating rounds."""

    name: str
    served: str
    """What was served, in a line."""
    headline: str
    """The figure that decides, one of :data:`TITLES`."""
    arms: Mapping[str, str]
    """What each arm is, by its name. The first one is stock vLLM; the last one is what the headline judges."""
    figures: Mapping[str, Mapping[str, Sequence[float]]]
    """By arm and figure: one value per round, the same requests in a round for all arms."""
    policies: Mapping[str, Mapping[str, Any]]
    """Summary of each arm over its rounds."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the JSON."""

    @property
    def stock(self) -> str:
        return next(iter(self.arms))

    @property
    def judged(self) -> str:
        return list(self.arms)[-1]

    @property
    def rounds(self) -> int:
        return len(self.figures[self.stock][self.headline])

    def ratio(self, figure: str, arm: str) -> Ratio:
        """The arm over stock vLLM, over rounds."""
        return student_ratio(list(self.figures[arm][figure]), list(self.figures[self.stock][figure]))

    def verdict(self, figure: str, arm: str) -> str:
        """:data:`BETTER` or :data:`WORSE` than stock vLLM, or :data:`OPEN` where the interval holds 1."""
        ratio = self.ratio(figure, arm)
        if not ratio.significant:
            return OPEN
        return BETTER if (ratio.value > 1) == (figure in MORE_IS_BETTER) else WORSE

    def verdicts(self, arm: str, verdict: str) -> list[str]:
        """The figures of which that is the verdict, the headline first."""
        figures = sorted(self.figures[arm], key=lambda figure: figure != self.headline)
        return [figure for figure in figures if self.verdict(figure, arm) == verdict]

    @property
    def others(self) -> list[str]:
        """All arms but stock vLLM."""
        return list(self.arms)[1:]

    def decided(self, arm: str) -> bool:
        """Whether the arm's headline figure is better than stock vLLM's."""
        return self.verdict(self.headline, arm) == BETTER

    def phrase(self, figure: str, arm: str) -> str:
        return f"{WORDS[figure]} x{ratio_text(self.ratio(figure, arm))}"

    def phrases(self, arm: str, verdict: str) -> str:
        """All figures of the arm with that verdict, with their ratios."""
        return ", ".join(self.phrase(figure, arm) for figure in self.verdicts(arm, verdict))

    def to_dict(self) -> dict[str, Any]:
        ratios = {
            f"{figure} {arm} / {self.stock}": self.ratio(figure, arm).to_dict()
            for arm in self.others
            for figure in self.figures[arm]
        }
        return {
            "served": self.served,
            "arms": dict(self.arms),
            "figures": {arm: {name: list(one) for name, one in own.items()} for arm, own in self.figures.items()},
            "policies": {arm: dict(values) for arm, values in self.policies.items()},
            "ratios": ratios,
            **self.details,
        }

    def rows(self) -> list[list[str]]:
        """The table: a head, stock vLLM's means, and each other arm's ratios over them."""
        figures = sorted(self.figures[self.stock], key=lambda figure: figure != self.headline)
        rows = [["arm", *(TITLES[figure] for figure in figures), "preempted, swapped"]]
        for arm in self.arms:
            own = self.figures[arm]
            shown = [
                f"{fmean(own[figure]):.3g}" if arm == self.stock else f"x{ratio_text(self.ratio(figure, arm))}"
                for figure in figures
            ]
            preemptions = self.policies[arm]["preemptions"]
            rows.append([arm, *shown, f"{sum(preemptions.values())}, {preemptions['swap']}"])
        return rows

    def lines(self) -> Iterator[str]:
        yield from (self.name, self.served, *aligned(self.rows()))
        yield f"first row: means; below: ratios over it, with 95% intervals over {self.rounds} rounds"
        for arm in self.others:
            if figures := self.verdicts(arm, OPEN):
                yield f"could not be told: {arm}: {', '.join(WORDS[figure] for figure in figures)}"


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Both scenarios, and what preemptions cost on the machine."""

    kind: str
    """``live`` or ``offline``."""
    scenarios: tuple[ScenarioReport, ...]
    bound: Headroom
    """What there was to win by choosing between recompute and swap, in the first scenario under stock vLLM."""
    seconds: Mapping[str, float]
    """By phase."""
    out: str
    """Folder."""
    exactness: Mapping[str, Any] | None = None
    """Tokens compared with stock vLLM's, ties and differences; None where no tokens were generated."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the JSON."""
    notes: Sequence[str] = ()
    """Texts that come first."""

    @property
    def exact(self) -> bool | None:
        return None if self.exactness is None else bool(self.exactness["exact"])

    @property
    def ok(self) -> bool:
        return self.exact is not False

    def headline(self) -> list[dict[str, Any]]:
        """One entry per scenario."""
        return [
            {
                "name": f"{one.name}: {WORDS[one.headline]}, {one.judged} over {one.stock}",
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            }
            for one in self.scenarios
            for ratio in [one.ratio(one.headline, one.judged)]
        ]

    def to_dict(self) -> dict[str, Any]:
        whole: dict[str, Any] = finite(
            {
                "kind": self.kind,
                "headline": self.headline(),
                "where": self.where(),
                "bound": self.bound.to_dict() | {"sentence": self.bound.sentence()},
                "seconds": {**self.seconds, "in all": sum(self.seconds.values())},
                "exact": self.exact,
                "exactness": self.exactness,
                **self.details,
                "scenarios": {one.name: one.to_dict() for one in self.scenarios},
            }
        )
        return whole

    def where(self) -> list[str]:
        """Where it pays and where it does not: sentences that follow from the figures alone."""
        arms = [(one, arm, f"{one.name} with {arm}") for one in self.scenarios for arm in one.others]
        pays = [f"{name} ({one.phrase(one.headline, arm)})" for one, arm, name in arms if one.decided(arm)]
        others = [f"{name} ({one.phrase(one.headline, arm)})" for one, arm, name in arms if not one.decided(arm)]
        costs = [f"{name} ({worse})" for one, arm, name in arms if (worse := one.phrases(arm, WORSE))]
        sentences = (
            [] if self.ok else ["NOT EXACT: an arm's tokens are not stock vLLM's, so that no figure here counts."]
        )
        sentences.append(f"It pays: {'; '.join(pays) or 'nowhere here'}.")
        if others:
            sentences.append(f"It does not pay there, or could not be told to: {'; '.join(others)}.")
        if costs:
            sentences.append(f"What it costs: {'; '.join(costs)}.")
        return sentences

    def text(self) -> str:
        lines = [line for note in self.notes for line in (note, "")]
        for one in self.scenarios:
            lines += [*one.lines(), ""]
        lines += [bound_line(self.bound), *self.where()]
        if self.exactness is not None:
            lines.append(
                f"{'exact' if self.exact else 'NOT EXACT'}: {self.exactness['tokens']} tokens compared with stock "
                f"vLLM's, {self.exactness['ties']} ties"
            )
            lines += [f"  {difference}" for difference in self.exactness["wrong"][:10]]
        phases = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.seconds.items())
        lines.append(f"seconds: {phases}; {sum(self.seconds.values()):.0f} in all")
        lines += ["", "headline, fixed beforehand:"]
        lines += [f"  {one['name']}: x{_headline_text(one)}" for one in self.headline()]
        return "\n".join([*lines, f"written to {self.out}"])


def bound_line(bound: Headroom) -> str:
    """What a preemption costs here, and what there is to win by choosing how it is served."""
    known = [
        f"{share_text(bound.tax)} of the decoded tokens were computed again" if bound.tax is not None else "",
        f"a recomputed token takes {bound.price_ratio:.2g} times a decoded one (p / d)" if bound.price_ratio else "",
        f"choosing between recompute and swap can win at most {share_text(bound.bound)} of throughput"
        if bound.bound is not None
        else bound.unknown,
    ]
    return f"preemptions here: {', '.join(filter(None, known))}"


def ratio_text(ratio: Ratio) -> str:
    """Three significant digits, with the interval in brackets."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3g} (1 round)"
    return f"{ratio.value:.3g} ({ratio.low:.3g}-{ratio.high:.3g})"


def _headline_text(entry: Mapping[str, Any]) -> str:
    return ratio_text(Ratio(entry["ratio"], entry["low"], entry["high"], 2))
