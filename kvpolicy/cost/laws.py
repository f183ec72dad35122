"""Laws: the fitted formulas behind predictions, in plain Python.

A law turns features into seconds of extra engine time, split into (save, load, recompute). All coefficients are 0 or
above and multiply terms that do not fall with the victim's length, so no law falls with it.

The arithmetic of each law is one function of two rows of numbers, features ``x`` and coefficients ``c``. It uses no
objects, so that it can be compiled as it is. The dataclasses name the coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, inf, sqrt
from typing import Any, Protocol

from kvpolicy.errors import InputError
from kvpolicy.features import FEATURES, Features
from kvpolicy.stored_values import object_at, value_at

Parts = tuple[float, float, float]
"""Seconds of (save, load, recompute)."""

(
    COMPUTED, RECOMPUTED, PAIRS, SAVE_BYTES, LOAD_BYTES, SAVE_SEGMENTS, LOAD_SEGMENTS, QUEUED_SAVE, QUEUED_LOAD,
    RUNNING, BATCH,
) = (
    FEATURES.index(name)
    for name in (
        "computed_tokens", "recomputed_tokens", "recomputed_pairs", "save_bytes", "load_bytes", "save_segments",
        "load_segments", "queued_save_bytes", "queued_load_bytes", "running_requests", "batch_tokens",
    )
)  # fmt: skip


MAX_COEFFICIENT = 1e12
"""With larger coefficients sums of squares or products may overflow, and a difference of infinities is NaN."""


class Law(Protocol):
    @property
    def used(self) -> frozenset[str]:
        """Names of the features that the law depends on."""
        ...

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients ``c`` of the law's scalar function."""
        ...

    def parts(self, x: Features) -> Parts: ...

    def to_dict(self) -> dict[str, Any]: ...


def recompute_seconds(x: Sequence[float], c: Sequence[float]) -> float:
    """Seconds of prefilling the lost tokens again, chunk by chunk, beside the decodes of other requests.

    ``c``: see :attr:`RecomputeRoofline.coefficients`.

    The linear layers of a step of T tokens take the root of (s_per_token T)^2 + (weight traffic)^2. This is a maximum
    with a rounded corner, because compute and traffic overlap only in part. On LLMServingSim's layer timings of an H100
    and an RTX PRO 6000 its error was 0.5 to 0.7 of that of a sharp maximum (lm_head: equal).

    A chunk costs the duration of its step less what the step would take with the other requests' decodes alone. If no
    other request runs, it costs the whole step. Attention takes max(compute, KV traffic) over all chunks together.
    """
    tokens = x[RECOMPUTED]
    others = x[RUNNING]
    chunk = max(c[10] - others, 1.0)
    full = float(floor(tokens / chunk))
    last_chunk = tokens - full * chunk if full > 0.0 else tokens
    cached = max(x[COMPUTED] - tokens, 0.0)
    seconds = c[0]
    undisturbed = 0.0
    if others > 0.0:
        undisturbed = sqrt((c[2] * others) ** 2 + (c[4] + c[5] * (1.0 - c[6] ** others)) ** 2)
    else:
        seconds += c[1] * max(full + (1.0 if last_chunk > 0.0 else 0.0), 1.0)
    traffic = 0.0
    if full > 0.0:
        batch = others + chunk
        seconds += full * (sqrt((c[2] * batch) ** 2 + (c[4] + c[5] * (1.0 - c[6] ** batch)) ** 2) - undisturbed)
        traffic += full * cached + chunk * full * (full + 1.0) / 2.0
    if last_chunk > 0.0:
        batch = others + last_chunk
        seconds += sqrt((c[2] * batch) ** 2 + (c[4] + c[5] * (1.0 - c[6] ** batch)) ** 2) - undisturbed
        traffic += cached + tokens
    attention = c[3] * x[PAIRS]
    if c[8] > 0.0:
        end, start, window = cached + tokens, cached, c[9]
        pairs = end * (end + 1.0) / 2.0 if end <= window else window * (end + (1.0 - window) / 2.0)
        pairs -= start * (start + 1.0) / 2.0 if start <= window else window * (start + (1.0 - window) / 2.0)
        attention += c[8] * pairs
    return seconds + max(attention, c[7] * traffic)


def swap_seconds(x: Sequence[float], c: Sequence[float]) -> tuple[float, float]:
    """Engine seconds of (copying out, copying back). ``c``: see :attr:`SwapRoofline.coefficients`."""
    save = c[8] * (c[0] + c[1] * x[SAVE_BYTES] + c[2] * x[SAVE_SEGMENTS]) + c[11] * c[1] * x[QUEUED_SAVE]
    load = c[3] + c[4] * x[LOAD_BYTES] + c[5] * x[LOAD_SEGMENTS]
    if x[RUNNING] > 0.0:
        seconds = c[6] + c[10] * load
        if c[13] > 0.0 and x[COMPUTED] > 0.0:
            held_s = load + c[4] * x[QUEUED_LOAD]
            seconds += c[13] * held_s * x[COMPUTED] / (x[COMPUTED] + x[BATCH])
        return save, seconds
    return save, c[6] + c[7] + c[9] * load + c[12] * c[4] * x[QUEUED_LOAD]


def linear_seconds(x: Sequence[float], c: Sequence[float]) -> float:
    """A constant plus one coefficient per feature."""
    total = c[0]
    for i in range(len(x)):
        total += c[i + 1] * x[i]
    return total


def linear_parts(x: Sequence[float], c: Sequence[float]) -> Parts:
    """The linear law's seconds, as save and load in proportion to the bytes moved, or as recompute if none are."""
    seconds = linear_seconds(x, c)
    moved = x[SAVE_BYTES] + x[LOAD_BYTES]
    if moved == 0.0:
        return 0.0, 0.0, seconds
    return seconds * x[SAVE_BYTES] / moved, seconds * x[LOAD_BYTES] / moved, 0.0


@dataclass(frozen=True, slots=True)
class RecomputeRoofline:
    """Law of prefilling the lost tokens again: see :func:`recompute_seconds`.

    The extra tokens join steps that are executed anyway. If no other request runs, they need steps of their own
    (``alone_s``).
    """

    fixed_s: float
    alone_s: float
    """Fixed time of each step that is executed for the victim alone."""
    s_per_token: float
    s_per_pair: float
    """Per (token, earlier token) pair, in layers that attend to the whole context."""
    weight_s: float = 0.0
    """Traffic of the weights that every step reads: the minimum time of a step's linear layers."""
    expert_s: float = 0.0
    """Traffic of a mixture's expert weights if all experts were used."""
    expert_miss: float = 0.0
    """Share of a mixture's experts that one token does not use."""
    s_per_kv_token: float = 0.0
    """Reading the KV of one context token in one chunk."""
    s_per_window_pair: float = 0.0
    """Per pair in layers that attend to a window of ``window_tokens``."""
    window_tokens: float = 0.0
    budget_tokens: float = inf
    """Maximum tokens of a step; infinite (a single chunk) if unknown."""
    coefficients: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.budget_tokens >= 1 or self.expert_miss > 1:
            raise InputError(
                f"budget_tokens {self.budget_tokens} and expert_miss {self.expert_miss}: "
                "should be 1 or above, and from 0 to 1"
            )
        object.__setattr__(self, "coefficients", tuple(float(getattr(self, name)) for name in RECOMPUTE_FIELDS))

    @property
    def used(self) -> frozenset[str]:
        names = {"recomputed_tokens", "recomputed_pairs", "running_requests"}
        return frozenset(names | {"computed_tokens"} if self.s_per_kv_token or self.s_per_window_pair else names)

    def parts(self, x: Features) -> Parts:
        return 0.0, 0.0, recompute_seconds(x, self.coefficients)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: an unknown budget is null."""
        values = {name: getattr(self, name) for name in RECOMPUTE_FIELDS}
        budget = None if self.budget_tokens == inf else self.budget_tokens
        return {"law": "recompute_roofline"} | values | {"budget_tokens": budget}


RECOMPUTE_FIELDS = (
    "fixed_s", "alone_s", "s_per_token", "s_per_pair", "weight_s", "expert_s", "expert_miss", "s_per_kv_token",
    "s_per_window_pair", "window_tokens", "budget_tokens",
)  # fmt: skip
FIRST_RECOMPUTE_FIELDS = RECOMPUTE_FIELDS[:4]
"""Fields that every model folder has; the others were added later."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction of the link: seconds = latency + bytes / bandwidth + a cost per contiguous piece."""

    latency_s: float
    s_per_byte: float
    s_per_segment: float

    def seconds(self, size_bytes: float, segments: float) -> float:
        return self.latency_s + self.s_per_byte * size_bytes + self.s_per_segment * segments


CHANNEL_FIELDS = ("latency_s", "s_per_byte", "s_per_segment")


@dataclass(frozen=True, slots=True)
class SwapRoofline:
    """Law of copying out and back. Only a share of a copy's duration is engine time.

    A save delays the engine at once, with the saves queued before it. A load runs beside the steps of other requests
    and delays them in part (``load_beside_share``). While it lasts, and while it waits for those queued before it, the
    victim holds its share of the memory, which nobody else can use: of that time, ``load_held_share`` times the
    victim's tokens over all tokens counts. If no other request runs, the engine waits for the load
    (``load_alone_share``) and for those queued before it.
    """

    save: Channel
    load: Channel
    fixed_s: float
    alone_s: float
    save_share: float
    load_alone_share: float
    load_beside_share: float
    save_queue_share: float = 0.0
    load_queue_share: float = 0.0
    load_held_share: float = 0.0
    coefficients: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        channels = [getattr(channel, name) for channel in (self.save, self.load) for name in CHANNEL_FIELDS]
        shares = [getattr(self, name) for name in SWAP_FIELDS]
        object.__setattr__(self, "coefficients", tuple(map(float, channels + shares)))

    @property
    def used(self) -> frozenset[str]:
        names = {"save_bytes", "load_bytes", "save_segments", "load_segments", "segment_bytes", "running_requests"}
        if self.save_queue_share:
            names.add("queued_save_bytes")
        if self.load_queue_share or self.load_held_share:
            names.add("queued_load_bytes")
        if self.load_held_share:
            names |= {"computed_tokens", "batch_tokens"}
        return frozenset(names)

    def parts(self, x: Features) -> Parts:
        save, load = swap_seconds(x, self.coefficients)
        return save, load, 0.0

    def to_dict(self) -> dict[str, Any]:
        channels = {
            way: {name: getattr(getattr(self, way), name) for name in CHANNEL_FIELDS} for way in ("save", "load")
        }
        return {"law": "swap_roofline"} | channels | {name: getattr(self, name) for name in SWAP_FIELDS}


SWAP_FIELDS = (
    "fixed_s", "alone_s", "save_share", "load_alone_share", "load_beside_share", "save_queue_share",
    "load_queue_share", "load_held_share",
)  # fmt: skip
FIRST_SWAP_FIELDS = SWAP_FIELDS[:5]


@dataclass(frozen=True, slots=True)
class LinearLaw:
    """A weighted sum of features. It does not distinguish save from load: both are in proportion to the bytes moved."""

    constant_s: float
    per_feature_s: Mapping[str, float]
    coefficients: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = (float(self.per_feature_s.get(name, 0.0)) for name in FEATURES)
        object.__setattr__(self, "coefficients", (float(self.constant_s), *weights))

    @property
    def used(self) -> frozenset[str]:
        return frozenset(self.per_feature_s)

    def parts(self, x: Features) -> Parts:
        return linear_parts(x, self.coefficients)

    def to_dict(self) -> dict[str, Any]:
        return {"law": "linear", "constant_s": self.constant_s, "per_feature_s": dict(self.per_feature_s)}


def law_from_dict(values: Mapping[str, Any]) -> Law:
    """Raises InputError naming a field that is missing or invalid."""
    kind = value_at(values, "law")
    if kind == "recompute_roofline":
        present = _present_fields(values, RECOMPUTE_FIELDS, FIRST_RECOMPUTE_FIELDS)
        unlimited = present.get("budget_tokens", inf) is None
        names = [name for name in present if name != "budget_tokens" or not unlimited]
        return RecomputeRoofline(**{name: _coefficient(present, name) for name in names})
    if kind == "swap_roofline":
        channels = (_channel(values, "save"), _channel(values, "load"))
        present = _present_fields(values, SWAP_FIELDS, FIRST_SWAP_FIELDS)
        shares = {name: _coefficient(present, name) for name in present}
        return SwapRoofline(save=channels[0], load=channels[1], **shares)
    if kind == "linear":
        weights = object_at(values, "per_feature_s")
        unknown = sorted(set(weights) - set(FEATURES))
        if unknown:
            raise InputError(f"per_feature_s: there is no feature {unknown[0]!r}")
        return LinearLaw(_coefficient(values, "constant_s"), {name: _coefficient(weights, name) for name in weights})
    raise InputError(f"law is {kind!r}, should be recompute_roofline, swap_roofline or linear")


def _present_fields(values: Mapping[str, Any], names: Sequence[str], needed: Sequence[str]) -> dict[str, Any]:
    return {name: value_at(values, name) for name in names if name in needed or name in values}


def _channel(values: Mapping[str, Any], name: str) -> Channel:
    return Channel(*(_coefficient(values, name, field) for field in CHANNEL_FIELDS))


def _coefficient(values: Mapping[str, Any], *path: str) -> float:
    value = value_at(values, *path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_COEFFICIENT:
        raise InputError(f"{'.'.join(path)} is {value!r}, should be a finite number, from 0 to {MAX_COEFFICIENT:g}")
    return float(value)
