"""Results of the demo, as a table for reading and as the content of demo.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpolicy.datasets.threshold import BEST_THRESHOLD
from kvpolicy.stats import Ratio
from kvpolicy_vllm.bench.exactness import Comparison

WIDTH = 140


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Results over one link."""

    name: str
    """``native`` or ``simulated``."""
    link: Mapping[str, Any]
    """As a trace's header names it."""
    policies: Mapping[str, Mapping[str, Any]]
    """By arm; see :func:`kvpolicy_vllm.bench.overload.summary`."""
    ratios: Mapping[str, Ratio]
    no_pressure_ratio: Ratio
    """Throughput with the plugin over throughput without it, where no request is preempted."""
    no_pressure_preemptions: int
    evaluate: Mapping[str, Any]
    train: Mapping[str, Any]
    comparison: Comparison
    targets: Mapping[str, Any]
    """Targets of the goodput, and their origin."""
    workload: Mapping[str, Any]
    makespan_s: Mapping[str, tuple[float, ...]]
    """Makespans of the blocks, by arm."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "link": dict(self.link),
            "policies": {arm: dict(values) for arm, values in self.policies.items()},
            "ratios": {name: ratio.to_dict() for name, ratio in self.ratios.items()},
            "no_pressure_ratio": self.no_pressure_ratio.to_dict(),
            "no_pressure_preemptions": self.no_pressure_preemptions,
            "evaluate": dict(self.evaluate),
            "train": dict(self.train),
            "exact": self.comparison.exact,
            "exactness": {
                "tokens": self.comparison.tokens,
                "ties": self.comparison.ties,
                "wrong": list(self.comparison.wrong),
            },
            "targets": dict(self.targets),
            "workload": dict(self.workload),
            "makespan_s": {arm: list(values) for arm, values in self.makespan_s.items()},
        }

    def title(self) -> str:
        if self.link["kind"] == "native":
            return "native link"
        return f"SIMULATED link: {self.link['bytes_per_s']:g} bytes/s, {self.link['latency_s']:g} s latency"

    def table(self) -> Table:
        table = Table(title=f"overload, {self.title()}", title_justify="left")
        table.add_column("arm")
        columns = ("tok/s", "goodput/s", "TTFT s p50", "p99", "ITL ms mean", "p99", "recompute", "swap")
        for column in (*columns, "recomputed tokens", "moved MB"):
            table.add_column(column, justify="right")
        for arm, values in self.policies.items():
            ttft_s, itl_s, preemptions = values["ttft_s"], values["itl_s"], values["preemptions"]
            table.add_row(
                arm,
                f"{values['throughput_tok_s']:.0f}",
                f"{values['goodput']:.2f}",
                f"{ttft_s['p50']:.2f}",
                f"{ttft_s['p99']:.2f}",
                f"{itl_s['mean'] * 1e3:.2f}",
                f"{itl_s['p99'] * 1e3:.1f}",
                str(preemptions["recompute"]),
                str(preemptions["swap"]),
                str(values["recomputed_tokens"]),
                f"{values['moved_bytes'] / 1e6:.0f}",
            )
        return table

    def lines(self) -> list[str]:
        runs = next(iter(self.policies.values()))["runs"]
        lines = [f"{name}: {_ratio_text(ratio)}" for name, ratio in self.ratios.items()]
        lines.append(f"throughput without pressure, plugin on / off: {_ratio_text(self.no_pressure_ratio)}")
        if self.no_pressure_preemptions:
            lines.append(f"  (yet with {self.no_pressure_preemptions} preemptions)")
        lines.append(f"in brackets: 95% intervals, bootstrap over {runs} paired blocks")
        if self.train["always_wins"]:
            lines.append(
                f"{self.train['always_wins']} cost less in every measured state: the learned policy is constant"
            )
        lines.append(self._threshold_line())
        comparison = self.comparison
        verdict = "exact" if comparison.exact else "NOT EXACT"
        lines.append(
            f"{verdict}: {comparison.tokens} tokens compared with runs with enough memory, {comparison.ties} ties"
        )
        return lines + [f"  {difference}" for difference in comparison.wrong[:10]]

    def _threshold_line(self) -> str:
        """What the best threshold is, and whether the learned policy served more than it."""
        rule = self.train["best_threshold"]
        arm = BEST_THRESHOLD if BEST_THRESHOLD in self.policies else rule
        ratio = self.ratios[f"throughput learned / {arm}"]
        better = ratio.significant and ratio.value > 1
        return f"{BEST_THRESHOLD} on the training states: {rule}; the learned policy's throughput is " + (
            "better" if better else "no better"
        )


def _ratio_text(ratio: Ratio) -> str:
    """The ratio with its interval; called a tie where that includes 1, so that neither arm is ahead."""
    if ratio.significant:
        return ratio.text()
    return f"tie ({ratio.value:.3f}, {ratio.low:.3f} to {ratio.high:.3f})"


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All links, the native one first."""

    links: tuple[LinkReport, ...]
    out: str
    """Path of demo.json."""

    @property
    def exact(self) -> bool:
        return all(link.comparison.exact for link in self.links)

    def to_dict(self) -> dict[str, Any]:
        """One object per link, by its name."""
        return {link.name: link.to_dict() for link in self.links}

    def text(self) -> str:
        buffer = StringIO()
        console = Console(file=buffer, width=WIDTH, highlight=False, markup=False)
        for link in self.links:
            console.print(link.table())
            for line in link.lines():
                console.print(line)
            console.print()
        if len(self.links) == 1:
            console.print("no simulated link: over the native one swap does not cost less at the median length")
        console.print(f"written to {self.out}")
        return buffer.getvalue()
