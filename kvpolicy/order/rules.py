"""The orders that ship. Each names the paper it follows, its formula, and what it gives up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp2, floor, inf, log2, nan
from numbers import Real
from typing import Any

from kvpolicy.order.base import MAX_SHOWN, Order, OrderError, Progress, Rank, View, group_of, levels
from kvpolicy.order.grouped_lengths import GroupedLengths
from kvpolicy.order.ranks import FIRST
from kvpolicy.order.seen_lengths import BOUNDS, Lengths, level_of
from kvpolicy.order.wrapper import Wrapper


@dataclass(frozen=True, repr=False)
class Fcfs(Order):
    """First come, first served: stock vLLM. Nothing is ranked and nobody displaced."""

    name: str = "fcfs"

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank(())


@dataclass(frozen=True, repr=False)
class Priority(Order):
    """vLLM's priority scheduling: by priority, then arrival; a newcomer waits until memory is free."""

    name: str = "priority"

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((request.priority,))

    def rank_group(self, request: Progress) -> Hashable:
        return request.priority


def is_stock(order: Order, scheduling: str) -> bool:
    """Whether the order is what vLLM does by itself under this scheduling policy. One derived from it may do more."""
    return type(order) is Fcfs or (type(order) is Priority and scheduling == "priority")


@dataclass(frozen=True, repr=False)
class Urgent(Order):
    """By priority, and a more urgent request displaces less urgent ones.

    rank = priority. vLLM's priority scheduling admits by the same rank, but lets a newcomer wait until memory is free.
    Gives up the time of those displaced, and what it costs to keep or recompute their state.
    """

    name: str = "urgent"
    quantum_tokens: int = 0
    promote_s: float = inf
    cool_down_s: float = 0.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((request.priority,))

    def rank_group(self, request: Progress) -> Hashable:
        return request.priority


@dataclass(frozen=True, repr=False)
class Reserve(Order):
    """A share of memory is kept free of less urgent requests; nobody is displaced.

    rank = priority; requests of a priority above ``above`` are admitted only where ``share`` of the blocks stays free.
    Gives up that share of memory while nobody urgent comes.
    """

    name: str
    share: float
    above: int = 0

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((request.priority,))

    def rank_group(self, request: Progress) -> Hashable:
        return request.priority

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        return waiting.priority <= self.above or free_after_blocks >= self.share * view.device_blocks


@dataclass(frozen=True, repr=False)
class Mlfq(Order):
    """Multi-level feedback: who has got few tokens so far goes before who has got many.

    rank = 0 below the quantum, then 1 + floor(log2(output tokens / quantum)): the levels double. After FastServe (Wu et
    al., 2023, arXiv:2305.05920), by output tokens instead of iterations' time. Long requests stall in favour of short
    ones, unless ``promote_s`` bounds their waiting.
    """

    name: str
    quantum_tokens: int = 64
    promote_s: float = inf
    cool_down_s: float = 0.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        base, tokens = self.quantum_tokens, request.output_tokens
        if tokens < base:
            return Rank((0,), base)
        level = 1 + floor(log2(tokens / base))
        return Rank((level,), base * exp2(level))

    def rank_group(self, request: Progress) -> Hashable:
        return ()


@dataclass(frozen=True, repr=False)
class Las(Order):
    """Least attained service: who has got the fewest tokens goes first, in steps of a quantum.

    rank = floor(output tokens / quantum). After Nuyens and Wierman (2008), "The Foreground-Background queue". Among
    long requests it is processor sharing, so that all of them end late.
    """

    name: str
    quantum_tokens: int = 256
    promote_s: float = inf
    cool_down_s: float = 0.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        level = request.output_tokens // self.quantum_tokens
        return Rank((level,), (level + 1) * self.quantum_tokens)

    def rank_group(self, request: Progress) -> Hashable:
        return ()


Predictor = Callable[[Progress, Any], float]
"""Expected tokens still to come, from a request and the order's state, the lengths seen so far; below 1 counts as 1."""


def by_lengths(request: Progress, state: GroupedLengths) -> float:
    """From the lengths seen so far of its class and prompt length: the mean of what those that got further than this
    one still got."""
    seen = state.of(request.class_name, request.prompt_tokens)
    return seen.remaining(request.output_tokens, request.max_output_tokens)


def by_limit(request: Progress, state: Any) -> float:
    """As if every request went on to its limit. In a simulation, where the limit is the length, this is the truth."""
    return request.max_output_tokens - request.output_tokens


@dataclass(frozen=True, repr=False)
class Srpt(Order):
    """Shortest remaining time first, by a prediction.

    rank = level of the predicted remaining tokens; neighbouring levels differ by 25%. A running request is displaced
    only until it has got ``bound`` of its predicted length. After TRAIL (Shahout et al., 2024, arXiv:2410.01035). Long
    requests wait for all shorter ones, and a wrong prediction is served wrongly.
    """

    name: str
    predictor: Predictor = by_lengths
    bound: float = 0.8
    quantum_tokens: int = 0
    promote_s: float = inf
    cool_down_s: float = 0.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((level_of(self._left(request, view)),), _next_bound(request.output_tokens))

    def rank_group(self, request: Progress) -> Hashable:
        if self.predictor is by_limit:
            return request.max_output_tokens
        if self.predictor is by_lengths:
            return request.class_name, request.prompt_tokens, request.max_output_tokens
        return None

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        got = running.output_tokens
        return got < self.bound * (got + self._left(running, view))

    def _left(self, request: Progress, view: View) -> float:
        """The predicted tokens still to come. Raises OrderError for a prediction that is no finite number."""
        tokens: object = self.predictor(request, view.state)
        left = float(tokens) if isinstance(tokens, Real) else nan
        if not -inf < left < inf:
            raise OrderError.of(self, "the predictor", tokens, "a finite number of tokens")
        return left

    def initial_state(self) -> GroupedLengths:
        return GroupedLengths()

    def finished(self, state: GroupedLengths, request: Progress) -> GroupedLengths:
        return state.seen(request.class_name, request.prompt_tokens, request.output_tokens)


@dataclass(frozen=True, repr=False)
class Gittins(Order):
    """By the Gittins index of the lengths seen so far, per unit of KV memory; no prediction for each request.

    index = max over horizons of P(ends within it) / E[tokens of KV held x steps until then], given what the request has
    got; rank = its level, the highest index first, neighbouring levels differing by 25%. The index minimises the mean
    waiting time of jobs of unknown length (Gittins, 1979; Aalto, Ayesta and Righter, 2009), here with memory as the
    cost of a step. Everybody's first ``quantum_tokens`` come before that: without them long prompts starve.
    """

    name: str
    quantum_tokens: int = 64
    promote_s: float = inf
    cool_down_s: float = 0.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        got = request.output_tokens
        if got < self.quantum_tokens:
            return Rank((0,), self.quantum_tokens)
        index = view.state.index(request.prompt_tokens, got, request.max_output_tokens)
        return Rank((1, _level_of_cost(1.0 / index)), _next_bound(got))

    def rank_group(self, request: Progress) -> Hashable:
        return request.prompt_tokens, request.max_output_tokens

    def initial_state(self) -> Lengths:
        return Lengths()

    def finished(self, state: Lengths, request: Progress) -> Lengths:
        return state.seen(request.output_tokens)


def _level_of_cost(token_steps: float) -> int:
    """Number of the level of an index's reciprocal; neighbouring levels differ by 25%."""
    return floor(log2(token_steps) / log2(1.25))


def _next_bound(tokens: int) -> float:
    """Output tokens at which a rank by lengths is looked at again."""
    return ceil(BOUNDS[min(level_of(tokens) + 1, len(BOUNDS) - 2)]) if tokens else 2


@dataclass(frozen=True, repr=False)
class Layered(Order):
    """By ``outer``, and among its equals by ``inner``, as in urgent/mlfq: feedback within each class.

    Victims are chosen by ``inner``; a bound that both have, as quantum and cool-down, is the stricter one.
    """

    name: str
    outer: Order
    inner: Order

    def __post_init__(self) -> None:
        parts = self.outer, self.inner
        object.__setattr__(self, "displaces_by_rank", any(part.displaces_by_rank for part in parts))
        object.__setattr__(self, "quantum_tokens", max(part.quantum_tokens for part in parts))
        object.__setattr__(self, "promote_s", min(part.promote_s for part in parts))
        object.__setattr__(self, "max_victims", min(part.max_victims for part in parts))
        object.__setattr__(self, "cool_down_s", max(part.cool_down_s for part in parts))
        object.__setattr__(self, "max_held_steps", min(part.max_held_steps for part in parts))

    @property
    def max_candidates(self) -> int:
        return self.inner.max_candidates

    @property
    def holds(self) -> bool:
        return type(self).hold is not Layered.hold or self.outer.holds or self.inner.holds

    @property
    def gates(self) -> bool:
        return type(self).admits is not Layered.admits or self.outer.gates or self.inner.gates

    def rank(self, request: Progress, view: View) -> Rank:
        outer, inner = self._asked(lambda order, its_view: order.rank(request, its_view), view)
        value = self._outer_value(levels(outer.value, self.outer.rank_ratio))
        value += levels(inner.value, self.inner.rank_ratio)
        return Rank(value, min(outer.until_tokens, inner.until_tokens), min(outer.until_s, inner.until_s))

    @property
    def groups_ranks(self) -> bool:
        overridden = type(self).rank_group is not Layered.rank_group
        return super().groups_ranks and (overridden or (self.outer.groups_ranks and self.inner.groups_ranks))

    def rank_group(self, request: Progress) -> Hashable:
        groups = group_of(self.outer, request), group_of(self.inner, request)
        return None if None in groups else groups

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        outer_view, inner_view = self._views(view)
        if waiting.rank == FIRST:  # it goes before all others, whatever either order says of them
            asked = (self.outer, outer_view), (self.inner, inner_view)
            return all(part.displaces(waiting, running, its) for part, its in asked if part.displaces_by_rank)
        across = self._outer_level(waiting, outer_view) < self._outer_level(running, outer_view)
        decides, its_view = (self.outer, outer_view) if across else (self.inner, inner_view)
        return decides.displaces_by_rank and decides.displaces(waiting, running, its_view)

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return self.inner.victims(waiting, running, self._views(view)[1])

    def probability(
        self, waiting: Progress, victims: Sequence[Progress], running: Sequence[Progress], view: View
    ) -> float:
        return self.inner.probability(waiting, victims, running, self._views(view)[1])

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        """The inner order judges only those that the outer one holds equal."""
        outer_view, inner_view = self._views(view)
        own = self._outer_level(waiting, outer_view)
        equals = [victim for victim in victims if self._outer_level(victim, outer_view) == own]
        return self.outer.worth(waiting, victims, outer_view) and (
            not equals or self.inner.worth(waiting, equals, inner_view)
        )

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        return all(self._asked(lambda order, its_view: order.admits(waiting, free_after_blocks, its_view), view))

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        held = self._asked(lambda order, its_view: order.hold(running, its_view), view)
        numbers = {one.number for part in held for one in part}
        return [one for one in running if one.number in numbers]

    def initial_state(self) -> Any:
        return self.outer.initial_state(), self.inner.initial_state()

    def finished(self, state: Any, request: Progress) -> Any:
        return self.outer.finished(state[0], request), self.inner.finished(state[1], request)

    def _views(self, view: View) -> tuple[View, View]:
        return replace(view, state=view.state[0]), replace(view, state=view.state[1])

    def _outer_level(self, request: Progress, outer_view: View) -> tuple[float, ...]:
        """What the outer order ranks by: requests whose values are in the same levels are its equals."""
        return levels(self.outer.rank(request, outer_view).value, self.outer.rank_ratio)

    def _asked(self, ask: Callable[[Order, View], Any], view: View) -> tuple[Any, Any]:
        outer_view, inner_view = self._views(view)
        return ask(self.outer, outer_view), ask(self.inner, inner_view)

    @staticmethod
    def _outer_value(value: tuple[float, ...]) -> tuple[float, ...]:
        """Padded, so that the inner order never decides between values of different lengths."""
        return (*value, *(-inf,) * (2 - len(value)))


VictimRule = Callable[[Progress, View], tuple[float, ...]]
"""Whoever has the lowest value is displaced first, among those of the highest rank."""


def least_computed(request: Progress, view: View) -> tuple[float, ...]:
    """Who has the least KV to lose."""
    return (request.computed_tokens,)


def cheapest(request: Progress, view: View) -> tuple[float, ...]:
    """Whose displacement is predicted to cost the least engine time per block freed; the least computed where no policy
    predicts costs."""
    price_s = None if view.price is None else view.price(request)
    blocks = max(1, -(-request.computed_tokens // view.block_size))
    return (inf, request.computed_tokens) if price_s is None else (price_s / blocks, request.computed_tokens)


VICTIM_RULES: dict[str, VictimRule] = {"least-computed": least_computed, "cheapest": cheapest}


@dataclass(frozen=True, repr=False)
class WithVictims(Wrapper):
    """Another order, which displaces those of equal rank by a rule instead of by the latest arrival."""

    rule: VictimRule

    @property
    def max_candidates(self) -> int:
        return MAX_SHOWN

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return sorted(running, key=lambda other: (*(-value for value in other.rank), *self.rule(other, view)))

    def probability(
        self, waiting: Progress, victims: Sequence[Progress], running: Sequence[Progress], view: View
    ) -> float:
        return 1.0  # by the rule, whatever the other order would draw
