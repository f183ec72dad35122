"""Assembles the scheduler side of an engine core from vLLM's configuration and the plugin's settings."""

from __future__ import annotations

import hashlib
import logging
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvpolicy.caching import ByCost, Hinted
from kvpolicy.cost import CostModel
from kvpolicy.errors import InputError
from kvpolicy.hardware import EngineSpec
from kvpolicy.order import Priority
from kvpolicy.order.by_class import unlisted_classes
from kvpolicy.policy import Decider, Policy
from kvpolicy.request_marks import Classes, HintLimits, granting
from kvpolicy.settings import GIB
from kvpolicy.trace.upkeep import DAY_S, Retention, Upkeep
from kvpolicy_vllm.plugin.controller import Controller
from kvpolicy_vllm.plugin.engine_config import engine_spec, header_of, model_loader, why_not_priced
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.kv_layout import block_tables, page_bytes
from kvpolicy_vllm.plugin.learner import remember
from kvpolicy_vllm.plugin.operator_log import PreemptionLog, start_line
from kvpolicy_vllm.plugin.order_limits import bounds_in_vain
from kvpolicy_vllm.plugin.prompt_cache import BlockPrices, caching_policy
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.shadow import ShadowCounter
from kvpolicy_vllm.plugin.spans import PreemptionSpans, span_writer
from kvpolicy_vllm.plugin.tested_setups import untested_setup
from kvpolicy_vllm.plugin.trace_writer import TraceWriter, pseudonym
from kvpolicy_vllm.plugin.versions import UnsupportedEngine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(f"vllm.{__name__}")

ONLY_TABLE: bytes = make_block_hash_with_group_id(BlockHash(b""), 0)
"""What vLLM appends to the hash of a block of the first block table."""


def controller_for(
    settings: Settings,
    vllm_config: VllmConfig,
    kv_cache: KVCacheConfig,
    slots: int,
    block_bytes: int,
    pool_count: int = 1,
) -> Controller:
    """The controller of this engine core. ``slots``: number of slots of the host pool; ``pool_count``: how many ranks
    have one of their own.

    Raises as :func:`kvpolicy.policy.load`, a cost model's ``check_fit`` and
    :func:`kvpolicy_vllm.plugin.learner.remember` do.
    """
    core = f"core-{uuid.uuid4().hex[:12]}"
    parallel = vllm_config.parallel_config
    rank = int(getattr(parallel, "data_parallel_index", 0))
    engine = engine_spec(vllm_config, kv_cache, block_bytes, settings)
    load_policy = partial(load_fitting, settings=settings, loader=model_loader(vllm_config, engine), engine=engine)
    seed = draw_seed(settings.seed, rank, core)
    if reason := why_not_priced(vllm_config, kv_cache):
        load_policy = partial(without_costs, load_policy, reason)
    decider = Decider(load_policy(""), random.Random(seed), settings.shadow)
    memory = None if settings.online_state is None else remember(decider, of_rank(settings.online_state, rank))
    complain = Complaints()

    def unpriced() -> None:
        controller.metrics.tally.add("cache_undecided")
        complain("predicting the price of a block failed; it is worth nothing (counted as cache_undecided)")

    prices = BlockPrices(decider, engine.block_size, block_bytes, unpriced)

    def cache_failed(method: str) -> None:
        controller.metrics.tally.add("cache_failed", method=method)
        complain(f"{method}() of caching policy {settings.cache} failed; lru takes its place (counted as cache_failed)")

    cache = caching_policy(settings.cache, slots, prices, settings.allow_python_policies, cache_failed)
    limits = settings.hints or HintLimits()
    if cache is not None:
        cache = Hinted(cache, lambda: controller.clock(), engine.block_size, limits)
    copies = CopyBook(slots, parallel.world_size, block_bytes, cache)
    controller = Controller(core, decider, copies, page_bytes(kv_cache), time.monotonic, complain, load_policy, memory)
    if settings.shadow or settings.control is not None:
        controller.observers.add(ShadowCounter(controller.metrics.tally, lambda: decider.shadow))
    if cache is not None:
        prompts = controller.cache_prompts(key_in_cache)
        prompts.prices, prices.segment_bytes = prices, lambda: controller.copies.segment_bytes
        if settings.cache_files is not None:
            prompts.keep_files(pool_count, settings.cache_files_policy == ByCost.name)
    controller.keep_tables(block_tables(kv_cache))
    order, classes = settings.load_order(), claimable(settings, vllm_config)
    for warning in unlisted_classes(order, classes.names):
        logger.warning("kvpolicy: %s", warning)
    controller.serve_by(order)
    controller.grant_marks(granting(classes, limits))
    if logger.isEnabledFor(logging.DEBUG):
        controller.observers.add(PreemptionLog())
    if (write := span_writer(vllm_config)) is not None:
        controller.observers.add(PreemptionSpans(write, controller.metrics.tally))
    tokens = None if controller.tables is not None else slots * engine.block_size
    pinned, untested = settings.pin_memory and not current_platform.is_cpu(), untested_setup(vllm_config, kv_cache)
    logger.info("kvpolicy: %s", start_line(settings, decider.policy, order, slots, tokens, pinned, untested))
    if settings.trace is not None:
        header = header_of(settings, engine, core, decider.policy.label, kv_cache.num_blocks, slots)
        serves = Priority() if vllm_config.scheduler_config.policy == "priority" else order
        header = replace(header, draw_seed=seed, order=serves.label, order_digest=serves.digest)
        recorder = TraceWriter(settings.trace / core, header, upkeep=upkeep_of(settings, settings.trace / core))
        controller.record_into(recorder, partial(pseudonym, uuid.uuid4().bytes), settings.trace_steps, seed)
    return controller


def upkeep_of(settings: Settings, core: Path) -> Upkeep | None:
    """What merges and cuts the trace of a server; None for a measurement, which keeps all it records."""
    if settings.source != "production":
        return None
    max_bytes = None if settings.trace_gib is None else settings.trace_gib * GIB
    max_age_s = None if settings.trace_days is None else settings.trace_days * DAY_S
    return Upkeep(core, Retention(max_bytes, max_age_s))


def key_in_cache(block_hash: bytes) -> bytes:
    """The key in vLLM's prefix cache of a block with one of a request's hashes, where there is one block table."""
    return block_hash + ONLY_TABLE


def claimable(settings: Settings, vllm_config: VllmConfig) -> Classes:
    """The classes that clients may claim. Raises InputError where vLLM itself ranks by priorities that they bound."""
    classes = settings.classes or Classes()
    if problem := bounds_in_vain(classes, vllm_config.scheduler_config.policy):
        raise InputError(problem)
    return classes


def load_fitting(name: str, settings: Settings, loader: Callable[[str], CostModel], engine: EngineSpec) -> Policy:
    """Load the policy of that name, or the settings' policy if the name is empty, ready for use.

    If it has a cost model, checks that the model was made for this engine.
    """
    policy = settings.load_policy(loader, name)
    if policy.cost_model is not None:
        policy.cost_model.check_fit(engine)
        policy.cost_model.warm()
    return policy


def without_costs(load: Callable[[str], Policy], reason: str, name: str) -> Policy:
    """Load the policy of that name. Raises UnsupportedEngine where it goes by predicted costs. ``reason``: why those of
    this model's layers are not known."""
    policy = load(name)
    if policy.cost_model is not None:
        raise UnsupportedEngine(
            f"policy {policy.name}: goes by predicted costs, and what this model's layers cost is not known "
            f"({reason}): give always-swap, always-recompute, threshold:TOKENS or a policy of your own without a cost "
            "model"
        )
    return policy


def draw_seed(seed: int, rank: int, core: str) -> int:
    """Seed of the policy's draws, different for each engine core and start, so that the random choices of two logs are
    independent. Recorded in the trace's header."""
    text = f"{seed}/{rank}/{core}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def of_rank(path: Path, rank: int) -> Path:
    """The state file of a data-parallel rank. Ranks learn separately: each but the first has its rank in the name."""
    return path if rank == 0 else path.with_name(f"{path.stem}-{rank}{path.suffix}")


class Complaints:
    """Logs errors with the exception being handled, each message once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, what: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.exception("kvpolicy: %s (reported once)", what)
