"""What was learned online, over a restart: JSON with the digest of the cost model it corrects."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from kvpolicy.cost import strictly
from kvpolicy.cost.model import ModelError
from kvpolicy.cost.online import (
    LEAST_ROOM,
    MOST_MISS,
    MOST_ROOM,
    QUANTITIES,
    SIZES,
    WINDOW,
    Miss,
    Online,
)
from kvpolicy.events import KINDS

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
        card = strictly.loads(path.read_text(encoding="utf-8"))
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
    if type(value) not in (int, float) or not abs(value) <= MOST_MISS + 1e-6:
        raise ModelError(f"{path}: field {field} holds a log miss of {value!r}, should be within {MOST_MISS:.3f}")
    return Miss(_whole(path, field, at, events - 1), _whole(path, field, size, SIZES - 1), float(value))


def _rooms(path: Path, card: Mapping[str, Any], name: str) -> tuple[float, ...]:
    rooms = _mapping(path, card, name)
    return tuple(_room(path, f"{name}.{kind}", rooms.get(kind)) for kind in KINDS)


def _room(path: Path, field: str, value: Any) -> float:
    if type(value) not in (int, float) or not LEAST_ROOM <= value <= MOST_ROOM:
        raise ModelError(f"{path}: field {field} is {value!r}, should be {LEAST_ROOM} to {MOST_ROOM}")
    return float(value)


def _whole(path: Path, field: str, value: Any, most: float) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ModelError(f"{path}: field {field} holds {value!r}, should be a whole number from 0 to {most:g}")
    return value
