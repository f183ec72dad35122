"""What a run in shadow mode says of the swaps that its policy intended, without any price of a swap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.headroom import share_text

HOUR_S = 3600.0
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IntendedSwaps:
    """Sums over the preemptions that a policy intended to swap, all of which were recomputed."""

    number: int = 0
    computed_tokens: int = 0
    """Of the victims."""
    held_blocks: int = 0
    measured: int = 0
    """Those whose recompute was measured."""
    measured_s: float = 0.0
    """What these recomputes cost: a swap that cost nothing would have saved that."""

    @classmethod
    def of(cls, swaps: Sequence[tuple[Row, Row | None]]) -> IntendedSwaps:
        """``swaps``: each decision with its outcome; None where there is none yet."""
        costs_s = [outcome["engine_s"] for _, outcome in swaps if outcome is not None]
        measured_s = [seconds for seconds in costs_s if seconds is not None]
        return cls(
            len(swaps),
            sum(row["computed_tokens"] for row, _ in swaps),
            sum(row["held_blocks"] for row, _ in swaps),
            len(measured_s),
            sum(measured_s),
        )

    def lines(self, hours: float | None, busy_hours: float | None) -> Iterator[str]:
        """``hours``: of all cores together; ``busy_hours``: of them, in steps."""
        if not self.number:
            return
        yield (
            f"of the {self.number} it intended to swap, victims had computed {self.computed_tokens:,} tokens in "
            f"{self.held_blocks:,} blocks, to be copied out and back"
        )
        if not self.measured or not hours:
            return
        share = ""
        if busy_hours:
            share = f", {share_text(max(0.0, self.measured_s) / (busy_hours * HOUR_S))} of the time in steps"
        yield (
            f"  {self.measured} of their recomputes were measured: {self.measured_s:.3g} s, or "
            f"{self.measured_s / hours:.3g} s of engine time per hour and core{share}; if swaps "
            "cost nothing, that much would have been saved"
        )
