"""A sweep of request rates, or of numbers of clients, as a kind of load. Called by
:mod:`kvpolicy_vllm.bench.run_bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.bench_settings import RateLoad
from kvpolicy.latency import NO_SLO
from kvpolicy.workload import Request
from kvpolicy_vllm.bench.load_kinds import SEED_STEP, Cell, Served, Terms, following
from kvpolicy_vllm.bench.load_results import rate_figures
from kvpolicy_vllm.bench.rate_load import RateSender, prompt_of, requests_of
from kvpolicy_vllm.bench.rate_sweep import next_rate
from kvpolicy_vllm.bench.reservation import Memory


@dataclass(frozen=True, slots=True)
class RateKind:
    """Requests by rate, or by number of clients."""

    load: RateLoad
    name: str = "rate"
    rate: str = "requests_s"

    def next_cell(self, served: Served) -> Cell | None:
        if self.load.concurrency:
            return following([{"concurrency": clients} for clients in self.load.concurrency], served)
        if self.load.rate:
            return following([{"rate": rate} for rate in self.load.rate], served)
        by_rate = {cell["rate"]: {name: [run] for name, run in runs.items()} for cell, runs in served}
        rate = next_rate(self.load.begin_rate, self.load.explodes, by_rate)
        return None if rate is None else {"rate": rate}

    def _seed(self, round_: int) -> int:
        return self.load.load_seed + SEED_STEP * round_

    def _requests(self, cell: Cell, round_: int, terms: Terms) -> list[Request]:
        context = min(self.load.context_tokens or terms.context_tokens, terms.context_tokens)
        return requests_of(self.load, context, cell.get("rate"), self._seed(round_))

    async def run(self, cell: Cell, round_: int, terms: Terms) -> dict[str, Any]:
        memory = Memory(await terms.server.kv_tokens()) if terms.reserve else None
        sender = RateSender(
            terms.server, terms.vocabulary, self._seed(round_), terms.salt, terms.clock, terms.progress, memory,
            terms.reserve, terms.context_tokens, terms.hints,
        )  # fmt: skip
        run = await sender.run(self._requests(cell, round_, terms), cell.get("concurrency"))
        reserved = {} if memory is None else {"memory_tokens": memory.tokens}
        return rate_figures(run, self.load.slo or NO_SLO) | reserved

    def prompt(self, cell: Cell, round_: int, terms: Terms, rows: Sequence[Mapping[str, Any]], at: Cell) -> list[int]:
        number = int(at["conversation"])
        request = self._requests(cell, round_, terms)[number]
        answer = next(row["token_ids"] for row in rows if row["conversation"] == at["conversation"])
        return [*prompt_of(request, number, terms.vocabulary, self._seed(round_)), *answer[: at["token"]]]
