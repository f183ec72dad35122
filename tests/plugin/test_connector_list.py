"""Which part of ``--kv-transfer-config`` is kvpolicy's, and which lists of connectors it can serve in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.plugin.connector_list import configured, own_connector, own_settings, problem_of
from kvpolicy_vllm.plugin.settings import transfer_config

OWN = transfer_config({"policy": "always-swap"})
SENDING = {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}
LOADING = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "other-connectors.md"


def transfer(given: dict[str, Any]) -> Any:
    """As vLLM makes it of the flag."""
    return SimpleNamespace(**{"kv_connector_extra_config": {}} | given)


def listed(*connectors: dict[str, Any], role: str = "kv_both") -> Any:
    extra = {"connectors": list(connectors)}
    return transfer({"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": extra})


def test_alone_all_of_it_is_kvpolicys() -> None:
    assert own_settings(transfer(OWN)) == {"policy": "always-swap"}
    assert configured(transfer(OWN)) == []
    assert problem_of(transfer(OWN)) == ""


@pytest.mark.parametrize("others", [[SENDING], [LOADING], [SENDING, LOADING]])
def test_what_is_written_is_served(others: list[dict[str, Any]]) -> None:
    written = transfer_config({"policy": "always-swap"}, others)
    assert problem_of(transfer(written)) == ""
    assert own_settings(transfer(written)) == {"policy": "always-swap"}
    assert written["kv_role"] == ("kv_both" if LOADING in others else "kv_producer")
    assert written["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize(
    ("list_of", "words"),
    [
        (listed(SENDING, OWN), ("ExampleConnector, KVPolicyConnector", "should be the first")),
        (listed(SENDING), ("KVPolicyConnector should be there, once",)),
        (listed(), ("no connectors",)),
        (listed(OWN | {"kv_role": "kv_both"}, LOADING), ("kv_role of KVPolicyConnector is kv_both", '"kv_producer"')),
        (listed(OWN, OWN), ("KVPolicyConnector should be there, once",)),
        (
            listed({name: value for name, value in OWN.items() if name != "kv_load_failure_policy"}, LOADING),
            ("KVPolicyConnector in the list", '"kv_load_failure_policy": "recompute"'),
        ),
        (listed(OWN, {"kv_connector": "MultiConnector"}), ("one list",)),
        (listed(OWN, {"kv_connector": "OffloadingConnector"}), ("OffloadingConnector should not be there",)),
        (listed(OWN, LOADING, role="kv_producer"), ("NixlConnector loads", '"kv_both"')),
    ],
)
def test_other_lists_are_told_what_is_wrong(list_of: Any, words: tuple[str, ...]) -> None:
    for text in words:
        assert text in problem_of(list_of)


@pytest.mark.parametrize("given", [["KVPolicyConnector"], [OWN, "NixlConnector"], OWN, 3, None])
def test_what_is_no_list_of_settings_is_told(given: Any) -> None:
    found = transfer({"kv_connector": "MultiConnector", "kv_role": "kv_both"})
    found.kv_connector_extra_config = {"connectors": given}
    assert "lists no connectors" in problem_of(found)
    assert own_settings(found) == {}


def test_the_own_connector_is_found_among_others() -> None:
    own = type("KVPolicyConnector", (), {})()
    assert own_connector(own) is own
    assert own_connector(SimpleNamespace(_connectors=[SimpleNamespace(), own])) is own
    assert own_connector(SimpleNamespace(_connectors=[SimpleNamespace()])) is None
    assert own_connector(None) is None


def test_the_documented_settings_are_those_that_are_written() -> None:
    """As vLLM's own flag; before it, what is given to `kvpolicy serve`, which makes this of it."""
    given_to_serve, shown = re.findall(r"--kv-transfer-config '(.*?)'", DOCUMENT.read_text(), re.DOTALL)
    assert json.loads(given_to_serve) == LOADING
    given = json.loads(shown)
    own, *others = given["kv_connector_extra_config"]["connectors"]
    assert given == transfer_config(own["kv_connector_extra_config"], others)
    assert problem_of(transfer(given)) == ""
