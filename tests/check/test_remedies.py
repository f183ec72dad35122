"""Changes with which the plugin would serve a server's arguments: each is tried, here on made-up arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.check import remedies
from kvpolicy_vllm.check.remedies import REMEDIES, Verdict

BY_NAME = {remedy.name: remedy for remedy in REMEDIES}
ATTENTION, STATES = {"kind": "FullAttentionSpec", "block_size": 16}, {"kind": "MambaSpec", "block_size": 128}


def helping(asked: Any, is_served: Callable[[Any], bool], groups: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Where the layers are known of all arguments or of none."""
    return remedies.helping(asked, lambda changed: Verdict(is_served(changed), groups), groups)


def arguments(extra: dict[str, Any] | None = None, **values: Any) -> Any:
    options = {"policy": "cheapest:mine", **(extra or {})}
    transfer = SimpleNamespace(kv_connector="KVPolicyConnector", kv_connector_extra_config=options)
    model = SimpleNamespace(max_model_len=4096)
    return SimpleNamespace(kv_transfer_config=transfer, create_model_config=lambda: model, **values)


def settings(changed: Any) -> dict[str, Any]:
    return dict(changed.kv_transfer_config.kv_connector_extra_config)


def test_only_what_helps_is_named() -> None:
    asked = arguments(pipeline_parallel_size=2, speculative_config={"method": "ngram"})
    assert helping(asked, lambda changed: changed.pipeline_parallel_size == 1) == ["--pipeline-parallel-size 1"]
    assert helping(asked, lambda changed: settings(changed)["policy"] == "always-swap") == ["--policy always-swap"]
    assert helping(asked, lambda changed: False) == []


@pytest.mark.parametrize("given", [{"speculative_config": {"method": "ngram"}}, {"spec_method": "ngram"}])
def test_a_server_that_drafts_by_any_flag_does_not_without_all_of_them(given: dict[str, Any]) -> None:
    asked = arguments(**(dict.fromkeys(("speculative_config", "spec_method")) | given))

    def drafts(changed: Any) -> bool:
        return bool(changed.speculative_config or changed.spec_method)

    assert drafts(asked) and helping(asked, lambda changed: not drafts(changed)) == ["no --speculative-config"]


def test_drafts_may_stay_without_asynchronous_scheduling() -> None:
    asked = arguments(async_scheduling=None, speculative_config={"method": "ngram"}, kv_cache_dtype="int8_per_token")
    assert helping(asked, lambda changed: changed.async_scheduling is False) == ["--no-async-scheduling"]
    assert helping(asked, lambda changed: changed.kv_cache_dtype == "auto") == ["--kv-cache-dtype auto"]


def test_a_server_that_goes_on_after_a_failed_step_does_not_without() -> None:
    asked = arguments(enable_fault_tolerance=True)
    name = "no --enable-fault-tolerance and no --fault-tolerance-config"
    assert helping(asked, lambda changed: not changed.enable_fault_tolerance) == [name]


def test_drafts_may_stay_with_as_many_tokens_in_a_step_as_the_model_is_long() -> None:
    """Without drafts that helps nobody, and is not tried."""
    values: dict[str, Any] = {"max_num_batched_tokens": 128, "pipeline_parallel_size": 2}
    for drafts, helps in (({"method": "mtp"}, ["--max-num-batched-tokens 4096"]), (None, [])):
        asked = arguments(speculative_config=drafts, **values)
        assert helping(asked, lambda changed: changed.max_num_batched_tokens == 4096) == helps


@pytest.mark.parametrize("drafts", [None, {"method": "mtp"}])
def test_a_limit_of_the_scheduler_is_raised_to_the_length_of_the_model(drafts: dict[str, Any] | None) -> None:
    """More tokens in a batch change nothing there."""
    asked = arguments(max_num_batched_tokens=128, max_num_scheduled_tokens=64, speculative_config=drafts)
    raised = ["--max-num-scheduled-tokens 4096"]
    assert helping(asked, lambda changed: changed.max_num_scheduled_tokens == 4096) == raised


@pytest.mark.parametrize(("limit", "name"), [(None, "batched"), (1024, "scheduled")])
def test_steps_are_kept_within_a_block_of_states(limit: int | None, name: str) -> None:
    """Where there are states, and by the flag that limits."""
    asked = arguments(max_num_batched_tokens=2048, max_num_scheduled_tokens=limit, enable_prefix_caching=None)

    def is_served(changed: Any) -> bool:
        return getattr(changed, f"max_num_{name}_tokens") == 128 or changed.enable_prefix_caching is False

    within, without = f"--max-num-{name}-tokens 128", "--no-enable-prefix-caching"
    assert helping(asked, is_served, [ATTENTION, STATES]) == [within, without]
    assert helping(asked, is_served, [ATTENTION]) == helping(asked, is_served) == [without]


@pytest.mark.parametrize(("limit", "name"), [(None, "batched"), (1024, "scheduled")])
def test_what_else_is_refused_is_helped_in_small_steps(limit: int | None, name: str) -> None:
    """Of a model with states, whose layers are not made before something else is put right: both flags are named."""
    asked = arguments({"cache": "cost"}, max_num_batched_tokens=2048, max_num_scheduled_tokens=limit)

    def judge(changed: Any) -> Verdict:
        if settings(changed).get("cache") != "off":
            return Verdict(False)
        return Verdict(getattr(changed, f"max_num_{name}_tokens") == 128, [ATTENTION, STATES])

    within = f"--max-num-{name}-tokens 128"
    assert remedies.helping(asked, judge) == [f"--cache off, and {within}"]
    assert "cache" in settings(asked) and asked.max_num_batched_tokens == 2048
    small = BY_NAME["--cache off"].changed(asked)
    assert remedies.helping(small, judge, [ATTENTION, STATES]) == [within], "one change is enough"


def test_an_environment_holds_for_small_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.delenv(name, raising=False)
    asked = arguments(max_num_batched_tokens=2048)

    def judge(changed: Any) -> Verdict:
        return Verdict(os.environ.get(name) == "0" and changed.max_num_batched_tokens == 128, [STATES])

    assert remedies.helping(asked, judge) == [f"{name}=0 in the environment, and --max-num-batched-tokens 128"]
    assert name not in os.environ


def test_one_change_is_tried_at_a_time_and_none_stays() -> None:
    asked = arguments(pipeline_parallel_size=2, speculative_config={"method": "ngram"})
    tried: list[tuple[int, bool, str]] = []

    def is_served(changed: Any) -> bool:
        found = changed.pipeline_parallel_size, changed.speculative_config is None, settings(changed)["policy"]
        tried.append(found)
        return False

    helping(asked, is_served)
    assert (1, False, "cheapest:mine") in tried and (2, True, "cheapest:mine") in tried
    assert (2, False, "always-swap") in tried and (1, True, "cheapest:mine") not in tried
    assert asked.pipeline_parallel_size == 2 and settings(asked) == {"policy": "cheapest:mine"}


def test_what_is_so_already_is_not_tried() -> None:
    asked = arguments({"policy": "always-swap", "order": "urgent"}, pipeline_parallel_size=1)
    assert not BY_NAME["--pipeline-parallel-size 1"].changes(asked)
    assert not BY_NAME["--policy always-swap"].changes(asked)
    assert BY_NAME["--order fcfs"].changes(asked)


def test_states_on_model_runner_v2_may_be_allowed_or_the_runner_left(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, allowed = "VLLM_USE_V2_MODEL_RUNNER", "allow_untested_states_v2"
    monkeypatch.setenv(runner, "1")

    def is_served(changed: Any) -> bool:
        return os.environ[runner] == "0" or settings(changed).get(allowed) is True

    assert helping(arguments(), is_served) == [f"{runner}=0 in the environment", "--allow-untested-states-v2"]
    assert not BY_NAME["--allow-untested-states-v2"].changes(arguments({allowed: True}))


def test_an_argument_that_this_vllm_does_not_have_is_no_remedy() -> None:
    assert not BY_NAME["--mamba-cache-mode align"].changes(arguments())
    assert not hasattr(BY_NAME["--order fcfs"].changed(arguments()), "mamba_cache_mode")


@pytest.mark.parametrize("before", [None, "1"])
def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    name = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    assert helping(arguments(), lambda changed: os.environ.get(name) == "0") == [f"{name}=0 in the environment"]
    assert os.environ.get(name) == before
