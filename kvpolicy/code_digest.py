"""Digest of an object and of the code behind it: the key by which results of a user's own policy are cached.

It covers the code that this process has loaded, even if the file has changed since: the object's values, its class,
and the functions, classes and constants that these use from modules outside installed packages (from the object's own
package even where that is installed). It does not cover files that are read, installed packages, or mutable globals
such as dictionaries. A class that depends on one of these should have a ``digest`` of its own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

from kvpolicy.errors import KVPolicyError

INSTALLED = {"site-packages", "dist-packages"}
LIBRARY = {"kvpolicy", "kvpolicy_vllm"}
"""Packages whose code is covered by every result's own digest, so that it need not be walked here."""
PLAIN = (type(None), bool, int, float, complex, str, bytes)


def digest_of(value: object) -> str:
    """SHA-256 in hex, the same in every process. Raises KVPolicyError for an object without a stable form."""
    return _Walk(type(value).__module__).digest(value).hex()


LABEL_DIGITS = 12
"""Characters of a digest in a label."""


class Named(Protocol):
    """An extension, such as a user's own policy."""

    name: str

    @property
    def digest(self) -> str: ...


def label_of(named: Named) -> str:
    """Name for reports and traces; the beginning of the digest is added where the class is not from this package."""
    return named.name if is_from_library(type(named)) else digest_label(named)


def is_from_library(kind: type) -> bool:
    """Whether the class is from this package."""
    return kind.__module__.partition(".")[0] in LIBRARY


def digest_label(named: Named) -> str:
    """Name with the beginning of the digest, for any class."""
    return f"{named.name}@{named.digest[:LABEL_DIGITS]}"


def call_of(named: Named) -> str:
    """The call that makes such an object, as ``Longer(tokens=512)``, for reports: of a dataclass, the class with its
    arguments but the name, objects among these by their class; empty for other classes, whose arguments are unknown."""
    if not is_dataclass(named):
        return ""
    names = [field.name for field in fields(named) if field.init and field.name != "name"]
    texts = [f"{name}={_shown(getattr(named, name))}" for name in names]
    return f"{type(named).__name__}({', '.join(texts)})"


def _shown(value: object) -> str:
    return repr(value) if _constant(value) else type(value).__name__


class _Walk:
    """Walks one object for its digest. ``home``: the module of its class."""

    def __init__(self, home: str) -> None:
        self._home = home.partition(".")[0]
        self._path: list[object] = []
        """Objects being walked, outermost first. One that contains itself is represented by its depth here."""
        self._walked: dict[int, object] = {}
        """Classes and functions that were walked already, by id. A second occurrence adds only their name."""

    def digest(self, value: object) -> bytes:
        if isinstance(value, PLAIN):
            return _sha(type(value).__name__.encode(), repr(value).encode())
        for depth, open_value in enumerate(self._path):
            if open_value is value:
                return _sha(b"again", str(depth).encode())
        self._path.append(value)
        try:
            return _sha(*self._parts(value))
        finally:
            self._path.pop()

    def _parts(self, value: object) -> Iterator[bytes]:
        yield type(value).__name__.encode()
        if isinstance(value, list | tuple):
            yield from map(self.digest, value)
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self.digest, value))
        elif isinstance(value, Mapping):
            yield from sorted(_sha(self.digest(key), self.digest(item)) for key, item in value.items())
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, ModuleType):
            yield value.__name__.encode()
        elif isinstance(value, CodeType):
            yield from self._code(value)
        else:
            yield from self._object(value)

    def _object(self, value: object) -> Iterator[bytes]:
        own_digest = getattr(value, "digest", "") if len(self._path) > 1 else ""
        if isinstance(own_digest, str) and own_digest:
            yield own_digest.encode()
            return
        if isinstance(value, MethodType):
            yield from (self.digest(value.__func__), self.digest(value.__self__))
            return
        try:
            reduced: Any = value.__reduce_ex__(4)
        except TypeError as error:
            owner = type(self._path[0]).__name__
            raise KVPolicyError(
                f"{owner}: no digest can be made of it: {error}; give the class a text `digest` that changes whenever "
                "it would decide otherwise"
            ) from error
        if isinstance(reduced, str):  # the name of a global
            yield reduced.encode()
            return
        for part in reduced:
            yield self.digest(list(part) if isinstance(part, Iterator) else part)

    def _class(self, value: type) -> Iterator[bytes]:
        yield f"{value.__module__}.{value.__qualname__}".encode()
        if not self._is_new(value):
            return
        yield from map(self.digest, value.__bases__)
        for name, member in sorted(vars(value).items()):
            inner = _code_in(member)
            if inner:
                yield from (name.encode(), *map(self.digest, inner))
            elif not name.startswith("__") and name != "_abc_impl":
                yield from (name.encode(), self.digest(member))

    def _function(self, value: FunctionType) -> Iterator[bytes]:
        yield f"{value.__module__}.{value.__qualname__}".encode()
        if not self._is_new(value):
            return
        yield self.digest(value.__code__)
        yield self.digest((value.__defaults__, value.__kwdefaults__))
        yield from (self.digest(cell.cell_contents) for cell in value.__closure__ or ())
        names = sorted(_names(value.__code__))
        for name in names:
            if name in value.__globals__:
                yield from self._global(name, value.__globals__[name], names)

    def _global(self, name: str, value: object, names: Iterable[str]) -> Iterator[bytes]:
        """Digest parts of a global that a function uses. ``names``: all names in the function, attributes included."""
        if isinstance(value, ModuleType):
            if self._is_own(value.__name__):
                for attribute in names:
                    if attribute in vars(value) and not isinstance(vars(value)[attribute], ModuleType):
                        yield from self._global(f"{name}.{attribute}", vars(value)[attribute], ())
        elif isinstance(value, type | FunctionType) or _constant(value):
            yield from (name.encode(), self.digest(value))

    def _code(self, code: CodeType) -> Iterator[bytes]:
        yield from (code.co_code, " ".join((*code.co_names, "|", *code.co_varnames)).encode())
        yield from map(self.digest, code.co_consts)

    def _is_new(self, value: type | FunctionType) -> bool:
        if id(value) in self._walked:
            return False
        self._walked[id(value)] = value
        return self._is_own(value.__module__)

    def _is_own(self, module: str) -> bool:
        top = module.partition(".")[0]
        if top in LIBRARY or top in sys.stdlib_module_names:
            return False
        file = getattr(sys.modules.get(module), "__file__", None)
        return top in (self._home, "__main__") or (file is not None and not INSTALLED & set(Path(file).parts))


def _sha(*parts: bytes) -> bytes:
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(len(part).to_bytes(8, "big") + part)
    return sha256.digest()


def _code_in(member: object) -> list[FunctionType]:
    """The functions of a class's member: of a method, a property, or a cached property."""
    inner = getattr(member, "__func__", member)
    candidates = (
        (inner.fget, inner.fset, inner.fdel) if isinstance(inner, property) else (getattr(inner, "func", inner),)
    )
    return [candidate for candidate in candidates if isinstance(candidate, FunctionType)]


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes that code uses, nested functions included."""
    inner_code = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner_code))


def _constant(value: object) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_constant, value))
    return isinstance(value, PLAIN)
