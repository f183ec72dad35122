"""Times, over a whole model, of operators that work token by token or sequence by sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from kvpolicy.arrays import Floats
from kvpolicy.cost.analytic import ASSUMED
from kvpolicy.hardware import Geometry
from kvpolicy.hardware.sheets import DeviceSheet
from kvpolicy.regression.estimator import BoostedRegressor
from kvpolicy.simulator.hardware.layout import Rows
from kvpolicy.simulator.hardware.layouts import NATIVE_DTYPE, VIDUR_OPERATORS
from kvpolicy.simulator.hardware.operator_tables import TableError, TableFile, medians, rows_of, subsampled
from kvpolicy.simulator.hardware.table_times import Curve

PER_LAYER: Mapping[str, int] = {
    "qkv_proj": 1, "q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 1, "gate_up_proj": 1, "gate_proj": 1, "up_proj": 1,
    "down_proj": 1, "act_fn": 1, "rotary_emb": 1, "rope": 1, "q_norm": 1, "k_norm": 1, "qk_norm": 1,
    "input_layernorm": 1, "post_layernorm": 1, "layernorm": 2,
}  # fmt: skip
"""LLMServingSim's operators, and how often a layer executes each: one name for both norms counts twice."""
ONCE = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")
ATTENTION = "attn"
ELEMENTWISE_LAUNCH_S = 2.5e-6
"""Norms, rotary embedding and activation at few tokens: 2.4 to 2.9 us each on LLMServingSim's RTX PRO 6000 table."""
ELEMENTWISE_PER_LAYER = 4
ROWS_TO_FIT = 20_000
MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class SourcedCurve:
    """A curve, the files it was taken from, each with what it contributed, and notes for the user."""

    curve: Curve
    sources: tuple[tuple[TableFile, str], ...]
    notes: tuple[str, ...] = ()


def curve_of(at: Floats, seconds: Floats) -> Curve:
    """A curve through these points. Beyond the last one it has the slope of the upper half, where matrix products are
    compute-bound."""
    half = int(np.searchsorted(at, at[-1] / 2))
    half = min(half, len(at) - 2)
    per_more = max(0.0, float((seconds[-1] - seconds[half]) / (at[-1] - at[half])))
    return Curve(tuple(map(float, at)), tuple(float(f"{value:.6g}") for value in seconds), per_more)


def summed(parts: Sequence[tuple[float, Floats, Floats]]) -> Curve:
    """Sum of (repeats, counts, seconds), each linear between its own points, at the counts of all of them."""
    last = min(float(at[-1]) for _, at, _ in parts)
    at = np.unique(np.concatenate([at for _, at, _ in parts]))
    at = at[at <= last]
    return curve_of(
        at, np.sum([repeats * np.interp(at, points, seconds) for repeats, points, seconds in parts], axis=0)
    )


# ---- LLMServingSim ----


def of_layers(table_file: TableFile, layers: int) -> SourcedCurve:
    """Operators by token. Raises TableError for an operator of unknown place, or where projections are missing."""
    parts = []
    for name, table in table_file.tables.items():
        if name in PER_SEQUENCE or name == ATTENTION:
            continue
        if name not in PER_LAYER and name not in ONCE:
            known = ", ".join([*PER_LAYER, *ONCE, *PER_SEQUENCE])
            raise TableError(f"{table_file.file}: operator {name!r} has no known place in a layer; known are {known}")
        points, seconds = medians(table.plain, table.seconds)
        parts.append((float(layers * PER_LAYER[name] if name in PER_LAYER else 1), points[:, 0], seconds))
    _needs(table_file, ("qkv_proj", "q_proj"), ("o_proj",), ("gate_up_proj", "up_proj"), ("down_proj",))
    notes = []
    if "q_proj" in table_file.tables:
        notes.append(
            f"{table_file.file.name}: projections measured one by one; vLLM joins q, k, v and gate, up: an upper bound"
        )
    if ATTENTION in table_file.tables:
        notes.append(f"{table_file.file.name}: its operator {ATTENTION}, without decoding requests, is not used")
    return SourcedCurve(summed(parts), ((table_file, "operators by token"),), tuple(notes))


def _needs(table_file: TableFile, *choices: tuple[str, ...]) -> None:
    for names in choices:
        if not set(names) & set(table_file.tables):
            raise TableError(f"{table_file.file}: no operator {' or '.join(names)}: a layer's time is unknown")


def of_sequences(table_file: TableFile) -> SourcedCurve:
    """The head and the sampler. Raises TableError where the head is missing."""
    _needs(table_file, ("lm_head",))
    parts = []
    for name in PER_SEQUENCE:
        if name in table_file.tables:
            points, seconds = medians(table_file.tables[name].plain, table_file.tables[name].seconds)
            parts.append((1.0, points[:, 0], seconds))
    notes = () if len(parts) == 2 else (f"{table_file.file.name}: no sampler in it, none is counted",)
    return SourcedCurve(summed(parts), ((table_file, "head and sampler"),), notes)


# ---- Vidur ----


def of_vidur(table_file: TableFile, geometry: Geometry, ranks: int) -> SourcedCurve:
    """Operators by token. Raises TableError where no model of this shape was measured on as many workers."""
    parts = []
    for name in [operator.removesuffix("_ms") for operator in VIDUR_OPERATORS]:
        if name not in table_file.tables:
            continue
        table = table_file.tables[name]
        settings = table.times.settings
        matching = (
            (settings["width"] == geometry.hidden) & (settings["head"] == geometry.heads * ranks)
            & (settings["kv_head"] == geometry.kv_heads * ranks) & (settings["inner"] == geometry.intermediate * ranks)
            & (settings["workers"] == ranks)
        )  # fmt: skip
        if not matching.any():
            raise TableError(
                f"{table_file.file}: no rows of {name} for hidden {geometry.hidden}, {geometry.heads * ranks} heads, "
                f"{geometry.kv_heads * ranks} KV heads, MLP {geometry.intermediate * ranks}, {ranks} workers"
            )
        points, seconds = medians(settings["tokens"][matching][:, None], table.seconds[matching])
        parts.append((1.0 if name == "emb" else float(geometry.layers), points[:, 0], seconds))
    return SourcedCurve(summed(parts), ((table_file, "operators by token"),))


# ---- AIConfigurator: matrix products ----


class Products:
    """Times of matrix products: measured for measured shapes, predicted by a regressor fitted to all for others."""

    def __init__(self, table_file: TableFile) -> None:
        self.table_file = table_file
        self.table = subsampled(table_file.tables["matrix product"], ROWS_TO_FIT, seed=0)
        self.fitted: BoostedRegressor | None = None
        self.predicted_shapes: list[str] = []

    def seconds(self, m: Floats, n: int, k: int) -> Floats:
        """Seconds of (m, k) x (k, n) for each m."""
        table = self.table_file.tables["matrix product"]
        settings = table.times.settings
        matching = (settings["n"] == n) & (settings["k"] == k)
        if matching.sum() >= 2:
            points, seconds = medians(settings["m"][matching][:, None], table.seconds[matching])
            return np.asarray(np.interp(m, points[:, 0], seconds), np.float64)
        self.predicted_shapes.append(f"{n} x {k}")
        return self._fitted().predict(self._features(m, n, k))

    def _fitted(self) -> BoostedRegressor:
        if self.fitted is None:
            regressor = BoostedRegressor(self.table.times.physics, self.table.columns)
            self.fitted = regressor.fit(self.table.x, self.table.seconds, groups=self.table.groups)
        return self.fitted

    def _features(self, m: Floats, n: int, k: int) -> Floats:
        layout, _ = rows_of(self.table_file.file)
        columns = {
            "device": [self.table_file.device] * len(m), "gemm_dtype": [NATIVE_DTYPE] * len(m), "m": m,
            "n": [n] * len(m), "k": [k] * len(m), "latency": [1.0] * len(m),
        }  # fmt: skip
        (part,) = layout.parts(Rows(str(self.table_file.file), pa.table(columns)))
        return np.column_stack([part.times.features[name] for name in self.table.columns])

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.predicted_shapes:
            return ()
        return (
            f"{self.table_file.file.name}: products of shape {', '.join(self.predicted_shapes)} not measured, "
            "predicted by a fit to all",
        )


def of_products(products: Products, geometry: Geometry, sheet: DeviceSheet) -> SourcedCurve:
    """Projections and MLP from matrix products; elementwise operators from the data sheet's memory bandwidth."""
    g = geometry
    max_tokens = min(MAX_TOKENS, float(products.table.times.settings["m"].max()))
    m = np.unique(products.table.times.settings["m"])
    m = m[m <= max_tokens]
    attention = g.heads * g.head_dim
    shapes = (
        (g.head_dim * (g.heads + 2 * g.kv_heads), g.hidden), (g.hidden, attention),
        (2 * g.intermediate, g.hidden), (g.hidden, g.intermediate),
    )  # fmt: skip
    seconds = np.sum([products.seconds(m, n, k) for n, k in shapes], axis=0)
    elements = 2 * 4 * g.hidden + 2 * (attention + g.kv_heads * g.head_dim) + 3 * g.intermediate
    rate = ASSUMED.weight_share.value * sheet.memory_bytes_per_s
    seconds = seconds + ELEMENTWISE_PER_LAYER * ELEMENTWISE_LAUNCH_S + m * elements * g.weight_bytes / rate
    note = (
        f"norms, rotary embedding and activation are in no table: {ELEMENTWISE_PER_LAYER} launches of "
        f"{ELEMENTWISE_LAUNCH_S * 1e6:g} us a layer and their bytes at {ASSUMED.weight_share.value:g} of "
        f"{sheet.name}'s memory bandwidth are assumed"
    )
    return SourcedCurve(curve_of(m, g.layers * seconds), ((products.table_file, "projections and MLP"),), (note,))


def head_of_products(products: Products, geometry: Geometry, ranks: int) -> SourcedCurve:
    """The head as a matrix product, without a sampler."""
    m = np.unique(products.table.times.settings["m"])
    m = m[m <= 1024]
    seconds = products.seconds(m, geometry.vocab // ranks, geometry.hidden)
    note = f"{products.table_file.file.name}: the head as a matrix product; no sampler in it, none is counted"
    return SourcedCurve(curve_of(m, seconds), ((products.table_file, "head"),), (note,))
