"""Which vLLM is served: releases by number, builds from source as what they are nearest to, others when asked for."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm

from kvpolicy_vllm.plugin import versions
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.versions import UnsupportedEngine, engine_version, warn_untested
from tests.vllm.kv_caches import kv_cache

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


CONFIG: Any = SimpleNamespace(kv_transfer_config=None)


@pytest.mark.parametrize(
    ("layers", "helps"), [("two-full", False), ("window", False), ("full-window", True), ("full-states", False)]
)
def test_windows_stored_whole_are_advised_where_vllm_would_store_them_so(
    monkeypatch: pytest.MonkeyPatch, layers: str, helps: bool
) -> None:
    """It does so with windows beside full attention only."""
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    with pytest.raises(UnsupportedEngine, match=r"KV cache groups \(.* older than 0\.32") as refused:
        versions._refuse_kv_cache(CONFIG, kv_cache(layers, 9, 16, caching=True))
    assert ("--disable-hybrid-kv-cache-manager" in str(refused.value)) == helps


def speculating(**changed: Any) -> Any:
    """A configuration with drafts by n-grams, which is served; ``changed``: what is otherwise."""
    of = {"method": "ngram", "is_hybrid": False, "use_mla": False, "asynchronous": False, "order": "fcfs"} | changed
    transfer = {"kv_connector": "KVPolicyConnector", "kv_connector_extra_config": {"order": of["order"]}}
    if of.get("listed"):
        transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [transfer]}}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=of["method"]),
        model_config=SimpleNamespace(is_hybrid=of["is_hybrid"], use_mla=of["use_mla"]),
        scheduler_config=SimpleNamespace(
            async_scheduling=of["asynchronous"], policy="fcfs",
        ),
        kv_transfer_config=SimpleNamespace(**transfer),
    )  # fmt: skip


def refused(feature: str) -> pytest.MarkDecorator:
    return pytest.mark.feature(feature, refused=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"method": "medusa"}, "speculation by medusa, only by ngram, draft_model, eagle, eagle3, mtp"),
        pytest.param({"is_hybrid": True}, "layers keep states", marks=refused("speculation on states")),
        pytest.param(
            {"use_mla": True, "method": "eagle"},
            "speculation by eagle of an MLA model, only by mtp",
            marks=refused("speculation on MLA by another method than MTP"),
        ),
        pytest.param(
            {"asynchronous": True}, "--no-async-scheduling", marks=refused("speculation with asynchronous scheduling")
        ),
        # Both in the words of kvpolicy_vllm.plugin.order_limits.
        pytest.param({"order": "urgent"}, "beside order urgent", marks=refused("speculation with an order")),
        ({"order": "urgent", "listed": True}, "beside order urgent"),
    ],
)
def test_speculation_is_served_only_where_it_was_tested(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    monkeypatch.setattr(versions, "platform", lambda: SimpleNamespace(is_cpu=lambda: False))
    versions._refuse_speculation(speculating())
    with pytest.raises(UnsupportedEngine, match=f"does not serve .*{words}"):
        versions._refuse_speculation(speculating(**changed))


def test_a_cpu_turns_asynchronous_scheduling_off_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    monkeypatch.setattr(versions, "platform", lambda: SimpleNamespace(is_cpu=lambda: True))
    versions._refuse_speculation(speculating(asynchronous=True))


def test_speculation_is_refused_before_0_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(UnsupportedEngine, match=r"older than 0\.32; leave --speculative-config out"):
        versions._refuse_speculation(speculating())


def test_a_build_without_a_version_is_as_old_as_its_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "dev")
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVPolicyConnector", kv_connector_extra_config={"allow_untested_version": True}
        )
    )
    older = kv_cache("full-window", 9, 16, caching=True)
    older.kv_cache_tensors = [SimpleNamespace(size=9, shared_by=["layer"])]
    with pytest.raises(UnsupportedEngine, match=r"older than 0\.32"):
        versions._refuse_kv_cache(config, older)


def test_the_setting_is_a_flag() -> None:
    assert not Settings.read({"policy": "always-swap"}).allow_untested_version
    assert Settings.read({"policy": "always-swap", "allow_untested_version": True}).allow_untested_version
    with pytest.raises(ValueError, match="allow_untested_version"):
        Settings.read({"policy": "always-swap", "allow_untested_version": "yes"})
