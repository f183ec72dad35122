"""One engine of gpu-check: ``python -m benchmarks.gpu.check_engine``. Takes jobs as `kvpolicy_vllm.bench.serve_engine`.

``start`` also takes ``environment``, set before the engine is made; ``serve`` also takes ``force_every``: one request
is forced out every so many steps, besides those that memory forces out. The answer also lists what is left behind.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.bench.serve_engine import Serving

OPEN = ("host_slots_used", "open_preemptions")


class Checked(Serving):
    """Forces requests out where asked to, and reports what the engine still holds when all are served."""

    force_every = 0

    def _step(self, progress: dict[str, Any], start: float) -> None:
        running = self._core.scheduler.running
        if self.force_every and running and self._counted.steps % self.force_every == 0:
            victim = running[self._counted.steps // self.force_every % len(running)]
            self._core.scheduler.preempt_at_next_step(victim.request_id)
        super()._step(progress, start)

    def left_behind(self) -> dict[str, Any]:
        pool = self._core.scheduler.kv_cache_manager.block_pool
        stats = self._stats()
        copier = get_kv_transfer_group().copier if has_kv_transfer_group() and stats else None
        return {
            "blocks_in_use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is vLLM's own
            **{name: round(stats.get(name, 0)) for name in OPEN},
            **(copier.told() if hasattr(copier, "told") else {}),
        }

    def about(self) -> dict[str, Any]:
        core = self._core
        config = core.vllm_config
        return super().about() | {
            "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "scheduler": type(core.scheduler).__name__,
            "graphs": str(config.compilation_config.cudagraph_mode),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "dtype": str(config.model_config.dtype),
        }


def main() -> None:
    checked: Checked | None = None
    for job, answer in jobs():
        if job["do"] == "start":
            os.environ.update(job.get("environment", {}))
            checked = Checked(job["engine"])
            answer("result", checked.about())
        else:
            assert checked is not None, "the first job starts the engine"
            checked.force_every = job.get("force_every", 0)
            result = checked.serve(job, partial(answer, "news"))
            answer("result", result | checked.left_behind())
    if checked is not None:
        checked.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
    os._exit(0)  # whatever threads a library left behind
