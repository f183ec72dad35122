"""Fitted cost models: laws, learned residuals, intervals, and what they were measured on.

Plain Python, because a server predicts with it at every preemption.
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
from kvpolicy.fields import refuse_other
from kvpolicy.hardware import EngineSpec, Geometry
from kvpolicy.regression.conformal import Margin

MIN_FLOOR_S = 1e-6
"""Noise floor of models that state none: costs under a microsecond cannot be distinguished from zero."""
LENGTH: Mapping[Kind, str] = {"recompute": "recomputed_tokens", "swap": "save_bytes"}
"""The feature that measures a victim's length."""
POWERS = {"recomputed_pairs": 2.0}
"""Power of length that a feature grows with; 1 for all others."""
OF_DATA_TYPE = ("weight_bytes", "kv_bytes")
"""Fields of a geometry that are compared last: where the data type differs it is what is to be named."""


class ModelError(KVPolicyError):
    """A cost model cannot be read, or does not fit the engine; the message names the file and the field."""


class ModelWarning(UserWarning):
    """A cost model or a hardware model is used beyond what was measured for it."""


class CostModel(ABC):
    """Predicts what each option costs the engine. All methods except ``warm`` are pure.

    To write a cost model, extend this class, set ``name`` and implement ``predict``.
    """

    __slots__ = ()

    name: str
    """Name in reports; different for models that predict differently."""
    step_time: StepTimeModel | None = None
    """Step-time model (what a step would have taken undisturbed) of its traces, or None. Costs are measured with it
    while serving."""
    floor_s: Mapping[Kind, float] = MappingProxyType(dict.fromkeys(KINDS, MIN_FLOOR_S))
    """Noise floor by option: the smallest cost that its traces could tell from none."""

    @abstractmethod
    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        """One cost per option."""

    @property
    def digest(self) -> str:
        """SHA-256 of everything that determines predictions: of its files, or else of its values and code."""
        return digest_of(self)

    @property
    def state_ids(self) -> frozenset[str]:
        """``CORE/STATE`` of every state it was fitted or calibrated on; evaluations exclude them."""
        return frozenset()

    @property
    def pinned(self) -> bool | None:
        """Whether it predicts copies over page-locked host memory; None if that is unknown."""
        return None

    @property
    def predicts_victim_delay(self) -> bool:
        return False

    def copies_s(self, situation: Preemption, option: Option, cost: Cost) -> float:
        """Seconds that the link is busy with both copies of a swap, whether or not the engine is delayed.

        ``cost``: as predicted for ``option``. Its save and load are returned if nothing better is known.
        """
        return cost.save_s + cost.load_s

    def check_fit(self, engine: EngineSpec) -> None:
        """Raises :class:`ModelError` for an engine it was not measured on; warns where it can be extrapolated."""
        return

    def warm(self) -> bool:
        """Compile what can be compiled; returns whether anything was. Call it at start-up, never during a decision."""
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
    """Bytes of a block divided by its tokens."""
    trace_digests: tuple[str, ...]
    state_ids: tuple[str, ...]
    """States of training and calibration, as ``CORE/STATE``."""
    noise: Mapping[str, Any]
    """``variation`` of identical undisturbed windows, and ``floor_s`` by option."""
    held_out: Mapping[str, Any]
    """Scores on held-out states."""
    notes: tuple[str, ...] = ()
    pinned: bool | None = None
    """Whether copies used page-locked host memory; None for a model that does not say."""

    @property
    def block_layers(self) -> int:
        """Layers whose pages a block holds: all, unless the engine has several block tables."""
        geometry = self.geometry
        if not (geometry.window_layers or geometry.state_layers):
            return geometry.layers
        return max(1, round(self.kv_bytes_per_token / geometry.layer_kv_bytes_per_token))

    @property
    def one_table(self) -> bool:
        """Whether a request has one block table with every token's block."""
        return self.geometry.one_table(self.block_layers)

    def held_blocks(self, tokens: int, block_size: int) -> int:
        """Blocks that a copy of a request of ``tokens`` tokens needs."""
        return self.geometry.held_blocks(tokens, block_size, self.block_layers)


@dataclass(frozen=True, slots=True)
class FittedModel(CostModel):
    """Laws, residuals and intervals, as they are fitted and stored.

    Inside the trained range a prediction is the law's times exp(residual). Outside, a *carried* residual keeps its
    value at the edge of the range. A residual that is not carried is dropped, and the law predicts alone. If a growing
    feature is beyond the range, that prediction is kept above (below) the one at the edge. In both cases a cost never
    falls with length.
    """

    name: str
    provenance: Provenance
    laws: Mapping[Kind, Law]
    residuals: Mapping[Kind, Forest]
    """Trees over all of :data:`~kvpolicy.features.FEATURES`; a kind may have none."""
    ranges: Mapping[Kind, Mapping[str, tuple[float, float]]]
    """Minimum and maximum of each feature in training."""
    floor_s: Mapping[Kind, float] = field()  # no default, unlike in the base class
    """Noise floor by option: the smallest cost that its traces could tell from none. No prediction is below it."""
    intervals: Intervals
    digest: str = ""
    victim_delays: Mapping[Kind, Law] = field(default_factory=dict)
    """Laws for the seconds until the victim is back; empty if its traces did not determine them."""
    others_share: Mapping[Kind, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    """Delay of each other running request divided by the engine time; 1 if each is delayed by all of it."""
    step_time: StepTimeModel | None = None
    """Step-time model of its traces; None if they hold too few undisturbed steps."""
    carried: Mapping[Kind, bool] = field(default_factory=lambda: dict.fromkeys(KINDS, False))
    """Whether the residual is applied outside the trained range."""
    _checks: Mapping[Kind, tuple[Check, ...]] = field(init=False, repr=False, compare=False)
    _packed: Packed = field(init=False, repr=False, compare=False)
    _compiled: Predictor | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks = {kind: self._checks_of(kind) for kind in self.laws}
        packed = pack(
            self.laws, self.victim_delays, self.residuals, checks, self.floor_s, self.others_share, self.intervals,
            self.carried,
        )  # fmt: skip
        object.__setattr__(self, "_checks", checks)
        object.__setattr__(self, "_packed", packed)
        object.__setattr__(self, "_compiled", None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the fields, because compiled code belongs to one process."""
        return type(self), tuple(getattr(self, entry.name) for entry in fields(self) if entry.init)

    def _checks_of(self, kind: Kind) -> tuple[Check, ...]:
        """Position, range and power of length of the features that a prediction depends on."""
        # Length is always checked: even if costs did not grow with it in training, longer victims are extrapolated.
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
        """One cost per option, with log ratios to the first. Raises InputError for a feature that is not finite."""
        costs = None if self._compiled is None else self._compiled(situation, options)
        return self._predict(situation, options) if costs is None else costs

    def _predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        n, c, running = self._packed.n, self._packed.c, situation.running_requests
        bin_index = kernel.bin_at(n, c, situation.computed_tokens, running)
        costs: list[Cost] = []
        first: tuple[Kind, float, bool, float] | None = None
        for option in options:
            kind, x = option.kind, features_of(situation, option)
            values = kernel.option_cost(n, c, KINDS.index(kind), bin_index, running, x, [0.0] * len(x))
            seconds, outside, distance = values[0], values[7], values[9]
            low = high = 0.0
            if first is None:
                first = kind, log(seconds), outside, distance
            else:
                margin = self.intervals.room("ratio", bin_index, outside or first[2], max(distance, first[3]))
                low, high = log_ratio_interval(log(seconds) - first[1], oriented_margin(margin, first[0], kind))
            delay_s = values[8] if kind in self.victim_delays else None
            costs.append(Cost(*values[:7], low, high, outside, delay_s))
        return tuple(costs)

    def law_seconds(self, kind: Kind, x: Features) -> float:
        """The law's prediction without the residual, not below the floor."""
        return max(sum(self.laws[kind].parts(x)), self.floor_s[kind])

    def seconds(self, kind: Kind, x: Features) -> float:
        """Predicted extra engine time."""
        return kernel.price(self._packed.n, self._packed.c, KINDS.index(kind), x, [0.0] * len(x))[0]

    def depends_on(self, kind: Kind) -> frozenset[str]:
        """The features that predictions depend on."""
        return frozenset(FEATURES[position] for position, *_ in self._checks[kind])

    def outside(self, kind: Kind, x: Features) -> tuple[str, ...]:
        """The features in which ``x`` is outside the trained range, of those that predictions depend on."""
        return tuple(
            FEATURES[position] for position, low, high, _ in self._checks[kind] if not low <= x[position] <= high
        )

    def distance(self, kind: Kind, x: Features) -> float:
        """Distance of ``x`` from the trained range, in the farthest feature; 0 inside."""
        return kernel.distance_outside(self._packed.n, self._packed.c, KINDS.index(kind), x)

    def copies_s(self, situation: Preemption, option: Option, cost: Cost) -> float:
        law = self.laws["swap"]
        if not isinstance(law, SwapRoofline):  # the law does not model the link
            return cost.save_s + cost.load_s
        x = features_of(situation, option)
        return law.save.seconds(x.save_bytes, x.save_segments) + law.load.seconds(x.load_bytes, x.load_segments)

    def warm(self) -> bool:
        """See :class:`CostModel`; takes some seconds. Without numba predictions are the same but slower."""
        try:
            compiler: Any = import_module("kvpolicy.cost.compile")
        except ImportError:
            return False
        nodes = [self.residuals[kind].nodes if kind in self.residuals else None for kind in KINDS]
        object.__setattr__(self, "_compiled", compiler.predictor(self._packed, nodes, self.predicts_victim_delay))
        return True

    # ---- fitting an engine ----

    @property
    def pinned(self) -> bool | None:
        return self.provenance.pinned

    def check_fit(self, engine: EngineSpec) -> None:
        """See :class:`CostModel`. Link and token budget are compared only if the engine states them."""
        self.check_geometry(engine.geometry)
        bytes_per_token = self.provenance.kv_bytes_per_token
        if engine.block_bytes is None or engine.block_bytes != engine.block_size * bytes_per_token:
            actual = None if engine.block_bytes is None else engine.block_bytes / engine.block_size
            self._refuse("KV bytes per token", bytes_per_token, actual)
        device = self.provenance.hardware.get("device")
        if engine.hardware.get("device") != device:
            self._refuse("device", device, engine.hardware.get("device"))
        if engine.link and dict(engine.link) != dict(self.provenance.link):
            self._refuse("link", dict(self.provenance.link), dict(engine.link))
        if device != "cpu":
            self._compare_host_memory(engine.pinned)
        self._compare_host(engine.hardware, device == "cpu")
        if engine.block_size not in self.provenance.block_sizes:
            sizes = ", ".join(map(str, self.provenance.block_sizes))
            self._warn(f"was measured on block sizes {sizes}; blocks of {engine.block_size} are extrapolated to")
        self._compare_budget(engine.token_budget)

    def check_geometry(self, geometry: Mapping[str, Any]) -> None:
        """The first part of :meth:`check_fit`: raises ModelError for a model of another shape or data type."""
        self._refuse_other_ranks(geometry)
        own = self.provenance.geometry
        values = own.to_dict() | own.kinds
        for name in sorted(values, key=OF_DATA_TYPE.__contains__):
            actual = geometry.get(name, 0 if name in own.kinds and geometry else None)
            if actual != values[name]:
                self._refuse(f"geometry.{name}", values[name], actual)

    def _refuse_other_ranks(self, actual: Mapping[str, Any]) -> None:
        """Raise ModelError that says so where the same model is split over another number of tensor-parallel ranks: a
        cost model is made for one rank, which has fewer heads the more ranks there are."""
        trained = self.provenance.geometry.to_dict()
        differing = {name for name, value in trained.items() if actual.get(name) != value}
        split = {"heads", "kv_heads", "intermediate", "linear_flops", "pair_flops"}
        if "heads" not in differing or not differing <= split:
            return
        heads, here = trained["heads"], actual.get("heads", 0)
        if not heads or not here or (heads % here and here % heads):
            return
        raise ModelError(
            f"cost model {self.name}: was measured with {here / heads:g} times as many tensor-parallel ranks "
            f"({heads} heads each, here {here}); make one for this --tensor-parallel-size with `kvpolicy profile` and "
            "`kvpolicy train`, or serve with the one that it was measured with"
        )

    def _compare_host(self, hardware: Mapping[str, Any], host_computes: bool) -> None:
        for name in ("processor", "cores"):
            trained, actual = self.provenance.hardware.get(name), hardware.get(name)
            if trained == actual:
                continue
            if host_computes and name == "processor":
                self._refuse(name, trained, actual)
            self._warn(f"was measured with {name} {trained!r}, here it is {actual!r}")

    def _compare_host_memory(self, actual: bool | None) -> None:
        if actual is None or self.pinned is actual:
            return
        if self.pinned is None:
            self._warn("does not say whether it was measured over page-locked host memory (field pinned)")
            return
        names = {True: "page-locked", False: "pageable"}
        raise ModelError(
            f"cost model {self.name}: field pinned is {self.pinned} ({names[self.pinned]} host memory), here it is "
            f"{actual} ({names[actual]}), and copies take another time; make one with `kvpolicy train"
            f"{'' if actual else ' --pageable'}`, or serve {'with' if actual else 'without'} --no-pin-memory"
        )

    def _compare_budget(self, actual: int | None) -> None:
        law = self.laws["recompute"]
        trained = law.budget_tokens if isinstance(law, RecomputeRoofline) else inf
        if actual is not None and trained not in (inf, actual):
            self._warn(
                f"was measured with a token budget of {trained:g} (max_num_batched_tokens, or max_num_scheduled_tokens "
                f"where that is less), here it is {actual}: long recomputes take other numbers of steps"
            )

    def _refuse(self, what: str, trained: Any, actual: Any) -> None:
        raise ModelError(
            f"cost model {self.name}: {what} is {actual!r} here, it was measured on {trained!r}; "
            "make one for this engine with `kvpolicy profile` and `kvpolicy train`"
        )

    def _warn(self, what: str) -> None:
        warnings.warn(f"cost model {self.name} {what}", ModelWarning, stacklevel=4)


def with_laws(model: object, verb: str) -> FittedModel:
    """The model itself. Raises ModelError for a cost model without laws, WrongValue for anything else.

    ``verb``: what is done with laws, as in "carried".
    """
    if isinstance(model, FittedModel):
        return model
    refuse_other("cost_model", model, CostModel, "a CostModel, a folder or a name")
    raise ModelError(
        f"cost model {getattr(model, 'name', '')} is a {type(model).__name__}, which has no laws that could be {verb}: "
        "should be one that `train` or `calibrate` made, or an untrained one"
    )


def log_ratio_interval(ratio: float, margin: Margin) -> tuple[float, float]:
    return ratio - margin[0], ratio + margin[1]


def oriented_margin(margin: Margin, first: Kind, other: Kind) -> Margin:
    """Margin around log(other / first), from the margin around log(swap / recompute)."""
    if first == other:
        return max(margin), max(margin)
    return margin if first == "recompute" else (margin[1], margin[0])
