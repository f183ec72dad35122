"""One engine that serves the same requests under several memories and policies, and records it.

    python -m kvpolicy_vllm.bench.pressure

Takes one job (see :mod:`kvpolicy_vllm.bench.engine_process`), a :class:`kvpolicy_vllm.bench.serve_job.ServedJob`. All
levels of memory are served by one engine whose block pool is made smaller between runs, as if it had been started with
less: two processes of one program can differ in speed for as long as they live, and that must not pass for an effect
of memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from kvpolicy.trace import window_row
from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.bench.job import Noise
from kvpolicy_vllm.bench.measure_engine import NOISE_STEPS, NOISE_WINDOWS
from kvpolicy_vllm.bench.measured_window import WindowDriver
from kvpolicy_vllm.bench.reach import ServedRun
from kvpolicy_vllm.bench.serve_engine import Serving
from kvpolicy_vllm.bench.serve_job import ServedJob
from kvpolicy_vllm.bench.states import State


class Pressure:
    """Everything one engine serves, in order."""

    def __init__(self, job: ServedJob, tell: Callable[[dict[str, Any]], None]) -> None:
        self._job = job
        self._tell = tell
        self._serving = Serving(job.engine)
        self.scheduler = self._serving.llm.llm_engine.engine_core.engine_core.scheduler
        self._pool = self.scheduler.kv_cache_manager.block_pool

    def run(self) -> Noise:
        """Serve every run; what came before, to warm up and to learn the machine's own noise, does not count."""
        controller = self.scheduler.kvpolicy
        controller.adopt("always-recompute")
        noise = self._noise()
        self._serve(ServedRun("warm-up/all", 100, "recompute", -1), "warm-up")
        lowest = min(self._job.runs, key=lambda run: run.level)
        for arm in self._job.policies:
            if arm != "recompute":
                self._serve(ServedRun(f"warm-up/{lowest.level}", lowest.level, arm, -1), "warm-up")
        self._tell({"windows": len(self._job.runs)})
        for run in self._job.runs:
            self._serve(run, "")
            self._tell({"done": 1})
        return noise

    def _noise(self) -> Noise:
        """Identical windows, nobody disturbed: a few of the requests, decoding."""
        load = self._job.load
        state = State(
            "noise", load.block_size, "memory", load.prompt_tokens, 2, (load.prompt_tokens,) * 3, 0, 0
        )  # fmt: skip
        driver = WindowDriver(self._serving.llm, self._job.seed)
        durations_s = []
        for repeat in range(NOISE_WINDOWS):
            window = driver.undisturbed(state, repeat, NOISE_STEPS)
            self._record(window.row() | {"discarded": "noise"})
            durations_s.append(window.duration_s)
        return Noise.of(durations_s)

    def _serve(self, run: ServedRun, discarded: str) -> None:
        load, controller = self._job.load, self.scheduler.kvpolicy
        request = [0.0, load.prompt_tokens, load.output_tokens]
        requests = [request] * load.requests
        asked = {"requests": requests, "seed": f"{self._job.seed}/{run.repeat}", "policy": self._job.policies[run.arm]}
        with self._memory(self._job.blocks_at(run.level)):
            first = controller.next_step
            result = self._serving.serve(asked, lambda news: None)
        row = window_row(
            state_id=run.state_id,
            arm=run.arm,
            repeat=run.repeat,
            cause="memory",
            first_step=first,
            last_step=controller.next_step - 1,
            duration_s=result["makespan_s"],
            preemption_id=None,
            discarded=discarded,
        )
        self._record(row)

    @contextmanager
    def _memory(self, blocks: int) -> Iterator[None]:
        """The pool as if the engine had been started with so many blocks; it must be idle."""
        whole = self._pool.num_gpu_blocks
        held = self._pool.get_new_blocks(whole - blocks)
        self._pool.num_gpu_blocks = blocks
        try:
            yield
        finally:
            self._pool.num_gpu_blocks = whole
            self._pool.free_blocks(held)

    def _record(self, row: dict[str, Any]) -> None:
        self.scheduler.kvpolicy.recorder.add("windows", row)

    def close(self) -> None:
        self._serving.llm.llm_engine.engine_core.shutdown()


def serve(job: ServedJob, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Start the engine, serve, and close the trace. Returns the core's name and its noise."""
    pressure = Pressure(job, tell)
    noise = pressure.run()
    controller = pressure.scheduler.kvpolicy
    core, recorder = controller.core, controller.recorder
    pressure.close()
    return {"core": core, "noise": asdict(noise), "records_dropped": recorder.dropped}


def main() -> None:
    for job, answer in jobs():
        answer("result", serve(ServedJob.from_dict(job), functools.partial(answer, "news")))


if __name__ == "__main__":
    main()
    os._exit(0)  # whatever threads a library left behind
