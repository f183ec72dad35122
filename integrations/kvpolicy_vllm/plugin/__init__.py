"""The plugin, which runs inside a server. `register` is the entry point that vLLM calls in every process."""

from __future__ import annotations

import os

NAME = "KVPolicyConnector"


def register() -> None:
    """Make the connector known to vLLM. Called in every process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvpolicy_vllm.connector", NAME)
    if os.environ.get("KVPOLICY"):
        from kvpolicy_vllm.plugin.one_flag import heed_environment

        heed_environment()
