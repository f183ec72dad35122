"""What a child process does with an engine. Each takes a job and returns something JSON can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams

Hook = Callable[["Run", int], None]


class Run:
    """An in-process engine and what has come out of it so far."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.llm = LLM(
            model=job["model"],
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            **job["engine"],
            **(job.get("plugin") or {}),
        )
        self.engine = self.llm.llm_engine
        self.tokens: dict[str, list[int]] = {}
        self.gaps: dict[str, list[float]] = {}
        self.finish: dict[str, str] = {}

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def copier(self) -> Any:
        worker = self.engine.engine_core.engine_core.model_executor.driver_worker
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        del worker
        return get_kv_transfer_group().copier

    def add(self, name: str, request: dict[str, Any]) -> None:
        parameters = SamplingParams(
            temperature=request.get("temperature", 0.0),
            seed=request.get("seed"),
            n=request.get("n", 1),
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if self.job.get("gaps") else None,
        )
        self.engine.add_request(
            name, {"prompt_token_ids": request["prompt"]}, parameters, priority=request.get("priority", 0)
        )

    def serve(self, hook: Hook | None = None) -> None:
        """Step until nothing is left; ``hook(run, step)`` comes before every step."""
        step = 0
        while self.engine.has_unfinished_requests():
            if hook is not None:
                hook(self, step)
            for output in self.engine.step():
                self._take(output)
            step += 1
            assert step < 100_000, "no progress"
        for _ in range(20):  # let loads of aborted requests come back
            self.engine.engine_core.engine_core.step()

    def _take(self, output: Any) -> None:
        if not output.finished:
            return
        for completion in output.outputs:
            name = output.request_id if len(output.outputs) == 1 else f"{output.request_id}/{completion.index}"
            self.tokens[name] = list(completion.token_ids)
            self.finish[name] = str(completion.finish_reason)
            if completion.logprobs:
                self.gaps[name] = [_gap(entry) for entry in completion.logprobs]

    def result(self) -> dict[str, Any]:
        pool = self.scheduler.kv_cache_manager.block_pool
        connector = self.scheduler.connector
        return {
            "tokens": self.tokens,
            "gaps": self.gaps,
            "finish": self.finish,
            "free_blocks": pool.get_num_free_blocks(),
            "device_blocks": pool.num_gpu_blocks,
            "stats": connector.stats() if connector is not None else {},
            "async": type(self.scheduler).__mro__[1].__name__,
        }


def _gap(entry: dict[int, Any]) -> float:
    best = sorted((value.logprob for value in entry.values()), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def plain(job: dict[str, Any]) -> dict[str, Any]:
    """All requests at once, to the end."""
    run = Run(job)
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)
    run.serve()
    return run.result()
