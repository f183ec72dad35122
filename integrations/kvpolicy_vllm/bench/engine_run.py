"""Runs one measuring engine to completion and moves its recording into the trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvpolicy_vllm.bench.engine_process import FLAGS, EngineProcess
from kvpolicy_vllm.bench.job import NOISE_LIMIT
from kvpolicy_vllm.bench.profile_results import finish_core
from kvpolicy_vllm.launch import core_variables

WindowProgress = Callable[[int, int], None]
"""Callback for progress: windows done, windows in all."""


def run_engine(
    module: str,
    job: Mapping[str, Any],
    out: Path,
    folder: Path,
    name: str,
    report_progress: WindowProgress,
    extra_noise: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> str:
    """Run ``module``'s engine on a job; return the name of the core that was added to the trace ``out``.

    ``folder``: where the engine records until the part is complete. ``name``: name of the part. ``extra_noise``:
    derives further entries of the header's noise from the engine's answer, which may have ``notes`` for the header.
    Raises EngineFailed.
    """
    counts = {"windows": 0, "done": 0}

    def news(values: dict[str, int]) -> None:
        for key, value in values.items():
            counts[key] += value
        report_progress(counts["done"], counts["windows"])

    report_progress(0, 0)
    flags = job["engine"].get(FLAGS)
    # With its plugin it would compute with other threads than the server whose engine it is measured as.
    cores = {} if flags is None else core_variables(flags, os.environ)
    with EngineProcess(module, folder / "engine.log", as_server=flags is not None, variables=cores) as engine:
        result = engine.ask(dict(job), news)
    core = str(result["core"])
    noise = result["noise"] | {
        "limit": NOISE_LIMIT,
        "above_limit": result["noise"]["variation"] > NOISE_LIMIT,
        "records_dropped": result["records_dropped"],
        "part": name,
    }
    finish_core(folder / "trace" / core, job["seed"], noise | dict(extra_noise(result)), result.get("notes", ""))
    (folder / "trace" / core).replace(out / core)
    return core
