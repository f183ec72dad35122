"""Attention over a whole model: measured points on dense grids, those between told by a regressor fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from kvpolicy.arrays import Flags, Floats, causal_pairs
from kvpolicy.hardware import Geometry
from kvpolicy.regression.ceilings import relative_fit
from kvpolicy.regression.estimator import BoostedRegressor
from kvpolicy.simulator.hardware.interpolation import TERMS
from kvpolicy.simulator.hardware.layouts import NATIVE_DTYPE, Rows
from kvpolicy.simulator.hardware.operator_tables import Opened, Table, TableError, medians, rows_of, subsampled
from kvpolicy.simulator.hardware.table_times import AXES, Grid

ROWS_TO_FIT = 30_000
SWEEPS = 30
"""So far, in points of a grid, what a fit missed at measured points corrects what it says of others."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a step, and which files told it."""

    prefill: Grid
    decode: Grid
    mixed: Grid | None
    by: tuple[tuple[Opened, str], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Points:
    """Measured points of one grid, columns as its axes, and the time of one layer."""

    at: Floats
    seconds: Floats


def terms(tokens: Floats, context: Floats, requests: Floats, decoded: Floats) -> Floats:
    """Columns of :data:`~kvpolicy.simulator.hardware.interpolation.TERMS`."""
    pairs = causal_pairs(context, context + tokens)
    read = np.where(tokens > 0, tokens + context, 0.0)
    return np.column_stack([np.ones(len(tokens)), pairs, tokens, read, requests * decoded, decoded, requests])


def constants_of(design: Floats, seconds: Floats) -> tuple[float, ...]:
    return tuple(map(float, relative_fit(design, seconds, np.ones(len(seconds)))))


def _four(name: str, at: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """(chunk tokens, their context, decoding requests, their context) of a grid's points."""
    nothing = np.zeros(len(at))
    if name == "prefill":
        return at[:, 0], at[:, 1], nothing, nothing
    if name == "decode":
        return nothing, nothing, at[:, 0], at[:, 1]
    return at[:, 0], at[:, 1], at[:, 2], at[:, 3]


def between_neighbours(values: Floats) -> Floats:
    """Unknown values of a grid (NaN) as the means of their neighbours along every axis; 0 where nothing is known."""
    known = ~np.isnan(values)
    given = np.where(known, values, 0.0)
    found = given
    for _ in range(SWEEPS if known.any() else 0):
        total, count = np.zeros_like(given), np.zeros_like(given)
        for axis in range(given.ndim):
            low = tuple(slice(None, -1) if one == axis else slice(None) for one in range(given.ndim))
            high = tuple(slice(1, None) if one == axis else slice(None) for one in range(given.ndim))
            total[low] += found[high]
            total[high] += found[low]
            count[low] += 1
            count[high] += 1
        found = np.where(known, given, total / count)
    return found


class Regressed:
    """What a regressor fitted to a table says of points that are not in it. Fitted when first asked."""

    def __init__(self, one: Opened, table: Table, named: Callable[[str, Floats], pa.Table]) -> None:
        """``named``: points of a grid, by its name, as the columns of such a file."""
        self.one = one
        self.table = table
        self.named = named

    @cached_property
    def fitted(self) -> BoostedRegressor:
        table = subsampled(self.table, ROWS_TO_FIT, seed=0)
        return BoostedRegressor(table.times.physics, table.columns).fit(table.x, table.seconds, groups=table.groups)

    def predict(self, grid: str, points: Floats) -> Floats:
        """Seconds of one layer."""
        layout, _ = rows_of(self.one.file)
        (part,) = layout.parts(Rows(str(self.one.file), self.named(grid, points)))
        return self.fitted.predict(np.column_stack([part.times.features[name] for name in self.table.columns]))

    @property
    def unseen_error(self) -> float | None:
        """Mean relative error on measured points unseen by it; None where there were too few."""
        misses = self.fitted.unseen_misses_
        return None if misses is None else float(np.nanmean(np.abs(np.expm1(-misses))))


def gridded(
    name: str,
    points: Points,
    layers: int,
    others: Regressed,
    constants: tuple[float, ...] | None = None,
    axes: Sequence[Floats] | None = None,
) -> Grid:
    """All combinations of the axes' values: measured ones as measured, the others told by a fit."""
    lines = list(axes) if axes is not None else [np.unique(column) for column in points.at.T]
    every = np.stack([one.ravel() for one in np.meshgrid(*lines, indexing="ij")], axis=1)
    measured = dict(zip(map(tuple, points.at.tolist()), points.seconds.tolist(), strict=True))
    seconds = np.array([measured.get(tuple(point), np.nan) for point in every.tolist()])
    unknown = np.isnan(seconds)
    error = None
    if unknown.any():
        told = others.predict(name, every)
        missed = np.log(seconds / told).reshape([len(line) for line in lines])
        seconds[unknown] = (told * np.exp(between_neighbours(missed).ravel()))[unknown]
        error = others.unseen_error
    if constants is None:
        constants = constants_of(terms(*_four(name, every)), seconds)
    return Grid(
        axes=dict(zip(AXES[name], (tuple(line.tolist()) for line in lines), strict=True)),
        seconds=tuple(float(f"{layers * one:.6g}") for one in seconds.tolist()),
        constants=tuple(layers * one for one in constants),
        measured=float(1 - unknown.mean()),
        unseen_error=error,
    )


# ---- LLMServingSim ----


MIXED = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def of_mixed(one: Opened, layers: int) -> Attention:
    """From attention measured in mixed batches. Raises TableError where one of three kinds of batch is not in it."""
    table = one.tables["attention"]
    others = Regressed(
        one,
        table,
        lambda name, at: pa.table(dict(zip(MIXED, _four(name, at), strict=True)) | {"time_us": np.ones(len(at))}),
    )
    at, seconds = medians(table.plain, table.seconds)
    chunk, decoding = at[:, 0] > 0, at[:, 2] > 0
    kinds = {"prefill": (chunk & ~decoding, [0, 1]), "decode": (~chunk & decoding, [2, 3]),
             "mixed": (chunk & decoding, [0, 1, 2, 3])}  # fmt: skip
    grids = {}
    for name, (rows, columns) in kinds.items():
        mine = Points(at[rows][:, columns], seconds[rows])
        if any(len(np.unique(column)) < 2 for column in mine.at.T):
            raise TableError(f"{one.file}: too few {name} batches: every setting should take two values at least")
        grids[name] = gridded(name, mine, layers, others)
    return Attention(grids["prefill"], grids["decode"], grids["mixed"], ((one, "attention"),), ())


# ---- AIConfigurator ----


def of_phases(prefill: Opened, decode: Opened, geometry: Geometry) -> Attention:
    """From prefill and decode attention measured apart. What is not measured is in the notes."""
    first, notes = _prefill(prefill, geometry)
    then, more = _decode(decode, geometry)
    told = (
        "chunks behind context were not measured: physics alone says what the context costs",
        "chunks beside decoding requests were not measured: both take as long as apart",
    )
    return Attention(first, then, None, ((prefill, "prefill attention"), (decode, "decode attention")),
                     (*notes, *more, *told))  # fmt: skip


def _like(one: Opened, operator: str, geometry: Geometry) -> tuple[Table, Flags, str]:
    """Rows of this head size, without window, by the kernel that most of them have; which are of this very shape."""
    table = one.tables[operator]
    has = table.times.settings
    mine = (has["dim"] == geometry.head_dim) & (has["window"] == 0)
    if mine.sum() < 2:
        raise TableError(f"{one.file}: no {operator} with head_dim {geometry.head_dim} and without window")
    kernels, counts = np.unique(has["kernel"][mine], return_counts=True)
    mine &= has["kernel"] == kernels[np.argmax(counts)]
    rows = table.times.of(mine)
    groups = np.unique(table.groups[mine], return_inverse=True)[1].ravel()
    chosen = Table(table.file, operator, table.layout, rows, table.seconds[mine], groups, table.rows_in_file, ())
    same = (rows.settings["heads"] == geometry.heads) & (rows.settings["kv_heads"] == geometry.kv_heads)
    kernel = str(sorted(set(one.rows.text("kernel_source").tolist()))[int(kernels[np.argmax(counts)])])
    return chosen, same, kernel


def _regressed(one: Opened, geometry: Geometry, chosen: Table, kernel: str) -> Regressed:
    prefill = chosen.operator == "prefill attention"
    same = {
        "op_name": "context_attention" if prefill else "generation_attention", "kernel_source": kernel,
        "device": one.device, "num_heads": geometry.heads, "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim, "attn_dtype": NATIVE_DTYPE, "kv_cache_dtype": NATIVE_DTYPE, "window_size": 0,
        "latency": 1.0,
    }  # fmt: skip

    def named(grid: str, at: Floats) -> pa.Table:
        ones = np.ones(len(at))
        if prefill:
            settings = {"batch_size": ones, "isl": at[:, 0], "step": 0 * ones}
        else:
            settings = {"batch_size": at[:, 0], "isl": ones, "step": at[:, 1] - 1}
        return pa.table({name: [value] * len(at) for name, value in same.items()} | settings)

    return Regressed(one, chosen, named)


def _prefill(one: Opened, geometry: Geometry) -> tuple[Grid, tuple[str, ...]]:
    chosen, same, kernel = _like(one, "prefill attention", geometry)
    others = _regressed(one, geometry, chosen, kernel)
    has = chosen.times.settings
    alone = same & (has["batch"] == 1)
    at, seconds = medians(has["length"][alone][:, None], chosen.seconds[alone])
    lengths = np.unique(has["length"])
    lengths = lengths[lengths > 1]
    constants = _prefill_constants(chosen, same, others, lengths)
    # No context but none was measured. An axis has two points: one token of context costs nothing to speak of.
    points = Points(np.vstack([np.column_stack([at, np.full(len(at), k)]) for k in (0.0, 1.0)]), np.tile(seconds, 2))
    grid = gridded("prefill", points, geometry.layers, others, constants, (lengths, np.array([0.0, 1.0])))
    return grid, () if same.any() else (_guess(one, geometry),)


def _prefill_constants(chosen: Table, same: Flags, others: Regressed, lengths: Floats) -> tuple[float, ...]:
    """From batches of this shape; from the regressor, where there are none."""
    has = chosen.times.settings
    if not same.any():
        nothing = np.zeros(len(lengths))
        return constants_of(terms(lengths, nothing, nothing, nothing), others.predict("prefill", lengths[:, None]))
    batch, length = has["batch"][same], has["length"][same]
    design = np.zeros((len(batch), len(TERMS)))
    design[:, 0], design[:, 1], design[:, 2] = 1.0, batch * causal_pairs(0, length), batch * length
    return constants_of(design, chosen.seconds[same])


def _decode(one: Opened, geometry: Geometry) -> tuple[Grid, tuple[str, ...]]:
    chosen, same, kernel = _like(one, "decode attention", geometry)
    has = chosen.times.settings
    at, seconds = medians(np.column_stack([has["batch"][same], has["length"][same]]), chosen.seconds[same])
    axes = (np.unique(has["batch"]), np.unique(has["length"]))
    others = _regressed(one, geometry, chosen, kernel)
    grid = gridded("decode", Points(at, seconds), geometry.layers, others, None, axes)
    return grid, () if same.any() else (_guess(one, geometry),)


def _guess(one: Opened, geometry: Geometry) -> str:
    return (
        f"{one.file.name}: {geometry.heads} heads on {geometry.kv_heads} KV heads not measured, told by a fit to other "
        "shapes of that head size"
    )
