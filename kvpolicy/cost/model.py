"""A fitted cost model: laws, learned residuals where there are any, intervals, and what all that was measured on.

In plain Python: this is what a server calls for every preemption.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Any, Protocol

from kvpolicy.cost.beyond import Room, distance_beyond
from kvpolicy.cost.compiled import Forest
from kvpolicy.cost.intervals import Intervals
from kvpolicy.cost.laws import Law, Parts
from kvpolicy.cost.undisturbed import StepTimeModel
from kvpolicy.events import KINDS, Cost, Kind, Option, Preemption
from kvpolicy.features import FEATURES, GROWING, Features, features_of
from kvpolicy.hardware import Geometry

FAMILIES = ("boosted", "linear", "analytic")
MOST_EXPONENT = 600.0
LENGTH: Mapping[Kind, str] = {"recompute": "recomputed_tokens", "swap": "save_bytes"}
"""The feature that is a victim's length."""
POWERS = {"recomputed_pairs": 2.0}
"""Of length, that a feature grows with; 1 for all others."""


class ModelError(ValueError):
    """A cost model that cannot be read, or does not fit; the message names the file and the field."""


class ModelWarning(UserWarning):
    """A cost model that is used beyond what it was measured on."""


class CostModel(Protocol):
    """What a policy needs of a model. All methods are pure but ``warm``."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """SHA-256 of its files."""
        ...

    @property
    def state_ids(self) -> frozenset[str]:
        """``CORE/STATE`` of every state it was fitted or calibrated on."""
        ...

    @property
    def step_time(self) -> StepTimeModel | None:
        """d0 of the traces it was fitted to, which costs are measured by while serving; None where there is none."""
        ...

    @property
    def floor_s(self) -> Mapping[Kind, float]:
        """The least cost its traces could tell from none."""
        ...

    @property
    def predicts_victim_delay(self) -> bool: ...

    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        """One cost per option."""
        ...

    def check_fit(
        self,
        block_size: int,
        block_bytes: int,
        geometry: Geometry | Mapping[str, Any],
        hardware: Mapping[str, Any],
        link: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises :class:`ModelError` for an engine it was not measured on; warns where physics carries over."""
        ...

    def warm(self) -> bool:
        """Compile what can be compiled; for start-up, never for the path of a decision."""
        ...


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a model was measured on."""

    family: str
    hardware: Mapping[str, Any]
    geometry: Geometry
    link: Mapping[str, Any]
    block_sizes: tuple[int, ...]
    kv_bytes_per_token: float
    """Bytes of a block over its tokens."""
    trace_digests: tuple[str, ...]
    state_ids: tuple[str, ...]
    """Of training and calibration; as ``CORE/STATE``."""
    noise: Mapping[str, Any]
    """``variation`` of identical undisturbed windows, and ``floor_s`` by option."""
    held_out: Mapping[str, Any]
    """Scores on states that it has not seen."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FittedModel:
    """Implements :class:`CostModel`.

    Inside the trained range a prediction is the law's times exp(residual). Outside, a residual that is carried goes on
    saying what it says at the range's edge. One that is not is left out: the law's prediction alone; where a growing
    feature is beyond what was seen it is held above (below) the prediction at the range's edge. Either way a cost
    never falls with length.
    """

    name: str
    provenance: Provenance
    laws: Mapping[Kind, Law]
    residuals: Mapping[Kind, Forest]
    """Trees over all of :data:`~kvpolicy.features.FEATURES`; a kind may have none."""
    ranges: Mapping[Kind, Mapping[str, tuple[float, float]]]
    """Lowest and highest of each feature in training."""
    floor_s: Mapping[Kind, float]
    """The least cost its traces could tell from none: no prediction is below."""
    intervals: Intervals
    digest: str = ""
    victim_delays: Mapping[Kind, Law] = field(default_factory=dict)
    """Seconds until the victim is back; empty where its traces did not tell."""
    others_share: Mapping[Kind, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    """Delay of each other running request over the engine time; 1: all sit through all of it."""
    step_time: StepTimeModel | None = None
    """d0 of the traces it was fitted to; None where they hold too few undisturbed steps."""
    carried: Mapping[Kind, bool] = field(default_factory=lambda: dict.fromkeys(KINDS, False))
    """Whether the residual is kept outside the trained range."""
    _checks: Mapping[Kind, tuple[tuple[int, float, float, float], ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks = {kind: self._checked(kind) for kind in self.laws}
        object.__setattr__(self, "_checks", checks)

    def _checked(self, kind: Kind) -> tuple[tuple[int, float, float, float], ...]:
        """Position, range and power of length of the features that a prediction depends on."""
        # A fit that saw costs not grow with length, in what it saw, knows nothing of longer ones.
        used = {LENGTH[kind], *self.laws[kind].used}
        if kind in self.residuals:
            used |= {FEATURES[position] for position in self.residuals[kind].used}
        spans = self.ranges[kind]
        return tuple((FEATURES.index(name), *spans[name], POWERS.get(name, 1.0)) for name in FEATURES if name in used)

    @property
    def state_ids(self) -> frozenset[str]:
        return frozenset(self.provenance.state_ids)

    @property
    def predicts_victim_delay(self) -> bool:
        return bool(self.victim_delays)

    # ---- predicting ----

    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        """One cost per option, log ratios against the first. Raises ValueError for a feature that is no number."""
        running = situation.running_requests
        number = self.intervals.bin_of(situation.computed_tokens, running)
        costs: list[Cost] = []
        first: tuple[Kind, float, bool, float] | None = None
        for option in options:
            kind, x = option.kind, features_of(situation, option)
            seconds, parts, outside, distance = self._price(kind, x)
            below, above = self.intervals.room(kind, number, outside, distance)
            low = high = 0.0
            if first is None:
                first = kind, log(seconds), outside, distance
            else:
                room = self.intervals.room("ratio", number, outside or first[2], max(distance, first[3]))
                low, high = log_ratio_interval(log(seconds) - first[1], turned(room, first[0], kind))
            delay = self.victim_delays.get(kind)
            costs.append(
                Cost(
                    seconds, *parts, seconds * running * self.others_share[kind], times_exp(seconds, -below),
                    times_exp(seconds, above), low, high, outside, None if delay is None else sum(delay.parts(x)),
                )
            )  # fmt: skip
        return tuple(costs)

    def law_seconds(self, kind: Kind, x: Features) -> float:
        """The law's prediction alone, not below the floor."""
        return max(sum(self.laws[kind].parts(x)), self.floor_s[kind])

    def seconds(self, kind: Kind, x: Features) -> float:
        """Predicted extra engine time."""
        return self._price(kind, x)[0]

    def outside(self, kind: Kind, x: Features) -> tuple[str, ...]:
        """The features, of those predictions depend on, in which ``x`` is beyond what was trained on."""
        return tuple(FEATURES[at] for at, low, high, _ in self._checks[kind] if not low <= x[at] <= high)

    def distance(self, kind: Kind, x: Features) -> float:
        """How far ``x`` is outside, in the feature that is farthest; 0 inside."""
        return max([distance_beyond(x[at], low, high, power) for at, low, high, power in self._checks[kind]], default=0)

    def _price(self, kind: Kind, x: Features) -> tuple[float, Parts, bool, float]:
        parts = self.laws[kind].parts(x)
        physics = max(sum(parts), self.floor_s[kind])
        outside, distance = False, 0.0
        for at, low, high, power in self._checks[kind]:
            if not low <= x[at] <= high:
                outside, distance = True, max(distance, distance_beyond(x[at], low, high, power))
        residual = self.residuals.get(kind)
        if residual is None:
            seconds = physics
        elif outside and not self.carried[kind]:
            seconds = self._extrapolate(kind, x, physics, residual)
        else:
            # Thresholds lie inside the range: beyond it a forest says what it says at the edge.
            seconds = physics * exp(residual.predict(x))
        return seconds, _scaled(parts, seconds, kind), outside, distance

    def _extrapolate(self, kind: Kind, x: Features, physics: float, residual: Forest) -> float:
        edge = list(x)
        above = below = False
        for at, low, high, _ in self._checks[kind]:
            if low <= x[at] <= high:
                continue
            if FEATURES[at] not in GROWING:
                return physics
            above, below = above or x[at] > high, below or x[at] < low
            edge[at] = min(max(x[at], low), high)
        if above and below:
            return physics
        at_edge = self.law_seconds(kind, Features(*edge)) * exp(residual.predict(edge))
        return max(physics, at_edge) if above else min(physics, at_edge)

    def warm(self) -> bool:
        compiled = [forest.warm() for forest in self.residuals.values()]
        return all(compiled)

    # ---- fitting an engine ----

    def check_fit(
        self,
        block_size: int,
        block_bytes: int,
        geometry: Geometry | Mapping[str, Any],
        hardware: Mapping[str, Any],
        link: Mapping[str, Any] | None = None,
    ) -> None:
        """See :class:`CostModel`. ``link`` as in a trace's header; not compared where it is None."""
        shape = geometry.to_dict() if isinstance(geometry, Geometry) else dict(geometry)
        trained = self.provenance.geometry.to_dict()
        for name, value in trained.items():
            if shape.get(name) != value:
                self._refuse(f"geometry.{name}", value, shape.get(name))
        bytes_per_token = self.provenance.kv_bytes_per_token
        if block_bytes != block_size * bytes_per_token:
            self._refuse("KV bytes per token", bytes_per_token, block_bytes / block_size)
        device = self.provenance.hardware.get("device")
        if hardware.get("device") != device:
            self._refuse("device", device, hardware.get("device"))
        if link is not None and dict(link) != dict(self.provenance.link):
            self._refuse("link", dict(self.provenance.link), dict(link))
        self._compare_host(hardware, device == "cpu")
        if block_size not in self.provenance.block_sizes:
            sizes = ", ".join(map(str, self.provenance.block_sizes))
            self._warn(f"was measured on block sizes {sizes}; blocks of {block_size} are priced by physics alone")

    def _compare_host(self, hardware: Mapping[str, Any], host_computes: bool) -> None:
        for name in ("processor", "cores"):
            trained, found = self.provenance.hardware.get(name), hardware.get(name)
            if trained == found:
                continue
            if host_computes and name == "processor":
                self._refuse(name, trained, found)
            self._warn(f"was measured with {name} {trained!r}, here it is {found!r}")

    def _refuse(self, what: str, trained: Any, found: Any) -> None:
        raise ModelError(
            f"cost model {self.name}: {what} is {found!r} here, it was measured on {trained!r}; "
            "make one for this engine with `kvpolicy profile` and `kvpolicy train`"
        )

    def _warn(self, what: str) -> None:
        warnings.warn(f"cost model {self.name} {what}", ModelWarning, stacklevel=4)


def _scaled(parts: Parts, seconds: float, kind: Kind) -> Parts:
    whole = sum(parts)
    if whole > 0:
        by = seconds / whole
        return parts[0] * by, parts[1] * by, parts[2] * by
    return (0.0, 0.0, seconds) if kind == "recompute" else (0.0, seconds, 0.0)


def log_ratio_interval(ratio: float, room: Room) -> tuple[float, float]:
    return ratio - room[0], ratio + room[1]


def turned(room: Room, first: Kind, other: Kind) -> Room:
    """Room around log(other / first), of room around log(swap / recompute)."""
    if first == other:
        return max(room), max(room)
    return room if first == "recompute" else (room[1], room[0])


def times_exp(seconds: float, exponent: float) -> float:
    if exponent > MOST_EXPONENT:
        return inf
    return 0.0 if exponent < -MOST_EXPONENT else seconds * exp(exponent)
