"""kvpolicy inside vLLM: a scheduler that asks a policy, and a connector that keeps what was evicted.

    --scheduler-cls kvpolicy_vllm.AdaptiveScheduler
    --kv-transfer-config '{"kv_connector": "KVPolicyConnector", "kv_role": "kv_producer", ...}'

`kvpolicy serve` and `kvpolicy config` write these flags. Importing this package does not import vLLM: vLLM resolves the
two names in its engine processes, and writing flags must not load an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.lazy_names import lazy_names

if TYPE_CHECKING:
    from kvpolicy_vllm.plugin.connector import KVPolicyConnector
    from kvpolicy_vllm.plugin.scheduler import AdaptiveScheduler

__all__ = ["AdaptiveScheduler", "KVPolicyConnector"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AdaptiveScheduler": "kvpolicy_vllm.plugin.scheduler",
        "KVPolicyConnector": "kvpolicy_vllm.plugin.connector",
    },
)
