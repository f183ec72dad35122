"""What vLLM's scheduler asks of memory, places and budget before it admits a request, without asking it to.

The rules differ between versions of vLLM, which are named where they do. Drafted tokens and pipeline stages take no
part: the plugin refuses drafted tokens beside an order of service, which alone asks here, and does not serve pipeline
stages at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvpolicy.order import Space
from kvpolicy_vllm.plugin.versions import engine_version


class Admission:
    """The arithmetic of one scheduler's admissions, for one table of full attention. Changes nothing.

    :class:`kvpolicy_vllm.plugin.table_admission.TableAdmission` is that of several block tables.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._size = int(scheduler.block_size)
        config = scheduler.scheduler_config
        self._reserves_whole = bool(scheduler.scheduler_reserve_full_isl)
        """Whether the blocks of the whole sequence must be free, not only those of its first chunk."""
        self._chunked = bool(config.enable_chunked_prefill)
        self._long_prefill = int(config.long_prefill_token_threshold)
        self.min_chunk_tokens = 1
        """The shortest chunk of a prompt that vLLM computes, its last one apart."""
        self._streams_hold_places = engine_version(allow_untested=True) >= (0, 25)
        """Whether sessions that wait for streaming input count as running. In vLLM 0.24 they do not."""

    # ---- who waits ----

    def lacks_encoder_room(self, request: Any) -> bool:
        """Whether the request's next token belongs to an input that the encoder cannot take now."""
        if not request.has_encoder_inputs:
            return False
        cache = self._scheduler.encoder_cache_manager
        room = min(self._scheduler.max_num_encoder_input_tokens, cache.num_freeable_slots)
        too_large = [
            feature.mm_position
            for number, feature in enumerate(request.mm_features)
            if feature.identifier not in cache.cached and request.get_num_encoder_embeds(number) > room
        ]
        if not too_large:
            return False
        position = self._begins_at(request)
        return any(place.offset <= position < place.offset + place.length for place in too_large)

    def _begins_at(self, request: Any) -> int:
        """Position of the first token that would be computed at its admission, past the prefix cache; the request's end
        where blocks would be loaded first, as nothing is computed then."""
        if request.num_computed_tokens > 0:
            return int(request.num_computed_tokens)
        local_tokens = self._found(request)[1]
        loads = self._scheduler.kvpolicy.loadable_tokens(request, local_tokens)
        return int(request.num_tokens if loads else local_tokens)

    def _found(self, request: Any) -> tuple[Sequence[Sequence[Any]], int]:
        """Blocks of the request in the prefix cache, by block table, and how many tokens they are. Without the
        statistics that vLLM counts when it asks itself."""
        manager = self._scheduler.kv_cache_manager
        if not manager.enable_caching or request.skip_reading_prefix_cache:
            return ((),), 0
        found = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return found[0], int(found[1])

    # ---- blocks ----

    def step_begins(self) -> None:
        """A step is about to be scheduled, and nobody is to come in yet."""

    def comes_in(self) -> None:
        """The request whose need was asked for last is to come in."""

    def local_hits(self, request: Any) -> tuple[Sequence[Any], int]:
        """Blocks of a waiting request that are in the prefix cache, as :meth:`need_blocks` takes them, and how many
        tokens they are."""
        found, tokens = self._found(request)
        return found[0], tokens

    def ids_of(self, hits: Sequence[Any]) -> frozenset[int]:
        """Numbers of the blocks that :meth:`local_hits` found."""
        return frozenset(block.block_id for block in hits)

    def held_blocks(self, request: Any) -> int:
        """Blocks that the request holds, shared ones included."""
        return len(self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0])

    def freed_blocks(self, request: Any, kept_ids: frozenset[int]) -> int:
        """Blocks that the request alone holds, without those of ``kept_ids``."""
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        return sum(block.ref_cnt == 1 and block.block_id not in kept_ids for block in blocks)

    def need_blocks(self, request: Any, hits: Sequence[Any], local_tokens: int, load_tokens: int) -> int:
        """Blocks that must be free for a request that holds none. ``hits``: blocks of it in the prefix cache,
        ``local_tokens`` tokens. ``load_tokens``: to be loaded first."""
        idle = sum(block.ref_cnt == 0 for block in hits)
        missing = self._missing(request, local_tokens, len(hits), chunk=not load_tokens)
        if load_tokens:
            loaded = max(0, self._blocks(local_tokens + load_tokens) - len(hits))
            missing = max(missing, loaded + self._scheduler._inflight_prefill_reserved_blocks())
        return int(missing + idle + self.watermark_blocks())

    def need_blocks_besides(self, request: Any, held: int) -> int:
        """Blocks that must be free for a request that was loaded and holds ``held``."""
        return self._missing(request, request.num_computed_tokens, held, chunk=True) + self.watermark_blocks()

    def _missing(self, request: Any, computed: int, held: int, chunk: bool) -> int:
        whole = self._blocks(min(request.num_tokens, self._scheduler.max_model_len)) if self._reserves_whole else 0
        first = self._blocks(self._first_chunk_ends(request, computed)) if chunk else 0
        return max(0, max(whole, first) - held)

    def _first_chunk_ends(self, request: Any, computed: int) -> int:
        """Position that the request's first chunk needs blocks up to."""
        budget = self._scheduler.max_num_scheduled_tokens
        return int(computed + min(request.num_tokens - computed, self._longest_chunk(), budget))

    def watermark_blocks(self) -> int:
        """Blocks that must be free beside those that a request takes: none where nobody runs."""
        scheduler = self._scheduler
        return int(getattr(scheduler.kv_cache_manager, "watermark_blocks", 0)) if scheduler.running else 0

    def _longest_chunk(self) -> float:
        """Most tokens of one request in a step, the budget apart."""
        if not self._long_prefill:
            return float("inf")
        scheduler = self._scheduler
        if not hasattr(scheduler, "adaptive_long_prefill_threshold"):  # up to vLLM 0.30
            return self._long_prefill
        requests = sum(scheduler.get_request_counts())
        if requests < 2:
            return float("inf")
        share = scheduler.scheduler_config.max_num_batched_tokens // requests
        return max(self._long_prefill, share) if scheduler.adaptive_long_prefill_threshold else self._long_prefill

    # ---- who runs ----

    def is_ending(self, request: Any) -> bool:
        """Whether a running request's last token is in flight, so that it is not scheduled again."""
        flying = request.num_output_placeholders
        ends = request.num_prompt_tokens + request.max_tokens
        return bool(flying and request.num_computed_tokens + 2 - flying >= ends)

    def defers_prefills(self, throttled: bool) -> bool:
        """Whether a step computes no prompts, so that only loads begin in it. ``throttled``: as vLLM is told, where
        several engines are to compute prompts at the same time."""
        scheduler = self._scheduler
        if scheduler.prefill_capacity_bound or not (throttled or self._keeps_interval()):
            return False
        return any(not request.is_prefill_chunk for request in scheduler.running)

    def _keeps_interval(self) -> bool:
        """Whether the last prompts were computed too few steps ago; from vLLM 0.33 on."""
        scheduler = self._scheduler
        interval = getattr(scheduler, "local_prefill_interval", 1)
        return interval > 1 and scheduler.num_executed_steps + 1 - scheduler.last_prefill_step < interval

    def space(self) -> Space:
        """What the next step has left once the running requests have what they take in it."""
        free, budget = self._left_by(self._scheduler.running)
        return Space(free, self._places(), budget, self._chunked)

    def fits(self, running: Sequence[Any]) -> bool:
        """Whether blocks are free for what the running requests, in this order, take in the next step."""
        return self._has_plenty(len(running)) or self._left_by(running)[0] >= 0

    def _has_plenty(self, running: int) -> bool:
        """Whether so many requests find blocks whatever they are: each fills up at most one more than its tokens do."""
        scheduler = self._scheduler
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return bool(free >= running + self._blocks(scheduler.max_num_scheduled_tokens))

    def _left_by(self, running: Sequence[Any]) -> tuple[int, int]:
        """Blocks that stay free, and tokens of the budget that are left, once these have what they take."""
        free = lowest = int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        budget = int(self._scheduler.max_num_scheduled_tokens)
        for request, computed, new in self._running_chunks(running):
            budget -= new
            if growth := self._growth(request, computed, new):
                free -= growth
                lowest = min(lowest, free)
        # Where they run out meanwhile, vLLM preempts a request and admits nobody, whatever others give back later.
        return lowest if lowest < 0 else free, budget

    def _running_chunks(self, running: Sequence[Any]) -> Iterator[tuple[Any, int, int]]:
        """Those of the running requests that the next step computes, their computed tokens, and how many it adds."""
        scheduler, longest = self._scheduler, self._longest_chunk()
        budget, last = scheduler.max_num_scheduled_tokens, scheduler.max_model_len - 1
        for request in running:
            if budget <= 0:
                break
            flying = request.num_output_placeholders
            if flying and self.is_ending(request):
                continue
            computed = request.num_computed_tokens
            new = request.num_tokens + flying - computed
            if new > 1:  # which it is not for those that decode, nearly all
                new = int(min(new, longest, budget))
            new = self._cut(request, min(new, last - computed))
            if new <= 0:
                continue
            budget -= new
            yield request, computed, new

    def _cut(self, request: Any, new: int) -> int:
        """Of ``new`` tokens of a running request those that one step computes."""
        return new

    def _growth(self, request: Any, computed: int, new: int) -> int:
        """Blocks that a running request takes in the step that computes ``new`` tokens of it."""
        if new == 1 and computed % self._size:  # within its last block, as nearly all that decode
            return 0
        return max(0, self._blocks(computed + new) - self.held_blocks(request))

    def _places(self) -> int:
        scheduler = self._scheduler
        limit = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        streams = scheduler.num_waiting_for_streaming_input if self._streams_hold_places else 0
        return int(limit - len(scheduler.running) - streams - scheduler.loaded_requests.places_held())

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)
