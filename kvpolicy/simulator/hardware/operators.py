"""Operators that work token by token or sequence by sequence: their times over a whole model, by count."""

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
from kvpolicy.simulator.hardware.layouts import NATIVE_DTYPE, VIDUR_OPERATORS, Rows
from kvpolicy.simulator.hardware.operator_tables import Opened, TableError, medians, rows_of, subsampled
from kvpolicy.simulator.hardware.table_times import Curve

PER_LAYER: Mapping[str, int] = {
    "qkv_proj": 1, "q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 1, "gate_up_proj": 1, "gate_proj": 1, "up_proj": 1,
    "down_proj": 1, "act_fn": 1, "rotary_emb": 1, "rope": 1, "q_norm": 1, "k_norm": 1, "qk_norm": 1,
    "input_layernorm": 1, "post_layernorm": 1, "layernorm": 2,
}  # fmt: skip
"""LLMServingSim's names, and how often a layer does that: one name for both norms stands for two."""
ONCE = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")
ATTENTION = "attn"
ELEMENTWISE_LAUNCH_S = 2.5e-6
"""Norms, rotary embedding and activation at few tokens: 2.4 to 2.9 us each on LLMServingSim's RTX PRO 6000 table."""
ELEMENTWISE_PER_LAYER = 4
ROWS_TO_FIT = 20_000
MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Told:
    """A curve, the files that told it and for what, and what a person should know of it."""

    curve: Curve
    by: tuple[tuple[Opened, str], ...]
    notes: tuple[str, ...] = ()


def curve_of(at: Floats, seconds: Floats) -> Curve:
    """Beyond the last point as over the upper half of the points, where matrix products are bound by computing."""
    half = int(np.searchsorted(at, at[-1] / 2))
    half = min(half, len(at) - 2)
    per_more = max(0.0, float((seconds[-1] - seconds[half]) / (at[-1] - at[half])))
    return Curve(tuple(map(float, at)), tuple(float(f"{one:.6g}") for one in seconds), per_more)


def summed(parts: Sequence[tuple[float, Floats, Floats]]) -> Curve:
    """Of (times, counts, seconds), each linear between its own points, on the counts of all of them together."""
    last = min(float(at[-1]) for _, at, _ in parts)
    at = np.unique(np.concatenate([at for _, at, _ in parts]))
    at = at[at <= last]
    return curve_of(at, np.sum([times * np.interp(at, own, seconds) for times, own, seconds in parts], axis=0))


# ---- LLMServingSim ----


def of_layers(one: Opened, layers: int) -> Told:
    """Raises TableError for an operator of unknown place, and where the projections are not there."""
    parts = []
    for name, table in one.tables.items():
        if name in PER_SEQUENCE or name == ATTENTION:
            continue
        if name not in PER_LAYER and name not in ONCE:
            known = ", ".join([*PER_LAYER, *ONCE, *PER_SEQUENCE])
            raise TableError(f"{one.file}: operator {name!r} has no known place in a layer; known are {known}")
        points, seconds = medians(table.plain, table.seconds)
        parts.append((float(layers * PER_LAYER[name] if name in PER_LAYER else 1), points[:, 0], seconds))
    _needs(one, ("qkv_proj", "q_proj"), ("o_proj",), ("gate_up_proj", "up_proj"), ("down_proj",))
    notes = []
    if "q_proj" in one.tables:
        notes.append(
            f"{one.file.name}: projections measured one by one; vLLM joins q, k, v and gate, up: an upper bound"
        )
    if ATTENTION in one.tables:
        notes.append(f"{one.file.name}: its operator {ATTENTION}, without decoding requests, is not used")
    return Told(summed(parts), ((one, "operators by token"),), tuple(notes))


def _needs(one: Opened, *choices: tuple[str, ...]) -> None:
    for names in choices:
        if not set(names) & set(one.tables):
            raise TableError(f"{one.file}: no operator {' or '.join(names)}: a layer's time cannot be told")


def of_sequences(one: Opened) -> Told:
    """The head and the sampler. Raises TableError where the head is not there."""
    _needs(one, ("lm_head",))
    parts = []
    for name in PER_SEQUENCE:
        if name in one.tables:
            points, seconds = medians(one.tables[name].plain, one.tables[name].seconds)
            parts.append((1.0, points[:, 0], seconds))
    notes = () if len(parts) == 2 else (f"{one.file.name}: no sampler in it, none is counted",)
    return Told(summed(parts), ((one, "head and sampler"),), notes)


# ---- Vidur ----


def of_vidur(one: Opened, geometry: Geometry, ranks: int) -> Told:
    """Raises TableError where no model of this shape was measured on as many workers."""
    parts = []
    for name in [operator.removesuffix("_ms") for operator in VIDUR_OPERATORS]:
        if name not in one.tables:
            continue
        table = one.tables[name]
        has = table.times.settings
        mine = (
            (has["width"] == geometry.hidden) & (has["head"] == geometry.heads * ranks)
            & (has["kv_head"] == geometry.kv_heads * ranks) & (has["inner"] == geometry.intermediate * ranks)
            & (has["workers"] == ranks)
        )  # fmt: skip
        if not mine.any():
            raise TableError(
                f"{one.file}: no rows of {name} for hidden {geometry.hidden}, {geometry.heads * ranks} heads, "
                f"{geometry.kv_heads * ranks} KV heads, MLP {geometry.intermediate * ranks}, {ranks} workers"
            )
        points, seconds = medians(has["tokens"][mine][:, None], table.seconds[mine])
        parts.append((1.0 if name == "emb" else float(geometry.layers), points[:, 0], seconds))
    return Told(summed(parts), ((one, "operators by token"),))


# ---- AIConfigurator: matrix products ----


class Products:
    """Times of matrix products of any shape: measured where that shape was, else a regressor's fitted to all."""

    def __init__(self, one: Opened) -> None:
        self.one = one
        self.table = subsampled(one.tables["matrix product"], ROWS_TO_FIT, seed=0)
        self.fitted: BoostedRegressor | None = None
        self.guessed: list[str] = []

    def seconds(self, m: Floats, n: int, k: int) -> Floats:
        """Of (m, k) x (k, n) for each m."""
        whole = self.one.tables["matrix product"]
        has = whole.times.settings
        mine = (has["n"] == n) & (has["k"] == k)
        if mine.sum() >= 2:
            points, seconds = medians(has["m"][mine][:, None], whole.seconds[mine])
            return np.asarray(np.interp(m, points[:, 0], seconds), np.float64)
        self.guessed.append(f"{n} x {k}")
        return self._fitted().predict(self._features(m, n, k))

    def _fitted(self) -> BoostedRegressor:
        if self.fitted is None:
            made = BoostedRegressor(self.table.times.physics, self.table.columns)
            self.fitted = made.fit(self.table.x, self.table.seconds, groups=self.table.groups)
        return self.fitted

    def _features(self, m: Floats, n: int, k: int) -> Floats:
        layout, _ = rows_of(self.one.file)
        columns = {
            "device": [self.one.device] * len(m), "gemm_dtype": [NATIVE_DTYPE] * len(m), "m": m, "n": [n] * len(m),
            "k": [k] * len(m), "latency": [1.0] * len(m),
        }  # fmt: skip
        (part,) = layout.parts(Rows(str(self.one.file), pa.table(columns)))
        return np.column_stack([part.times.features[name] for name in self.table.columns])

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.guessed:
            return ()
        return (
            f"{self.one.file.name}: products of shape {', '.join(self.guessed)} not measured, told by a fit to all",
        )


def of_products(products: Products, geometry: Geometry, sheet: DeviceSheet) -> Told:
    """Projections and MLP from matrix products; operators by element from the data sheet's memory bandwidth."""
    g = geometry
    most = min(MAX_TOKENS, float(products.table.times.settings["m"].max()))
    m = np.unique(products.table.times.settings["m"])
    m = m[m <= most]
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
    return Told(curve_of(m, g.layers * seconds), ((products.one, "projections and MLP"),), (note,))


def head_of_products(products: Products, geometry: Geometry, ranks: int) -> Told:
    """The head from matrix products; no sampler."""
    m = np.unique(products.table.times.settings["m"])
    m = m[m <= 1024]
    seconds = products.seconds(m, geometry.vocab // ranks, geometry.hidden)
    note = f"{products.one.file.name}: the head as a matrix product; no sampler in it, none is counted"
    return Told(curve_of(m, seconds), ((products.one, "head"),), (note,))
