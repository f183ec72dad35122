"""Measures one engine: the process that `bench.run_profile` starts for every block size and pass.

    python -m kvpolicy_vllm.bench.measure_engine

Takes one job (see :mod:`kvpolicy_vllm.bench.engine_process`), a :class:`kvpolicy_vllm.bench.job.Job`. The plugin inside
the engine records the trace; the answer holds what the trace's tables do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvpolicy_vllm.bench.engine_flags import start
from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.measured_window import WindowDriver
from kvpolicy_vllm.bench.measurement import Measurement


def measure(job: Job, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Start the engine, measure, and close the trace. Return the core's name, noise, repeats and discard reasons."""
    llm = start(job.engine)
    driver = WindowDriver(llm, job.seed)
    measurement = Measurement(driver, job, tell)
    noise = measurement.run()
    llm.llm_engine.engine_core.shutdown()
    return {
        "core": driver.controller.core,
        "noise": asdict(noise),
        "repeats": job.repeats * min(noise.factor, job.max_extra),
        "discarded": measurement.discarded,
        "records_dropped": driver.controller.recorder.dropped,
        "left_out": measurement.left_out,
        "measured_s": measurement.measured_s,
    }


def main() -> None:
    for job, answer in jobs():
        answer("result", measure(Job.from_dict(job), functools.partial(answer, "news")))


if __name__ == "__main__":
    main()
