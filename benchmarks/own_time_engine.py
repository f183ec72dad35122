"""An engine whose plugin is clocked, in a process of its own: ``python -m own_time_engine``, for `own_time.py`.

Jobs (see :mod:`kvpolicy_vllm.bench.engine_process`): ``{"do": "start", "engine": {...}, "clock": NAME}`` with the
arguments of :class:`vllm.LLM` and one of :data:`CLOCKS`, then any number of ``{"do": "serve", "prefix_tokens": ...,
"texts": ..., "seed": ..., "hints": ...}``, answered with ``{"steps": ..., "step_s": ..., "own_s": {method: seconds}}``.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterable
from time import perf_counter_ns, thread_time_ns
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvpolicy.request_marks import KEY
from kvpolicy_vllm.bench.analytics_load import texts
from kvpolicy_vllm.bench.engine_flags import start
from kvpolicy_vllm.bench.engine_process import jobs

PLUGIN = "kvpolicy_vllm."
CLOCKS: dict[str, Callable[[], int]] = {"wall": perf_counter_ns, "cpu": thread_time_ns}
OUTPUT_TOKENS = 2
FIRST_TOKEN_ID = 10
"""Lowest token id in prompts; lower ones include special tokens."""


class OwnTime:
    """Nanoseconds in the plugin's code, by the method that vLLM called; ``now_ns``: the clock.

    It reads the clock whenever a call passes from vLLM to the plugin, or back: what a plugin's method has vLLM do by
    ``super()`` is vLLM's. What else it calls is its own.
    """

    def __init__(self, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self.ns: Counter[str] = Counter()
        self._now_ns = now_ns
        self._since_ns = 0
        self._method = ""
        """Of the plugin, that runs; empty while vLLM does."""

    def on(self, function: Callable[..., Any], method: str) -> Callable[..., Any]:
        """``function`` with the clocks on; ``method``: what its time is counted as, empty for vLLM's own."""

        def timed(*arguments: Any, **options: Any) -> Any:
            outer = self._method
            self._pass_to(method and (outer or method))
            try:
                return function(*arguments, **options)
            finally:
                self._pass_to(outer)

        return timed

    def _pass_to(self, method: str) -> None:
        now_ns = self._now_ns()
        if self._method:
            self.ns[self._method] += now_ns - self._since_ns
        self._since_ns, self._method = now_ns, method

    def put_on(self, instance: Any, side: str) -> None:
        """Clock all methods of an object whose class is the plugin's. The methods of vLLM that they override are
        clocked in their classes, as vLLM's own."""
        classes = type(instance).__mro__
        ours = [one for one in classes if one.__module__.startswith(PLUGIN)]
        names = {name for one in ours for name in methods_of(one)}
        for one in classes:
            if one not in ours:
                for name in names & methods_of(one):
                    setattr(one, name, self.on(vars(one)[name], ""))
        for name in names:
            setattr(instance, name, self.on(getattr(instance, name), f"{side} {name}"))


def methods_of(one: type) -> set[str]:
    """Names of the plain methods that a class itself defines, without those that Python calls."""
    return {name for name, value in vars(one).items() if inspect.isfunction(value) and not name.startswith("__")}


class Serving:
    """An engine in this process, its plugin and its steps clocked."""

    def __init__(self, arguments: dict[str, Any], now_ns: Callable[[], int]) -> None:
        self._llm = start(arguments)
        self._now_ns = now_ns
        core: Any = self._llm.llm_engine.engine_core.engine_core
        self._own, self._steps, self._steps_ns = OwnTime(now_ns), 0, 0
        self._own.put_on(core.scheduler, "scheduler's")
        self._own.put_on(core.scheduler.connector, "connector's scheduler side:")
        self._own.put_on(get_kv_transfer_group(), "connector's worker side:")
        core.step_fn = self._counting(core.step_fn)

    def _counting(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def counted() -> Any:
            begun_ns = self._now_ns()
            result = step()
            self._steps_ns += self._now_ns() - begun_ns
            self._steps += 1
            return result

        return counted

    def serve(self, prefix_tokens: int, count: int, seed: int, hints: bool) -> dict[str, Any]:
        """So many texts behind one prefix, once that is computed."""
        vocabulary, rng = range(FIRST_TOKEN_ID, self._llm.model_config.get_vocab_size()), random.Random(seed)
        prefix = rng.choices(vocabulary, k=prefix_tokens)
        all_texts = texts(count, vocabulary, rng)
        self._answer([prefix])
        self._own.ns.clear()
        self._steps = self._steps_ns = 0
        self._answer(([*prefix, *text] for text in all_texts), {"pin": prefix_tokens, "once": True} if hints else None)
        own_s = {method: ns / 1e9 for method, ns in self._own.ns.items()}
        return {"steps": self._steps, "step_s": self._steps_ns / 1e9, "own_s": own_s}

    def _answer(self, prompts: Iterable[list[int]], hints: dict[str, Any] | None = None) -> None:
        how = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        if hints is not None:
            how.extra_args = {"kv_transfer_params": {KEY: hints}}
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)


def main() -> None:
    serving: Serving | None = None
    for job, answer in jobs():
        if job["do"] == "start":
            serving = Serving(job["engine"], CLOCKS[job["clock"]])
            answer("result", {})
        else:
            assert serving is not None
            answer("result", serving.serve(job["prefix_tokens"], job["texts"], job["seed"], job["hints"]))


if __name__ == "__main__":
    main()
