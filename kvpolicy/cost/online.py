"""Online correction of a cost model by measured outcomes: per option and size, robust, forgetting and bounded.

The state holds the errors log(measured / predicted) of each option's last predictions. An option's correction is their
weighted median together with two pseudo-outcomes of error 0. The median limits the influence of outliers. An outcome's
weight halves after every 200 outcomes of any option. The correction m is shrunk by its own standard error (the garrote:
m (1 - (2 se / m)^2), 0 if that is below 0), so a correction needs evidence. The correction of an option that is no
longer chosen is forgotten, so it will be tried again and stays if it has become cheap. Sizes that differ from the rest
of their option get a second correction in the same way, with four pseudo-outcomes.

Margins around predictions adapt by conformal inference (Gibbs, Candes 2021), in the form that tracks the quantile
itself (Angelopoulos, Candes, Tibshirani 2023): every outcome multiplies a margin factor by exp(0.1 (missed - 0.1)).
Under any drift the share of missed outcomes approaches 0.1, as long as the factor stays within its bounds. The
intervals then cover single preemptions. Predictions outside the trained range have a factor of their own. An outcome
whose prediction is unbounded on one side changes no factor: it cannot miss there, and would narrow the margins of those
that can. A ratio is never measured; its margin takes the larger factor of its two options.

:func:`save` and :func:`load` keep the state over a restart, as JSON with the digest of the corrected cost model.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, isfinite, log, sqrt
from pathlib import Path
from typing import Any, Literal

from kvpolicy.cost.card import loads
from kvpolicy.cost.kernel import times_exp
from kvpolicy.cost.model import ModelError
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Cost, Kind, Option
from kvpolicy.regression.conformal import CONFIDENCE

Quantity = Literal["engine", "victim"]
QUANTITIES: tuple[Quantity, ...] = ("engine", "victim")
"""Corrected quantities: ``engine_s``, with ``stall_s`` in proportion to it, and ``victim_delay_s``."""

SIZE_EDGES = (64, 256, 1024, 4096, 16384, 65536)
"""Computed tokens at which the next size class begins."""
SIZES = len(SIZE_EDGES) + 1

WINDOW = 17
"""Outcomes that an option's correction is computed from: 10 alike determine the median."""
HALF_LIFE = 200.0
"""Outcomes of any option after which the weight of an outcome has halved."""
OPTION_DOUBT, SIZE_DOUBT = 2.0, 4.0
"""Number of pseudo-outcomes with error 0, for an option and for a size."""
DOUBTED_ERRORS = 2.0
MIN_SCALE = 0.05
MAX_LOG = log(16.0)
"""Corrections lie between 1 / 16 and 16."""
MAX_MISS = log(64.0)

MISCOVERAGE = 1.0 - CONFIDENCE
ADAPTATION = 0.1
MIN_MARGIN, MAX_MARGIN = 0.05, 20.0
MIN_S = 1e-6


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Predicted and measured cost of one preemption."""

    kind: Kind
    """What was executed."""
    computed_tokens: float
    predicted: Cost
    """Prediction of the model without correction."""
    engine_s: float | None
    """None if it could not be attributed."""
    victim_delay_s: float | None
    floor_s: float = MIN_S
    """Noise floor of the model's traces: costs below it cannot be distinguished from zero."""


@dataclass(frozen=True, slots=True)
class Miss:
    """What is remembered of one outcome."""

    at: int
    """Number of outcomes before it."""
    size: int
    log_miss: float
    """log(measured / predicted)."""


@dataclass(frozen=True)
class Online:
    """State learned while serving. Frozen: :meth:`updated` returns the next one."""

    events: int = 0
    misses: tuple[tuple[Miss, ...], ...] = ((),) * (len(QUANTITIES) * len(KINDS))
    """The last outcomes by quantity, then option; oldest first."""
    room: tuple[float, ...] = (1.0,) * len(KINDS)
    """By option, the factor on the log margins of predictions inside the trained range."""
    room_outside: tuple[float, ...] = (1.0,) * len(KINDS)
    """The same for extrapolated predictions."""

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """Corrections by quantity, then option, then size; rounded as they are recorded, so that a record is exact."""
        return tuple(
            round(exp(correction), 4) for misses in self.misses for correction in _corrections(misses, self.events)
        )

    @cached_property
    def _summary(self) -> str:
        summary: dict[str, Any] = {"outcomes": self.events}
        for i, quantity in enumerate(QUANTITIES):
            for j, kind in enumerate(KINDS):
                summary[f"{quantity}_{kind}"] = self.factors[_factor_index(i, j, 0) : _factor_index(i, j, SIZES)]
        return json.dumps(summary | {"room": self.room, "room_outside": self.room_outside}, separators=(",", ":"))

    def to_json(self) -> str:
        """The values that decisions depend on. :func:`kvpolicy.cost.online.save` writes the complete state."""
        return self._summary

    def updated(self, measured: MeasuredCost) -> Online:
        """The state after one more outcome."""
        kind_index = KINDS.index(measured.kind)
        size = size_of(measured.computed_tokens)
        pairs = (
            (measured.engine_s, measured.predicted.engine_s, measured.floor_s),
            (measured.victim_delay_s, measured.predicted.victim_delay_s, MIN_S),
        )
        misses = list(self.misses)
        for i, (seconds, predicted_s, floor_s) in enumerate(pairs):
            if seconds is not None and predicted_s is not None and isfinite(seconds):
                window = i * len(KINDS) + kind_index
                log_miss = log(max(seconds, floor_s) / max(predicted_s, floor_s))
                miss = Miss(self.events, size, round(min(MAX_MISS, max(-MAX_MISS, log_miss)), 6))
                misses[window] = (*misses[window], miss)[-WINDOW:]
        successor = Online(self.events + 1, tuple(misses), *self._margin_factors_after(measured, kind_index, size))
        successor.to_json()  # now, and not at the next decision
        return successor

    def margin_factor(self, kind: int, extrapolated: bool) -> float:
        return (self.room_outside if extrapolated else self.room)[kind]

    def _margin_factors_after(
        self, measured: MeasuredCost, kind_index: int, size: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(:attr:`room`, :attr:`room_outside`) after one more outcome."""
        predicted = measured.predicted
        if measured.engine_s is None or not isfinite(measured.engine_s) or not _bounded(predicted):
            return self.room, self.room_outside
        cost = corrected_cost(predicted, self, kind_index, size)
        seconds = max(measured.engine_s, measured.floor_s)
        missed = not cost.low_s <= seconds <= max(cost.high_s, measured.floor_s)
        factors = list(self.room_outside if predicted.extrapolated else self.room)
        factor = factors[kind_index] * exp(ADAPTATION * (missed - MISCOVERAGE))
        factors[kind_index] = round(min(MAX_MARGIN, max(MIN_MARGIN, factor)), 6)
        return (self.room, tuple(factors)) if predicted.extrapolated else (tuple(factors), self.room_outside)


def _bounded(cost: Cost) -> bool:
    """Whether a measured cost can lie outside the prediction's interval on either side."""
    return cost.low_s > 0.0 and cost.high_s != inf


def size_of(computed_tokens: float) -> int:
    return bisect_right(SIZE_EDGES, computed_tokens)


def _factor_index(quantity: int, kind: int, size: int) -> int:
    """Position in :attr:`Online.factors`."""
    return (quantity * len(KINDS) + kind) * SIZES + size


# ---- estimating ----


def _corrections(misses: Sequence[Miss], now: int) -> list[float]:
    """Log correction of every size, from an option's last outcomes."""
    if not misses:
        return [0.0] * SIZES
    weights = [0.5 ** ((now - miss.at) / HALF_LIFE) for miss in misses]
    values = [miss.log_miss for miss in misses]
    common = estimate(values, weights, OPTION_DOUBT)
    corrections = []
    for size in range(SIZES):
        indices = [i for i, miss in enumerate(misses) if miss.size == size]
        # Fewer cannot outvote the pseudo-outcomes.
        size_correction = (
            0.0
            if len(indices) <= SIZE_DOUBT
            else estimate([values[i] - common for i in indices], [weights[i] for i in indices], SIZE_DOUBT)
        )
        corrections.append(min(MAX_LOG, max(-MAX_LOG, common + size_correction)))
    return corrections


def estimate(values: Sequence[float], weights: Sequence[float], doubt: float) -> float:
    """Weighted median, shrunk by its standard error (the garrote). ``doubt``: weight of the pseudo-outcomes."""
    count = sum(weights)
    if count <= 0:
        return 0.0
    center = weighted_median([*values, 0.0], [*weights, doubt])
    spread = weighted_median([abs(value - center) for value in values], weights)
    error = 1.2533 * max(MIN_SCALE, 1.4826 * spread) / sqrt(count)
    doubted = (DOUBTED_ERRORS * error) ** 2
    if center * center <= doubted:
        return 0.0
    return center * (1.0 - doubted / (center * center))


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value with at most half of the weight below and above it; the mean of two if both qualify."""
    ordered = sorted(zip(values, weights, strict=True))
    half, cumulative = sum(weights) / 2.0, 0.0
    for i, (value, weight) in enumerate(ordered):
        cumulative += weight
        if cumulative > half * (1 + 1e-12):
            return value
        if cumulative >= half * (1 - 1e-12) and i + 1 < len(ordered):
            return (value + ordered[i + 1][0]) / 2.0
    return ordered[-1][0]


# ---- correcting ----


def corrected_costs(
    costs: Sequence[Cost], options: Sequence[Option], computed_tokens: float, online: Online
) -> tuple[Cost, ...]:
    """Correct a model's predictions. ``costs``: one per option, with log ratios to the first."""
    if not online.events:
        return tuple(costs)
    size, kinds = size_of(computed_tokens), [KINDS.index(option.kind) for option in options]
    results = [corrected_cost(cost, online, kind, size) for cost, kind in zip(costs, kinds, strict=True)]
    for i in range(1, len(results)):
        margin_factor = max(online.margin_factor(kinds[j], costs[j].extrapolated) for j in (0, i))
        predicted_ratio, corrected_ratio = (
            costs[i].engine_s / costs[0].engine_s,
            results[i].engine_s / results[0].engine_s,
        )
        low = log(corrected_ratio) + margin_factor * (costs[i].log_ratio_low - log(predicted_ratio))
        high = log(corrected_ratio) + margin_factor * (costs[i].log_ratio_high - log(predicted_ratio))
        results[i] = _with_log_ratio(results[i], low, high)
    return tuple(results)


def corrected_cost(cost: Cost, online: Online, kind: int, size: int) -> Cost:
    """Correct one option's cost; its log ratio is unchanged."""
    factor = online.factors[_factor_index(0, kind, size)]
    margin_factor = online.margin_factor(kind, cost.extrapolated)
    seconds = cost.engine_s * factor
    delay_s = cost.victim_delay_s
    if delay_s is not None:
        delay_s *= online.factors[_factor_index(1, kind, size)]
    return Cost(
        seconds, cost.save_s * factor, cost.load_s * factor, cost.recompute_s * factor, cost.stall_s * factor,
        _stretched(seconds, cost.low_s, cost.engine_s, margin_factor),
        _stretched(seconds, cost.high_s, cost.engine_s, margin_factor), cost.log_ratio_low, cost.log_ratio_high,
        cost.extrapolated, delay_s,
    )  # fmt: skip


def _stretched(seconds: float, edge_s: float, center_s: float, margin_factor: float) -> float:
    if edge_s <= 0.0 or edge_s == inf:
        return edge_s
    return times_exp(seconds, margin_factor * log(edge_s / center_s))


def _with_log_ratio(cost: Cost, low: float, high: float) -> Cost:
    return Cost(
        cost.engine_s, cost.save_s, cost.load_s, cost.recompute_s, cost.stall_s, cost.low_s, cost.high_s, low, high,
        cost.extrapolated, cost.victim_delay_s,
    )  # fmt: skip


SCHEMA_VERSION = 2
FIRST_BYTES = b'{"schema_version": '
DIGEST_SHOWN = 12
"""Characters of a digest in a file's name."""


class OtherModelError(ModelError):
    """A valid state was learned with another cost model, the one of this ``digest``."""

    def __init__(self, path: Path, digest: str, wanted: str) -> None:
        super().__init__(path, digest, wanted)
        self.path, self.digest, self.wanted = path, digest, wanted

    def __str__(self) -> str:
        should = f"should be {self.wanted!r}: it was learned with another cost model"
        return f"{self.path}: model_digest is {self.digest!r}, {should}"


class DamagedError(ModelError):
    """A file begins like a state, or is empty as after a crash, but cannot be read as a state of this version."""


def save(online: Online, model_digest: str, path: Path) -> None:
    """Write the state by rename. ``model_digest``: digest of the cost model that it corrects."""
    misses = {
        name: [[miss.at, miss.size, miss.log_miss] for miss in window]
        for name, window in zip(_names(), online.misses, strict=True)
    }
    card = {
        "schema_version": SCHEMA_VERSION, "model_digest": model_digest, "outcomes": online.events, "misses": misses,
        "room": dict(zip(KINDS, online.room, strict=True)),
        "room_outside": dict(zip(KINDS, online.room_outside, strict=True)),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "w") as sink:
        sink.write(json.dumps(card, allow_nan=False) + "\n")
        sink.flush()
        os.fsync(sink.fileno())
    scratch.replace(path)


def load(path: Path, model_digest: str) -> Online:
    """Read what :func:`save` wrote.

    Raises :class:`OtherModelError` for a valid state of another cost model, :class:`DamagedError` for a damaged state,
    :class:`ModelError` for any other file; each names file and field.
    """
    try:
        digest, online = _read(path)
    except ModelError as error:
        if _was_state(path):
            raise DamagedError(str(error)) from error
        raise
    if digest != model_digest:
        raise OtherModelError(path, digest, model_digest)
    return online


def set_aside(path: Path, digest: str) -> Path:
    """Rename the state of another model, the one of ``digest``, so that it is kept until that model serves again.

    Replaces an older file of the same name. Raises OSError if it cannot be renamed.
    """
    return path.replace(path.with_name(f"{path.name}.other-{digest[:DIGEST_SHOWN]}"))


def set_damaged_aside(path: Path) -> Path:
    """Rename a damaged state. Replaces an older file of the same name. Raises OSError if it cannot be renamed."""
    return path.replace(path.with_name(f"{path.name}.damaged"))


def _was_state(path: Path) -> bool:
    """Whether the file is empty or begins as :func:`save` writes. Other files are not treated as damaged states."""
    try:
        with path.open("rb") as source:
            first_bytes = source.read(len(FIRST_BYTES))
    except OSError:
        return False
    return first_bytes == FIRST_BYTES or not first_bytes.strip(b"\0")


MAX_STATE_BYTES = 1 << 24
"""Of a state file, which has some hundred kilobytes at most."""


def _read(path: Path) -> tuple[str, Online]:
    """(digest of the cost model it was learned with, the state)"""
    try:
        with path.open("rb") as source:
            content = source.read(MAX_STATE_BYTES + 1)
        if len(content) > MAX_STATE_BYTES:
            raise InputError(f"is larger than {MAX_STATE_BYTES:,} bytes")
        card = loads(content.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as a state learned online: {error}") from error
    if not isinstance(card, dict) or card.get("schema_version") != SCHEMA_VERSION:
        version = card.get("schema_version") if isinstance(card, dict) else None
        raise ModelError(f"{path}: schema_version is {version!r}, should be {SCHEMA_VERSION}: no state learned online")
    digest = card.get("model_digest")
    if not isinstance(digest, str) or not digest.isalnum():  # becomes part of a file name when the state is set aside
        raise ModelError(f"{path}: field model_digest is {digest!r}, should be a cost model's digest")
    events = _whole(path, "outcomes", card.get("outcomes"), inf)
    misses = _mapping(path, card, "misses")
    windows = tuple(_window(path, misses, name, events) for name in _names())
    return digest, Online(
        events, windows, _margin_factors(path, card, "room"), _margin_factors(path, card, "room_outside")
    )


def _names() -> list[str]:
    return [f"{quantity}_{kind}" for quantity in QUANTITIES for kind in KINDS]


def _mapping(path: Path, card: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = card.get(name)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: field {name} is {value!r}, should be an object")
    return value


def _window(path: Path, misses: Mapping[str, Any], name: str, events: int) -> tuple[Miss, ...]:
    rows = misses.get(name)
    if not isinstance(rows, list) or len(rows) > WINDOW:
        raise ModelError(f"{path}: field misses.{name} should be a list of at most {WINDOW}")
    return tuple(_miss(path, f"misses.{name}", row, events) for row in rows)


def _miss(path: Path, field: str, row: Any, events: int) -> Miss:
    if not isinstance(row, list) or len(row) != 3:
        raise ModelError(f"{path}: field {field} holds {row!r}, should hold [outcome, size, log miss]")
    at, size, value = row
    if type(value) not in (int, float) or not abs(value) <= MAX_MISS + 1e-6:
        raise ModelError(f"{path}: field {field} holds a log miss of {value!r}, should be within {MAX_MISS:.3f}")
    return Miss(_whole(path, field, at, events - 1), _whole(path, field, size, SIZES - 1), float(value))


def _margin_factors(path: Path, card: Mapping[str, Any], name: str) -> tuple[float, ...]:
    factors = _mapping(path, card, name)
    return tuple(_margin_factor(path, f"{name}.{kind}", factors.get(kind)) for kind in KINDS)


def _margin_factor(path: Path, field: str, value: Any) -> float:
    if type(value) not in (int, float) or not MIN_MARGIN <= value <= MAX_MARGIN:
        raise ModelError(f"{path}: field {field} is {value!r}, should be {MIN_MARGIN} to {MAX_MARGIN}")
    return float(value)


def _whole(path: Path, field: str, value: Any, maximum: float) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise ModelError(f"{path}: field {field} holds {value!r}, should be a whole number from 0 to {maximum:g}")
    return value
