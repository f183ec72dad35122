"""kvpolicy inside vLLM: a scheduler that asks a policy, and a connector that keeps what was evicted.

    --scheduler-cls kvpolicy_vllm.AdaptiveScheduler
    --kv-transfer-config '{"kv_connector": "KVPolicyConnector", "kv_role": "kv_producer", ...}'

`kvpolicy serve` and `kvpolicy config` write these flags. Importing this package does not import vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AdaptiveScheduler", "KVPolicyConnector"]


def __getattr__(name: str) -> Any:
    # vLLM resolves these names in its engine processes; whoever only writes flags must not load an engine.
    if name == "AdaptiveScheduler":
        from kvpolicy_vllm.plugin.scheduler import AdaptiveScheduler

        return AdaptiveScheduler
    if name == "KVPolicyConnector":
        from kvpolicy_vllm.plugin.connector import KVPolicyConnector

        return KVPolicyConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
