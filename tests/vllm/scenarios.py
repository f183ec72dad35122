"""What a child process does with an engine. Each takes a job and returns something JSON can hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvpolicy import load_order, load_policy
from kvpolicy_vllm.plugin.connector_list import own_connector
from kvpolicy_vllm.plugin.host_copies import Copy
from tests.vllm.asking import adapter_of, parameters_of, prompt_of

Hook = Callable[["Run", int], None]


def plugin_of(job: dict[str, Any]) -> dict[str, Any]:
    """The plugin's engine arguments; ``object``, ``order_object``: what leads to the policy and the order that are
    given themselves, not their names."""
    plugin = dict(job.get("plugin") or {})
    objects: dict[str, Any] = {"policy": load_policy(job["object"])} if "object" in job else {}
    objects |= {"order": load_order(job["order_object"])} if "order_object" in job else {}
    if objects:
        transfer = plugin["kv_transfer_config"]
        extra = transfer["kv_connector_extra_config"] | objects
        plugin["kv_transfer_config"] = transfer | {"kv_connector_extra_config": extra}
    return plugin


class Run:
    """An in-process engine and what has come out of it so far."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.llm = LLM(
            model=job["model"],
            enforce_eager=True,
            disable_log_stats=False,
            **{"dtype": "float32", "skip_tokenizer_init": True} | job["engine"],
            **plugin_of(job),
        )
        self.engine = self.llm.llm_engine
        self.tokens: dict[str, list[int]] = {}
        self.gaps: dict[str, list[float]] = {}
        self.finish: dict[str, str] = {}
        self._many: dict[str, bool] = {}
        if plugin_of(job):
            # Elsewhere each start draws differently: here the same job does the same at every run.
            self.scheduler.kvpolicy.decider._rng = random.Random(job.get("seed", 0))

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def copier(self) -> Any:
        return own_connector(get_kv_transfer_group()).copier

    def add(self, name: str, request: dict[str, Any], logprobs: int | None = None) -> None:
        self._many[name] = request.get("n", 1) > 1
        self.engine.add_request(
            name,
            prompt_of(request),
            parameters_of(request, 2 if self.job.get("gaps") else logprobs),
            lora_request=adapter_of(request),
            priority=request.get("priority", 0),
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
        prompts = getattr(getattr(self.scheduler, "kvpolicy", None), "prompts", None)
        while prompts is not None and prompts.files_under_way:  # a disk may be slow
            self.engine.engine_core.engine_core.step()
            step += 1
            assert step < 200_000, "what became of files is not reported"

    def _take(self, output: Any) -> None:
        """Keep finished completions. Outputs are cumulative, and completions of one request finish apart."""
        for completion in output.outputs:
            if completion.finish_reason is None:
                continue
            name = f"{output.request_id}/{completion.index}" if self._many[output.request_id] else output.request_id
            self.tokens[name] = list(completion.token_ids)
            self.finish[name] = str(completion.finish_reason)
            if completion.logprobs:
                self.gaps[name] = [_gap(entry) for entry in completion.logprobs]

    def result(self) -> dict[str, Any]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "tokens": self.tokens,
            "gaps": self.gaps,
            "finish": self.finish,
            "free_blocks": pool.get_num_free_blocks(),
            "device_blocks": pool.num_gpu_blocks,
            "stats": self.scheduler.kvpolicy.stats() if hasattr(self.scheduler, "kvpolicy") else {},
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


def several(job: dict[str, Any]) -> dict[str, Any]:
    """Workloads one after the other in one engine; the references."""
    run = Run(job)
    values: dict[str, Any] = {}
    for name, workload in job["workloads"].items():
        run.tokens, run.gaps, run.finish = {}, {}, {}
        for i, request in enumerate(workload):
            run.add(f"r{i}", request)
        run.serve()
        values[name] = {"tokens": run.tokens, "gaps": run.gaps}
    preempted = [m.value for m in run.llm.get_metrics() if m.name == "vllm:num_preemptions"]
    return values | {"preempted": sum(preempted)}


def digests(job: dict[str, Any]) -> dict[str, Any]:
    """Like ``plain``, with what the digest-keeping copier saw."""
    run = Run(job)
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)
    run.serve()
    return run.result() | {"saved": run.copier.saved, "restored": run.copier.restored}


def victims(job: dict[str, Any]) -> dict[str, Any]:
    """Like ``plain``, with every preemption as it happens: the victim, and who runs on, in their order."""
    run = Run(job)
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)
    seen: list[tuple[str, list[str]]] = []
    preempt = run.scheduler._preempt_request

    def watched(request: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((_name(request.request_id), [_name(other.request_id) for other in run.scheduler.running]))
        preempt(request, *args, **kwargs)

    run.scheduler._preempt_request = watched
    run.serve()
    return run.result() | {"victims": seen}


def aborts(job: dict[str, Any]) -> dict[str, Any]:
    """Abort one request in each stage a copy can be in, as soon as there is one; the others go on."""
    run = Run(job)
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)
    aborted: dict[str, str] = {}

    def hook(run: Run, step: int) -> None:
        controller = run.scheduler.kvpolicy
        for stage in ("saved", "loading"):
            for request_id in list(run.scheduler.requests):
                copy = controller.copies.of(request_id)
                if stage not in aborted and copy is not None and _stage(copy) == stage:
                    aborted[stage] = request_id
                    run.engine.abort_request([_external(run, request_id)])
        if step in (20, 21, 22) and run.scheduler.running:
            run.scheduler.preempt_at_next_step(run.scheduler.running[0].request_id)
        if step == 12:
            aborted["running"] = run.scheduler.running[0].request_id
            run.engine.abort_request([_external(run, aborted["running"])])

    run.serve(hook)
    return run.result() | {"aborted": {stage: _name(request_id) for stage, request_id in aborted.items()}}


def _stage(copy: Copy) -> str:
    if copy.loading:
        return "loading"
    return "saved" if copy.saved else "kept"


def _name(request_id: str) -> str:
    """The test's name of a request; vLLM may have appended something to it."""
    return request_id.split("-")[0]


def _external(run: Run, request_id: str) -> str:
    """What ``abort_request`` takes: the name the request was added under."""
    return _name(request_id)


def reset(job: dict[str, Any]) -> dict[str, Any]:
    """Change the weights and reset the cache while requests run, are saved and are being loaded; then check every
    continuation against the changed model alone."""
    run = Run(job)
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)
    before: dict[str, list[int]] = {}
    seen: dict[str, int] = {}
    raised: list[str] = []

    def hook(run: Run, step: int) -> None:
        stages = [_stage(copy) for copy in run.scheduler.kvpolicy.copies._of_request.values()]
        if before:
            return
        if step >= 20 and len(run.scheduler.running) > 1:
            run.scheduler.preempt_at_next_step(run.scheduler.running[0].request_id)
        if not run.scheduler.running or not {"saved", job["while"]} <= set(stages):
            return
        for stage in stages:
            seen[stage] = seen.get(stage, 0) + 1
        seen["running"] = len(run.scheduler.running)
        for request in run.scheduler.requests.values():
            before[_name(request.request_id)] = list(request.output_token_ids)
        _change_weights(run)
        try:
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:
            raised.append(str(error))

    run.serve(hook)
    result = run.result()
    checks = _continuations(run, job["requests"], before)
    return result | {"before": before, "seen": seen, "raised": raised, "checks": checks}


def _change_weights(run: Run) -> None:
    """Give every token another token's embedding: all keys and values change."""
    worker = run.engine.engine_core.engine_core.model_executor.driver_worker.worker
    weight = worker.model_runner.model.model.embed_tokens.weight.data
    weight.copy_(weight.roll(1, dims=0).clone())


def _continuations(run: Run, requests: list[dict[str, Any]], before: dict[str, list[int]]) -> dict[str, Any]:
    """For each request, by the changed model, as many at a time as have memory enough: the tokens after those it had,
    and how close they were."""
    run.job["gaps"] = True
    run.tokens, run.gaps = {}, {}
    unfinished = [name for name, had in before.items() if len(had) < requests[int(name[1:])]["max_tokens"]]
    blocks = [-(-_tokens(requests[int(name[1:])]) // run.job["engine"]["block_size"]) for name in unfinished]
    at_once = (run.result()["device_blocks"] - 1) // max(blocks)
    for first in range(0, len(unfinished), at_once):
        for name in unfinished[first : first + at_once]:
            request, had = requests[int(name[1:])], before[name]
            run.add(name, {"prompt": request["prompt"] + had, "max_tokens": request["max_tokens"] - len(had)})
        run.serve()
    return {"tokens": run.tokens, "gaps": run.gaps}


def _tokens(request: dict[str, Any]) -> int:
    return len(request["prompt"]) + int(request["max_tokens"])


def losing_trace(job: dict[str, Any]) -> dict[str, Any]:
    """Remove the trace folder while it is written to."""
    import shutil

    run = Run(job)
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)

    def hook(run: Run, step: int) -> None:
        if step == 20:
            run.scheduler.kvpolicy.recorder.flush()
            shutil.rmtree(job["remove"])
        elif step > 20 and step % 50 == 0:
            run.scheduler.kvpolicy.recorder.flush()

    run.serve(hook)
    run.scheduler.kvpolicy.recorder.flush()
    run.scheduler.kvpolicy.observers.tell("idle")
    return run.result()


def harried(job: dict[str, Any]) -> dict[str, Any]:
    """Like ``plain``, with somebody forced out every third step, or every so many as ``every`` says, on top of what
    memory does by itself; shut down as a server would, so that the trace is whole."""
    run = Run(job)
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)

    def hook(run: Run, step: int) -> None:
        running = run.scheduler.running
        if step % job.get("every", 3) == 0 and running:
            run.scheduler.preempt_at_next_step(running[step % len(running)].request_id)

    run.serve(hook)
    result = run.result()
    if job.get("host_pool"):
        pool = run.copier.host_segments
        result |= {"copier": type(run.copier).__name__, "host_pool_bytes": sum(part.nbytes for part in pool)}
    run.scheduler.connector.shutdown()
    return result


def own_process(job: dict[str, Any]) -> dict[str, Any]:
    """Through ``LLM.generate``, with the engine core elsewhere: all that is known comes by way of metrics."""
    llm = LLM(
        model=job["model"], dtype="float32", skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=False,
        **job["engine"], **plugin_of(job),
    )  # fmt: skip
    parameters = [
        SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        for request in job["requests"]
    ]
    inputs = [{"prompt_token_ids": request["prompt"]} for request in job["requests"]]
    outputs = llm.generate(inputs, parameters, use_tqdm=False)
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:kvpolicy_"):
            name = metric.name.removeprefix("vllm:kvpolicy_")
            # A histogram has a count, and no value.
            values[name] = values.get(name, 0) + getattr(metric, "value", 0)
    return {"tokens": {f"r{i}": list(out.outputs[0].token_ids) for i, out in enumerate(outputs)}, "metrics": values}
