"""Attention over a whole model: measured points on dense grids, those between told by a regressor fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvpolicy.cost.ceilings import relative_fit
from kvpolicy.cost.estimator import BoostedRegressor
from kvpolicy.cost.layouts import NATIVE_DTYPE, Rows
from kvpolicy.cost.tables import Table, TableError, rows_of, subsampled
from kvpolicy.hardware import Geometry
from kvpolicy.simulator.hardware import AXES, Grid
from kvpolicy.simulator.profiles.opened import Opened, medians

Floats = NDArray[np.float64]
Predict = Callable[[Floats], Floats]
Settings = Callable[[Floats], Mapping[str, Floats]]

ROWS_TO_FIT = 30_000


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
    """Columns of :data:`~kvpolicy.simulator.interpolation.TERMS`."""
    pairs = tokens * context + tokens * (tokens + 1) / 2
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


def gridded(
    name: str, points: Points, layers: int, predict: Predict, unseen_error: float | None,
    constants: tuple[float, ...] | None = None, axes: Sequence[Floats] | None = None,
) -> Grid:  # fmt: skip
    """All combinations of the axes' values; measured ones as measured, the others as ``predict`` says of one layer."""
    lines = list(axes) if axes is not None else [np.unique(column) for column in points.at.T]
    every = np.stack([one.ravel() for one in np.meshgrid(*lines, indexing="ij")], axis=1)
    seconds = predict(every)
    number = {tuple(point): i for i, point in enumerate(every.tolist())}
    known = 0
    for point, measured in zip(points.at.tolist(), points.seconds.tolist(), strict=True):
        if tuple(point) in number:
            seconds[number[tuple(point)]] = measured
            known += 1
    if constants is None:
        constants = constants_of(terms(*_four(name, every)), seconds)
    return Grid(
        axes=dict(zip(AXES[name], (tuple(line.tolist()) for line in lines), strict=True)),
        seconds=tuple(float(f"{layers * one:.6g}") for one in seconds.tolist()),
        constants=tuple(layers * one for one in constants),
        measured=known / len(every),
        unseen_error=unseen_error,
    )


def _fitted(table: Table) -> tuple[BoostedRegressor, float | None]:
    """A regressor, and its mean relative error on points unseen by it."""
    made = BoostedRegressor(table.times.physics, table.columns).fit(table.x, table.seconds, groups=table.groups)
    misses = made.unseen_misses_
    return made, None if misses is None else float(np.nanmean(np.abs(np.expm1(-misses))))


def _predictor(
    one: Opened, fitted: BoostedRegressor, columns: Sequence[str], named: Callable[[Floats], pa.Table]
) -> Predict:
    layout, _ = rows_of(one.file)

    def predict(at: Floats) -> Floats:
        (part,) = layout.parts(Rows(str(one.file), named(at)))
        return fitted.predict(np.column_stack([part.times.features[column] for column in columns]))

    return predict


# ---- LLMServingSim ----


def of_mixed(one: Opened, layers: int) -> Attention:
    """From attention measured in mixed batches. Raises TableError where one of three kinds of batch is not in it."""
    table = one.tables["attention"]
    fitted, error = _fitted(subsampled(table, ROWS_TO_FIT, seed=0))
    at, seconds = medians(table.plain, table.seconds)
    chunk, decoding = at[:, 0] > 0, at[:, 2] > 0
    kinds = {"prefill": (chunk & ~decoding, (0, 1)), "decode": (~chunk & decoding, (2, 3)),
             "mixed": (chunk & decoding, (0, 1, 2, 3))}  # fmt: skip

    def named(at: Floats) -> pa.Table:
        names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        return pa.table(dict(zip(names, at.T, strict=True)) | {"time_us": np.ones(len(at))})

    predict = _predictor(one, fitted, table.columns, named)
    grids = {}
    for name, (rows, columns) in kinds.items():
        mine = Points(at[rows][:, list(columns)], seconds[rows])
        if any(len(np.unique(column)) < 2 for column in mine.at.T) or not len(mine.at):
            raise TableError(f"{one.file}: too few {name} batches: every setting should take two values at least")
        grids[name] = gridded(name, mine, layers, _of_all_four(name, predict), error)
    return Attention(grids["prefill"], grids["decode"], grids["mixed"], ((one, "attention"),), ())


def _of_all_four(name: str, predict: Predict) -> Predict:
    return lambda at: predict(np.column_stack(_four(name, at)))


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


def _like(one: Opened, operator: str, geometry: Geometry) -> tuple[Table, NDArray[np.bool_], str]:
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


def _phase(one: Opened, geometry: Geometry, chosen: Table, kernel: str, settings: Settings,
           ) -> tuple[Predict, float | None]:  # fmt: skip
    fitted, error = _fitted(subsampled(chosen, ROWS_TO_FIT, seed=0))
    word = "context_attention" if chosen.operator.startswith("prefill") else "generation_attention"

    def named(at: Floats) -> pa.Table:
        same = {
            "op_name": word, "kernel_source": kernel, "device": one.device, "num_heads": geometry.heads,
            "num_key_value_heads": geometry.kv_heads, "head_dim": geometry.head_dim, "attn_dtype": NATIVE_DTYPE,
            "kv_cache_dtype": NATIVE_DTYPE, "window_size": 0, "latency": 1.0,
        }  # fmt: skip
        return pa.table({name: [value] * len(at) for name, value in same.items()} | dict(settings(at)))

    return _predictor(one, fitted, chosen.columns, named), error


def _prefill(one: Opened, geometry: Geometry) -> tuple[Grid, tuple[str, ...]]:
    chosen, same, kernel = _like(one, "prefill attention", geometry)
    has = chosen.times.settings

    def settings(at: Floats) -> Mapping[str, Floats]:
        return {"batch_size": np.ones(len(at)), "isl": at[:, 0], "step": np.zeros(len(at))}

    predict, error = _phase(one, geometry, chosen, kernel, settings)
    alone = same & (has["batch"] == 1)
    at, seconds = medians(has["length"][alone][:, None], chosen.seconds[alone])
    lengths = np.unique(has["length"])
    # One context only was measured, none: the axis has a second point so that it is one, and it costs nothing.
    axes = (lengths[lengths > 1], np.array([0.0, 1.0]))
    constants = _prefill_constants(chosen, same, geometry, predict, axes[0])
    points = Points(np.column_stack([at, np.zeros(len(at))]), seconds)
    grid = gridded("prefill", points, geometry.layers, predict, error, constants, axes)
    level = np.repeat(np.array(grid.seconds).reshape(len(axes[0]), 2)[:, :1], 2, axis=1).ravel()
    flat = Grid(grid.axes, tuple(level.tolist()), grid.constants, 2 * grid.measured, grid.unseen_error)
    return flat, () if same.any() else (_guess(one, geometry),)


def _prefill_constants(
    chosen: Table, same: NDArray[np.bool_], geometry: Geometry, predict: Predict, lengths: Floats
) -> tuple[float, ...]:
    """From batches of this shape; from the regressor, where there are none."""
    has = chosen.times.settings
    nothing = np.zeros(len(lengths))
    if not same.any():
        alone = np.column_stack([lengths, nothing])
        return constants_of(terms(lengths, nothing, nothing, nothing), predict(alone))
    batch, length = has["batch"][same], has["length"][same]
    design = np.zeros((len(batch), 7))
    design[:, 0], design[:, 1], design[:, 2] = 1.0, batch * length * (length + 1) / 2, batch * length
    return constants_of(design, chosen.seconds[same])


def _decode(one: Opened, geometry: Geometry) -> tuple[Grid, tuple[str, ...]]:
    chosen, same, kernel = _like(one, "decode attention", geometry)
    has = chosen.times.settings

    def settings(at: Floats) -> Mapping[str, Floats]:
        return {"batch_size": at[:, 0], "isl": np.ones(len(at)), "step": at[:, 1] - 1}

    predict, error = _phase(one, geometry, chosen, kernel, settings)
    at, seconds = medians(np.column_stack([has["batch"][same], has["length"][same]]), chosen.seconds[same])
    axes = (np.unique(has["batch"]), np.unique(has["length"]))
    grid = gridded("decode", Points(at, seconds), geometry.layers, predict, error, None, axes)
    return grid, () if same.any() else (_guess(one, geometry),)


def _guess(one: Opened, geometry: Geometry) -> str:
    return (
        f"{one.file.name}: {geometry.heads} heads on {geometry.kv_heads} KV heads not measured, told by a fit to other "
        "shapes of that head size"
    )
