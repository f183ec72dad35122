"""Serves the same requests with several memory sizes and policies on one engine, and records it.

    python -m kvpolicy_vllm.bench.pressure

Takes one job (see :mod:`kvpolicy_vllm.bench.engine_process`), a :class:`kvpolicy_vllm.bench.serve_job.ServedJob`. All
memory sizes are served by one engine whose block pool is shrunk between runs, as if it had been started with less. Two
processes of the same program can differ in speed for as long as they live, which must not look like a memory effect.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from kvpolicy.trace import window_row
from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.bench.job import Noise
from kvpolicy_vllm.bench.measured_window import WindowDriver
from kvpolicy_vllm.bench.measurement import NOISE_STEPS, NOISE_WINDOWS
from kvpolicy_vllm.bench.reach import Load, ServedRun
from kvpolicy_vllm.bench.serve_engine import Serving
from kvpolicy_vllm.bench.serve_job import ServedJob
from kvpolicy_vllm.bench.states import State

ALL = 100
"""Percent of the memory: the whole engine's."""


class Pressure:
    """Serves all runs of one engine, in order."""

    def __init__(self, job: ServedJob, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._serving = Serving(job.engine)
        self.scheduler = self._serving.llm.llm_engine.engine_core.engine_core.scheduler
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._job = replace(job, load=self._with_tables(job.load))

    def _with_tables(self, load: Load) -> Load:
        """The load, with the blocks that its requests take here where they have several block tables."""
        tables = self.scheduler.kvpolicy.tables
        if tables is None:
            return load
        held_blocks = tables.load_blocks(self.scheduler, 0, load.total_tokens)
        return replace(load, held_blocks=held_blocks, max_held_blocks=tables.max_held_blocks(load.total_tokens))

    def run(self) -> Noise:
        """Measure the machine's noise and warm up, which is discarded, then serve every run."""
        controller = self.scheduler.kvpolicy
        controller.adopt("always-recompute")
        noise = self._noise()
        self._serve(ServedRun("warm-up/all", ALL, "recompute", -1), "warm-up")
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
        """Measure the variation of identical windows in which a few requests decode undisturbed."""
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
        job = {"requests": requests, "seed": f"{self._job.seed}/{run.repeat}", "policy": self._job.policies[run.arm]}
        with self._memory(self._blocks_of(run)):
            first_step = controller.next_step
            result = self._serving.serve(job, lambda news: None)
        row = window_row(
            state_id=run.state_id,
            arm=run.arm,
            repeat=run.repeat,
            cause="memory",
            first_step=first_step,
            last_step=controller.next_step - 1,
            duration_s=result["makespan_s"],
            preemption_id=None,
            discarded=discarded,
        )
        self._record(row)

    def about(self) -> dict[str, Any]:
        """What the trace's header says of the runs."""
        blocks = {run.state_id: self._blocks_of(run) for run in self._job.runs}
        return {"device_blocks": blocks, "notes": self._job.load.scaling()}

    def _blocks_of(self, run: ServedRun) -> int:
        return self._pool.num_gpu_blocks if run.level >= ALL else self._job.load.blocks_at(run.level)

    @contextmanager
    def _memory(self, blocks: int) -> Iterator[None]:
        """Shrink the pool to ``blocks`` blocks, as if the engine had been started with these; it must be idle."""
        all_blocks = self._pool.num_gpu_blocks
        held_blocks = self._pool.get_new_blocks(all_blocks - blocks)
        self._pool.num_gpu_blocks = blocks
        try:
            yield
        finally:
            self._pool.num_gpu_blocks = all_blocks
            self._pool.free_blocks(held_blocks)

    def _record(self, row: dict[str, Any]) -> None:
        self.scheduler.kvpolicy.recorder.add("windows", row)

    def close(self) -> None:
        self._serving.llm.llm_engine.engine_core.shutdown()


def serve(job: ServedJob, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Start the engine, serve, and close the trace. Return the core's name and its noise."""
    pressure = Pressure(job, tell)
    noise = pressure.run()
    controller = pressure.scheduler.kvpolicy
    core, recorder = controller.core, controller.recorder
    about = pressure.about()
    pressure.close()
    return {"core": core, "noise": asdict(noise), "records_dropped": recorder.dropped, **about}


def main() -> None:
    for job, answer in jobs():
        answer("result", serve(ServedJob.from_dict(job), functools.partial(answer, "news")))


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries may have left threads that would keep the process alive
