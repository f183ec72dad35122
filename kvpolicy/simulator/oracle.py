"""Two oracles, which use what only a simulator knows.

:class:`Oracle` is a rule with perfect prices: the cheaper option of every preemption by the simulator's own times. It
is no bound. What survives on the device is expected, not known, and an option that costs less by itself may bring about
later preemptions that cost more. :func:`best_in_hindsight` is a bound, for small cases: it tries all sequences of
actions, each in a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpolicy.arrays import causal_pairs
from kvpolicy.errors import InputError
from kvpolicy.events import Cost, Decision, Kind, Option, Preemption
from kvpolicy.features import features_of
from kvpolicy.policy import NoState, Objective, Policy, PricedPolicy
from kvpolicy.policy.base import certain_choice, first_option_of
from kvpolicy.policy.cheapest import lowest
from kvpolicy.policy.objective import ENGINE
from kvpolicy.simulator.base import DecisionObserver, Server, StepLoad, Summary, Times
from kvpolicy.simulator.choice_count import ChoiceCount

# ---- per decision ----


@dataclass(frozen=True)
class Oracle(PricedPolicy[NoState]):
    """Chooses the option with the lower engine time by ``times``, as of the preemption; ties recompute. No bound.

    A recompute costs the chunks of what is expected to be lost (``hit_blocks``), beside the other requests' decodes. A
    swap costs the part of its copies that ``server.link`` lets the engine feel. How much of the victim really survives
    depends on who ends next, and effects on later preemptions are not included; see :func:`best_in_hindsight`.
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
        return certain_choice(lowest(costs, self.objective), len(options))

    def _cost(self, situation: Preemption, option: Option) -> Cost:
        if option.kind == "recompute":
            save_s, load_s, recompute_s = 0.0, 0.0, recompute_s_of(situation, self.server, self.times)
        else:
            (save_s, load_s), recompute_s = swap_s_of(situation, self.server, self.times), 0.0
        total = save_s + load_s + recompute_s
        return Cost(total, save_s, load_s, recompute_s, total * situation.running_requests, total, total)


def recompute_s_of(situation: Preemption, server: Server, times: Times) -> float:
    """Seconds that recomputing the victim, chunk by chunk, adds to steps; or that its own steps take."""
    others = situation.running_requests
    done = situation.computed_tokens - round(features_of(situation, Option("recompute")).recomputed_tokens)
    read_tokens = situation.batch_tokens + others
    undisturbed_s = times.step_s(StepLoad(others, others, read_tokens, 0, 0, 0)) if others else 0.0
    chunk_budget = max(1, server.token_budget - others)
    seconds = 0.0
    while done < situation.computed_tokens:
        chunk = min(chunk_budget, situation.computed_tokens - done)
        pairs = causal_pairs(done, done + chunk)
        seconds += times.step_s(StepLoad(others + chunk, others, read_tokens, pairs, 1, done)) - undisturbed_s
        done += chunk
    return seconds


def swap_s_of(situation: Preemption, server: Server, times: Times) -> tuple[float, float]:
    """Seconds that the save and the load add to the engine's steps.

    A copy counts in full where a step waits for it or no other request runs; otherwise by how much it slows the steps.
    """
    segment = max(1, situation.segment_bytes)
    x = features_of(situation, Option("swap", situation.computed_tokens))
    save_s = times.copy_s("save", round(x.save_bytes), round(x.save_segments), segment)
    load_s = times.copy_s("load", round(x.load_bytes), round(x.load_segments), segment)
    link = server.link
    if link.overlapped and situation.running_requests:
        return save_s * (1.0 if link.saves_wait else link.slowdown), load_s * link.slowdown
    return save_s, load_s


# ---- in hindsight ----


@dataclass(frozen=True, slots=True)
class ScriptState:
    """Number of choices that a script has made."""

    choices: int = 0

    def to_json(self) -> str:
        return f'{{"choices": {self.choices}}}'


@dataclass(frozen=True)
class Scripted(Policy[ScriptState]):
    """Takes the given kinds in turn, wherever there is a choice; recomputes once they are used up."""

    kinds: tuple[Kind, ...]
    name: str = "scripted"

    def initial_state(self) -> ScriptState:
        return ScriptState()

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: ScriptState) -> tuple[float, ...]:
        at = state.choices
        kind = self.kinds[at] if len(options) > 1 and at < len(self.kinds) else "recompute"
        return certain_choice(first_option_of(kind, options) or 0, len(options))

    def next_state(self, state: ScriptState, decision: Decision) -> ScriptState:
        return ScriptState(state.choices + (len(decision.options) > 1))


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The best schedule of a search, with hindsight: a bound on every policy if ``complete``."""

    kinds: tuple[Kind, ...]
    """What it executed at the preemptions that had a choice, in their order."""
    summary: Summary
    value: float
    """Its value; lower is better."""
    schedules: int
    """Number of schedules tried; no two executed the same."""
    complete: bool
    """Whether no schedule had more choices than were varied; beyond them every preemption was recomputed."""


MAX_CHOICES = 12


def best_in_hindsight(
    simulate: Callable[[Policy, DecisionObserver], Summary],
    value: Callable[[Summary], float] = lambda summary: summary.makespan_s,
    choices: int = MAX_CHOICES,
) -> Hindsight:
    """Try every sequence of actions at the first ``choices`` preemptions that have a choice; the lowest ``value`` wins.

    If the search is complete, no policy has a lower value in this simulation, whatever it knows.

    ``simulate`` runs the whole workload under a policy and calls the observer with its decisions; runs are otherwise
    equal. Which preemptions follow depends on the actions so far, so sequences are extended from what happened in a
    run: at most 2 ** ``choices`` runs, and the first of equals wins. Raises InputError for more choices than
    :data:`MAX_CHOICES`.
    """
    if not 0 <= choices <= MAX_CHOICES:
        raise InputError(f"choices is {choices}: should be from 0 to {MAX_CHOICES}, as each doubles the runs")
    best: tuple[float, tuple[Kind, ...], Summary] | None = None
    scripts: list[tuple[Kind, ...]] = [()]
    schedules, complete = 0, True
    while scripts:
        script = scripts.pop()
        count = ChoiceCount()
        summary = simulate(Scripted(script), count)
        schedules += 1
        choices_met = count.choices
        complete = complete and choices_met <= choices
        recompute: Kind = "recompute"
        recomputed = (recompute,) * (min(choices_met, choices) - len(script))
        kinds = script + recomputed
        script_value = value(summary)
        if best is None or script_value < best[0]:
            best = script_value, kinds, summary
        # Each later choice at which this run recomputed could have been a swap: each of these is another schedule.
        scripts += [(*kinds[:at], "swap") for at in range(len(kinds) - 1, len(script) - 1, -1)]
    assert best is not None
    return Hindsight(best[1], best[2], best[0], schedules, complete)
