"""The user's own ``--kv-transfer-config``: its connectors serve behind kvpolicy's. Works without an installed vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy_vllm.plugin.settings import CONNECTOR, MULTI_CONNECTOR, transfer_config

FLAG = "--kv-transfer-config"
ENGINE_ID = "engine_id"
SHOULD = 'should be a JSON object with "kv_connector"'


def given_transfer(vllm_flags: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The value of the flag, empty where it is not on the command line in full, and the other flags.

    Raises InputError for a value that is no connector's configuration, and for a second one.
    """
    values, others = [], []
    flags = iter(vllm_flags)
    for flag in flags:
        name, is_joined, value = flag.partition("=")
        if name.replace("_", "-") == FLAG:
            values.append(value if is_joined else next(flags, ""))
        else:
            others.append(flag)
    if len(values) > 1:
        raise InputError(f"{FLAG} is given {len(values)} times, should be once")
    return (_read(values[0]) if values else {}), others


def _read(value: str) -> dict[str, Any]:
    try:
        given = json.loads(value)
    except ValueError as error:
        raise InputError(f"{FLAG} is {value!r}, {SHOULD}: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("kv_connector"), str):
        raise InputError(f"{FLAG} is {value}, {SHOULD}")
    return given


def put_first(extra: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """One ``--kv-transfer-config`` with kvpolicy's connector, of these options, before those that are given: a single
    one, or vLLM's list of several, whose other fields stay. A single one's engine id becomes the list's, which all its
    connectors have.

    Raises InputError where kvpolicy's own is among them, one in a list has an engine id of its own, or the list is
    none.
    """
    is_list = given["kv_connector"] == MULTI_CONNECTOR
    options = given.get("kv_connector_extra_config") or {}
    others = options.get("connectors") if is_list and isinstance(options, dict) else [given]
    if not (isinstance(others, list) and others and all(isinstance(one, dict) for one in others)):
        raise InputError(
            f'{FLAG}: {MULTI_CONNECTOR} should have a list of connectors in "kv_connector_extra_config": '
            '{"connectors": [...]}'
        )
    if any(one.get("kv_connector") == CONNECTOR for one in others):
        raise InputError(f"{FLAG}: {CONNECTOR} should not be there: kvpolicy adds it, with its own flags as options")
    if is_list:
        _refuse_engine_ids(others)
        whole = transfer_config(extra, others)
        whole["kv_connector_extra_config"] = {**options, **whole["kv_connector_extra_config"]}
        return {**given, **whole}
    behind = {name: value for name, value in given.items() if name != ENGINE_ID}
    return transfer_config(extra, [behind]) | {name: given[name] for name in [ENGINE_ID] if name in given}


def _refuse_engine_ids(connectors: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError for an engine id inside a list: vLLM 0.24 to 0.33 would end by a TypeError, as it gives every
    connector an id beside the one in its settings."""
    for one in connectors:
        if ENGINE_ID in one:
            raise InputError(
                f'{FLAG}: "{ENGINE_ID}" of {one.get("kv_connector")} should be beside "kv_connector": '
                f'"{MULTI_CONNECTOR}", not in the list: all its connectors have that one'
            )
