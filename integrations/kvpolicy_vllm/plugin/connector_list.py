"""kvpolicy's part of ``--kv-transfer-config``: the whole of it, or one of the connectors of vLLM's MultiConnector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy_vllm.plugin.settings import CONNECTOR, MULTI_CONNECTOR, loads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WRONG_BESIDE = {
    "OffloadingConnector": "it does not notice which blocks another connector loads into, and may store what was "
    "written there instead of what was there before",
}
"""Connectors that serve wrong tokens beside another one that loads, and why."""


def configured(transfer: Any) -> list[Mapping[str, Any]]:
    """The settings of each connector under MultiConnector, as they were given; empty for any other connector, and where
    they are no list of settings.

    ``transfer``: vLLM's ``KVTransferConfig``.
    """
    if transfer.kv_connector != MULTI_CONNECTOR:
        return []
    given = transfer.kv_connector_extra_config.get("connectors")
    is_list = isinstance(given, (list, tuple)) and all(isinstance(one, Mapping) for one in given)
    return list(given) if is_list else []


def own_settings(transfer: Any) -> Mapping[str, Any]:
    """kvpolicy's ``kv_connector_extra_config``; empty where it is not among the connectors."""
    if transfer.kv_connector != MULTI_CONNECTOR:
        return dict(transfer.kv_connector_extra_config)
    own = (one for one in configured(transfer) if one.get("kv_connector") == CONNECTOR)
    return dict(next(own, {}).get("kv_connector_extra_config") or {})


def has_set(config: VllmConfig, name: str) -> bool:
    """Whether one of kvpolicy's settings is true. The settings themselves are checked later."""
    transfer = config.kv_transfer_config
    return transfer is not None and own_settings(transfer).get(name) is True


def give_own(transfer: Any, key: str, value: Any) -> None:
    """Set a key of kvpolicy's ``kv_connector_extra_config`` in vLLM's configuration."""
    if transfer.kv_connector != MULTI_CONNECTOR:
        transfer.kv_connector_extra_config[key] = value
        return
    for one in transfer.kv_connector_extra_config["connectors"]:
        if one.get("kv_connector") == CONNECTOR:
            one["kv_connector_extra_config"] = {**(one.get("kv_connector_extra_config") or {}), key: value}


def connectors_beside(config: VllmConfig) -> list[str]:
    """Names of the connectors that serve beside kvpolicy's."""
    transfer = config.kv_transfer_config
    listed = [] if transfer is None else configured(transfer)
    return [name for one in listed if (name := str(one.get("kv_connector"))) != CONNECTOR]


def own_connector(connector: Any) -> Any:
    """kvpolicy's connector: ``connector`` itself, or the one among those of a MultiConnector; None where there is
    none."""
    children = getattr(connector, "_connectors", None)
    candidates = [connector] if children is None else children
    # By name: the class's module needs this one.
    return next((one for one in candidates if any(base.__name__ == CONNECTOR for base in type(one).__mro__)), None)


def problem_of(transfer: Any) -> str:
    """What is wrong with the list of connectors; empty where nothing is, and for a connector that is no list."""
    if transfer.kv_connector != MULTI_CONNECTOR:
        return ""
    listed = configured(transfer)
    names = [str(one.get("kv_connector")) for one in listed]
    found = f"--kv-transfer-config: {MULTI_CONNECTOR} lists {', '.join(names) or 'no connectors'}"
    if names.count(CONNECTOR) != 1:
        return f"{found}; {CONNECTOR} should be there, once"
    if MULTI_CONNECTOR in names:
        return f"{found}; the connectors should stand in one list"
    if names[0] != CONNECTOR:
        return (
            f"{found}; {CONNECTOR} should be the first: vLLM lets the first one load that has tokens of a request, and "
            "has the connectors work in this order"
        )
    wrong = next((name for name in names if name in WRONG_BESIDE), None)
    if wrong is not None:
        return f"{found}; {wrong} should not be there: {WRONG_BESIDE[wrong]}"
    if listed[0].get("kv_role") != "kv_producer":
        return f'--kv-transfer-config: kv_role of {CONNECTOR} is {listed[0].get("kv_role")}, should be "kv_producer"'
    if listed[0].get("kv_load_failure_policy") != "recompute":  # vLLM gives it no part of the list's settings
        return (
            f"--kv-transfer-config: {CONNECTOR} in the list of {MULTI_CONNECTOR} should have "
            '"kv_load_failure_policy": "recompute" of its own'
        )
    return _problem_of_role(transfer, listed[1:])


def _problem_of_role(transfer: Any, others: Sequence[Mapping[str, Any]]) -> str:
    loading = [str(one.get("kv_connector")) for one in others if loads(one)]
    if transfer.kv_role == "kv_producer" and loading:
        return (
            f"--kv-transfer-config: kv_role of {MULTI_CONNECTOR} is kv_producer, should be "
            f'"kv_both" as {loading[0]} loads: with asynchronous scheduling vLLM would otherwise give blocks away that '
            "a step in flight still writes to"
        )
    return ""
