"""Attention over a whole model: grids of measured points, with gaps filled by a regressor fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from kvpolicy.arrays import Flags, Floats, causal_pairs
from kvpolicy.hardware import Geometry
from kvpolicy.regression.ceilings import positive_fit
from kvpolicy.regression.estimator import BoostedRegressor
from kvpolicy.simulator.hardware.interpolation import TERMS
from kvpolicy.simulator.hardware.layout import Rows
from kvpolicy.simulator.hardware.layouts import NATIVE_DTYPE
from kvpolicy.simulator.hardware.operator_tables import Table, TableError, TableFile, medians, rows_of, subsampled
from kvpolicy.simulator.hardware.table_times import AXES, Grid

ROWS_TO_FIT = 30_000
SWEEPS = 30
"""How far, in grid points, the fit's errors at measured points correct its predictions at others."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a step, and the files it was taken from."""

    prefill: Grid
    decode: Grid
    mixed: Grid | None
    sources: tuple[tuple[TableFile, str], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Points:
    """Measured points of one grid, with a column per axis, and the time of one layer at each."""

    at: Floats
    seconds: Floats


def terms(tokens: Floats, context: Floats, requests: Floats, decoded: Floats) -> Floats:
    """Columns of :data:`~kvpolicy.simulator.hardware.interpolation.TERMS`."""
    pairs = causal_pairs(context, context + tokens)
    read = np.where(tokens > 0, tokens + context, 0.0)
    return np.column_stack([np.ones(len(tokens)), pairs, tokens, read, requests * decoded, decoded, requests])


def constants_of(design: Floats, seconds: Floats) -> tuple[float, ...]:
    return tuple(map(float, positive_fit(design, seconds, np.ones(len(seconds)))))


def _load_columns(name: str, at: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """(chunk tokens, their context, decoding requests, their context) of a grid's points."""
    nothing = np.zeros(len(at))
    if name == "prefill":
        return at[:, 0], at[:, 1], nothing, nothing
    if name == "decode":
        return nothing, nothing, at[:, 0], at[:, 1]
    return at[:, 0], at[:, 1], at[:, 2], at[:, 3]


def between_neighbours(values: Floats) -> Floats:
    """A grid's values with unknown ones (NaN) filled by means of their neighbours; 0 where nothing is known."""
    known = ~np.isnan(values)
    start = np.where(known, values, 0.0)
    filled = start
    for _ in range(SWEEPS if known.any() else 0):
        total, count = np.zeros_like(start), np.zeros_like(start)
        for axis in range(start.ndim):
            low = tuple(slice(None, -1) if other_axis == axis else slice(None) for other_axis in range(start.ndim))
            high = tuple(slice(1, None) if other_axis == axis else slice(None) for other_axis in range(start.ndim))
            total[low] += filled[high]
            total[high] += filled[low]
            count[low] += 1
            count[high] += 1
        filled = np.where(known, start, total / count)
    return filled


class TableRegressor:
    """Predictions of a regressor for points that are not in its table. It is fitted on first use."""

    def __init__(self, table_file: TableFile, table: Table, as_columns: Callable[[str, Floats], pa.Table]) -> None:
        """``as_columns``: turns points of the grid of a name into the columns of such a file."""
        self.table_file = table_file
        self.table = table
        self.as_columns = as_columns

    @cached_property
    def fitted(self) -> BoostedRegressor:
        table = subsampled(self.table, ROWS_TO_FIT, seed=0)
        return BoostedRegressor(table.times.physics, table.columns).fit(table.x, table.seconds, groups=table.groups)

    def predict(self, grid: str, points: Floats) -> Floats:
        """Seconds of one layer."""
        layout, _ = rows_of(self.table_file.file)
        (part,) = layout.parts(Rows(str(self.table_file.file), self.as_columns(grid, points)))
        return self.fitted.predict(np.column_stack([part.times.features[name] for name in self.table.columns]))

    @property
    def unseen_error(self) -> float | None:
        """Mean relative error on held-out measured points; None where there were too few."""
        misses = self.fitted.unseen_misses_
        return None if misses is None else float(np.nanmean(np.abs(np.expm1(-misses))))


def complete_grid(
    name: str,
    points: Points,
    layers: int,
    regressor: TableRegressor,
    constants: tuple[float, ...] | None = None,
    axes: Sequence[Floats] | None = None,
) -> Grid:
    """A grid of all combinations of axis values: measured points as measured, the others predicted by a fit."""
    axis_values = list(axes) if axes is not None else [np.unique(column) for column in points.at.T]
    grid_points = np.stack([axis.ravel() for axis in np.meshgrid(*axis_values, indexing="ij")], axis=1)
    measured = dict(zip(map(tuple, points.at.tolist()), points.seconds.tolist(), strict=True))
    seconds = np.array([measured.get(tuple(point), np.nan) for point in grid_points.tolist()])
    missing = np.isnan(seconds)
    error = None
    if missing.any():
        predicted = regressor.predict(name, grid_points)
        log_errors = np.log(seconds / predicted).reshape([len(values) for values in axis_values])
        seconds[missing] = (predicted * np.exp(between_neighbours(log_errors).ravel()))[missing]
        error = regressor.unseen_error
    if constants is None:
        constants = constants_of(terms(*_load_columns(name, grid_points)), seconds)
    return Grid(
        axes=dict(zip(AXES[name], (tuple(values.tolist()) for values in axis_values), strict=True)),
        seconds=tuple(float(f"{layers * value:.6g}") for value in seconds.tolist()),
        constants=tuple(layers * constant for constant in constants),
        measured=float(1 - missing.mean()),
        unseen_error=error,
    )


# ---- LLMServingSim ----


MIXED = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def of_mixed(table_file: TableFile, layers: int) -> Attention:
    """Attention measured in mixed batches. Raises TableError where one of the three kinds of batch is missing."""
    table = table_file.tables["attention"]
    regressor = TableRegressor(
        table_file,
        table,
        lambda name, at: pa.table(
            dict(zip(MIXED, _load_columns(name, at), strict=True)) | {"time_us": np.ones(len(at))}
        ),
    )
    at, seconds = medians(table.plain, table.seconds)
    with_chunk, with_decodes = at[:, 0] > 0, at[:, 2] > 0
    kinds = {"prefill": (with_chunk & ~with_decodes, [0, 1]), "decode": (~with_chunk & with_decodes, [2, 3]),
             "mixed": (with_chunk & with_decodes, [0, 1, 2, 3])}  # fmt: skip
    grids = {}
    for name, (rows, columns) in kinds.items():
        points = Points(at[rows][:, columns], seconds[rows])
        if any(len(np.unique(column)) < 2 for column in points.at.T):
            raise TableError(
                f"{table_file.file}: too few {name} batches: every setting should take two values at least"
            )
        grids[name] = complete_grid(name, points, layers, regressor)
    return Attention(grids["prefill"], grids["decode"], grids["mixed"], ((table_file, "attention"),), ())


# ---- AIConfigurator ----


def of_phases(prefill: TableFile, decode: TableFile, geometry: Geometry) -> Attention:
    """Prefill and decode attention measured separately. The notes say what was not measured."""
    prefill_grid, notes = _prefill(prefill, geometry)
    decode_grid, decode_notes = _decode(decode, geometry)
    unmeasured = (
        "chunks behind context were not measured: physics alone says what the context costs",
        "chunks beside decoding requests were not measured: both take as long as apart",
    )
    return Attention(prefill_grid, decode_grid, None, ((prefill, "prefill attention"), (decode, "decode attention")),
                     (*notes, *decode_notes, *unmeasured))  # fmt: skip


def _matching_rows(table_file: TableFile, operator: str, geometry: Geometry) -> tuple[Table, Flags, str]:
    """Rows of this head size without window, of the most frequent kernel; which have this very shape; the kernel."""
    table = table_file.tables[operator]
    settings = table.times.settings
    matching = (settings["dim"] == geometry.head_dim) & (settings["window"] == 0)
    if matching.sum() < 2:
        raise TableError(f"{table_file.file}: no {operator} with head_dim {geometry.head_dim} and without window")
    kernels, counts = np.unique(settings["kernel"][matching], return_counts=True)
    matching &= settings["kernel"] == kernels[np.argmax(counts)]
    rows = table.times.of(matching)
    groups = np.unique(table.groups[matching], return_inverse=True)[1].ravel()
    chosen = Table(table.file, operator, table.layout, rows, table.seconds[matching], groups, table.rows_in_file, ())
    same_shape = (rows.settings["heads"] == geometry.heads) & (rows.settings["kv_heads"] == geometry.kv_heads)
    kernel = str(sorted(set(table_file.rows.text("kernel_source").tolist()))[int(kernels[np.argmax(counts)])])
    return chosen, same_shape, kernel


def _regressor_of(table_file: TableFile, geometry: Geometry, chosen: Table, kernel: str) -> TableRegressor:
    prefill = chosen.operator == "prefill attention"
    fixed_columns = {
        "op_name": "context_attention" if prefill else "generation_attention", "kernel_source": kernel,
        "device": table_file.device, "num_heads": geometry.heads, "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim, "attn_dtype": NATIVE_DTYPE, "kv_cache_dtype": NATIVE_DTYPE, "window_size": 0,
        "latency": 1.0,
    }  # fmt: skip

    def as_columns(grid: str, at: Floats) -> pa.Table:
        ones = np.ones(len(at))
        if prefill:
            settings = {"batch_size": ones, "isl": at[:, 0], "step": 0 * ones}
        else:
            settings = {"batch_size": at[:, 0], "isl": ones, "step": at[:, 1] - 1}
        return pa.table({name: [value] * len(at) for name, value in fixed_columns.items()} | settings)

    return TableRegressor(table_file, chosen, as_columns)


def _prefill(table_file: TableFile, geometry: Geometry) -> tuple[Grid, tuple[str, ...]]:
    chosen, same_shape, kernel = _matching_rows(table_file, "prefill attention", geometry)
    regressor = _regressor_of(table_file, geometry, chosen, kernel)
    settings = chosen.times.settings
    single = same_shape & (settings["batch"] == 1)
    at, seconds = medians(settings["length"][single][:, None], chosen.seconds[single])
    lengths = np.unique(settings["length"])
    lengths = lengths[lengths > 1]
    constants = _prefill_constants(chosen, same_shape, regressor, lengths)
    # Only chunks without context were measured. An axis needs two points; one token of context costs next to nothing.
    points = Points(np.vstack([np.column_stack([at, np.full(len(at), k)]) for k in (0.0, 1.0)]), np.tile(seconds, 2))
    grid = complete_grid("prefill", points, geometry.layers, regressor, constants, (lengths, np.array([0.0, 1.0])))
    return grid, () if same_shape.any() else (_prediction_note(table_file, geometry),)


def _prefill_constants(
    chosen: Table, same_shape: Flags, regressor: TableRegressor, lengths: Floats
) -> tuple[float, ...]:
    """Constants of the physics, from batches of this shape, or where there are none from the regressor."""
    settings = chosen.times.settings
    if not same_shape.any():
        nothing = np.zeros(len(lengths))
        return constants_of(terms(lengths, nothing, nothing, nothing), regressor.predict("prefill", lengths[:, None]))
    batch, length = settings["batch"][same_shape], settings["length"][same_shape]
    design = np.zeros((len(batch), len(TERMS)))
    design[:, 0], design[:, 1], design[:, 2] = 1.0, batch * causal_pairs(0, length), batch * length
    return constants_of(design, chosen.seconds[same_shape])


def _decode(table_file: TableFile, geometry: Geometry) -> tuple[Grid, tuple[str, ...]]:
    chosen, same_shape, kernel = _matching_rows(table_file, "decode attention", geometry)
    settings = chosen.times.settings
    at, seconds = medians(
        np.column_stack([settings["batch"][same_shape], settings["length"][same_shape]]), chosen.seconds[same_shape]
    )
    axes = (np.unique(settings["batch"]), np.unique(settings["length"]))
    regressor = _regressor_of(table_file, geometry, chosen, kernel)
    grid = complete_grid("decode", Points(at, seconds), geometry.layers, regressor, None, axes)
    return grid, () if same_shape.any() else (_prediction_note(table_file, geometry),)


def _prediction_note(table_file: TableFile, geometry: Geometry) -> str:
    return (
        f"{table_file.file.name}: {geometry.heads} heads on {geometry.kv_heads} KV heads not measured, predicted by "
        "a fit to other shapes of that head size"
    )
