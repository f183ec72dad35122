"""Many simulations: grids of workload x policy x memory x link x seed, and what to deploy by them.

Loaded on first use, so that a command line that does something else is not kept waiting.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy.study.grid import simulate
    from kvpolicy.study.recommend import recommend

__all__ = ["recommend", "simulate"]

_HOMES = {"recommend": "kvpolicy.study.recommend", "simulate": "kvpolicy.study.grid"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
