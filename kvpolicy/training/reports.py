"""Reports of trained and transferred cost models: their figures as values and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvpolicy.attribution.step_work import BatchPrices
from kvpolicy.cost.model import FittedModel
from kvpolicy.datasets.quality import DataQuality
from kvpolicy.datasets.threshold import Difference
from kvpolicy.events import KINDS, Kind
from kvpolicy.training.error_by_count import ErrorByCount
from kvpolicy.training.importance_weights import MAX_WEIGHT, Average


def report_values(report: Any) -> dict[str, Any]:
    """The fields of a report as plain values, without the model: its digest identifies it."""
    return {name: value for name, value in asdict(replace(report, model=None)).items() if name != "model"}


@dataclass(frozen=True, slots=True)
class TrainReport:
    """A trained model, with the figures that say how far to trust it."""

    model: FittedModel
    out: str
    """The model's folder; empty if it was not stored."""
    family: str
    digest: str
    training_states: int
    held_out_states: int
    held_out: Mapping[str, Any]
    """See :func:`kvpolicy.training.fit.held_out_scores`."""
    trees: Mapping[Kind, int]
    variation: float | None
    """Variation between identical undisturbed windows, of the worst core; None if a forced trace does not hold it."""
    floor_s: Mapping[Kind, float]
    below_floor: Mapping[Kind, int]
    """Training states whose measured median was under the floor."""
    natural_preemptions: int
    natural_outside: Mapping[str, float]
    """Per feature, the share of natural preemptions outside the trained range."""
    natural_extrapolated: float | None
    """Share of natural preemptions whose prediction depends on such a feature; None without natural preemptions."""
    always_wins: Kind | None
    left_out: Mapping[str, int]
    notes: tuple[str, ...]
    floor: DataQuality
    """Quality of the costs that the training traces hold."""
    replaced: bool
    """Whether the folder held a model before."""
    prices: BatchPrices
    """What a recomputed token costs beside the measured batches, over a decoded one."""
    best_threshold: str
    """Policy with the lowest cost over the training states that decides by length alone."""
    against_threshold: Difference
    """The model compared with it on the held-out states."""

    def to_dict(self) -> dict[str, Any]:
        return report_values(self)

    def text(self) -> str:
        lines = [
            f"cost model {self.out or 'in memory'} ({self.family}), digest {self.digest[:12]}",
            *(["replaces the cost model that was there"] if self.replaced else []),
            f"states: {self.training_states} trained on, {self.held_out_states} held out",
            "",
            "held-out error, |log(measured / predicted)| of a state's median:",
            f"  {'option':<10} {'mean':>7} {'p90':>7} {'bias':>7} {'formula alone':>14} {'trees':>6}",
        ]
        for kind in KINDS:
            score = self.held_out[kind]
            lines.append(
                f"  {kind:<10} {score['mean_error']:>7.1%} {score['p90_error']:>7.1%} {score['bias']:>+7.1%} "
                f"{score['law_mean_error']:>14.1%} {self.trees[kind]:>6}"
            )
        lines += [
            "",
            f"best threshold on the training states: {self.best_threshold}; on the held-out states",
            f"  {self.against_threshold.text()}",
        ]
        lines += ["", *self._coverage_lines(), *self._beyond_lines(), *self._delay_lines()]
        lines += ["", *self._noise_lines(), *self._natural_lines()]
        if self.always_wins:
            lines.append(f"{self.always_wins} costs less in every state: here always choosing it is optimal")
        lines.append(self.prices.sentence())
        lines += [f"left out: {count} {reason}" for reason, count in self.left_out.items() if count]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _coverage_lines(self) -> list[str]:
        lines = ["coverage of the 90% interval on held-out states [95% confidence interval]:"]
        for quantity, coverage in self.held_out["coverage"].items():
            for row in [coverage, *(coverage["bins"] if len(coverage["bins"]) > 1 else [])]:
                holds = "-" if row["holds"] is None else f"{row['holds']:.0%}"
                counts = f"{holds:>4} of {row['states']:<4} [{row['low']:.0%}, {row['high']:.0%}]"
                lines.append(f"  {quantity:<10} {_span(row):<34} {counts}")
        return lines

    def _beyond_lines(self) -> list[str]:
        lines = ["90% interval holds beyond the range, by fits to short training states tested on longer ones:"]
        for quantity, coverage in self.held_out["beyond"].items():
            for name, row in {
                "all": coverage,
                "up to 2x the edge": coverage["up_to_2x"],
                "from 2x": coverage["from_2x"],
            }.items():
                holds = "unknown" if row["holds"] is None else f"{row['holds']:.0%} of {row['states']}"
                lines.append(f"  {quantity:<10} {name:<34} {holds} [{row['low']:.0%}, {row['high']:.0%}]")
        return lines

    def _delay_lines(self) -> list[str]:
        return [
            f"victim delay, {kind}: {score['mean_error']:.1%} mean error, bias {score['bias']:+.1%}"
            for kind, score in self.held_out["victim_delay"].items()
        ]

    def _noise_lines(self) -> list[str]:
        noise = "unknown" if self.variation is None else f"{self.variation:.1%} between identical undisturbed windows"
        lines = [f"noise: {noise}"]
        for kind in KINDS:
            line = f"  {kind}: costs under {self.floor_s[kind] * 1e3:.3g} ms cannot be distinguished from zero"
            if self.below_floor[kind]:
                line += f"; {self.below_floor[kind]} states measured less and count as that much"
            if self.below_floor[kind] > self.training_states / 2:
                line += f": most costs of {kind} are below that, so that its scores mean little"
            lines.append(line)
        return lines + self.floor.lines()

    def _natural_lines(self) -> list[str]:
        if self.natural_extrapolated is None:
            return ["natural preemptions: none in these traces; the model was not trained on memory pressure"]
        lines = [
            f"natural preemptions: {self.natural_preemptions}, "
            f"{self.natural_extrapolated:.1%} outside the trained range of a feature that predictions depend on"
        ]
        return lines + [f"  {name}: {share:.1%} outside" for name, share in self.natural_outside.items() if share]


def _span(row: Mapping[str, Any]) -> str:
    """Tokens and running requests of a bin, as text."""
    if "tokens_from" not in row:
        return "all"
    sides = [
        f"{name} {row[f'{name}_from'] or 0:g}" + ("+" if row[f"{name}_below"] is None else f"-{row[f'{name}_below']:g}")
        for name in ("tokens", "running")
    ]
    return ", ".join(sides)


@dataclass(frozen=True, slots=True)
class LogTrainReport:
    """A model trained from logs, with the figures that say how far to trust it."""

    model: FittedModel
    out: str
    """The model's folder; empty if it was not stored."""
    family: str
    digest: str
    records: Mapping[Kind, int]
    """Training records."""
    held_out_records: int
    held_out: Mapping[str, Any]
    """See :func:`kvpolicy.training.log_fits.held_out_scores`."""
    trees: Mapping[Kind, int]
    clipped: Mapping[Kind, int]
    """Training records whose weight was clipped."""
    min_chance: Mapping[Kind, float]
    averages: Mapping[Kind, Average]
    """Mean cost over all situations of the logs, direct and doubly robust; the model was scaled where they differ."""
    best_threshold: str
    """Policy with the lowest cost over the training records, doubly robustly, that decides by length alone."""
    against_threshold: Difference | None
    """The model compared with it on the held-out records; None where these are of fewer than two requests."""
    left_out: Mapping[str, int]
    notes: tuple[str, ...]
    replaced: bool
    """Whether the folder held a model before."""

    def to_dict(self) -> dict[str, Any]:
        return report_values(self)

    def text(self) -> str:
        lines = [
            f"cost model {self.out or 'in memory'} ({self.family}), from logs, digest {self.digest[:12]}",
            *(["replaces the cost model that was there"] if self.replaced else []),
            f"records: {', '.join(f'{kind} {count}' for kind, count in self.records.items())} trained on, "
            f"{self.held_out_records} of other requests held out",
            "held-out error of single preemptions, |log(measured / predicted)|, weighted by 1 / chance:",
            f"  {'option':<10} {'mean':>7} {'bias':>7} {'formula alone':>14} {'trees':>6}  90% interval holds",
        ]
        for kind in KINDS:
            score = self.held_out.get(kind)
            if score is None:
                lines.append(f"  {kind:<10} no record was held out")
                continue
            coverage = score["coverage"]
            holds = f"{coverage['holds']:.0%} of {coverage['states']} [{coverage['low']:.0%}, {coverage['high']:.0%}]"
            lines.append(
                f"  {kind:<10} {score['mean_error']:>7.1%} {score['bias']:>+7.1%} {score['law_mean_error']:>14.1%} "
                f"{self.trees[kind]:>6}  {holds}"
            )
        for kind in KINDS:
            lines.append(
                f"{kind}: lowest logged probability {self.min_chance[kind]:.3g}; {self.clipped[kind]} of "
                f"{self.records[kind]} records stand for more than {MAX_WEIGHT:g} situations and count as that many"
            )
        for kind in KINDS:
            mean = self.averages[kind]
            lines.append(
                f"{kind}: over all situations {mean.direct_s * 1e3:.3g} ms by the law, {mean.robust_s * 1e3:.3g} ms "
                f"[{mean.low_s * 1e3:.3g}, {mean.high_s * 1e3:.3g}] doubly robustly"
            )
        compared = self.against_threshold
        lines += [
            f"best threshold on the training records: {self.best_threshold}; on the held-out records, doubly robustly",
            "  not compared: records of two requests or more are needed"
            if compared is None
            else f"  {compared.text()}",
        ]
        lines += [f"left out: {count} {reason}" for reason, count in self.left_out.items() if count]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class CalibrateReport:
    """A model transferred to another machine, link or LLM, with its error by number of measured states."""

    model: FittedModel
    out: str
    """The model's folder; empty if it was not stored."""
    source: str
    digest: str
    states: int
    held_out_states: int
    errors: tuple[ErrorByCount, ...]
    """Held-out error by number of measured states; empty if there were too few states to hold some out."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return report_values(self)

    def text(self) -> str:
        lines = [
            f"cost model {self.out or 'in memory'}, digest {self.digest[:12]}: "
            f"{self.source} transferred with {self.states} states"
        ]
        if self.errors:
            lines += [
                f"held-out error on {self.held_out_states} states, |log(measured / predicted)| of a state's median, by "
                f"number of measured states; mean (and worst) of {max(row.draws for row in self.errors)} draws:",
                f"  {'states':>6} " + " ".join(f"{kind:>18}" for kind in KINDS),
            ]
        for row in self.errors:
            shown = (f"{row.mean_error[kind]:.1%} ({row.worst_draw[kind]:.1%})" for kind in KINDS)
            lines.append(f"  {row.states:>6} " + " ".join(f"{text:>18}" for text in shown))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
