"""What vLLM asks of memory before it admits a request, where a request has several block tables or windows or states.

Blocks of all groups come from one pool, so they are counted together. How many a group takes is asked of vLLM's own
manager of that group, in the way that vLLM 0.32 and 0.33 ask it: windows are bounded, states take one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvpolicy_vllm.plugin.admission import Admission

Hits = Sequence[Sequence[Any]]
"""Blocks of a request in the prefix cache, by group, with null blocks for those that it needs no more."""


class TableAdmission(Admission):
    """The arithmetic of one scheduler's admissions, for several block tables. Changes nothing that vLLM goes by.

    Where states are cached, vLLM cuts chunks at the ends of blocks: a request that finds less of the step's budget than
    it needs for that does not come in. Nor does one that finds a state which the same step is to compute. That is not
    known here: others are then displaced for it in vain, which is counted.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._coordinator = scheduler.kv_cache_manager.coordinator
        self._managers = self._coordinator.single_type_managers
        self._nothing: Hits = tuple(() for _ in self._managers)
        self._cuts = bool(getattr(scheduler, "need_mamba_block_aligned_split", False))
        """Whether chunks of prompts end at the ends of blocks."""
        if self._cuts:
            self.min_chunk_tokens = self._size
        self._budget: int | None = None
        """Tokens that the next step has left for waiting requests, once it was asked for."""
        self._chunk_tokens = 0
        """Of these, what the request takes whose need was asked for last."""
        self._given_back: frozenset[int] | None = None
        """Blocks that the running requests give back in the next step, once it was asked for."""

    def step_begins(self) -> None:
        self._budget, self._chunk_tokens, self._given_back = None, 0, None
        # vLLM forgets them itself as its step begins: states that the step before has computed can be used now.
        self._coordinator.new_step_starts()

    def comes_in(self) -> None:
        if self._cuts:
            self._budget, self._chunk_tokens = self._left_tokens() - self._chunk_tokens, 0

    # ---- blocks ----

    def _has_plenty(self, running: int) -> bool:
        """Not known without asking every group."""
        return False

    def local_hits(self, request: Any) -> tuple[Hits, int]:
        found, tokens = self._found(request)
        return (found, tokens) if tokens else (self._nothing, 0)

    def ids_of(self, hits: Hits) -> frozenset[int]:
        return frozenset(block.block_id for table in hits for block in table if not block.is_null)

    def held_blocks(self, request: Any) -> int:
        return sum(not block.is_null for table in self._tables(request) for block in table)

    def freed_blocks(self, request: Any, kept_ids: frozenset[int]) -> int:
        """Without those that it would give back in this step, which :meth:`space` has counted."""
        counted = kept_ids | self._given_back_ids()
        return sum(
            block.ref_cnt == 1 and not block.is_null and block.block_id not in counted
            for table in self._tables(request)
            for block in table
        )

    def need_blocks(self, request: Any, hits: Hits, local_tokens: int, load_tokens: int) -> int:
        computed = local_tokens + load_tokens
        missing = self._whole(request, hits, computed, local_tokens)
        if load_tokens:
            first = self._taken(request, computed, hits, computed, local_tokens, capped=False)
            first += self._scheduler._inflight_prefill_reserved_blocks()
        else:
            first = self._first_chunk(request, hits, computed)
        return int(max(missing, first) + self._idle_soon(hits) + self.watermark_blocks())

    def _idle_soon(self, hits: Hits) -> int:
        """Of a request's blocks in the prefix cache those that others give back in this step: taking them over takes
        them from the free ones."""
        ids = self.ids_of(hits)
        return len(ids & self._given_back_ids()) if ids else 0

    def need_blocks_besides(self, request: Any, held: int) -> int:
        """As of one table; vLLM itself knows what the request holds."""
        computed = request.num_computed_tokens
        missing = self._whole(request, self._nothing, computed, computed)
        return max(missing, self._first_chunk(request, self._nothing, computed)) + self.watermark_blocks()

    def _whole(self, request: Any, hits: Hits, computed: int, local_tokens: int) -> int:
        if not self._reserves_whole:
            return 0
        tokens = min(request.num_tokens, self._scheduler.max_model_len)
        return self._taken(request, tokens, hits, computed, local_tokens, capped=True)

    def _first_chunk(self, request: Any, hits: Hits, computed: int) -> int:
        """Blocks for a request's first chunk; more than there are where the step's budget holds no such chunk."""
        ends = self._first_chunk_ends(request, computed)
        if ends <= computed:
            return int(self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
        return self._taken(request, ends, hits, computed, computed, capped=False)

    def _first_chunk_ends(self, request: Any, computed: int) -> int:
        if not self._cuts:
            return super()._first_chunk_ends(request, computed)
        new = int(min(request.num_tokens - computed, self._longest_chunk(), self._left_tokens()))
        self._chunk_tokens = max(0, self._cut(request, new, computed - request.num_computed_tokens))
        return computed + self._chunk_tokens

    def _taken(
        self, request: Any, tokens: int, hits: Hits, computed: int, local_tokens: int, *, capped: bool
    ) -> int:  # fmt: skip
        """Blocks that vLLM takes from the pool so that the request has those for its first ``tokens`` tokens.

        ``computed``: tokens that are computed then, ``local_tokens`` of them on the device. ``capped``: of a window no
        more than it ever has at a time.
        """
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        return sum(
            manager.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=tokens,
                new_computed_blocks=found,
                total_computed_tokens=computed,
                num_local_computed_tokens=local_tokens,
                num_tokens_main_model=tokens,
                # Without it a group of states would note down what it is about to take.
                apply_admission_cap=capped or hasattr(manager, "mamba_cache_mode"),
                prefill_end=prefill_end if self._coordinator.retention_interval == 0 else 0,
            )
            for manager, found in zip(self._managers, hits, strict=True)
        )

    # ---- who runs ----

    def _left_tokens(self) -> int:
        if self._budget is None:
            taken = sum(new for _, _, new in self._running_chunks(self._scheduler.running))
            self._budget = int(self._scheduler.max_num_scheduled_tokens) - taken
        return self._budget

    def _cut(self, request: Any, new: int, found_tokens: int = 0) -> int:
        """``found_tokens``: those of a waiting request that are in the prefix cache or loaded."""
        if not self._cuts or new <= 0:
            return new
        return int(self._scheduler._mamba_block_aligned_split(request, new, found_tokens))

    def _growth(self, request: Any, computed: int, new: int) -> int:
        """Less than none where the request gives back more than it takes: what a window has left behind, and a state
        that another one follows."""
        taken = self._taken(request, computed + new, self._nothing, computed, computed, capped=False)
        return taken - sum(1 for _ in self._left_behind(request))

    def _given_back_ids(self) -> frozenset[int]:
        if self._given_back is None:
            running = (request for request, _, _ in self._running_chunks(self._scheduler.running))
            self._given_back = frozenset(block.block_id for one in running for block in self._left_behind(one))
        return self._given_back

    def _left_behind(self, request: Any) -> Iterator[Any]:
        """Blocks that vLLM frees before it looks for others for a running request."""
        processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        for manager, table in zip(self._managers, self._tables(request), strict=True):
            skipped = max(0, manager.get_num_skipped_tokens(processed)) // manager.block_size
            retired = getattr(manager, "_num_retired_blocks", None)
            first = 0 if retired is None else retired.get(request.request_id, 0)
            for index in range(min(skipped, len(table)) - 1, first - 1, -1):
                if table[index].is_null and retired is None:
                    break  # so are all before it
                if not table[index].is_null and table[index].ref_cnt == 1:
                    yield table[index]

    def _tables(self, request: Any) -> Hits:
        tables: Hits = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return tables
