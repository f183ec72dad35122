"""kvpolicy: recompute or swap, decided by measured cost, for LLM servers that run out of KV memory.

The steps of the loop are functions here, with the arguments of the commands: :func:`profile`, :func:`train`,
:func:`calibrate`, :func:`evaluate`, :func:`explain`, :func:`demo`, :func:`simulate`, :func:`recommend`,
:func:`characterize`, :func:`report`;
:func:`import_profile` makes a simulator's hardware from published tables. They are loaded on first use: a server that
only decides must not load the trainers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpolicy.version import __version__

if TYPE_CHECKING:
    from kvpolicy.integrations import characterize, demo, profile
    from kvpolicy.evaluation import evaluate
    from kvpolicy.explaining import explain
    from kvpolicy.reporting.writing import report
    from kvpolicy.simulator.hardware.import_profile import import_profile
    from kvpolicy.study import recommend, simulate
    from kvpolicy.training import calibrate, train

__all__ = [
    "__version__",
    "calibrate",
    "characterize",
    "demo",
    "evaluate",
    "explain",
    "import_profile",
    "profile",
    "recommend",
    "report",
    "simulate",
    "train",
]

_HOMES = {
    "calibrate": "kvpolicy.training",
    "characterize": "kvpolicy.integrations",
    "demo": "kvpolicy.integrations",
    "evaluate": "kvpolicy.evaluation",
    "explain": "kvpolicy.explaining",
    "import_profile": "kvpolicy.simulator.hardware.import_profile",
    "profile": "kvpolicy.integrations",
    "recommend": "kvpolicy.study.recommend",
    "report": "kvpolicy.reporting.writing",
    "simulate": "kvpolicy.study.grid",
    "train": "kvpolicy.training",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
