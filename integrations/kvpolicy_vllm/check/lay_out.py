"""Makes a model's layers without memory and asks vLLM for their KV cache: ``python -m kvpolicy_vllm.check.lay_out``.

Takes jobs ``{"flags": [LLM, FLAG, ...]}``, as for ``vllm serve``, and answers with the fields of
:class:`kvpolicy_vllm.check.CheckReport`.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import vllm

from kvpolicy.errors import KVPolicyError
from kvpolicy.hardware import available_memory_bytes
from kvpolicy_vllm.bench.engine_flags import RefusedByVllm, server_arguments, server_config
from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.bench.weightless import laid_out
from kvpolicy_vllm.check.remedies import Verdict, helping
from kvpolicy_vllm.plugin.assembly import controller_for
from kvpolicy_vllm.plugin.config_refusals import refuse_unsupported
from kvpolicy_vllm.plugin.connector import cores_here, host_slots, pools
from kvpolicy_vllm.plugin.connector_list import own_settings
from kvpolicy_vllm.plugin.engine_config import device_name
from kvpolicy_vllm.plugin.file_namespace import refuse_unnameable
from kvpolicy_vllm.plugin.kv_layout import block_bytes
from kvpolicy_vllm.plugin.scheduler import refuse_order
from kvpolicy_vllm.plugin.settings import Settings, refuse_unsafe_files
from kvpolicy_vllm.plugin.tested_setups import untested_setup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig

NOTHING: dict[str, Any] = {
    "engine": "", "device": "", "refused": "", "groups": [], "block_bytes": 0, "not_laid_out": "", "helps": [],
    "untested": "", "host_gib": 0.0,
}  # fmt: skip


def main() -> None:
    for job, answer in jobs():
        answer("result", NOTHING | looked_at(job["flags"]))


def looked_at(flags: list[str]) -> dict[str, Any]:
    """What is said of these flags; whatever vLLM or the plugin raises refuses them."""
    known: dict[str, Any] = {"engine": f"vllm {vllm.__version__}", "device": device_name()}
    try:
        arguments = server_arguments(flags)
    except RefusedByVllm as error:
        return known | {"refused": str(error)}
    try:
        return known | judged(arguments)
    except RefusedByVllm as error:  # which names vLLM's own flags
        return known | {"refused": str(error)}
    except NotServed as error:
        helps = helping(arguments, verdict_of, error.groups)
        return known | {"refused": str(error), "groups": error.groups, "helps": helps}


class NotServed(KVPolicyError):
    """The plugin does not serve it. ``groups``: of the layers, where they were made before it was refused."""

    def __init__(self, reason: str, groups: list[dict[str, Any]]) -> None:
        super().__init__(reason, groups)
        self.reason, self.groups = reason, groups

    def __str__(self) -> str:
        return self.reason


def judged(arguments: AsyncEngineArgs) -> dict[str, Any]:
    """What is known of a server with these arguments. Raises RefusedByVllm, and NotServed where it is the plugin that
    refuses."""
    try:
        config = server_config(deepcopy(arguments))  # making a configuration fills in what is not given
    except RefusedByVllm:
        raise
    except KVPolicyError as error:
        raise NotServed(str(error), []) from error
    try:
        kv_cache = laid_out(config)
    # The model's own error, or one of a model that needs its weights or a device to be made: which is not known.
    except Exception as error:  # noqa: BLE001
        return {"not_laid_out": f"{type(error).__name__}: {error}", "untested": untested_setup(config, None)}
    groups = groups_of(kv_cache)
    try:
        served = {
            "groups": groups,
            "block_bytes": served_block_bytes(config, kv_cache),
            "host_gib": host_gib_of(config),
        }
    except KVPolicyError as error:
        raise NotServed(str(error), groups) from error
    return served | {"untested": untested_setup(config, kv_cache)}


def verdict_of(arguments: AsyncEngineArgs) -> Verdict:
    """Whether the plugin serves it, for certain, and the layers of what it does not."""
    try:
        return Verdict("not_laid_out" not in judged(arguments))
    except NotServed as error:
        return Verdict(False, error.groups)
    except KVPolicyError:
        return Verdict(False)


def served_block_bytes(config: VllmConfig, kv_cache: KVCacheConfig) -> int:
    """Bytes of host memory that one block takes, over all ranks that keep a part of it. Raises KVPolicyError as the
    plugin does when an engine starts."""
    refuse_unsupported(config, kv_cache)
    settings = Settings.read(own_settings(config.kv_transfer_config))
    rank_bytes = block_bytes(kv_cache)
    pool_count = pools(config, kv_cache, settings)
    slots = host_slots(settings, rank_bytes, pool_count)
    if settings.cache_files is not None:
        refuse_unnameable(config, kv_cache, pool_count < config.parallel_config.world_size)
        settings.refuse_small_files(rank_bytes, pool_count)
        refuse_unsafe_files(settings)
    settings.refuse_too_much_memory(available_memory_bytes(), cores_here(config))
    controller = controller_for(replace(settings, trace=None, online_state=None), config, kv_cache, slots, rank_bytes)
    refuse_order(controller.order, config.scheduler_config.policy)
    return rank_bytes * pool_count


def host_gib_of(config: VllmConfig) -> float:
    """Host memory of one engine core, GiB, by its settings, or as it would be taken here."""
    return Settings.read(own_settings(config.kv_transfer_config)).pool_gib


def groups_of(kv_cache: KVCacheConfig) -> list[dict[str, Any]]:
    return [
        {
            "kind": type(group.kv_cache_spec).__name__,
            "layers": len(group.layer_names),
            "block_size": group.kv_cache_spec.block_size,
            "window": getattr(group.kv_cache_spec, "sliding_window", None)
            or getattr(group.kv_cache_spec, "attention_chunk_size", None),
        }
        for group in kv_cache.kv_cache_groups
    ]


if __name__ == "__main__":
    main()
