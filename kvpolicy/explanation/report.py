"""An explanation as text and as a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf
from typing import Any

from kvpolicy.events import SITUATION_FIELDS, Kind, Preemption, as_row
from kvpolicy.explanation.boundary import BreakEven, Grid
from kvpolicy.explanation.breakdown import Breakdown, time_text
from kvpolicy.explanation.choice import PolicyChoice
from kvpolicy.explanation.drivers import drivers_of
from kvpolicy.explanation.question import ResolvedQuestion
from kvpolicy.json_values import finite
from kvpolicy.policy import Objective
from kvpolicy.policy.cheapest import lowest

MAX_SHOWN = 6
"""The text lists up to this many turns one by one; the dictionary always has all of them."""
SIGNS: Mapping[tuple[bool, bool], str] = {
    (False, True): "R", (False, False): "r", (True, True): "S", (True, False): "s",
}  # fmt: skip
"""Letter of the grid, by whether swap is cheaper and whether that is certain."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Both costs of one situation, and why one of them is lower."""

    cost_model: str
    family: str
    objective: Objective
    question: ResolvedQuestion
    breakdowns: tuple[Breakdown, Breakdown]
    """Of recompute and of swap."""
    break_even: BreakEven
    grid: Grid
    notes: tuple[str, ...]
    choice: PolicyChoice | None = None
    """Choice of a policy, where one was given."""
    not_drawn: str = ""
    """Why a requested plot was not drawn; empty otherwise."""

    @property
    def drivers(self) -> tuple[str, ...]:
        """What drove the choice; see :func:`drivers_of`."""
        return drivers_of(self.breakdowns, self.objective)

    @property
    def chosen(self) -> Kind:
        return self.breakdowns[lowest([breakdown.cost for breakdown in self.breakdowns], self.objective)].kind

    def to_dict(self) -> dict[str, Any]:
        """For JSON: infinite bounds are null."""
        values = {
            "cost_model": self.cost_model,
            "family": self.family,
            "objective": self.objective.text,
            "situation": {name: as_row(self.question.situation)[name] for name in SITUATION_FIELDS if name != "time_s"},
            "assumed": list(self.question.assumed),
            "chosen": self.chosen,
            "drivers": list(self.drivers),
            "options": [breakdown.to_dict() for breakdown in self.breakdowns],
            "break_even": self.break_even.to_dict(),
            "grid": self.grid.to_dict(),
            "notes": list(self.notes),
        }
        if self.choice is not None:
            values["policy"] = self.choice.to_dict()
        finite_values: dict[str, Any] = finite(values)
        return finite_values

    def text(self) -> str:
        # Where nothing was learned for either option, the reasons say so once.
        learned = any(breakdown.residual_factor != 1 for breakdown in self.breakdowns)
        parts = ["\n".join(_breakdown_lines(breakdown, learned)) for breakdown in self.breakdowns]
        blocks = ["\n".join(self._head()), *parts]
        blocks += ["\n".join(self._why()), "\n".join(self._map())]
        if self.choice is not None:
            blocks.append("\n".join([*self.choice.lines(), *_break_even_lines(self.choice.turns)]))
        if self.notes:
            blocks.append("\n".join(f"note: {note}" for note in self.notes))
        return "\n\n".join(blocks)

    def _head(self) -> list[str]:
        situation = self.question.situation
        load_text = (
            f"beside {situation.running_requests} running ({situation.batch_tokens} tokens)"
            if situation.running_requests
            else "with no other request running"
        )
        return [
            f"{situation.computed_tokens} tokens in {situation.held_blocks} blocks of {situation.block_size} "
            f"({situation.copy_bytes / 2**20:.3g} MiB, {situation.shared_blocks} shared{_expected(situation)}), "
            f"{load_text}, "
            f"{situation.free_blocks} blocks free{_queued(situation)}",
            f"cost model {self.cost_model} ({self.family}); minimised: {self.objective.text}",
            f"choice: {self.chosen}",
            "reasons:",
            *(f"  {line}" for line in self.drivers),
        ]

    def _why(self) -> list[str]:
        recompute, swap = self.breakdowns
        low, high = swap.cost.log_ratio_low, swap.cost.log_ratio_high
        ratio = swap.cost.engine_s / recompute.cost.engine_s
        doubt = "not significant" if low <= 0 <= high else "significant: the interval excludes 1"
        lines = [
            f"swap / recompute: {ratio:.3g} (90% interval {_exp(low)} to {_exp(high)}); {doubt}",
        ]
        return lines + _break_even_lines(self.break_even, self.question.situation.block_size)

    def _map(self) -> list[str]:
        """The choice over lengths and loads as letters, highest load first."""
        grid, width = self.grid, len(str(self.grid.running[-1]))
        lines = [
            "choice over tokens and running requests: R recompute, S swap; lower case where not significant",
            "across: tokens of the victim, evenly in their logarithm; upwards: other running requests",
        ]
        for load in reversed(range(len(grid.running))):
            signs = [SIGNS[ratio < 0, sure] for ratio, sure in zip(grid.log_ratio[load], grid.sure[load], strict=True)]
            lines.append(f"{grid.running[load]:>{width}} |{''.join(signs)}")
        first, last = str(grid.tokens[0]), f"{grid.tokens[-1]} tokens"
        lines.append(f"{'':>{width}}  {first}{last:>{max(len(last) + 1, len(grid.tokens) - len(first))}}")
        return lines


def _expected(situation: Preemption) -> str:
    """What survives beyond the shared blocks, and what is saved unless it is all."""
    survive = (
        f", {situation.hit_blocks:g} expected to survive" if situation.hit_blocks > situation.shared_blocks else ""
    )
    save = f", {situation.save_blocks:g} to be saved" if situation.save_blocks != situation.held_blocks else ""
    return survive + save


def _break_even_lines(even: BreakEven, block_size: int = 0) -> list[str]:
    """``block_size``: where costs alone choose, so that a turn back at a block's first token is that block's copy."""
    turns = _turns(even, block_size)
    if not even.turns:
        return [f"break-even at this load: none up to {even.up_to_tokens} tokens, always {even.first}", *turns]
    return turns


def _turns(even: BreakEven, block_size: int) -> list[str]:
    """A line for each turn or, where there are many, one line with the first and the last."""
    lines = []
    if len(even.turns) > MAX_SHOWN:
        first, last = even.turns[0], even.turns[-1]
        suffix = " (partly extrapolated)" if any(turn.extrapolated for turn in even.turns) else ""
        lines.append(
            f"break-even at this load: {even.first} below {first.tokens} tokens, {last.to} from {last.tokens} on; "
            f"between them the choice changes {len(even.turns) - 2} more times{suffix}, since whole blocks are copied"
        )
    else:
        for turn in even.turns:
            another_block = block_size and turn.to == "recompute" and (turn.tokens - 1) % block_size == 0
            suffix = " (one more block to copy)" if another_block else ""
            suffix += " (extrapolated)" if turn.extrapolated else ""
            lines.append(f"break-even at this load: {turn.to} from {turn.tokens} tokens on{suffix}")
    if even.every_up_to < even.up_to_tokens:
        lines.append(
            f"every length up to {even.every_up_to} was checked; above, only block edges up to {even.widest_gap} "
            "tokens apart, between which the choice may change and change back"
        )
    return lines


def _queued(situation: Preemption) -> str:
    queues = (("saved", situation.queued_save_bytes), ("loaded", situation.queued_load_bytes))
    return "".join(f", {size / 2**20:.3g} MiB queued to be {direction}" for direction, size in queues if size)


def _breakdown_lines(breakdown: Breakdown, learned: bool) -> list[str]:
    cost = breakdown.cost
    interval = f"{time_text(cost.low_s)} to {time_text(cost.high_s)}"
    lines = [
        f"{breakdown.kind}: {time_text(cost.engine_s)} (90% interval {interval})",
        f"  save {time_text(cost.save_s)}, load {time_text(cost.load_s)}, recompute {time_text(cost.recompute_s)}",
        f"  others wait {time_text(cost.stall_s, 'request-')}"
        + ("" if cost.victim_delay_s is None else f"; the victim is back after {time_text(cost.victim_delay_s)}"),
        f"  physics {time_text(breakdown.law_s)}"
        + (f", below the noise floor of the traces: {time_text(breakdown.floor_s)} used" if breakdown.floored else "")
        + (_learned(breakdown) if learned else ""),
    ]
    if len(breakdown.beyond) > 1 and not any(feature.low or feature.high for feature in breakdown.beyond):
        return [*lines, "  extrapolated: untrained, so that no feature has a range that was measured"]
    for feature in breakdown.beyond:
        lines.append(
            f"  extrapolated: {feature.feature} is {feature.value:g}, trained on {feature.low:g} to {feature.high:g}"
        )
    return lines


def _learned(breakdown: Breakdown) -> str:
    if breakdown.residual_factor == 1:
        return "; no learned correction here"
    what = "held at the edge of the trained range" if breakdown.beyond else "learned"
    return f", times {breakdown.residual_factor:.3g} {what}"


def _exp(value: float) -> str:
    return "unbounded" if value == inf else f"{exp(value):.3g}"
