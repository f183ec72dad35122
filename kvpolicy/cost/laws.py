"""The formulas behind predictions, in plain Python: what is left of a fit once it is done.

A law turns features into seconds of extra engine time, split in (save, load, recompute). All its coefficients are 0
or above and multiply something that cannot fall with the victim's length, so no law can either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from kvpolicy.features import FEATURES, Features

Parts = tuple[float, float, float]
"""Seconds of (save, load, recompute)."""


class Law(Protocol):
    @property
    def used(self) -> frozenset[str]:
        """Names of the features that it depends on."""
        ...

    def parts(self, x: Features) -> Parts: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class RecomputeRoofline:
    """Prefilling the lost tokens again: a fixed cost, the projections per token, attention per pair of tokens.

    The extra tokens ride on steps that are executed anyway; where nobody else runs (``alone_s``) they need their own.
    """

    fixed_s: float
    alone_s: float
    s_per_token: float
    s_per_pair: float

    @property
    def used(self) -> frozenset[str]:
        return frozenset({"recomputed_tokens", "recomputed_pairs", "running_requests"})

    def parts(self, x: Features) -> Parts:
        again = self.fixed_s + self.s_per_token * x.recomputed_tokens + self.s_per_pair * x.recomputed_pairs
        return 0.0, 0.0, again + (0.0 if x.running_requests else self.alone_s)

    def to_dict(self) -> dict[str, Any]:
        return {"law": "recompute_roofline"} | asdict(self)


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction of the link: seconds = latency + bytes over bandwidth + a cost per contiguous piece."""

    latency_s: float
    s_per_byte: float
    s_per_segment: float

    def seconds(self, size_bytes: float, segments: float) -> float:
        return self.latency_s + self.s_per_byte * size_bytes + self.s_per_segment * segments


@dataclass(frozen=True, slots=True)
class SwapRoofline:
    """Copying out and back. A copy's duration is not its cost: the shares say how much of it the engine feels.

    A save is felt at once. A load runs beside the steps of the others and is felt in part (``load_beside_share``);
    where nobody else runs the engine waits for it (``load_alone_share``).
    """

    save: Channel
    load: Channel
    fixed_s: float
    alone_s: float
    save_share: float
    load_alone_share: float
    load_beside_share: float

    @property
    def used(self) -> frozenset[str]:
        names = {"save_bytes", "load_bytes", "save_segments", "load_segments", "segment_bytes", "running_requests"}
        return frozenset(names)

    def parts(self, x: Features) -> Parts:
        save = self.save_share * self.save.seconds(x.save_bytes, x.save_segments)
        load = self.load.seconds(x.load_bytes, x.load_segments)
        if x.running_requests:
            return save, self.fixed_s + self.load_beside_share * load, 0.0
        return save, self.fixed_s + self.alone_s + self.load_alone_share * load, 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"law": "swap_roofline"} | asdict(self)


@dataclass(frozen=True, slots=True)
class LinearLaw:
    """A weighted sum of features. Its save and load are in proportion to the bytes moved: it cannot tell them apart."""

    constant_s: float
    per_feature_s: Mapping[str, float]

    @property
    def used(self) -> frozenset[str]:
        return frozenset(self.per_feature_s)

    def parts(self, x: Features) -> Parts:
        seconds = self.constant_s + sum(c * getattr(x, name) for name, c in self.per_feature_s.items())
        moved = x.save_bytes + x.load_bytes
        if not moved:
            return 0.0, 0.0, seconds
        return seconds * x.save_bytes / moved, seconds * x.load_bytes / moved, 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"law": "linear", "constant_s": self.constant_s, "per_feature_s": dict(self.per_feature_s)}


def law_from_dict(values: Mapping[str, Any]) -> Law:
    """Raises KeyError for a field that is missing, ValueError or TypeError, naming it, for one that is wrong."""
    kind = values["law"]
    if kind == "recompute_roofline":
        return RecomputeRoofline(*(_coefficient(values, name) for name in RecomputeRoofline.__slots__))
    if kind == "swap_roofline":
        shares = ("fixed_s", "alone_s", "save_share", "load_alone_share", "load_beside_share")
        channels = (_channel(values, "save"), _channel(values, "load"))
        return SwapRoofline(*channels, *(_coefficient(values, name) for name in shares))
    if kind == "linear":
        weights = values["per_feature_s"]
        unknown = sorted(set(weights) - set(FEATURES))
        if unknown:
            raise ValueError(f"per_feature_s: there is no feature {unknown[0]!r}")
        return LinearLaw(_coefficient(values, "constant_s"), {name: _coefficient(weights, name) for name in weights})
    raise ValueError(f"law is {kind!r}, should be recompute_roofline, swap_roofline or linear")


def _channel(values: Mapping[str, Any], name: str) -> Channel:
    return Channel(*(_coefficient(values[name], field) for field in Channel.__slots__))


def _coefficient(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {value!r}, should be a finite number, 0 or above")
    return float(value)
