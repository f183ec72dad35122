"""The module path under which the connector can be named where no entry point is installed."""

from kvpolicy_vllm.plugin.connector import KVPolicyConnector

__all__ = ["KVPolicyConnector"]
