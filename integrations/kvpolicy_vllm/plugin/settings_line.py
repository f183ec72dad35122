"""The plugin's settings in one line of text: ``cheapest:models/mine,order=urgent,host_gib=8``.

The policy comes first. The line is cut at every comma that is followed by the name of a setting and ``=``; any other
comma, and any ``=`` after the first of a piece, belongs to the value. So values keep their own commas, as in
``explore:models/mine,online=on,budget=2%,hints=keep=60,share=0.5``: there ``online`` and ``budget`` are options of the
policy. A policy of one's own whose options have the name of a setting is given as JSON: a line that begins with ``{``
is the dictionary of settings itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from kvpolicy import fields
from kvpolicy.errors import InputError
from kvpolicy.settings import ServerSettings

POLICY = "policy"
KEYS = tuple(field.name for field in fields.options_of(ServerSettings))
SWITCH = {"on": True, "true": True, "off": False, "false": False}


def read_line(text: str, where: str, keys: Iterable[str] = KEYS) -> dict[str, Any]:
    """The settings that a line gives, by key, each of its own type. ``keys``: those that may be given.

    Raises InputError naming ``where``, the key and what would be right. Whether a policy of that name can be loaded is
    not looked at.
    """
    text, known = text.strip(), tuple(keys)
    values = _parsed(text, where) if text.startswith("{") else _cut(text, where, known)
    for key in values:
        if key not in known:
            raise InputError(f"{where}: unknown key {key!r}; the keys are {', '.join(sorted(known))}")
    return values


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: begins with {{ and cannot be read as JSON: {error}") from None
    return dict(values)


def _cut(text: str, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Pieces by key; the first is the policy, unless it begins with a key."""
    hints = get_type_hints(ServerSettings)
    begins = re.compile(rf"(?:^|,)\s*({'|'.join(known)})\s*=")
    marks = list(begins.finditer(text))
    first = text[: marks[0].start()] if marks else text
    pieces = [(POLICY, first.strip())] if first.strip() else []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    pieces += [(mark[1], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=False)]
    values: dict[str, Any] = {}
    for key, value in pieces:
        if key in values:
            raise InputError(f"{where}: {key} is given twice")
        if not value:
            raise InputError(f"{where}: {key} is empty")
        values[key] = _typed(key, value, fields.kind_of(hints[key]), where)
    return values


def _typed(key: str, value: str, kind: Any, where: str) -> Any:
    """The value of a key whose type is ``kind``. What has a form of its own stays a text, which the settings read."""
    try:
        if kind is bool:
            return SWITCH[value]
        return kind(value) if kind in (int, float) else value
    except (KeyError, ValueError):
        should = "on or off" if kind is bool else fields.WORDS[kind]
        raise InputError(f"{where}: {key} is {value!r}, should be {should}") from None


def server_settings(values: Mapping[str, Any], where: str) -> ServerSettings:
    """Raises InputError naming ``where`` and the key."""
    return fields.read(ServerSettings, values, where)
