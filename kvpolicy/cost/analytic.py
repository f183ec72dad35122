"""Fitting the rooflines: a handful of constants, none below 0, by robust least squares on measured costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpolicy.cost.dataset import Move
from kvpolicy.cost.examples import Example, Examples
from kvpolicy.cost.laws import Channel, Law, RecomputeRoofline, SwapRoofline
from kvpolicy.cost.nonnegative import nonnegative_fit
from kvpolicy.events import Kind

Floats = NDArray[np.float64]

ROUNDS = 30
OUTLIER_SCALES = 2.5
"""Relative residuals beyond that many robust standard deviations count only linearly."""
FEWEST_MOVES = 10
FEWEST_PER_REGIME = 3
"""With fewer states in which nobody else runs (or somebody does) the two are not told apart."""


def fit_analytic(examples: Examples, moves: Sequence[Move], floor_s: dict[Kind, float]) -> dict[Kind, Law]:
    """Both rooflines. ``moves`` calibrate the copies' own durations where there are enough of them."""
    return {
        "recompute": _fit_recompute(examples["recompute"], floor_s["recompute"]),
        "swap": _fit_swap(examples["swap"], moves, floor_s["swap"]),
    }


def relative_fit(design: Floats, seconds: Floats, floor_s: float) -> Floats:
    """Coefficients c >= 0 with ``design @ c`` near ``seconds`` in relative terms; what is below the floor, in absolute.

    Iteratively reweighted least squares, Huber's weights (1964). ``seconds`` may hold values below 0.
    """
    expected = np.maximum(seconds, max(floor_s, 0.05 * float(np.median(np.abs(seconds)))))
    huber = np.ones(len(seconds))
    coefficients = np.zeros(design.shape[1])
    for _ in range(ROUNDS):
        before = coefficients
        coefficients = nonnegative_fit(design, seconds, huber / expected**2)
        if np.allclose(coefficients, before, rtol=1e-6, atol=0.0):
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
    return min(alone, len(examples) - alone) >= FEWEST_PER_REGIME


def _cost(examples: Sequence[Example]) -> Floats:
    return np.array([example.engine_s for example in examples], np.float64)


def _fit_recompute(examples: Sequence[Example], floor_s: float) -> RecomputeRoofline:
    columns = [
        np.ones(len(examples)),
        _alone(examples) * _both_regimes(examples),
        _column(examples, "recomputed_tokens"),
        _column(examples, "recomputed_pairs"),
    ]
    return RecomputeRoofline(*map(float, relative_fit(np.column_stack(columns), _cost(examples), floor_s)))


def _fit_swap(examples: Sequence[Example], moves: Sequence[Move], floor_s: float) -> SwapRoofline:
    save, load = _channels(examples, moves, floor_s)
    alone = _alone(examples)
    save_s, load_s = _durations(save, examples, "save"), _durations(load, examples, "load")
    columns = [np.ones(len(examples)), save_s]
    if _both_regimes(examples):
        columns += [alone, load_s * alone, load_s * (1 - alone)]
    else:
        columns.append(load_s)
    fixed_s, save_share, *more = map(float, relative_fit(np.column_stack(columns), _cost(examples), floor_s))
    alone_s, load_alone, load_beside = more if len(more) > 1 else (0.0, *more, *more)
    return SwapRoofline(save, load, fixed_s, alone_s, save_share, load_alone, load_beside)


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
        mine = [move for move in moves if move.direction == direction]
        if len(mine) >= FEWEST_MOVES:
            sizes = np.array([move.size_bytes for move in mine], np.float64)
            segments = np.array([move.segments for move in mine], np.float64)
            seconds = np.array([move.duration_s for move in mine], np.float64)
            floor = 1e-6
        else:
            sizes, segments = _column(examples, f"{direction}_bytes"), _column(examples, f"{direction}_segments")
            seconds, floor = _cost(examples) / 2, floor_s / 2
        design = np.column_stack([np.ones(len(sizes)), sizes, segments])
        found.append(Channel(*map(float, relative_fit(design, seconds, floor))))
    return found[0], found[1]
