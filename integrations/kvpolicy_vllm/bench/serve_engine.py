"""Serves workloads on one engine and times every token: ``python -m kvpolicy_vllm.bench.serve_engine``.

Jobs (see :mod:`kvpolicy_vllm.bench.engine_process`): ``{"do": "start", "engine": {...}}`` with the arguments of
:class:`vllm.LLM`, then any number of ``{"do": "serve", "requests": [[arrival_s, prompt_tokens, output_tokens], ...],
"seed": ...}``. ``"policy"``: the plugin's policy; null switches the plugin off. ``"priorities"`` and
``"transfer_params"``, where given, hold one entry per request: vLLM's ``priority``, and its ``kv_transfer_params`` or
null. The engine core runs in this process and is stepped here.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from kvpolicy_vllm.bench.engine_flags import start
from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.bench.plugin_switch import PluginSwitch

FIRST_TOKEN_ID = 10
"""Lowest token id in prompts; lower ones include special tokens."""
NEWS_EVERY_S = 0.2
SETTLING_STEPS = 1000
OFFLOADED = ("vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes")
"""Metrics of vLLM's own offloading, where the engine keeps statistics."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a job."""

    name: str
    arrival_s: float
    output_tokens: int
    priority: int
    transfer_params: dict[str, Any] | None


def _requests(job: dict[str, Any], prefix: str) -> list[Asked]:
    """The requests of a job, in their order. ``prefix``: begins their names."""
    rows = job["requests"]
    priorities = job.get("priorities") or [0] * len(rows)
    parameters = job.get("transfer_params") or [None] * len(rows)
    return [
        Asked(f"{prefix}-{number}", arrival_s, output_tokens, priority, params)
        for number, ((arrival_s, _, output_tokens), priority, params) in enumerate(
            zip(rows, priorities, parameters, strict=True)
        )
    ]


@dataclass(slots=True)
class Progress:
    """Output of one request so far."""

    arrival_s: float
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ScheduleCounts:
    """Counts of scheduled work, the same for every scheduler. vLLM itself does not count recomputed tokens."""

    steps: int = 0
    preemptions: int = 0
    scheduled_tokens: int = 0
    recomputed_tokens: int = 0
    _highest: dict[str, int] = field(default_factory=dict)

    def count(self, output: Any, requests: dict[str, Any]) -> None:
        """Count one output of ``schedule()``. The requests' computed tokens already include those scheduled."""
        self.steps += output.total_num_scheduled_tokens > 0
        self.preemptions += len(output.preempted_req_ids or ())
        for request_id, new_tokens in output.num_scheduled_tokens.items():
            end = requests[request_id].num_computed_tokens
            highest = self._highest.get(request_id, 0)
            self.scheduled_tokens += new_tokens
            self.recomputed_tokens += max(0, min(end, highest) - (end - new_tokens))
            self._highest[request_id] = max(highest, end)


class Serving:
    """Serves workloads one after the other on an engine in this process."""

    def __init__(self, arguments: dict[str, Any], clock: Callable[[], float] = time.perf_counter) -> None:
        self.llm = start(arguments)
        self._clock = clock
        self._core = self.llm.llm_engine.engine_core.engine_core
        self._vocabulary = self.llm.model_config.get_vocab_size()
        self._counted = ScheduleCounts()
        self._names = itertools.count()
        self._plugin = PluginSwitch(self._core)
        self._count_schedules()

    def _count_schedules(self) -> None:
        scheduler = self._core.scheduler

        def counting_schedule(*args: Any, **kwargs: Any) -> Any:
            # Looked up in the present class, which the plugin switch changes.
            output = type(scheduler).schedule(scheduler, *args, **kwargs)
            self._counted.count(output, scheduler.requests)
            return output

        scheduler.schedule = counting_schedule

    def about(self) -> dict[str, Any]:
        pool = self._core.scheduler.kv_cache_manager.block_pool
        return {"engine": f"vllm {vllm.__version__}", "device_blocks": pool.num_gpu_blocks}

    def serve(self, job: dict[str, Any], news: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Serve every request to its end, none before its arrival. ``news`` is called with the tokens so far."""
        self._plugin.set(job["policy"] is not None)
        if job["policy"] is not None:
            self._core.scheduler.kvpolicy.adopt(job["policy"])
        held_blocks = self._hold_back(job.get("device_blocks"))
        prompts = self._prompts(job)
        number = next(self._names)
        waiting = _requests(job, str(number))
        progress = {request.name: Progress(request.arrival_s) for request in waiting}
        self._counted = ScheduleCounts()
        before, offloaded_before = self._stats(), self._offloaded_bytes()
        start_s = news_s = self._clock()
        start_cpu_s = time.process_time()
        arrived = 0
        while arrived < len(waiting) or self.llm.llm_engine.has_unfinished_requests():
            now = self._clock() - start_s
            while arrived < len(waiting) and waiting[arrived].arrival_s <= now:
                self._add(waiting[arrived], prompts[arrived], job.get("gaps", False))
                arrived += 1
            if not self.llm.llm_engine.has_unfinished_requests():
                time.sleep(waiting[arrived].arrival_s - now)
                continue
            self._step(progress, start_s)
            if self._clock() - news_s > NEWS_EVERY_S:
                news_s = self._clock()
                news({"tokens": sum(len(request_progress.tokens) for request_progress in progress.values())})
        makespan_s, cpu_s = self._clock() - start_s, time.process_time() - start_cpu_s
        self._settle(held_blocks)
        return self._result(progress, makespan_s, before) | {
            "offloaded_bytes": self._offloaded_bytes() - offloaded_before,
            "cpu_s": cpu_s,
        }

    def _prompts(self, job: dict[str, Any]) -> list[list[int]]:
        rng = random.Random(job["seed"])
        return [
            [rng.randrange(FIRST_TOKEN_ID, self._vocabulary) for _ in range(prompt_tokens)]
            for _, prompt_tokens, _ in job["requests"]
        ]

    def _add(self, asked: Asked, prompt: list[int], gaps: bool) -> None:
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=asked.output_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if gaps else None,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if asked.transfer_params is None else {"kv_transfer_params": asked.transfer_params},
        )
        engine = self.llm.llm_engine
        engine.add_request(asked.name, {"prompt_token_ids": prompt}, parameters, priority=asked.priority)

    def _step(self, progress: dict[str, Progress], start: float) -> None:
        outputs = self.llm.llm_engine.step()
        now = self._clock() - start
        for output in outputs:
            request, completion = progress[output.request_id], output.outputs[0]
            request.tokens += completion.token_ids
            request.times_s += [now] * len(completion.token_ids)
            if completion.logprobs:
                request.gaps += [_gap(entry) for entry in completion.logprobs]

    def _hold_back(self, device_blocks: int | None) -> list[Any]:
        """Hold blocks back until ``device_blocks`` are left, including the one that vLLM keeps; None holds none."""
        pool = self._core.scheduler.kv_cache_manager.block_pool
        if device_blocks is None:
            return []
        if not 1 < device_blocks <= pool.num_gpu_blocks:
            raise ValueError(f"device_blocks is {device_blocks}, the engine has {pool.num_gpu_blocks}")
        return list(pool.get_new_blocks(pool.num_gpu_blocks - device_blocks))

    def _settle(self, held_blocks: list[Any]) -> None:
        """Step until late reports are in, free the held blocks, and empty the prefix cache for the next run."""
        for _ in range(SETTLING_STEPS):
            # With asynchronous scheduling a step can still be in flight when no request is left.
            if not self._core.scheduler.has_requests() and not self._core.batch_queue:
                break
            self._core.step_fn()
        self._core.scheduler.kv_cache_manager.block_pool.free_blocks(held_blocks)
        self.llm.reset_prefix_cache()

    def _stats(self) -> dict[str, float]:
        """The plugin's counters; empty for other connectors, which have none."""
        stats = getattr(self._core.scheduler.connector, "stats", None)
        return {} if stats is None else stats()

    def _offloaded_bytes(self) -> int:
        """Bytes moved by vLLM's own offloading since the start; 0 where the engine keeps no statistics."""
        if not self.llm.llm_engine.log_stats:
            return 0
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name in OFFLOADED)

    def _result(self, progress: dict[str, Progress], makespan_s: float, before: dict[str, float]) -> dict[str, Any]:
        after = self._stats()
        return {
            "scheduler": [base.__name__ for base in type(self._core.scheduler).__mro__],
            "makespan_s": makespan_s,
            "arrival_s": [request.arrival_s for request in progress.values()],
            "times_s": [[round(time_s, 6) for time_s in request.times_s] for request in progress.values()],
            "tokens": [request.tokens for request in progress.values()],
            "gaps": [request.gaps for request in progress.values()],
            "steps": self._counted.steps,
            "preemptions": self._counted.preemptions,
            "scheduled_tokens": self._counted.scheduled_tokens,
            "recomputed_tokens": self._counted.recomputed_tokens,
            "stats": {name: value - before.get(name, 0) for name, value in after.items()},
        }


def _gap(entry: dict[int, Any]) -> float:
    """The best token's log-probability minus the second best's."""
    best = sorted((value.logprob for value in entry.values()), reverse=True)
    return float(best[0] - best[1])


def main() -> None:
    serving: Serving | None = None
    for job, answer in jobs():
        if job["do"] == "start":
            serving = Serving(job["engine"])
            answer("result", serving.about())
        else:
            assert serving is not None, "the first job starts the engine"
            answer("result", serving.serve(job, partial(answer, "news")))
    if serving is not None:
        serving.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries may have left threads that would keep the process alive
