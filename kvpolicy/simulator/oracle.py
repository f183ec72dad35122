"""What could have been had: the cheaper option of every preemption by the simulator's own times, and, for small cases,
the best of all schedules by trying them. Neither can be deployed: they know what only a simulator knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpolicy.arrays import causal_pairs
from kvpolicy.errors import InputError
from kvpolicy.events import Cost, Decision, Kind, Option, Preemption, copy_pieces
from kvpolicy.features import blocks_back
from kvpolicy.policy import NoState, Objective, Policy, PricedPolicy
from kvpolicy.policy.base import all_on, first_of
from kvpolicy.policy.cheapest import lowest
from kvpolicy.policy.objective import ENGINE
from kvpolicy.simulator.base import DecisionObserver, Server, StepLoad, Summary, Times
from kvpolicy.simulator.choice_count import ChoiceCount

# ---- per decision ----


@dataclass(frozen=True)
class Oracle(PricedPolicy[NoState]):
    """The option that costs the engine less by ``times``, as things stand at the preemption; ties recompute.

    Of a recompute it counts the chunks beside the others' decodes, as if nothing of the victim survived in the prefix
    cache but the blocks it shares; of a swap what ``server.link`` makes the engine feel. What an option does to later
    preemptions is not in it: that is what :func:`best_in_hindsight` is for.
    """

    times: Times
    server: Server
    objective: Objective = ENGINE
    name: str = "oracle"

    def costs(self, situation: Preemption, options: Sequence[Option], state: NoState) -> tuple[Cost, ...]:
        return tuple(self._cost(situation, option) for option in options)

    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: NoState
    ) -> tuple[float, ...]:
        return all_on(lowest(costs, self.objective), len(options))

    def _cost(self, situation: Preemption, option: Option) -> Cost:
        if option.kind == "recompute":
            save_s, load_s, recompute_s = 0.0, 0.0, recompute_s_of(situation, self.server, self.times)
        else:
            (save_s, load_s), recompute_s = swap_s_of(situation, self.server, self.times), 0.0
        total = save_s + load_s + recompute_s
        return Cost(total, save_s, load_s, recompute_s, total * situation.running_requests, total, total)


def recompute_s_of(one: Preemption, server: Server, times: Times) -> float:
    """Seconds by which computing the victim again, chunk by chunk, makes steps longer, or that its own steps take."""
    others, done = one.running_requests, min(one.shared_blocks * one.block_size, one.computed_tokens)
    read = one.batch_tokens + others
    calm_s = times.step_s(StepLoad(others, others, read, 0, 0, 0)) if others else 0.0
    room = max(1, server.token_budget - others)
    seconds = 0.0
    while done < one.computed_tokens:
        chunk = min(room, one.computed_tokens - done)
        pairs = causal_pairs(done, done + chunk)
        seconds += times.step_s(StepLoad(others + chunk, others, read, pairs, 1, done)) - calm_s
        done += chunk
    return seconds


def swap_s_of(one: Preemption, server: Server, times: Times) -> tuple[float, float]:
    """Seconds that the engine feels of the save and of the load.

    Copies that are waited for count in full, and so do those beside which nobody else runs; others by what they slow.
    """
    segment = max(1, one.segment_bytes)
    pieces = copy_pieces(one.block_bytes, segment)
    back = blocks_back(one.held_blocks, one.shared_blocks)
    save_s = times.copy_s("save", one.copy_bytes, one.copy_segments, segment)
    load_s = times.copy_s("load", back * one.block_bytes, back * pieces, segment)
    link = server.link
    if link.overlapped and one.running_requests:
        return save_s * (1.0 if link.saves_wait else link.slowdown), load_s * link.slowdown
    return save_s, load_s


# ---- in hindsight ----


@dataclass(frozen=True, slots=True)
class Played:
    """How many choices a script has made."""

    choices: int = 0

    def to_json(self) -> str:
        return f'{{"choices": {self.choices}}}'


@dataclass(frozen=True)
class Scripted(Policy[Played]):
    """The given kinds one after the other, wherever there is a choice at all; recompute once they are used up."""

    kinds: tuple[Kind, ...]
    name: str = "scripted"

    def initial_state(self) -> Played:
        return Played()

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: Played) -> tuple[float, ...]:
        at = state.choices
        kind = self.kinds[at] if len(options) > 1 and at < len(self.kinds) else "recompute"
        return all_on(first_of(kind, options) or 0, len(options))

    def next_state(self, state: Played, decision: Decision) -> Played:
        return Played(state.choices + (len(decision.options) > 1))


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The best of all schedules."""

    kinds: tuple[Kind, ...]
    """What it did at the preemptions that had a choice, in their order."""
    summary: Summary
    value: float
    """What it came to; lower is better."""
    schedules: int
    """How many were tried: each differs from all others in what was really done."""
    complete: bool
    """Whether none had more choices than were tried, after which everything was recomputed."""


MAX_CHOICES = 12


def best_in_hindsight(
    simulate: Callable[[Policy, DecisionObserver], Summary],
    value: Callable[[Summary], float] = lambda summary: summary.makespan_s,
    choices: int = MAX_CHOICES,
) -> Hindsight:
    """Try every sequence of actions at the first ``choices`` preemptions that have a choice; the lowest ``value`` wins.

    ``simulate``: a whole run under a policy, its decisions told to an observer; the same in all else. What is done at
    one preemption decides which come after it, so sequences grow with what really happens: at most 2 ** ``choices``
    runs, the first of equals wins. Raises ValueError for more choices than :data:`MAX_CHOICES`.
    """
    if not 0 <= choices <= MAX_CHOICES:
        raise InputError(f"choices is {choices}: should be from 0 to {MAX_CHOICES}, as each doubles the runs")
    best: tuple[float, tuple[Kind, ...], Summary] | None = None
    open_ones: list[tuple[Kind, ...]] = [()]
    schedules, complete = 0, True
    while open_ones:
        script = open_ones.pop()
        count = ChoiceCount()
        summary = simulate(Scripted(script), count)
        schedules += 1
        met = count.choices
        complete = complete and met <= choices
        recompute: Kind = "recompute"
        rest = (recompute,) * (min(met, choices) - len(script))
        done = script + rest
        found = value(summary)
        if best is None or found < best[0]:
            best = found, done, summary
        # Every later choice that this run recomputed at could have been a swap: each of these is another schedule.
        open_ones += [(*done[:at], "swap") for at in range(len(done) - 1, len(script) - 1, -1)]
    assert best is not None
    return Hindsight(best[1], best[2], best[0], schedules, complete)
