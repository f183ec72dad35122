"""Measured states by what is to be minimised."""

from __future__ import annotations

from dataclasses import replace

from kvpolicy.datasets.profiles import Sample, State
from kvpolicy.policy.objective import ENGINE, Objective
from kvpolicy.trace import TraceError


def judged_by(state: State, objective: Objective) -> State:
    """The state as if what the objective weighs were its engine time: all that prices options looks at that alone.

    Raises TraceError, naming the preemption, where a delay that counts was not measured.
    """
    if objective == ENGINE:
        return state
    samples = {
        kind: tuple(replace(sample, engine_s=_weighed(sample, objective)) for sample in some)
        for kind, some in state.samples.items()
    }
    return State(state.name, state.ids, samples)


def _weighed(sample: Sample, objective: Objective) -> float:
    try:
        return objective.weigh(sample.engine_s, sample.victim_delay_s, sample.others_delay_s)
    except ValueError as error:
        raise TraceError(f"table outcomes, preemption {sample.preemption_id}: {error}") from error
