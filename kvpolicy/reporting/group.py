"""Traces of one machine, model and link with their findings: a section of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvpolicy.evaluation.displacements import Displacements
from kvpolicy.headroom import Headroom
from kvpolicy.reporting.findings import Finding
from kvpolicy.reporting.measurements import Material
from kvpolicy.reporting.model_section import Learned
from kvpolicy.trace import Header


@dataclass(frozen=True, slots=True)
class Group:
    """Traces of one machine, model and link."""

    name: str
    """The link; with machine and model where the groups differ in these."""
    folders: tuple[Path, ...]
    material: Material
    findings: tuple[Finding, ...]
    missing: tuple[tuple[str, str], ...]
    """Figures that these traces cannot fill, each with the reason."""
    learned: Learned
    headrooms: Mapping[str, Headroom] = field(default_factory=dict)
    """What there was to win in the runs served under recompute, by state."""
    displacements: Displacements | None = None
    """Requests that an order of service displaced; None where none is recorded."""

    def findings_of(self, figure: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.figure == figure)

    @property
    def answers(self) -> dict[str, int]:
        counts = Counter(finding.evidence.answer for finding in self.findings)
        return {answer: counts[answer] for answer in ("yes", "no", "cannot tell")}

    def verdict(self) -> str:
        """Counts of the answers, as one sentence."""
        if not self.findings:
            return "These traces fill none of the study's figures."
        yes, no, open_ = self.answers.values()
        tested = f"{len(self.findings)} statements of the study can be tested with these traces"
        outcome = f"{yes} {'holds' if yes == 1 else 'hold'} here, {no} {'does' if no == 1 else 'do'} not"
        undecided = f", {open_} {'is' if open_ == 1 else 'are'} undecided" if open_ else ""
        return f"{tested}: {outcome}{undecided}."


def link_name(header: Header) -> str:
    """The link in words."""
    link = header.link
    if link["kind"] == "native":
        return "native link"
    if link["kind"] == "simulated":
        return f"simulated link, {link['bytes_per_s'] / 1e9:.3g} GB/s and {1e3 * link['latency_s']:.3g} ms"
    return f"{link['kind']} link"
