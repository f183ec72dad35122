"""Which vLLM is served: releases by number, builds from source as what they are nearest to, others when asked for."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

import vllm

from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.versions import UnsupportedEngine, engine_version, warn_untested

FLAG = '"allow_untested_version": true'


@pytest.mark.parametrize(
    ("called", "version"),
    [
        ("0.24.0", (0, 24)),
        ("0.33.0", (0, 33)),
        ("0.33.2", (0, 33)),
        ("0.32.0+cpu", (0, 32)),
        ("0.30.1.post1+cu129", (0, 30)),
    ],
)
def test_releases_of_the_range(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, called: str, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(vllm, "__version__", called)
    assert engine_version() == version
    warn_untested()
    assert not caplog.records


@pytest.mark.parametrize(
    ("called", "version"),
    [("0.33.1.dev12+gabc1234", (0, 33)), ("0.31.0rc1", (0, 31)), ("0.28.0rc2.dev7+g12345.d20260101", (0, 28))],
)
def test_a_build_between_two_releases_is_taken_as_the_nearest_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, called: str, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(vllm, "__version__", called)
    assert engine_version() == version
    with caplog.at_level(logging.WARNING):
        warn_untested()
    (record,) = caplog.records
    assert called in record.getMessage() and f"taken as {version[0]}.{version[1]}" in record.getMessage()


@pytest.mark.parametrize("called", ["0.34.0", "0.34.0rc1", "0.99.0", "1.0.0"])
def test_a_newer_one_is_refused_with_what_to_do_and_let_through_when_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, called: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", called)
    with pytest.raises(UnsupportedEngine, match=r"0\.24 to 0\.33") as refused:
        engine_version()
    assert called in str(refused.value)
    assert FLAG in str(refused.value) and "--allow-untested-version" in str(refused.value)
    assert engine_version(allow_untested=True) > (0, 33)
    with caplog.at_level(logging.WARNING):
        warn_untested()
    (record,) = caplog.records
    assert called in record.getMessage() and "0.24 to 0.33" in record.getMessage()


@pytest.mark.parametrize("called", ["0.1.dev1", "0.1.dev13521+g0a1b2c3", "dev", "0.0.0"])
def test_a_build_that_does_not_know_its_version_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, called: str
) -> None:
    """As a build from sources without their tags."""
    monkeypatch.setattr(vllm, "__version__", called)
    with pytest.raises(UnsupportedEngine, match="VLLM_VERSION_OVERRIDE") as refused:
        engine_version()
    assert repr(called) in str(refused.value) and FLAG in str(refused.value)
    assert engine_version(allow_untested=True) == (0, 33)
    with caplog.at_level(logging.WARNING):
        warn_untested()
    assert "taken as 0.33" in caplog.text


@pytest.mark.parametrize("called", ["0.23.1", "0.9.2", "0.23.0rc1.dev3+gabc"])
def test_an_older_one_stays_refused(monkeypatch: pytest.MonkeyPatch, called: str) -> None:
    monkeypatch.setattr(vllm, "__version__", called)
    for allowed in (False, True):
        with pytest.raises(UnsupportedEngine, match=r"older .* 0\.24 to 0\.33") as refused:
            engine_version(allow_untested=allowed)
        assert "allow_untested_version" not in str(refused.value)


def test_the_setting_is_a_flag() -> None:
    assert not Settings.read({"policy": "always-swap"}).allow_untested_version
    assert Settings.read({"policy": "always-swap", "allow_untested_version": True}).allow_untested_version
    with pytest.raises(ValueError, match="allow_untested_version"):
        Settings.read({"policy": "always-swap", "allow_untested_version": "yes"})
