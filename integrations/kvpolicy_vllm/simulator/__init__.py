"""vLLM's own scheduler as a simulator: the real `Scheduler` and KV cache on a virtual clock, without model or device.

`VllmScheduler` is loaded on first use: importing the package loads no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy_vllm.simulator.engine import VllmScheduler

__all__ = ["VllmScheduler"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("kvpolicy_vllm.simulator.engine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
