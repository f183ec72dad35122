"""Pictures in drawn prompts, for an encoder whose budget and cache run short. No model and no encoder take part."""

from __future__ import annotations

import random
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from tests.vllm.setups import Setup

ALBUM = 8
"""Different pictures: several requests bring the same one."""
MIN_TOKENS = 4


def drawn_features(setup: Setup, number: int, start: int, end: int) -> list[MultiModalFeatureSpec]:
    """The pictures of request ``number`` in its own part of the prompt, positions ``start`` to ``end``. Draws of their
    own, so that a setup without pictures has the same requests."""
    if not setup.picture_tokens:
        return []
    album = random.Random(f"album {setup.seed}")
    tokens = [album.randint(MIN_TOKENS, setup.picture_tokens) for _ in range(ALBUM)]
    rng = random.Random(f"pictures {setup.seed} {number}")
    features: list[MultiModalFeatureSpec] = []
    for _ in range(rng.choice([0, 1, 1, 3])):
        start += rng.choice([0, 0, rng.randint(0, 40)])
        picture = rng.randrange(ALBUM)
        if start + tokens[picture] >= end:
            break
        features.append(
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=f"picture-{picture}",
                mm_position=PlaceholderRange(offset=start, length=tokens[picture]),
            )
        )
        start += tokens[picture]
    return features


def limit_encoder(scheduler: Any, setup: Setup) -> None:
    """Give the scheduler of a model without pictures an encoder that takes the largest one, and little more."""
    if setup.picture_tokens:
        tokens = int(setup.picture_tokens * setup.encoder_room)
        scheduler.max_num_encoder_input_tokens = tokens
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=tokens)


def lacks_encoder_room(scheduler: Any, request: Request) -> bool:
    """Whether the picture of the position at which the request would begin cannot be encoded before anybody ends."""
    position, cache = _begins_at(scheduler, request), scheduler.encoder_cache_manager
    for feature in request.mm_features:
        first, tokens = feature.mm_position.offset, feature.mm_position.length
        if first <= position < first + tokens and feature.identifier not in cache.cached:
            return bool(tokens > scheduler.max_num_encoder_input_tokens or tokens > cache.num_freeable_slots)
    return False


def _begins_at(scheduler: Any, request: Request) -> int:
    """Position of the first token that would be computed; the end of the prompt where blocks are loaded first."""
    if request.num_computed_tokens:
        return int(request.num_computed_tokens)
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or request.skip_reading_prefix_cache:
        local = 0
    else:
        local = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1]
    loads = scheduler.kvpolicy.loadable_tokens(request, local)
    return int(request.num_tokens if loads else local)


class RefusedByEncoder:
    """Watches for whom others are displaced: nobody whose picture cannot be encoded anyway."""

    def __init__(self, scheduler: Any) -> None:
        self.found: list[str] = []
        self.let_in = 0
        """Requests with pictures that others were displaced for."""
        ordering = scheduler.ordering
        if ordering is None:
            return
        step_begins = ordering.step_begins

        def watched(*arguments: Any) -> Any:
            victims = step_begins(*arguments)
            for request in ordering._let_in if victims else ():
                self.let_in += bool(request.mm_features)
                if lacks_encoder_room(scheduler, request):
                    self.found.append(request.request_id)
            return victims

        ordering.step_begins = watched
