"""The module path under which the connector can be named where no entry point is installed."""

from __future__ import annotations

from typing import NoReturn

from kvpolicy_vllm.plugin.connector import KVPolicyConnector
from kvpolicy_vllm.plugin.versions import UnsupportedEngine

__all__ = ["KVPolicyConnector"]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    # With --kv-offloading-size vLLM puts its own connector's name in the place of ours and looks for it here.
    raise UnsupportedEngine(
        f"kvpolicy works only as the one connector, {name} was asked for; leave --kv-offloading-size and other "
        "connectors out"
    )
