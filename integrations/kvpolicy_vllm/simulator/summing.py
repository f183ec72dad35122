"""What a run came to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvpolicy.events import KINDS
from kvpolicy.simulator import Summary, Tail


class Sums:
    """Adds up."""

    def __init__(self) -> None:
        self._steps = 0
        self._arrived: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._e2e: list[float] = []
        self._ttft: list[float] = []
        self._itl: list[float] = []
        self._tokens = 0
        self._first_s: float | None = None
        self._end_s = 0.0
        self._totals: Mapping[str, float] = {}

    def step(self, computes: bool) -> None:
        self._steps += computes

    def arrived(self, name: str, at_s: float) -> None:
        self._arrived[name] = at_s
        self._first_s = at_s if self._first_s is None else min(self._first_s, at_s)

    def token(self, name: str, at_s: float) -> None:
        last = self._last.get(name)
        if last is None:
            self._ttft.append(at_s - self._arrived[name])
        else:
            self._itl.append(at_s - last)
        self._last[name] = self._end_s = at_s
        self._tokens += 1

    def finished(self, name: str) -> None:
        self._e2e.append(self._last.pop(name) - self._arrived.pop(name))

    def count(self, totals: Mapping[str, float]) -> None:
        self._totals = totals

    def summary(self, wall_s: float) -> Summary:
        makespan = self._end_s - (self._first_s or 0.0)
        return Summary(
            requests=len(self._e2e),
            throughput_tok_s=self._tokens / makespan if makespan else 0.0,
            e2e_s=_tail(self._e2e),
            ttft_s=_tail(self._ttft),
            itl_s=_tail(self._itl),
            preemptions={kind: int(self._sum("preemptions", f"executed={kind}")) for kind in KINDS},
            recomputed_tokens=int(self._sum("recomputed_tokens")),
            moved_bytes=int(self._sum("copy_bytes")),
            makespan_s=makespan,
            steps=self._steps,
            simulator_wall_s=wall_s,
        )

    def _sum(self, name: str, *labels: str) -> float:
        return sum(v for k, v in self._totals.items() if k.split("|")[0] == name and set(labels) <= set(k.split("|")))


def _tail(values: list[float]) -> Tail:
    if not values:
        return Tail(0.0, 0.0, 0.0)
    return Tail(float(np.mean(values)), float(np.quantile(values, 0.5)), float(np.quantile(values, 0.99)))
