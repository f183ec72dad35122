"""Fit laws to measured costs: rooflines, the linear family, and the delays of the victim and of the other requests.

Rooflines have few constants, fitted by robust least squares. The linear family is least squares on the features
themselves. No coefficient is below 0. Delays are needed for objectives other than engine time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.cost.laws import Channel, Law, LinearLaw, RecomputeRoofline, SwapRoofline, recompute_seconds
from kvpolicy.datasets.examples import Example, Examples, log_miss
from kvpolicy.datasets.profiles import State
from kvpolicy.datasets.tables import TransferRecord, TransferTable
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import Features
from kvpolicy.hardware import Geometry
from kvpolicy.regression.nnls import relative_fit, typical_floor

MIN_TRANSFERS = 10
MIN_PER_REGIME = 3
"""Minimum number of states in which no other request runs, and in which some do, to fit the two separately."""
ROOFS_TOKENS = (16, 32, 64, 128, 256, 512)
"""Candidates for the roof: tokens of a step at which compute takes as long as reading the weights. No roof is tried
as well."""
COLLINEAR = 0.99
"""Two columns with at least this squared correlation cannot be separated: only noise tells them apart."""
MIN_GAIN = 0.05
"""Share by which a roof must lower the mean error to be taken."""


class PairShares(NamedTuple):
    """How a pair's FLOPs are shared by the layers that attend to the whole context and those with a window.

    Their kernels are taken to be equally fast: within the window, lengths cannot tell the two apart.
    """

    full: float = 1.0
    window: float = 0.0
    window_tokens: float = 0.0

    @classmethod
    def of(cls, geometry: Geometry | None) -> PairShares:
        """All in the layers of full attention where ``geometry`` is None."""
        if geometry is None or not geometry.window_layers:
            return cls()
        window = geometry.window_layers / geometry.attention_layers
        return cls(1.0 - window, window, float(geometry.window_tokens))

    def law(self, s_per_pair: float) -> RecomputeRoofline:
        """The law of attention alone. ``s_per_pair``: of a pair within the window, over all layers."""
        return RecomputeRoofline(
            0.0, 0.0, 0.0, self.full * s_per_pair,
            s_per_window_pair=self.window * s_per_pair, window_tokens=self.window_tokens,
        )  # fmt: skip


ALL_FULL = PairShares()
"""Every layer attends to the whole context."""


def fit_analytic(
    examples: Examples,
    transfers: Sequence[TransferRecord],
    floor_s: Mapping[Kind, float],
    budget_tokens: float = inf,
    geometry: Geometry | None = None,
) -> dict[Kind, Law]:
    """Fit both rooflines. ``transfers`` calibrate the durations of copies if there are enough of them.

    ``budget_tokens``: maximum number of tokens per step; infinite if unknown, which makes every recompute one chunk.
    ``geometry``: says which layers have windows; None where none has.
    """
    return {
        "recompute": fit_recompute(examples["recompute"], floor_s["recompute"], budget_tokens, PairShares.of(geometry)),
        "swap": _fit_swap(examples["swap"], transfers, floor_s["swap"]),
    }


def _cost_fit(
    design: Floats, seconds: Floats, floor_s: float, weight: Floats | None = None, robust: bool = True
) -> Floats:
    """:func:`kvpolicy.regression.nnls.relative_fit` of costs, which noise can bring below 0."""
    start = np.maximum(seconds, max(floor_s, typical_floor(seconds)))
    return relative_fit(design, seconds, floor_s, weight, start, robust)


def _column(examples: Sequence[Example], name: str) -> Floats:
    return np.array([getattr(example.x, name) for example in examples], np.float64)


def _runs_alone(examples: Sequence[Example]) -> Floats:
    """1 where no other request runs, else 0; (examples,)."""
    return np.where(_column(examples, "running_requests") == 0, 1.0, 0.0)


def _both_regimes(examples: Sequence[Example]) -> bool:
    """Whether there are enough examples both with and without other running requests."""
    alone_count = int(_runs_alone(examples).sum())
    return min(alone_count, len(examples) - alone_count) >= MIN_PER_REGIME


def _cost_s(examples: Sequence[Example]) -> Floats:
    return np.array([example.engine_s for example in examples], np.float64)


def _weights(examples: Sequence[Example]) -> Floats:
    return np.array([example.weight for example in examples], np.float64)


def fit_recompute(
    examples: Sequence[Example], floor_s: float, budget_tokens: float = inf, shares: PairShares = ALL_FULL
) -> RecomputeRoofline:
    """Fit the roofline, with a roof if that lowers the error enough."""
    # ``alone_s`` is a separate column only if both regimes were measured.
    steps = RecomputeRoofline(0.0, float(_both_regimes(examples)), 0.0, 0.0, budget_tokens=budget_tokens)
    rows = [example.x for example in examples]
    alone = _recompute_s(steps, rows)
    pairs = _recompute_s(shares.law(1.0), rows)

    def fitted(roof_tokens: float) -> tuple[RecomputeRoofline, float]:
        return _with_roof(examples, rows, (alone, pairs), floor_s, roof_tokens, budget_tokens, shares)

    without_roof, error_without_roof = fitted(0.0)
    with_roof, error_with_roof = min(
        (fitted(roof) for roof in ROOFS_TOKENS),
        key=lambda pair: pair[1],
    )
    return with_roof if error_with_roof < (1 - MIN_GAIN) * error_without_roof else without_roof


def _with_roof(
    examples: Sequence[Example],
    rows: Sequence[Features],
    columns_without_roof: tuple[Floats, Floats],
    floor_s: float,
    roof_tokens: float,
    budget_tokens: float,
    shares: PairShares,
) -> tuple[RecomputeRoofline, float]:
    """The best law with that roof, and its mean error on the log scale.

    ``columns_without_roof``: per example, the number of steps that hold recomputed tokens only, 0 unless it is a
    column; and its pairs, each weighed by the share of the layers that compute it.
    The columns are computed by the law itself: given the roof in tokens, its seconds are linear in all other
    coefficients.
    """
    unit = RecomputeRoofline(0.0, 0.0, 1.0, 0.0, weight_s=roof_tokens, budget_tokens=budget_tokens)
    alone, pairs = columns_without_roof
    columns = [np.ones(len(examples)), alone, _recompute_s(unit, rows), pairs]
    fixed_s, alone_s, s_per_token, s_per_pair = map(
        float, _cost_fit(np.column_stack(columns), _cost_s(examples), floor_s, _weights(examples))
    )
    law = replace(
        shares.law(s_per_pair), fixed_s=fixed_s, alone_s=alone_s, s_per_token=s_per_token,
        weight_s=roof_tokens * s_per_token, budget_tokens=budget_tokens,
    )  # fmt: skip
    predicted = zip(examples, _recompute_s(law, rows).tolist(), strict=True)
    misses = [abs(log_miss(example.engine_s, seconds, floor_s)) for example, seconds in predicted]
    return law, float(np.average(misses, weights=_weights(examples)))


def _recompute_s(law: RecomputeRoofline, rows: Sequence[Features]) -> Floats:
    """The law's seconds, row by row, by the function that decisions use: both must agree to the last bit."""
    coefficients = law.coefficients
    return np.array([recompute_seconds(x, coefficients) for x in rows], np.float64)


def _fit_swap(examples: Sequence[Example], transfers: Sequence[TransferRecord], floor_s: float) -> SwapRoofline:
    save, load = _channels(examples, transfers, floor_s)
    alone = _runs_alone(examples)
    save_s, load_s = _durations(save, examples, "save"), _durations(load, examples, "load")
    columns = {"fixed_s": np.ones(len(examples)), "save_share": save_s}
    if _both_regimes(examples):
        columns |= {"alone_s": alone, "load_alone_share": load_s * alone, "load_beside_share": load_s * (1 - alone)}
    else:
        columns["load_share"] = load_s
    for direction, channel, waits in (("save", save, np.ones(len(alone))), ("load", load, alone)):
        waited_s = channel.s_per_byte * _column(examples, f"queued_{direction}_bytes") * waits
        if np.count_nonzero(waited_s) >= MIN_PER_REGIME:
            columns[f"{direction}_queue_share"] = waited_s
    fitted = _cost_fit(np.column_stack(list(columns.values())), _cost_s(examples), floor_s, _weights(examples))
    coefficients = dict(zip(columns, map(float, fitted), strict=True))
    if "load_share" in coefficients:
        share = coefficients.pop("load_share")
        coefficients |= {"alone_s": 0.0, "load_alone_share": share, "load_beside_share": share}
    return SwapRoofline(save=save, load=load, **coefficients)


def load_notes(law: Law, examples: Sequence[Example]) -> tuple[str, ...]:
    """A note if the whole cost of a swap was attributed to saves because loads were as large in every state."""
    if not isinstance(law, SwapRoofline) or law.load_alone_share or law.load_beside_share or not law.save_share:
        return ()
    if not _collinear(_column(examples, "save_bytes"), _column(examples, "load_bytes")):
        return ()
    return (
        "swap: saved and loaded bytes grow together in every state, and the fit attributes all of the cost to saves. "
        "Whether loads are free cannot be learned from this trace; states with shared blocks would show it",
    )


def _collinear(column: Floats, other: Floats) -> bool:
    """Whether nearly all variance of one column is explained by the other."""
    if len(column) < 2 or not (np.std(column) and np.std(other)):
        return True
    return bool(np.corrcoef(column, other)[0, 1] ** 2 > COLLINEAR)


def _durations(channel: Channel, examples: Sequence[Example], direction: str) -> Floats:
    return np.array(
        [
            channel.seconds(getattr(example.x, f"{direction}_bytes"), getattr(example.x, f"{direction}_segments"))
            for example in examples
        ],
        np.float64,
    )


def _channels(
    examples: Sequence[Example], transfers: Sequence[TransferRecord], floor_s: float
) -> tuple[Channel, Channel]:
    """Durations of saves and of loads; fitted to half of the costs if too few transfers were recorded."""
    channels = []
    for direction in ("save", "load"):
        sizes, segments, seconds = TransferTable.of(transfers).columns(direction)
        floor, weight = 1e-6, None
        if len(sizes) < MIN_TRANSFERS:
            sizes, segments = _column(examples, f"{direction}_bytes"), _column(examples, f"{direction}_segments")
            seconds, floor, weight = _cost_s(examples) / 2, floor_s / 2, _weights(examples)
        design = np.column_stack([np.ones(len(sizes)), sizes, segments])
        channels.append(Channel(*map(float, _cost_fit(design, seconds, floor, weight))))
    return channels[0], channels[1]


LINEAR_INPUTS: dict[Kind, tuple[str, ...]] = {
    "recompute": ("recomputed_tokens", "running_requests", "batch_tokens"),
    "swap": ("save_bytes", "load_bytes", "load_segments", "running_requests", "batch_tokens"),
}


def fit_linear(examples: Examples, floor_s: Mapping[Kind, float]) -> dict[Kind, Law]:
    """Fit one linear law per option."""
    return {
        kind: _fit(examples[kind], (*LINEAR_INPUTS[kind], *_queues(kind, examples[kind])), floor_s[kind])
        for kind in KINDS
    }


def _queues(kind: Kind, examples: Sequence[Example]) -> tuple[str, ...]:
    """Queued bytes that enough examples have to show what waiting for them costs."""
    if kind == "recompute":
        return ()
    names = ("queued_save_bytes", "queued_load_bytes")
    return tuple(name for name in names if np.count_nonzero(_column(examples, name)) >= MIN_PER_REGIME)


def _fit(examples: Sequence[Example], inputs: tuple[str, ...], floor_s: float) -> LinearLaw:
    design = np.array([[1.0, *(getattr(example.x, name) for name in inputs)] for example in examples])
    coefficients = _cost_fit(design, _cost_s(examples), floor_s, _weights(examples), robust=False)
    return LinearLaw(
        float(coefficients[0]), {name: float(c) for name, c in zip(inputs, coefficients[1:], strict=True) if c > 0}
    )


DELAY_INPUTS: dict[Kind, tuple[str, ...]] = {
    "recompute": ("recomputed_tokens", "recomputed_pairs", "running_requests", "batch_tokens"),
    "swap": ("save_bytes", "load_bytes", "load_segments", "running_requests", "batch_tokens"),
}
"""What the victim computes or copies, and the load that makes its steps longer."""
MIN_STATES = 12
MAX_SHARE = 2.0


def fit_victim_delays(states: Sequence[State]) -> dict[Kind, LinearLaw]:
    """Laws for the victim's delay without its wait for blocks, seconds; empty if fewer than 12 states measured it."""
    laws = {}
    for kind in KINDS:
        examples = victim_delay_examples(states, kind)
        if len(examples) < MIN_STATES:
            return {}
        names = (*DELAY_INPUTS[kind], *_queues(kind, examples))
        design = np.array([[1.0, *(getattr(example.x, name) for name in names)] for example in examples])
        seconds = np.array([example.engine_s for example in examples])
        constant, *weights = map(float, relative_fit(design, seconds, typical_floor(seconds)))
        # Sorted by name, as in the model card: after reading it back the sum is the same to the last bit.
        laws[kind] = LinearLaw(constant, {name: c for name, c in sorted(zip(names, weights, strict=True)) if c > 0})
    return laws


def victim_delay_examples(states: Sequence[State], kind: Kind) -> tuple[Example, ...]:
    """Examples with the state's median delay in place of the cost; states without measured delays are left out."""
    delays = ((state.mean_features[kind], _victim_delay_s(state, kind)) for state in states)
    return tuple(Example(x, seconds) for x, seconds in delays if seconds is not None and seconds > 0)


def fit_others_shares(states: Sequence[State]) -> dict[Kind, float]:
    """By option, the others' delay over (engine time x running requests); 1 if no other request ever ran."""
    shares = {}
    for kind in KINDS:
        waited = expected = 0.0
        for state in states:
            delays = [sample.others_delay_s for sample in state.samples[kind] if sample.others_delay_s is not None]
            if delays:
                running = fmean(sample.situation.running_requests for sample in state.samples[kind])
                waited += median(delays)
                expected += state.typical_s[kind] * running
        shares[kind] = min(MAX_SHARE, max(0.0, waited / expected)) if expected > 0 else 1.0
    return shares


def victim_delay_misses(laws: Mapping[Kind, Law], states: Sequence[State], kind: Kind) -> list[float]:
    """log(measured / predicted) of the median delay of each state in which it was measured."""
    misses = []
    for state in states:
        seconds = _victim_delay_s(state, kind)
        if seconds is not None and seconds > 0:
            predicted = sum(laws[kind].parts(state.expected_features[kind]))
            misses.append(float(np.log(seconds / max(predicted, 1e-9))))
    return misses


def _victim_delay_s(state: State, kind: Kind) -> float | None:
    delays = [sample.victim_delay_s for sample in state.samples[kind] if sample.victim_delay_s is not None]
    return median(delays) if delays else None
