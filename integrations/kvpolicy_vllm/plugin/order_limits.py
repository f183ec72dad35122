"""What an order of service cannot be combined with, in words for refusals, and which order the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy_vllm.plugin.connector_list import own_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def order_of(config: VllmConfig) -> str:
    """The order of service that the settings name. The settings themselves are checked later."""
    transfer = config.kv_transfer_config
    return "fcfs" if transfer is None else str(own_settings(transfer).get("order", "fcfs"))


def ranks_itself(config: VllmConfig) -> bool:
    """Whether the order of service is another than vLLM's own."""
    return order_of(config) not in ("fcfs", config.scheduler_config.policy)


def loads_beside(order: str, connector: str) -> str:
    """Why another connector is refused beside an order of service, and what would be right."""
    return (
        f"order {order}: reckons with what a request loads, and what {connector} loads is not known to it: leave the "
        "order out, or the other connectors"
    )


def drafts_beside(order: str) -> str:
    """Why drafted tokens are refused beside an order of service, and what would be right."""
    return (
        f"speculative decoding beside order {order}, which counts the blocks of one token a step: leave the order or "
        "--speculative-config out"
    )
