"""The names by which vLLM's own OffloadingConnector takes kvpolicy's caching policy and tier of files. The plugin's
entry point makes them known, so that one setting has the policy:

    "eviction_policy": "kvpolicy-cost"
"""

from __future__ import annotations

import logging
from contextlib import suppress
from importlib.util import find_spec

logger = logging.getLogger(f"vllm.{__name__}")

POLICY, TIER = "kvpolicy-cost", "kvpolicy-files"
"""vLLM compares whole names, so that with the name of this package in front none of its own is the same."""


def register() -> None:
    """Register both where this vLLM can use them, once, however often this is called.

    vLLM's registries take the path of a module: what it needs is imported where a server's settings have the name.
    """
    for register_one in (_register_policy, _register_tier):
        try:
            register_one()
        except ImportError:  # a vLLM without caching policies or tiers to choose
            continue
        # The boundary between vLLM and a plugin that every server loads: who does not ask for the name loses nothing,
        # and who does is told by vLLM that there is no such name.
        except Exception:
            logger.debug("kvpolicy: vLLM's OffloadingConnector does not know its names", exc_info=True)


def _register_policy() -> None:
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    # Without it, as in vLLM 0.30, which has the registry, a policy is not told in what order chunks follow each other.
    if hasattr(CachePolicy, "on_request_finished"):
        with suppress(ValueError):  # registered already
            CachePolicyFactory.register_cache_policy(POLICY, "kvpolicy_vllm.offloading", "CostCachePolicy")


def _register_tier() -> None:
    # Without it, as in vLLM 0.30, which has the registry, tiers are made with other arguments.
    if find_spec("vllm.v1.kv_offload.tiering.backpressure") is None:
        return
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    with suppress(ValueError):  # registered already
        SecondaryTierFactory.register_tier(TIER, "kvpolicy_vllm.file_offloading", "BoundedFileTier")
