"""One request alone in an engine, forced out at given lengths, with the device's whole KV cache overwritten before it
comes back. What it says is then compared with what it says undisturbed, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.sampling_params import BeamSearchParams

from tests.vllm import scenarios

RUBBISH, RUBBISH_BYTE = 0.37, 93
TOP = 3
MAX_STEPS = 5_000


def interrupted(job: dict[str, Any]) -> dict[str, Any]:
    """``job["cases"]``: by name, ``tokens`` (the lengths at which the request is forced out, rising), ``kind`` (what is
    done with it), ``failing`` (whether its loads fail), and ``request``, where it is not ``job["request"]``. In the
    result, ``chunks`` is whether vLLM computes prompts in chunks here: those of MLA, on a CPU, only with AMX."""
    run = scenarios.Run(job)
    groups = run.scheduler.kv_cache_config.kv_cache_groups
    found = {
        name: _case(run, name, case.get("request", job.get("request")), case) for name, case in job["cases"].items()
    }
    beams = _beams(run, job["beams"]) if "beams" in job else {}
    kinds = sorted(type(group.kv_cache_spec).__name__ for group in groups)
    chunks = bool(run.scheduler.scheduler_config.enable_chunked_prefill)
    return {"cases": found, "groups": kinds, "beams": beams, "chunks": chunks} | run.result()


def _case(run: scenarios.Run, name: str, request: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """What is said, in numbers; with ``n`` answers, one after the other."""
    scheduler, left, said = run.scheduler, list(case["tokens"]), []
    scheduler.kvpolicy.pin(case["kind"])
    before = dict(scheduler.kvpolicy.stats())
    _overwrite(run)
    run.add(name, request, logprobs=TOP)
    out_at: list[int] = []
    with _loads(run, case.get("failing", False)), drafts_of(scheduler) as drafts:
        while run.engine.has_unfinished_requests():
            live = list(scheduler.requests.values())
            if left and all(one in scheduler.running and one.num_computed_tokens >= left[0] for one in live):
                left.pop(0)
                out_at += [one.num_computed_tokens for one in live]
                for one in live:
                    scheduler.preempt_at_next_step(one.request_id)
                said += run.engine.step()
                _overwrite(run)
            said += run.engine.step()
            drafts.steps += 1
            assert drafts.steps < MAX_STEPS, f"{name}: no end"
    for _ in range(3):
        run.engine.engine_core.engine_core.step()
    after = scheduler.kvpolicy.stats()
    return {
        "out_at": out_at,
        "steps": drafts.steps,
        "drafts": drafts.found,
        "stats": {key: value - before.get(key, 0) for key, value in after.items()},
    } | _answers(said)


def _answers(said: list[Any]) -> dict[str, Any]:
    answers = {one.index: one for output in said for one in output.outputs if one.finish_reason is not None}
    completions = [answers[index] for index in sorted(answers)]
    of_prompts = [output.prompt_logprobs for output in said if output.prompt_logprobs]
    return {
        "tokens": [token for one in completions for token in one.token_ids],
        "logprobs": [_best(entry) for one in completions for entry in one.logprobs],
        "of_the_prompt": [_best(entry) for entry in of_prompts[-1] if entry] if of_prompts else [],
    }


def _best(entry: dict[int, Any]) -> list[tuple[int, float]]:
    return sorted((token, one.logprob) for token, one in entry.items())


class Drafts:
    """The tokens drafted after each length of the request, and how many steps it took."""

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = {}
        self.steps = 0


@contextmanager
def drafts_of(scheduler: Any) -> Iterator[Drafts]:
    """Keep what is drafted meanwhile."""
    drafts, update = Drafts(), scheduler.update_draft_token_ids

    def watched(drafted: Any) -> None:
        update(drafted)
        for request in scheduler.requests.values():
            if request.spec_token_ids:
                drafts.found[str(request.num_tokens)] = list(request.spec_token_ids)

    scheduler.update_draft_token_ids = watched
    yield drafts
    del scheduler.update_draft_token_ids


@contextmanager
def _loads(run: scenarios.Run, failing: bool) -> Iterator[None]:
    """Have every load fail meanwhile, where they should; of an engine whose worker is in this process."""
    if failing:
        copier, copy_in = run.copier, run.copier.copy_in
        copier.copy_in = _fail
    yield
    if failing:
        copier.copy_in = copy_in


def _fail(job: Any) -> None:
    raise RuntimeError("this load was made to fail")


def _overwrite(run: scenarios.Run) -> None:
    """No request holds a block: forget what the prefix cache knows, and fill the devices' KV with a constant."""
    assert run.scheduler.kv_cache_manager.reset_prefix_cache()
    run.engine.engine_core.engine_core.model_executor.collective_rpc(fill)


def fill(worker: Any) -> None:
    """Runs in every worker."""
    tensors = worker.model_runner.kv_caches
    for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values():
        rubbish = RUBBISH if tensor.dtype.is_floating_point else RUBBISH_BYTE
        torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).fill_(rubbish)


def _beams(run: scenarios.Run, asked: dict[str, Any]) -> dict[str, Any]:
    """Beam search, undisturbed and with the requests of all beams forced out in their prefills."""
    found: dict[str, Any] = {}
    step, scheduler = run.engine.step, run.scheduler

    def disturbed() -> Any:
        for request in scheduler.running:
            if request.num_preemptions < asked["times"] and 0 < request.num_computed_tokens < request.num_tokens - 1:
                scheduler.preempt_at_next_step(request.request_id)
        return step()

    for kind in ("undisturbed", "swap"):
        before = dict(scheduler.connector.stats())
        scheduler.kvpolicy.pin("swap")
        run.engine.step = step if kind == "undisturbed" else disturbed
        (result,) = run.llm.beam_search(
            [{"prompt_token_ids": asked["prompt"]}],
            BeamSearchParams(beam_width=asked["width"], max_tokens=asked["max_tokens"], ignore_eos=True),
        )
        after = scheduler.connector.stats()
        found[kind] = {
            "beams": [[beam.tokens, beam.cum_logprob] for beam in result.sequences],
            "stats": {key: value - before.get(key, 0) for key, value in after.items()},
        }
    run.engine.step = step
    return found
