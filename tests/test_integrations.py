"""Engines found by entry point: what is registered is used, what is not is a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy import integrations
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.settings import Measurement, ServerSettings
from kvpolicy_vllm.integration import VllmIntegration

ENGINE = """
class Silent:
    launcher = None

    def profile(self, out, how):
        return (out, how)

    def simulator(self):
        return "simulated"
"""


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package that registers an integration for an engine of the same name."""
    (tmp_path / "silent_engine.py").write_text(ENGINE)
    folder = tmp_path / "silent_engine-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: silent-engine\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[{integrations.GROUP}]\nsilent_engine = silent_engine:Silent\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "silent_engine"


def test_a_registered_engine_is_found(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert integrations.simulator(silent) == "simulated"
    assert integrations.launcher(silent) is None
    monkeypatch.setattr(integrations, "engine", lambda: integrations.integration(silent))
    assert integrations.profile("out", Measurement(link="2e9")) == (Path("out"), Measurement(link=SimulatedLink(2e9)))


def test_what_nobody_registered_is_named_with_what_is(silent: str) -> None:
    with pytest.raises(integrations.EngineMissing, match=r"'nothing' \(registered: .*silent_engine"):
        integrations.engine("nothing")


def test_an_engine_that_is_not_installed_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrations, "find_spec", lambda name: None)
    with pytest.raises(integrations.EngineMissing, match=r"vllm is not installed .*: `pip install 'kvpolicy\[vllm\]'"):
        integrations.engine()


def test_flags_are_written_where_the_engine_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrations, "find_spec", lambda name: None)
    assert integrations.launcher().options(ServerSettings("always-swap")) == {"policy": "always-swap"}


def test_vllm_has_all_that_an_integration_has() -> None:
    promised = {name for name in vars(integrations.Integration) if not name.startswith("_")}
    assert promised <= set(dir(VllmIntegration))
