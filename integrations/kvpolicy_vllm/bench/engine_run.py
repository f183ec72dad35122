"""One engine that measures, run to its end, and what it recorded put into the trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.job import NOISE_LIMIT
from kvpolicy_vllm.bench.profile_results import finish_core

Counted = Callable[[int, int], None]
"""Told windows done, and windows in all."""


def run_to_its_end(
    module: str,
    job: Mapping[str, Any],
    out: Path,
    folder: Path,
    name: str,
    tell: Counted,
    more: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    notes: str = "",
) -> str:
    """Run ``module``'s engine on a job; returns the name of the core that is now in the trace ``out``.

    ``folder``: where the engine records until it is whole. ``name``: of the part. ``more``: what the header's noise
    says besides, out of the engine's answer. Raises EngineFailed.
    """
    counted = {"windows": 0, "done": 0}

    def news(values: dict[str, int]) -> None:
        for key, value in values.items():
            counted[key] += value
        tell(counted["done"], counted["windows"])

    tell(0, 0)
    with EngineProcess(module, folder / "engine.log") as engine:
        result = engine.ask(dict(job), news)
    core = str(result["core"])
    noise = result["noise"] | {
        "limit": NOISE_LIMIT,
        "above_limit": result["noise"]["variation"] > NOISE_LIMIT,
        "records_dropped": result["records_dropped"],
        "part": name,
    }
    finish_core(folder / "trace" / core, job["seed"], noise | dict(more(result)), notes)
    (folder / "trace" / core).replace(out / core)
    return core
