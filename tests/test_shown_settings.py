"""What documents show beside commands and Python: `KVPOLICY=...`, connectors as JSON, bodies of requests, files."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpolicy import cost, fields
from kvpolicy.request_marks import read_marks
from kvpolicy.settings import ServerSettings
from kvpolicy_vllm.plugin import control_file
from kvpolicy_vllm.plugin.settings import CONNECTOR, Settings
from kvpolicy_vllm.plugin.settings_line import read_line, server_settings
from tests.snippets import ROOT, commands, posted
from tests.test_cli import run

PAGES = sorted(str(path.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md"))


def found(pattern: str) -> list[tuple[str, str]]:
    """What the pattern's group matches, with the page; the changelog is about former versions, too."""
    texts = [(page, (ROOT / page).read_text()) for page in PAGES if page != "CHANGELOG.md"]
    return [(page, match) for page, text in texts for match in re.findall(pattern, text, re.DOTALL)]


LINES = found(r"\bKVPOLICY=('[^']+'|[^\s`'.][^\s`']*)")
CONNECTORS = found(r"--kv-transfer-config\s+'(\{.*?\})'")
BODIES = [(page, *sent) for page in PAGES if page != "CHANGELOG.md" for sent in posted(page)]
CONTROL = found(r"\n(mkdir -p -m 700 /run/kvpolicy|\(umask 077; [^\n]*\))")


def test_they_are_found() -> None:
    assert {page for page, _ in LINES} == {"README.md", "docs/operating.md"} and len(LINES) == 5
    assert {page for page, _ in CONNECTORS} == {
        "docs/caching.md", "docs/other-connectors.md", "docs/serving.md", "docs/tiers.md"
    }  # fmt: skip
    assert len(BODIES) == len(found(r"\ncurl ")) == 4 and len(CONTROL) == 4


@pytest.mark.parametrize(("page", "line"), LINES, ids=[line for _, line in LINES])
def test_a_line_of_the_variable_is_read(page: str, line: str) -> None:
    settings = server_settings(read_line(line.strip("'").replace('"..."', '"always-swap"'), page), page)
    assert settings != ServerSettings(settings.policy), "more than the policy is set"


def connectors(configured: dict[str, Any]) -> list[dict[str, Any]]:
    """That connector, or those of which it is made up."""
    listed: list[dict[str, Any]] = configured.get("kv_connector_extra_config", {}).get("connectors", [configured])
    return listed


@pytest.mark.parametrize(("page", "text"), CONNECTORS, ids=[page for page, _ in CONNECTORS])
def test_a_connector_that_is_shown_is_read(page: str, text: str) -> None:
    configured = json.loads(text)
    for one in connectors(configured):
        if one["kv_connector"] == CONNECTOR:
            assert Settings.read(one["kv_connector_extra_config"]).policy


@pytest.mark.parametrize(("page", "text"), CONNECTORS, ids=[page for page, _ in CONNECTORS])
def test_vllm_takes_it_and_what_it_names_exists(page: str, text: str) -> None:
    pytest.importorskip("vllm")
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvpolicy_vllm import file_offloading
    from kvpolicy_vllm.plugin import register

    register()  # as vLLM does, which then knows the names
    made = KVTransferConfig(**json.loads(text))
    for one in made.kv_connector_extra_config.get("secondary_tiers", ()):
        assert one["type"] in SecondaryTierFactory._registry
        settings = {key: value for key, value in one.items() if key != "type"}
        assert fields.read(file_offloading.TierSettings, settings, page).max_gib == one["max_gib"]
    if policy := made.kv_connector_extra_config.get("eviction_policy"):
        assert policy in CachePolicyFactory._registry


@pytest.mark.parametrize(("page", "path", "body"), BODIES)
def test_the_body_of_a_request_is_read(page: str, path: str, body: dict[str, Any]) -> None:
    """`tests/vllm/test_server.py` sends them to a server."""
    assert page == "docs/requests.md" and path.startswith("/v1/")
    marks = read_marks(body["kv_transfer_params"]["kvpolicy"])
    assert marks != read_marks(None) and body["model"] == "LLM" and body.keys() & {"prompt", "messages"}


def test_the_control_file_is_written_as_it_is_read(tmp_path: Path) -> None:
    for page in ("docs/operating.md", "docs/tutorial.md"):
        folder = tmp_path / Path(page).stem
        for _, line in (shown for shown in CONTROL if shown[0] == page):
            subprocess.run(["bash", "-ec", line.replace("/run/kvpolicy", str(folder))], check=True)
        content = control_file.read(folder / "control")
        assert content == control_file.OFF or set(read_line(content, page, control_file.KEYS)) == {"policy", "order"}


def test_settings_are_merged_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvpolicy config ... --into FILE`, with a shipped model in the place of a reader's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(ROOT / "models" / "cpu-llama-native")
    (tmp_path / "server.yaml").write_text("port: 8001\n")
    (shown,) = (one for one in commands("docs/operating.md") if "--into" in one.flags)
    assert run(*shown.words[1:]) == 0
    merged = yaml.safe_load((tmp_path / "server.yaml").read_text())
    extra = merged["kv-transfer-config"]["kv_connector_extra_config"]
    assert merged["port"] == 8001 and Settings.read(extra).order == "urgent"


def test_a_model_is_trained_as_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a trace that ships, in the place of a reader's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "mine").symlink_to(ROOT / "traces" / "cpu-llama-native")
    (shown,) = (one for one in commands("README.md") if one.words[1] == "train")
    assert run(*shown.words[1:]) == 0
    assert cost.load(tmp_path / "models" / "mine").digest


@pytest.mark.slow
def test_the_demo_without_an_engine_runs_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shorter, and with its page: tests/test_cli.py."""
    monkeypatch.chdir(tmp_path)
    (shown,) = (one for one in commands("README.md") if "--offline" in one.flags)
    assert run(*shown.words[1:]) == 0
    assert "headline, fixed beforehand:" in capsys.readouterr().out
