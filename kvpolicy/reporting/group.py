"""Traces of one machine, model and link, with what was found in them: the report has a section for each group."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.reporting.findings import Finding
from kvpolicy.reporting.measurements import Material
from kvpolicy.reporting.model_section import Learned
from kvpolicy.trace import Header


@dataclass(frozen=True, slots=True)
class Group:
    """Traces of one machine, model and link."""

    name: str
    """The link, and what else tells groups apart."""
    folders: tuple[Path, ...]
    material: Material
    findings: tuple[Finding, ...]
    missing: tuple[tuple[str, str], ...]
    """Figures these traces cannot fill, and why."""
    learned: Learned

    def of(self, figure: str) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.figure == figure)

    @property
    def answers(self) -> dict[str, int]:
        counted = Counter(one.evidence.answer for one in self.findings)
        return {answer: counted[answer] for answer in ("yes", "no", "cannot tell")}

    def verdict(self) -> str:
        """In one sentence."""
        if not self.findings:
            return "These traces fill none of the study's figures."
        yes, no, open_ = self.answers.values()
        tested = f"{len(self.findings)} statements of the study can be tested with these traces"
        told = f"{yes} {'holds' if yes == 1 else 'hold'} here, {no} {'does' if no == 1 else 'do'} not"
        return f"{tested}: {told}{f', {open_} cannot be told either way' if open_ else ''}."


def link_name(header: Header) -> str:
    """For a person."""
    link = header.link
    if link["kind"] == "native":
        return "native link"
    if link["kind"] == "simulated":
        return f"simulated link, {link['bytes_per_s'] / 1e9:.3g} GB/s and {1e3 * link['latency_s']:.3g} ms"
    return f"{link['kind']} link"
