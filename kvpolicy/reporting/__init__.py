"""The overflow study's report: traces in, one HTML file and the figures out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy.reporting.writing import report

__all__ = ["report"]


def __getattr__(name: str) -> Any:
    if name == "report":
        return import_module("kvpolicy.reporting.writing").report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
