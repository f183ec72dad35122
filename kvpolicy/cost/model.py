"""A fitted cost model: laws, learned residuals where there are any, intervals, and what all that was measured on.

In plain Python: this is what a server calls for every preemption.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from math import inf, log
from types import MappingProxyType
from typing import Any

from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.code_digest import digest_of
from kvpolicy.cost import kernel
from kvpolicy.cost.forest import Forest
from kvpolicy.cost.intervals import Intervals
from kvpolicy.cost.kernel import Check, Packed, Predictor, pack
from kvpolicy.cost.laws import Law, RecomputeRoofline, SwapRoofline
from kvpolicy.errors import KVPolicyError
from kvpolicy.events import KINDS, Cost, Kind, Option, Preemption
from kvpolicy.features import FEATURES, Features, features_of
from kvpolicy.hardware import EngineSpec, Geometry
from kvpolicy.regression.conformal import Room

MIN_FLOOR_S = 1e-6
"""No model is taken to tell costs under a microsecond apart, unless it says so."""
LENGTH: Mapping[Kind, str] = {"recompute": "recomputed_tokens", "swap": "save_bytes"}
"""The feature that is a victim's length."""
POWERS = {"recomputed_pairs": 2.0}
"""Of length, that a feature grows with; 1 for all others."""


class ModelError(KVPolicyError):
    """A cost model that cannot be read, or does not fit; the message names the file and the field."""


class ModelWarning(UserWarning):
    """A cost model that is used beyond what it was measured on."""


class CostModel(ABC):
    """What an option will cost the engine. All methods are pure but ``warm``.

    A cost model of one's own extends this class, has a ``name`` and writes ``predict``.
    """

    __slots__ = ()

    name: str
    """In reports; different for models that predict differently."""
    step_time: StepTimeModel | None = None
    """d0 of the traces it was fitted to, which costs are measured by while serving; None where there is none."""
    floor_s: Mapping[Kind, float] = MappingProxyType(dict.fromkeys(KINDS, MIN_FLOOR_S))
    """The least cost its traces could tell from none."""

    @abstractmethod
    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        """One cost per option."""

    @property
    def digest(self) -> str:
        """Of all that it predicts by: SHA-256 of its files where it has some, else of its values and its code."""
        return digest_of(self)

    @property
    def state_ids(self) -> frozenset[str]:
        """``CORE/STATE`` of every state it was fitted or calibrated on; an evaluation leaves them out."""
        return frozenset()

    @property
    def predicts_victim_delay(self) -> bool:
        return False

    def copies_s(self, situation: Preemption, option: Option, cost: Cost) -> float:
        """How long the link is busy with both copies of a swap, whatever of it the engine feels. ``cost``: as predicted
        for ``option``; what it puts down to copies is taken where no more is known."""
        return cost.save_s + cost.load_s

    def check_fit(self, engine: EngineSpec) -> None:
        """Raises :class:`ModelError` for an engine it was not measured on; warns where physics carries over."""
        return

    def warm(self) -> bool:
        """Compile what can be compiled, for start-up and never for the path of a decision; False for nothing."""
        return False


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
class FittedModel(CostModel):
    """Laws, residuals and intervals, as they are fitted and stored.

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
    floor_s: Mapping[Kind, float] = field()  # without a default, whatever the base class has
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
    _checks: Mapping[Kind, tuple[Check, ...]] = field(init=False, repr=False, compare=False)
    _packed: Packed = field(init=False, repr=False, compare=False)
    _fast: Predictor | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks = {kind: self._checked(kind) for kind in self.laws}
        packed = pack(
            self.laws, self.victim_delays, self.residuals, checks, self.floor_s, self.others_share, self.intervals,
            self.carried,
        )  # fmt: skip
        object.__setattr__(self, "_checks", checks)
        object.__setattr__(self, "_packed", packed)
        object.__setattr__(self, "_fast", None)

    def __reduce__(self) -> tuple[Any, ...]:
        """What it is made of: compiled code is of one process."""
        return type(self), tuple(getattr(self, one.name) for one in fields(self) if one.init)

    def _checked(self, kind: Kind) -> tuple[Check, ...]:
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
        costs = None if self._fast is None else self._fast(situation, options)
        return self._predict(situation, options) if costs is None else costs

    def _predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        n, c, running = self._packed.n, self._packed.c, situation.running_requests
        number = kernel.bin_at(n, c, situation.computed_tokens, running)
        costs: list[Cost] = []
        first: tuple[Kind, float, bool, float] | None = None
        for option in options:
            kind, x = option.kind, features_of(situation, option)
            found = kernel.option_cost(n, c, KINDS.index(kind), number, running, x, [0.0] * len(x))
            seconds, outside, distance = found[0], found[7], found[9]
            low = high = 0.0
            if first is None:
                first = kind, log(seconds), outside, distance
            else:
                room = self.intervals.room("ratio", number, outside or first[2], max(distance, first[3]))
                low, high = log_ratio_interval(log(seconds) - first[1], turned(room, first[0], kind))
            delay_s = found[8] if kind in self.victim_delays else None
            costs.append(Cost(*found[:7], low, high, outside, delay_s))
        return tuple(costs)

    def law_seconds(self, kind: Kind, x: Features) -> float:
        """The law's prediction alone, not below the floor."""
        return max(sum(self.laws[kind].parts(x)), self.floor_s[kind])

    def seconds(self, kind: Kind, x: Features) -> float:
        """Predicted extra engine time."""
        return kernel.price(self._packed.n, self._packed.c, KINDS.index(kind), x, [0.0] * len(x))[0]

    def depends_on(self, kind: Kind) -> frozenset[str]:
        """The features that predictions depend on."""
        return frozenset(FEATURES[at] for at, *_ in self._checks[kind])

    def outside(self, kind: Kind, x: Features) -> tuple[str, ...]:
        """The features, of those predictions depend on, in which ``x`` is beyond what was trained on."""
        return tuple(FEATURES[at] for at, low, high, _ in self._checks[kind] if not low <= x[at] <= high)

    def distance(self, kind: Kind, x: Features) -> float:
        """How far ``x`` is outside, in the feature that is farthest; 0 inside."""
        return kernel.how_far(self._packed.n, self._packed.c, KINDS.index(kind), x)

    def copies_s(self, situation: Preemption, option: Option, cost: Cost) -> float:
        law = self.laws["swap"]
        if not isinstance(law, SwapRoofline):  # one that knows no link
            return cost.save_s + cost.load_s
        x = features_of(situation, option)
        return law.save.seconds(x.save_bytes, x.save_segments) + law.load.seconds(x.load_bytes, x.load_segments)

    def warm(self) -> bool:
        """Some seconds. Where numba is missing nothing changes but speed."""
        try:
            fast: Any = import_module("kvpolicy.cost.compile")
        except ImportError:
            return False
        nodes = [self.residuals[kind].nodes if kind in self.residuals else None for kind in KINDS]
        object.__setattr__(self, "_fast", fast.predictor(self._packed, nodes, self.predicts_victim_delay))
        return True

    # ---- fitting an engine ----

    def check_fit(self, engine: EngineSpec) -> None:
        """See :class:`CostModel`. Link and token budget are not compared where the engine does not say them."""
        for name, value in self.provenance.geometry.to_dict().items():
            if engine.geometry.get(name) != value:
                self._refuse(f"geometry.{name}", value, engine.geometry.get(name))
        bytes_per_token = self.provenance.kv_bytes_per_token
        if engine.block_bytes is None or engine.block_bytes != engine.block_size * bytes_per_token:
            found = None if engine.block_bytes is None else engine.block_bytes / engine.block_size
            self._refuse("KV bytes per token", bytes_per_token, found)
        device = self.provenance.hardware.get("device")
        if engine.hardware.get("device") != device:
            self._refuse("device", device, engine.hardware.get("device"))
        if engine.link and dict(engine.link) != dict(self.provenance.link):
            self._refuse("link", dict(self.provenance.link), dict(engine.link))
        self._compare_host(engine.hardware, device == "cpu")
        if engine.block_size not in self.provenance.block_sizes:
            sizes = ", ".join(map(str, self.provenance.block_sizes))
            self._warn(f"was measured on block sizes {sizes}; blocks of {engine.block_size} are extrapolated to")
        self._compare_budget(engine.token_budget)

    def _compare_host(self, hardware: Mapping[str, Any], host_computes: bool) -> None:
        for name in ("processor", "cores"):
            trained, found = self.provenance.hardware.get(name), hardware.get(name)
            if trained == found:
                continue
            if host_computes and name == "processor":
                self._refuse(name, trained, found)
            self._warn(f"was measured with {name} {trained!r}, here it is {found!r}")

    def _compare_budget(self, found: int | None) -> None:
        law = self.laws["recompute"]
        trained = law.budget_tokens if isinstance(law, RecomputeRoofline) else inf
        if found is not None and trained not in (inf, found):
            self._warn(
                f"was measured with a token budget of {trained:g} (max_num_batched_tokens), here it is {found}: long "
                "recomputes take other numbers of steps"
            )

    def _refuse(self, what: str, trained: Any, found: Any) -> None:
        raise ModelError(
            f"cost model {self.name}: {what} is {found!r} here, it was measured on {trained!r}; "
            "make one for this engine with `kvpolicy profile` and `kvpolicy train`"
        )

    def _warn(self, what: str) -> None:
        warnings.warn(f"cost model {self.name} {what}", ModelWarning, stacklevel=4)


def log_ratio_interval(ratio: float, room: Room) -> tuple[float, float]:
    return ratio - room[0], ratio + room[1]


def turned(room: Room, first: Kind, other: Kind) -> Room:
    """Room around log(other / first), of room around log(swap / recompute)."""
    if first == other:
        return max(room), max(room)
    return room if first == "recompute" else (room[1], room[0])
