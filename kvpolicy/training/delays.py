"""What the victim and the others wait: laws fitted to measured delays, for objectives beyond engine time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import numpy as np

from kvpolicy.cost.laws import Law, LinearLaw
from kvpolicy.datasets.examples import Example
from kvpolicy.datasets.profiles import State
from kvpolicy.events import KINDS, Kind
from kvpolicy.regression.nnls import robust_nonnegative_fit

INPUTS: dict[Kind, tuple[str, ...]] = {
    "recompute": ("recomputed_tokens", "recomputed_pairs", "running_requests", "batch_tokens"),
    "swap": ("save_bytes", "load_bytes", "load_segments", "running_requests", "batch_tokens"),
}
"""The victim computes or copies, in steps that the others make longer."""
FEWEST_STATES = 12
MOST_SHARE = 2.0


def fit_victim_delays(states: Sequence[State]) -> dict[Kind, LinearLaw]:
    """Seconds until the victim is back, its wait for blocks left out; none where fewer than 12 states tell them."""
    laws = {}
    for kind in KINDS:
        told = victim_delay_examples(states, kind)
        if len(told) < FEWEST_STATES:
            return {}
        names = INPUTS[kind]
        design = np.array([[1.0, *(getattr(one.x, name) for name in names)] for one in told])
        scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
        seconds = np.array([one.engine_s for one in told])
        constant, *more = map(float, robust_nonnegative_fit(design / scale, seconds) / scale)
        # By name, as a card lists them: a sum read back is then the same to the last bit.
        laws[kind] = LinearLaw(constant, {name: c for name, c in sorted(zip(names, more, strict=True)) if c > 0})
    return laws


def victim_delay_examples(states: Sequence[State], kind: Kind) -> tuple[Example, ...]:
    """Each state's median delay, where it was measured, in place of the cost."""
    found = ((state.mean_features[kind], _victim_delay_s(state, kind)) for state in states)
    return tuple(Example(x, seconds) for x, seconds in found if seconds is not None and seconds > 0)


def fit_others_shares(states: Sequence[State]) -> dict[Kind, float]:
    """By option, delay of the others over (engine time x requests running); 1 where nobody else ever ran."""
    shares = {}
    for kind in KINDS:
        waited = expected = 0.0
        for state in states:
            delays = [one.others_delay_s for one in state.samples[kind] if one.others_delay_s is not None]
            if delays:
                running = fmean(one.situation.running_requests for one in state.samples[kind])
                waited += median(delays)
                expected += state.typical_s[kind] * running
        shares[kind] = min(MOST_SHARE, max(0.0, waited / expected)) if expected > 0 else 1.0
    return shares


def victim_delay_misses(laws: Mapping[Kind, Law], states: Sequence[State], kind: Kind) -> list[float]:
    """log(measured / predicted) of each state's median delay, where it was measured."""
    misses = []
    for state in states:
        seconds = _victim_delay_s(state, kind)
        if seconds is not None and seconds > 0:
            predicted = sum(laws[kind].parts(state.mean_features[kind]))
            misses.append(float(np.log(seconds / max(predicted, 1e-9))))
    return misses


def _victim_delay_s(state: State, kind: Kind) -> float | None:
    delays = [one.victim_delay_s for one in state.samples[kind] if one.victim_delay_s is not None]
    return median(delays) if delays else None
