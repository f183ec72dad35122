"""Records of a log, as an estimate takes them."""

from __future__ import annotations

from kvpolicy.datasets.logs import Record
from kvpolicy.events import Kind
from tests.synthetic import situation


def record(
    tokens: int = 500, kind: Kind = "swap", chance: float = 0.5, request: str = "c/r", cost_s: float = 1.0
) -> Record:
    return Record(situation(tokens), kind, chance, cost_s, request, 0)
