"""What an order of service cannot be combined with, in words for refusals, and which order the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.errors import InputError
from kvpolicy.order import Order, is_stock
from kvpolicy.request_marks import Classes
from kvpolicy_vllm.plugin.connector_list import own_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvpolicy_vllm.plugin.settings import Settings


def order_of(config: VllmConfig) -> str:
    """The order of service that the settings name. The settings themselves are checked later."""
    transfer = config.kv_transfer_config
    return "fcfs" if transfer is None else str(own_settings(transfer).get("order", "fcfs"))


def ranks_itself(config: VllmConfig) -> bool:
    """Whether the order of service is another than vLLM's own."""
    return order_of(config) not in ("fcfs", config.scheduler_config.policy)


def ranks_twice(order: Order, scheduling: str) -> str:
    """Why vLLM's ``--scheduling-policy`` is refused beside an order of service; empty where it is not."""
    if is_stock(order, scheduling) or scheduling == "fcfs":
        return ""
    return f"order {order.name}: ranks requests itself, --scheduling-policy {scheduling} does too: leave the flag out"


def bounds_in_vain(classes: Classes, scheduling: str) -> str:
    """Why vLLM's ``--scheduling-policy`` is refused beside classes that bound priorities; empty where it is not."""
    if not classes.bounds_priority or scheduling != "priority":
        return ""
    return (
        f"classes is {classes.text!r}, which bounds priorities, and --scheduling-policy priority goes by what "
        'clients give: leave that flag out, and give the order "priority" or "urgent"'
    )


def refuse_ranking(settings: Settings, scheduling: str) -> None:
    """Raise InputError where the settings' order or classes and vLLM's ``--scheduling-policy`` exclude each other."""
    order, classes = settings.load_order(), settings.classes or Classes()
    if problem := ranks_twice(order, scheduling) or bounds_in_vain(classes, scheduling):
        raise InputError(problem)


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
