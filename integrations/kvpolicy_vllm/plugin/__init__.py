"""The plugin, which runs inside a server. `register` is the entry point that vLLM calls in every process."""

from __future__ import annotations

import os

from kvpolicy_vllm.plugin import offloading_names

NAME = "KVPolicyConnector"


def register() -> None:
    """Make the connector known to vLLM, and to its own connector what that can use. Called in every process, possibly
    more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvpolicy_vllm.connector", NAME)
    offloading_names.register()
    if os.environ.get("KVPOLICY"):
        from kvpolicy_vllm.plugin.one_flag import heed_environment

        heed_environment()
