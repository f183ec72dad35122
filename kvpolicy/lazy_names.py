"""Public names of a package that are loaded from its modules on first use, so that importing the package stays light.

For packages that a server or a command line imports before it knows what it needs. A type checker cannot follow this,
so such a package also has a stub (``__init__.pyi``) or imports under ``TYPE_CHECKING``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``.

    ``homes``: the module that each name is loaded from, or ``MODULE:NAME`` where it has another name there.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = homes[name].partition(":")
        return getattr(import_module(module), attribute or name)

    def names() -> list[str]:
        return sorted({*vars(import_module(package)), *homes})

    return load, names
