"""Measured outcomes correct a cost model while it serves: by option and size, robust, forgetting, bounded.

Kept is how far the last predictions of each option missed, log(measured / predicted). An option's correction is their
median, so that an outlier moves it no more than any other value, with two more that missed by nothing; each outcome
counts half after every 200, of whichever option. From it goes what its own standard error may have made of nothing
(the garrote: m (1 - (2 se / m)^2), 0 where that is below 0). So a correction needs evidence, and that of an option
nobody takes any more is forgotten: it is tried again one day, and comes back if it has become cheap. Sizes that differ
from the rest of their option get a second correction the same way, of four that missed by nothing.

Room around predictions follows by adaptive conformal inference (Gibbs, Candes 2021), in the form that tracks the
quantile itself (Angelopoulos, Candes, Tibshirani 2023): every outcome multiplies it by exp(0.1 (missed - 0.1)).
Whatever drifts, the share missed comes to 0.1 as long as the multiple stays within its bounds. It is single preemptions
that are covered then. Predictions outside the trained range have a multiple of their own, and an outcome whose
prediction is unbounded on a side moves none: it cannot miss there, and would narrow the room of those that can. A ratio
is never measured; its room takes the wider multiple of its two options.

:func:`save` and :func:`load` carry it over a restart: JSON with the digest of the cost model it corrects.
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

from kvpolicy.cost import store
from kvpolicy.cost.kernel import times_exp
from kvpolicy.cost.model import ModelError
from kvpolicy.events import KINDS, Cost, Kind, Option
from kvpolicy.regression.conformal import CONFIDENCE

Quantity = Literal["engine", "victim"]
QUANTITIES: tuple[Quantity, ...] = ("engine", "victim")
"""``engine_s``, with what others wait in proportion to it, and ``victim_delay_s``."""

SIZE_EDGES = (64, 256, 1024, 4096, 16384, 65536)
"""Computed tokens at which a new size begins."""
SIZES = len(SIZE_EDGES) + 1

WINDOW = 17
"""Outcomes an option's correction is taken from: 10 alike turn the median."""
HALF_LIFE = 200.0
"""Outcomes of whichever option after which one counts half."""
OPTION_DOUBT, SIZE_DOUBT = 2.0, 4.0
"""So many outcomes that missed by nothing are taken to have been there before."""
SURE_ERRORS = 2.0
MIN_SCALE = 0.05
MAX_LOG = log(16.0)
"""No correction is beyond 16 or below 1 / 16."""
MAX_MISS = log(64.0)

MISCOVERAGE = 1.0 - CONFIDENCE
ADAPTATION = 0.1
MIN_MARGIN, MAX_MARGIN = 0.05, 20.0
MIN_S = 1e-6


@dataclass(frozen=True, slots=True)
class Measured:
    """What one preemption was predicted to cost, by the model as it is, and did cost."""

    kind: Kind
    """What was executed."""
    computed_tokens: float
    predicted: Cost
    """Without correction."""
    engine_s: float | None
    """None where it could not be attributed."""
    victim_delay_s: float | None
    floor_s: float = MIN_S
    """What the model's traces could not tell from no cost."""


@dataclass(frozen=True, slots=True)
class Miss:
    """One outcome, as far as it is remembered."""

    at: int
    """Outcomes there had been before it."""
    size: int
    log_miss: float
    """log(measured / predicted)."""


@dataclass(frozen=True)
class Online:
    """What was learned while serving. Frozen: :meth:`updated` gives the next one."""

    events: int = 0
    misses: tuple[tuple[Miss, ...], ...] = ((),) * (len(QUANTITIES) * len(KINDS))
    """By quantity, then option: the last of them, oldest first."""
    room: tuple[float, ...] = (1.0,) * len(KINDS)
    """By option, what the log room around its predictions inside the trained range is multiplied by."""
    room_outside: tuple[float, ...] = (1.0,) * len(KINDS)
    """The same for extrapolated predictions."""

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """By quantity, then option, then size; rounded as they are recorded, so that a record tells all."""
        return tuple(round(exp(one), 4) for misses in self.misses for one in _corrections(misses, self.events))

    @cached_property
    def _short(self) -> str:
        told: dict[str, Any] = {"outcomes": self.events}
        for i, quantity in enumerate(QUANTITIES):
            for j, kind in enumerate(KINDS):
                told[f"{quantity}_{kind}"] = self.factors[_at(i, j, 0) : _at(i, j, SIZES)]
        return json.dumps(told | {"room": self.room, "room_outside": self.room_outside}, separators=(",", ":"))

    def to_json(self) -> str:
        """What decisions follow from; :func:`kvpolicy.cost.online.save` keeps the memory behind it."""
        return self._short

    def updated(self, measured: Measured) -> Online:
        """The state after one more outcome."""
        which = KINDS.index(measured.kind)
        size = size_of(measured.computed_tokens)
        pairs = (
            (measured.engine_s, measured.predicted.engine_s, measured.floor_s),
            (measured.victim_delay_s, measured.predicted.victim_delay_s, MIN_S),
        )
        misses = list(self.misses)
        for i, (seconds, predicted_s, floor_s) in enumerate(pairs):
            if seconds is not None and predicted_s is not None and isfinite(seconds):
                at = i * len(KINDS) + which
                found = log(max(seconds, floor_s) / max(predicted_s, floor_s))
                kept = Miss(self.events, size, round(min(MAX_MISS, max(-MAX_MISS, found)), 6))
                misses[at] = (*misses[at], kept)[-WINDOW:]
        after = Online(self.events + 1, tuple(misses), *self._rooms_after(measured, which, size))
        after.to_json()  # now, and not at the next decision
        return after

    def room_of(self, kind: int, extrapolated: bool) -> float:
        return (self.room_outside if extrapolated else self.room)[kind]

    def _rooms_after(self, measured: Measured, which: int, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(:attr:`room`, :attr:`room_outside`) after one more outcome."""
        predicted = measured.predicted
        if measured.engine_s is None or not isfinite(measured.engine_s) or not _bounded(predicted):
            return self.room, self.room_outside
        cost = corrected_cost(predicted, self, which, size)
        seconds = max(measured.engine_s, measured.floor_s)
        missed = not cost.low_s <= seconds <= max(cost.high_s, measured.floor_s)
        rooms = list(self.room_outside if predicted.extrapolated else self.room)
        room = rooms[which] * exp(ADAPTATION * (missed - MISCOVERAGE))
        rooms[which] = round(min(MAX_MARGIN, max(MIN_MARGIN, room)), 6)
        return (self.room, tuple(rooms)) if predicted.extrapolated else (tuple(rooms), self.room_outside)


def _bounded(cost: Cost) -> bool:
    """Whether a measured cost can lie outside the prediction's interval on either side."""
    return cost.low_s > 0.0 and cost.high_s != inf


def size_of(computed_tokens: float) -> int:
    return bisect_right(SIZE_EDGES, computed_tokens)


def _at(quantity: int, kind: int, size: int) -> int:
    """Position in :attr:`Online.factors`."""
    return (quantity * len(KINDS) + kind) * SIZES + size


# ---- estimating ----


def _corrections(misses: Sequence[Miss], now: int) -> list[float]:
    """Log correction of every size, of an option's last misses."""
    if not misses:
        return [0.0] * SIZES
    weights = [0.5 ** ((now - miss.at) / HALF_LIFE) for miss in misses]
    values = [miss.log_miss for miss in misses]
    common = estimate(values, weights, OPTION_DOUBT)
    found = []
    for size in range(SIZES):
        mine = [i for i, miss in enumerate(misses) if miss.size == size]
        # Fewer cannot outvote those that missed by nothing.
        own = (
            0.0
            if len(mine) <= SIZE_DOUBT
            else estimate([values[i] - common for i in mine], [weights[i] for i in mine], SIZE_DOUBT)
        )
        found.append(min(MAX_LOG, max(-MAX_LOG, common + own)))
    return found


def estimate(values: Sequence[float], weights: Sequence[float], doubt: float) -> float:
    """Weighted median, less what its standard error may have made of nothing."""
    count = sum(weights)
    if count <= 0:
        return 0.0
    middle = weighted_median([*values, 0.0], [*weights, doubt])
    spread = weighted_median([abs(value - middle) for value in values], weights)
    error = 1.2533 * max(MIN_SCALE, 1.4826 * spread) / sqrt(count)
    unsure = (SURE_ERRORS * error) ** 2
    if middle * middle <= unsure:
        return 0.0
    return middle * (1.0 - unsure / (middle * middle))


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value below and above which lies no more than half of the weight; the mean of two where both do."""
    ordered = sorted(zip(values, weights, strict=True))
    half, passed = sum(weights) / 2.0, 0.0
    for i, (value, weight) in enumerate(ordered):
        passed += weight
        if passed > half * (1 + 1e-12):
            return value
        if passed >= half * (1 - 1e-12) and i + 1 < len(ordered):
            return (value + ordered[i + 1][0]) / 2.0
    return ordered[-1][0]


# ---- correcting ----


def corrected(
    costs: Sequence[Cost], options: Sequence[Option], computed_tokens: float, online: Online
) -> tuple[Cost, ...]:
    """A model's predictions with what was learned. ``costs``: one per option, log ratios against the first."""
    if not online.events:
        return tuple(costs)
    size, kinds = size_of(computed_tokens), [KINDS.index(option.kind) for option in options]
    found = [corrected_cost(cost, online, kind, size) for cost, kind in zip(costs, kinds, strict=True)]
    for i in range(1, len(found)):
        by = max(online.room_of(kinds[j], costs[j].extrapolated) for j in (0, i))
        was, now = costs[i].engine_s / costs[0].engine_s, found[i].engine_s / found[0].engine_s
        low = log(now) + by * (costs[i].log_ratio_low - log(was))
        high = log(now) + by * (costs[i].log_ratio_high - log(was))
        found[i] = _with_ratio(found[i], low, high)
    return tuple(found)


def corrected_cost(cost: Cost, online: Online, kind: int, size: int) -> Cost:
    """One option's, its log ratio left as it was."""
    by = online.factors[_at(0, kind, size)]
    room = online.room_of(kind, cost.extrapolated)
    seconds = cost.engine_s * by
    delay_s = cost.victim_delay_s
    if delay_s is not None:
        delay_s *= online.factors[_at(1, kind, size)]
    return Cost(
        seconds, cost.save_s * by, cost.load_s * by, cost.recompute_s * by, cost.stall_s * by,
        _stretched(seconds, cost.low_s, cost.engine_s, room), _stretched(seconds, cost.high_s, cost.engine_s, room),
        cost.log_ratio_low, cost.log_ratio_high, cost.extrapolated, delay_s,
    )  # fmt: skip


def _stretched(seconds: float, edge_s: float, middle_s: float, room: float) -> float:
    if edge_s <= 0.0 or edge_s == inf:
        return edge_s
    return times_exp(seconds, room * log(edge_s / middle_s))


def _with_ratio(cost: Cost, low: float, high: float) -> Cost:
    return Cost(
        cost.engine_s, cost.save_s, cost.load_s, cost.recompute_s, cost.stall_s, cost.low_s, cost.high_s, low, high,
        cost.extrapolated, cost.victim_delay_s,
    )  # fmt: skip


SCHEMA_VERSION = 2
BEGINS = b'{"schema_version": '
DIGEST_SHOWN = 12
"""Characters of a digest in a file's name."""


class OtherModelError(ModelError):
    """A state that is whole, but was learned with another cost model, of this ``digest``."""

    def __init__(self, path: Path, digest: str, wanted: str) -> None:
        super().__init__(
            f"{path}: model_digest is {digest!r}, should be {wanted!r}: it was learned with another cost model"
        )
        self.digest = digest


class DamagedError(ModelError):
    """What begins as a state, or is empty as after a crash, and cannot be read as one of this version."""


def save(online: Online, model_digest: str, path: Path) -> None:
    """Write the state, by rename. ``model_digest``: of the cost model that it corrects."""
    misses = {
        name: [[miss.at, miss.size, miss.log_miss] for miss in some]
        for name, some in zip(_names(), online.misses, strict=True)
    }
    card = {
        "schema_version": SCHEMA_VERSION, "model_digest": model_digest, "outcomes": online.events, "misses": misses,
        "room": dict(zip(KINDS, online.room, strict=True)),
        "room_outside": dict(zip(KINDS, online.room_outside, strict=True)),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w") as sink:
        sink.write(json.dumps(card, allow_nan=False) + "\n")
        sink.flush()
        os.fsync(sink.fileno())
    scratch.replace(path)


def load(path: Path, model_digest: str) -> Online:
    """What :func:`save` wrote.

    Raises :class:`OtherModelError` for what is whole but of another cost model, :class:`DamagedError` for what was a
    state, :class:`ModelError` for anything else; each names file and field.
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
    """Rename the state of another model, of this digest, so that it is there when that one serves again.

    An older one set aside under the same name is replaced. Raises OSError where it cannot be renamed.
    """
    return path.replace(path.with_name(f"{path.name}.other-{digest[:DIGEST_SHOWN]}"))


def set_damaged_aside(path: Path) -> Path:
    """Rename what is no longer a state. An older one under the same name is replaced. Raises OSError where it cannot be
    renamed."""
    return path.replace(path.with_name(f"{path.name}.damaged"))


def _was_state(path: Path) -> bool:
    """Whether the file is empty, or begins as :func:`save` writes: nobody else's file is taken for a damaged state."""
    try:
        with path.open("rb") as source:
            begins = source.read(len(BEGINS))
    except OSError:
        return False
    return begins == BEGINS or not begins.strip(b"\0")


def _read(path: Path) -> tuple[str, Online]:
    """(digest of the cost model it was learned with, what was learned)"""
    try:
        card = store.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as a state learned online: {error}") from error
    if not isinstance(card, dict) or card.get("schema_version") != SCHEMA_VERSION:
        found = card.get("schema_version") if isinstance(card, dict) else None
        raise ModelError(f"{path}: schema_version is {found!r}, should be {SCHEMA_VERSION}: no state learned online")
    digest = card.get("model_digest")
    if not isinstance(digest, str) or not digest.isalnum():  # part of a file's name, where it is set aside
        raise ModelError(f"{path}: field model_digest is {digest!r}, should be a cost model's digest")
    events = _whole(path, "outcomes", card.get("outcomes"), inf)
    misses = _mapping(path, card, "misses")
    windows = tuple(_window(path, misses, name, events) for name in _names())
    return digest, Online(events, windows, _rooms(path, card, "room"), _rooms(path, card, "room_outside"))


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


def _rooms(path: Path, card: Mapping[str, Any], name: str) -> tuple[float, ...]:
    rooms = _mapping(path, card, name)
    return tuple(_room(path, f"{name}.{kind}", rooms.get(kind)) for kind in KINDS)


def _room(path: Path, field: str, value: Any) -> float:
    if type(value) not in (int, float) or not MIN_MARGIN <= value <= MAX_MARGIN:
        raise ModelError(f"{path}: field {field} is {value!r}, should be {MIN_MARGIN} to {MAX_MARGIN}")
    return float(value)


def _whole(path: Path, field: str, value: Any, most: float) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ModelError(f"{path}: field {field} holds {value!r}, should be a whole number from 0 to {most:g}")
    return value
