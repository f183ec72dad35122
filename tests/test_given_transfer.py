"""The user's own connectors stand behind kvpolicy's in what `kvpolicy serve` gives to vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.test_launch import dry_run, following, run, vllm_is_there  # noqa: F401  # a fixture

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
DECODE = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_producer"}
LISTED = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "engine_id": "one"}


@pytest.mark.parametrize(
    ("given", "behind", "role"),
    [
        (NIXL, [NIXL], "kv_both"),
        (DECODE, [DECODE], "kv_producer"),
        (NIXL | {"engine_id": "one"}, [NIXL], "kv_both"),
        (LISTED | {"kv_connector_extra_config": {"connectors": [DECODE, NIXL]}}, [DECODE, NIXL], "kv_both"),
    ],
)
def test_connectors_that_are_given_come_behind_kvpolicys(
    capsys: pytest.CaptureFixture[str], given: dict[str, Any], behind: list[dict[str, Any]], role: str
) -> None:
    """Once, with its own options, and in the setting that is right for all of them."""
    for flags in (["--kv-transfer-config", json.dumps(given)], [f"--kv_transfer_config={json.dumps(given)}"]):
        command = dry_run(capsys, "some/llm", "--policy", "always-swap", "--port", "8001", *flags, "--seed", "3")
        transfer = json.loads(following(command, "--kv-transfer-config"))
        own, *others = transfer["kv_connector_extra_config"]["connectors"]
        assert own["kv_connector"] == "KVPolicyConnector" and others == behind
        assert own["kv_connector_extra_config"] == {"policy": "always-swap"}
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("MultiConnector", role)
        assert transfer["kv_load_failure_policy"] == "recompute"
        assert transfer.get("engine_id") == given.get("engine_id")
        assert command[-4:] == ["--port", "8001", "--seed", "3"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (["{"], "--kv-transfer-config is '{', should be a JSON object with \"kv_connector\""),
        (["[1]"], 'should be a JSON object with "kv_connector"'),
        (["{}"], 'should be a JSON object with "kv_connector"'),
        ([json.dumps(LISTED)], 'MultiConnector should have a list of connectors in "kv_connector_extra_config"'),
        ([json.dumps({"kv_connector": "KVPolicyConnector"})], "KVPolicyConnector should not be there: kvpolicy adds"),
        (
            [json.dumps(LISTED | {"kv_connector_extra_config": {"connectors": [DECODE, NIXL | {"engine_id": "two"}]}})],
            '"engine_id" of NixlConnector should be beside "kv_connector": "MultiConnector", not in the list',
        ),
        ([json.dumps(NIXL)] * 2, "is given 2 times, should be once"),
    ],
)
def test_connectors_that_cannot_be_put_behind(capsys: pytest.CaptureFixture[str], values: list[str], told: str) -> None:
    flags = [part for value in values for part in ("--kv-transfer-config", value)]
    assert run("serve", "some/llm", "--policy", "always-swap", *flags, "--dry-run") == 2
    assert told in " ".join(capsys.readouterr().err.split())
