"""Fitting laws to measured costs: rooflines, the linear family, and what the victim and the others wait.

Rooflines have a handful of constants, none below 0, by robust least squares. The linear family is least squares with no
coefficient below 0 on the features as they are. Delays serve objectives beyond engine time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean, median

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.cost.laws import Channel, Law, LinearLaw, RecomputeRoofline, SwapRoofline, recompute_seconds
from kvpolicy.datasets.examples import Example, Examples, log_miss
from kvpolicy.datasets.profiles import State
from kvpolicy.datasets.tables import Move, Moves
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import Features
from kvpolicy.regression.nnls import nonnegative_fit, relative_sum, robust_nonnegative_fit

ROUNDS = 30
OUTLIER_SCALES = 2.5
"""Relative residuals beyond that many robust standard deviations count only linearly."""
MIN_TRANSFERS = 10
MIN_PER_REGIME = 3
"""With fewer states in which nobody else runs (or somebody does) the two are not told apart."""
ROOFS_TOKENS = (16, 32, 64, 128, 256, 512)
"""Tokens of a step at which compute takes as long as reading the weights, tried one by one; none at all besides."""
COLLINEAR = 0.99
"""Two columns with that share of their variance in common are told apart by noise alone."""
MIN_GAIN = 0.05
"""The share by which a roof must lessen the mean miss to be told from none."""


def fit_analytic(
    examples: Examples, moves: Sequence[Move], floor_s: Mapping[Kind, float], budget_tokens: float = inf
) -> dict[Kind, Law]:
    """Both rooflines. ``moves`` calibrate the copies' own durations where there are enough of them.

    ``budget_tokens``: most tokens of a step; infinite where it is not known, which makes every recompute one chunk.
    """
    return {
        "recompute": fit_recompute(examples["recompute"], floor_s["recompute"], budget_tokens),
        "swap": _fit_swap(examples["swap"], moves, floor_s["swap"]),
    }


def relative_fit(design: Floats, seconds: Floats, floor_s: float) -> Floats:
    """Coefficients c >= 0 with ``design @ c`` near ``seconds`` in relative terms; what is below the floor, in absolute.

    Iteratively reweighted least squares, Huber's weights (1964). ``seconds`` may hold values below 0.
    """
    expected = np.maximum(seconds, max(floor_s, 0.05 * float(np.median(np.abs(seconds)))))
    huber = np.ones(len(seconds))
    coefficients = np.zeros(design.shape[1])
    for number in range(ROUNDS):
        before = coefficients
        coefficients = nonnegative_fit(design, seconds, huber / expected**2)
        if number and np.allclose(coefficients, before, rtol=1e-6, atol=0.0):
            break
        expected = np.maximum(design @ coefficients, floor_s)
        missed = np.abs(seconds - design @ coefficients) / expected
        limit = OUTLIER_SCALES * max(1.4826 * float(np.median(missed)), 1e-9)
        huber = np.minimum(1.0, limit / np.maximum(missed, 1e-300))
    return coefficients


def _column(examples: Sequence[Example], name: str) -> Floats:
    return np.array([getattr(example.x, name) for example in examples], np.float64)


def _alone(examples: Sequence[Example]) -> Floats:
    return np.where(_column(examples, "running_requests") == 0, 1.0, 0.0)


def _both_regimes(examples: Sequence[Example]) -> bool:
    alone = int(_alone(examples).sum())
    return min(alone, len(examples) - alone) >= MIN_PER_REGIME


def _cost(examples: Sequence[Example]) -> Floats:
    return np.array([example.engine_s for example in examples], np.float64)


def fit_recompute(examples: Sequence[Example], floor_s: float, budget_tokens: float = inf) -> RecomputeRoofline:
    """The roofline, its roof where there is one to be seen."""
    # ``alone_s`` is a column of its own only where both regimes were seen.
    steps = RecomputeRoofline(0.0, float(_both_regimes(examples)), 0.0, 0.0, budget_tokens=budget_tokens)
    rows = [example.x for example in examples]
    alone = _recomputes(steps, rows)
    plain, missed = _with_roof(examples, rows, alone, floor_s, 0.0, budget_tokens)
    roofed, least = min(
        (_with_roof(examples, rows, alone, floor_s, roof, budget_tokens) for roof in ROOFS_TOKENS),
        key=lambda pair: pair[1],
    )
    return roofed if least < (1 - MIN_GAIN) * missed else plain


def _with_roof(
    examples: Sequence[Example],
    rows: Sequence[Features],
    alone: Floats,
    floor_s: float,
    roof_tokens: float,
    budget_tokens: float,
) -> tuple[RecomputeRoofline, float]:
    """The best law with that roof, and its mean miss on the log scale. ``alone``: steps for these tokens only.

    The law itself makes the columns: with the roof in tokens its seconds are linear in all other coefficients.
    """
    unit = RecomputeRoofline(0.0, 0.0, 1.0, 0.0, weight_s=roof_tokens, budget_tokens=budget_tokens)
    columns = [np.ones(len(examples)), alone, _recomputes(unit, rows), _column(examples, "recomputed_pairs")]
    fixed_s, alone_s, s_per_token, s_per_pair = map(
        float, relative_fit(np.column_stack(columns), _cost(examples), floor_s)
    )
    law = RecomputeRoofline(
        fixed_s, alone_s, s_per_token, s_per_pair, weight_s=roof_tokens * s_per_token, budget_tokens=budget_tokens
    )
    pairs = zip(examples, _recomputes(law, rows).tolist(), strict=True)
    misses = [abs(log_miss(example.engine_s, seconds, floor_s)) for example, seconds in pairs]
    return law, sum(misses) / len(misses)


def _recomputes(law: RecomputeRoofline, rows: Sequence[Features]) -> Floats:
    """The law's seconds, row by row: fits are to agree with decisions to the last bit."""
    coefficients = law.coefficients
    return np.array([recompute_seconds(x, coefficients) for x in rows], np.float64)


def _fit_swap(examples: Sequence[Example], moves: Sequence[Move], floor_s: float) -> SwapRoofline:
    save, load = _channels(examples, moves, floor_s)
    alone = _alone(examples)
    save_s, load_s = _durations(save, examples, "save"), _durations(load, examples, "load")
    columns = {"fixed_s": np.ones(len(examples)), "save_share": save_s}
    if _both_regimes(examples):
        columns |= {"alone_s": alone, "load_alone_share": load_s * alone, "load_beside_share": load_s * (1 - alone)}
    else:
        columns["load_share"] = load_s
    for way, channel, felt in (("save", save, np.ones(len(alone))), ("load", load, alone)):
        waited_s = channel.s_per_byte * _column(examples, f"queued_{way}_bytes") * felt
        if np.count_nonzero(waited_s) >= MIN_PER_REGIME:
            columns[f"{way}_queue_share"] = waited_s
    fitted = relative_fit(np.column_stack(list(columns.values())), _cost(examples), floor_s)
    found = dict(zip(columns, map(float, fitted), strict=True))
    if "load_share" in found:
        share = found.pop("load_share")
        found |= {"alone_s": 0.0, "load_alone_share": share, "load_beside_share": share}
    return SwapRoofline(save=save, load=load, **found)


def untold_loads(law: Law, examples: Sequence[Example]) -> tuple[str, ...]:
    """A note where all of a swap's cost was put down to saves because loads were as large in every state."""
    if not isinstance(law, SwapRoofline) or law.load_alone_share or law.load_beside_share or not law.save_share:
        return ()
    if not _collinear(_column(examples, "save_bytes"), _column(examples, "load_bytes")):
        return ()
    return (
        "swap: what is saved and what is loaded grow together in every state, and the fit puts all of the cost down to "
        "saves: a load counts as free, which this trace cannot tell; blocks shared with others would tell them apart",
    )


def _collinear(one: Floats, other: Floats) -> bool:
    """Whether nearly all of either's spread is the other's."""
    if len(one) < 2 or not (np.std(one) and np.std(other)):
        return True
    return bool(np.corrcoef(one, other)[0, 1] ** 2 > COLLINEAR)


def _durations(channel: Channel, examples: Sequence[Example], direction: str) -> Floats:
    return np.array(
        [
            channel.seconds(getattr(one.x, f"{direction}_bytes"), getattr(one.x, f"{direction}_segments"))
            for one in examples
        ],
        np.float64,
    )


def _channels(examples: Sequence[Example], moves: Sequence[Move], floor_s: float) -> tuple[Channel, Channel]:
    """Each direction's own durations; from the costs themselves, halved, where too few transfers were recorded."""
    found = []
    for direction in ("save", "load"):
        sizes, segments, seconds = Moves.of(moves).measured(direction)
        floor = 1e-6
        if len(sizes) < MIN_TRANSFERS:
            sizes, segments = _column(examples, f"{direction}_bytes"), _column(examples, f"{direction}_segments")
            seconds, floor = _cost(examples) / 2, floor_s / 2
        design = np.column_stack([np.ones(len(sizes)), sizes, segments])
        found.append(Channel(*map(float, relative_fit(design, seconds, floor))))
    return found[0], found[1]


LINEAR_ROUNDS = 10

LINEAR_INPUTS: dict[Kind, tuple[str, ...]] = {
    "recompute": ("recomputed_tokens", "running_requests", "batch_tokens"),
    "swap": ("save_bytes", "load_bytes", "load_segments", "running_requests", "batch_tokens"),
}


def fit_linear(examples: Examples, floor_s: Mapping[Kind, float]) -> dict[Kind, Law]:
    """One law per option."""
    return {kind: _fit(examples[kind], LINEAR_INPUTS[kind], floor_s[kind]) for kind in KINDS}


def _fit(examples: Sequence[Example], inputs: tuple[str, ...], floor_s: float) -> LinearLaw:
    """Errors count relative to what is predicted, or to the floor where that is more: relative to what was measured,
    single preemptions that noise made cheap would count for all others."""
    cost = np.array([example.engine_s for example in examples])
    design = np.array([[1.0, *(getattr(example.x, name) for name in inputs)] for example in examples])
    expected = np.maximum(cost, max(floor_s, 0.05 * float(np.median(np.abs(cost)))))
    for _ in range(LINEAR_ROUNDS):
        coefficients = relative_sum(design, cost, 1.0 / expected**2)
        expected = np.maximum(design @ coefficients, floor_s)
    return LinearLaw(
        float(coefficients[0]), {name: float(c) for name, c in zip(inputs, coefficients[1:], strict=True) if c > 0}
    )


DELAY_INPUTS: dict[Kind, tuple[str, ...]] = {
    "recompute": ("recomputed_tokens", "recomputed_pairs", "running_requests", "batch_tokens"),
    "swap": ("save_bytes", "load_bytes", "load_segments", "running_requests", "batch_tokens"),
}
"""The victim computes or copies, in steps that the others make longer."""
MIN_STATES = 12
MAX_SHARE = 2.0


def fit_victim_delays(states: Sequence[State]) -> dict[Kind, LinearLaw]:
    """Seconds until the victim is back, its wait for blocks left out; none where fewer than 12 states tell them."""
    laws = {}
    for kind in KINDS:
        told = victim_delay_examples(states, kind)
        if len(told) < MIN_STATES:
            return {}
        names = DELAY_INPUTS[kind]
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
        shares[kind] = min(MAX_SHARE, max(0.0, waited / expected)) if expected > 0 else 1.0
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
