"""Drives live engines: profile, overload, overflow study, demo. The entry point `kvpolicy.engines` names this package.

Its functions are loaded on first use: importing the package loads no engine.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy_vllm.bench.characterize import characterize
    from kvpolicy_vllm.bench.demo import demo
    from kvpolicy_vllm.bench.profile import profile

__all__ = ["characterize", "demo", "profile"]


class _Package(ModuleType):
    """Keeps the functions' names: on import of a submodule Python would bind `profile` to the module of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"kvpolicy_vllm.bench.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
