"""Values of files in JSON, read with the type that they should have: for files that users may edit or damage.

Anything else than a damaged file is left to raise what it raises, so that a fault of this package is not reported as
the file's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError, KVPolicyError


class FieldMissing(InputError):
    """A field that should be there; ``field`` is its dotted path."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field

    def __str__(self) -> str:
        return f"field {self.field} is missing"


MAX_JSON_BYTES = 64 << 20
"""Maximum size of a file of text, as JSON or YAML, that is read whole; a cost model has a few megabytes at most."""


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """A file's content. Raises OSError where it cannot be read; InputError, without the file's name, where it is larger
    than ``max_bytes``."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InputError(f"is larger than {max_bytes:,} bytes, which is the most that is read")
    return content


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """A text file's content, its line ends as they are. Raises as :func:`read_bytes`; InputError where it is no
    UTF-8."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"is no text in UTF-8: {error}") from None


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file. Raises as :func:`read_bytes`; InputError, without the file's name, where it is no
    JSON, or is nested too deeply."""
    return json_of(read_bytes(path, max_bytes))


def reason_of(error: Exception) -> str:
    """What is wrong with a file, for a message that names it already: the error of reading it, or the one that its
    content led to."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, KVPolicyError):
        return str(error)
    if isinstance(error, KeyError) and error.args:
        return f"field {error.args[0]} is missing"
    return f"a field is of an unexpected kind: {type(error).__name__}: {error}"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file of any size, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SEAL = "sha256"
"""The member of a sealed file that holds the digest of all others."""


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON gives them back, with their digest: of a file from which an interrupted run goes on, which
    nobody else writes. :func:`read_sealed` reads it."""
    plain = json.loads(json.dumps(dict(values)))
    return {**plain, SEAL: _seal_of(plain)}


def read_sealed(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The values of a file that was written with :func:`sealed`. Raises InputError, naming the file, where it is not
    there or is not as it was written."""
    try:
        values = read_json(path, max_bytes)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if isinstance(values, dict) and SEAL not in values:
        raise InputError(f"{path}: has no {SEAL}: was written by an earlier kvpolicy, or changed since")
    if not isinstance(values, dict) or values.pop(SEAL) != _seal_of(values):
        raise InputError(f"{path}: was damaged or changed since it was written")
    return values


def _seal_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def json_of(text: str | bytes) -> Any:
    """The value of a JSON text. Raises InputError where it is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError("is nested too deeply to be read") from None
    except ValueError as error:  # no UTF-8, a number of thousands of digits, or no JSON
        raise InputError(f"is no JSON: {error}") from None


def value_at(values: Any, *path: str) -> Any:
    """The value at a path of names. Raises FieldMissing, or InputError where something on the way is no object."""
    for depth, name in enumerate(path):
        if not isinstance(values, Mapping):
            where = f"field {'.'.join(path[:depth])} " if depth else ""
            raise InputError(f"{where}is {values!r}, should be an object with the field {name}")
        if name not in values:
            raise FieldMissing(".".join(path[: depth + 1]))
        values = values[name]
    return values


def object_at(values: Any, *path: str) -> Mapping[str, Any]:
    """An object. Raises InputError, as do all below, for a value of another type and where it is missing."""
    value = value_at(values, *path)
    if not isinstance(value, Mapping):
        raise _wrong(path, value, "an object")
    return value


def list_at(values: Any, *path: str) -> list[Any]:
    value = value_at(values, *path)
    if not isinstance(value, list | tuple):
        raise _wrong(path, value, "a list")
    return list(value)


def text_at(values: Any, *path: str) -> str:
    value = value_at(values, *path)
    if not isinstance(value, str):
        raise _wrong(path, value, "a text")
    return value


def number_at(values: Any, *path: str) -> float:
    """A finite number."""
    value = value_at(values, *path)
    if not is_number(value):
        raise _wrong(path, value, "a finite number")
    return float(value)


def whole_at(values: Any, *path: str) -> int:
    """A whole number, 0 or above."""
    value = value_at(values, *path)
    if type(value) is not int or value < 0:
        raise _wrong(path, value, "a whole number, 0 or above")
    return value


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no truth value."""
    return type(value) in (int, float) and isfinite(value)


def _wrong(path: tuple[str, ...], value: Any, should: str) -> InputError:
    return InputError(f"{'.'.join(path)} is {value!r}, should be {should}")
