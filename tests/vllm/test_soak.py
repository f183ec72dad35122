"""Drawn schedules are clean on the installed vLLM, and on the sources that are here: a short form of `make soak`.

Also: that every version kvpolicy claims to serve is among those that `make soak` runs, that a failure can be replayed,
and that the fuzz sees what it is there to see.
"""

from __future__ import annotations

import gc
import json
import logging
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("vllm")

from kvpolicy.host_store import HostBlock, HostStore
from kvpolicy_vllm.plugin import controller
from kvpolicy_vllm.plugin.messages import Job
from kvpolicy_vllm.plugin.observers import MetricsCounter
from kvpolicy_vllm.plugin.prompt_cache import PromptCache
from kvpolicy_vllm.plugin.versions import NEWEST, OLDEST
from tests.vllm import fuzz, soak
from tests.vllm.models import write_llama
from tests.vllm.setups import Setup
from tests.vllm.symbolic import SymbolicWorker
from tests.vllm.versions import CLAIMED, FETCHED_BY_MAKE, INSTALLED, ROOT, quick_and_others, source_or_skip

pytestmark = pytest.mark.scheduler

Function = TypeVar("Function", bound=Callable[..., None])

SEEDS = range(30)
PRESSED: dict[str, Any] = {
    "scheduling": "fcfs", "order": "fcfs", "adapters": 0, "grammars": False, "prompt_logprobs": False,
    "copies_fail": False, "harried": False, "resets": "none", "pauses": False, "spare_blocks": 2,
    "policy": "always-swap", "requests": 60,
}  # fmt: skip
"""Much swapping, and nothing that goes wrong by itself."""
SESSIONS: dict[str, Any] = PRESSED | {
    "order": "las:quantum=8,promote=5", "asynchronous": False, "sessions": True, "max_running": 16,
}  # fmt: skip
"""Sessions, which few setups draw, are preempted."""


def shows(*features: str) -> Callable[[Function], Function]:
    """Marks a test that shows all of these."""

    def marked(test: Function) -> Function:
        for feature in features:
            test = pytest.mark.feature(feature)(test)
        return test

    return marked


@shows(*fuzz.FEATURES)
@pytest.mark.soak
@pytest.mark.parametrize("version", quick_and_others(INSTALLED, FETCHED_BY_MAKE))
def test_drawn_schedules_are_clean(version: str, tmp_path: Path) -> None:
    source_or_skip(version)
    setups = [Setup.draw(seed) for seed in SEEDS] + [Setup.draw(seed, **SESSIONS) for seed in (100, 101)]
    done = soak.run(version, setups, tmp_path)
    assert len(done.outcomes) == len(setups)
    assert not done.failed, "\n".join([str(done), *done.replays()])
    assert sum(outcome["swaps"] for outcome in done.outcomes) > 150
    featured = {name: sum(outcome["featured"].get(name, 0) for outcome in done.outcomes) for name in fuzz.FEATURES}
    assert min(featured.values()) > 0, featured
    assert sum(outcome["turns"] for outcome in done.outcomes) > 0
    assert sum(outcome["displaced"] for outcome in done.outcomes) > 50


def test_blocks_that_no_step_has_computed_are_not_found(tmp_path: Path) -> None:
    """Under priority scheduling vLLM preempts requests that it has just scheduled, and would find the blocks which that
    step was to fill."""
    setup = Setup.draw(
        248, scheduling="priority", asynchronous=False, prefix_caching=True, token_budget=2048, max_running=16,
        spare_blocks=2, ranks=1, policy="random:0.7", host_gib=0.001, requests=60, max_prompt_tokens=100,
        max_output_tokens=200, stops=False, adapters=0, grammars=False, copies_fail=True, max_late_steps=4,
        harried=True, resets="none", pauses=True, reserves_whole=False, long_prefill=40, throttled=False, pictures=0,
        cache="off",
    )  # fmt: skip
    made = fuzz.Schedule(setup, write_llama(tmp_path))
    withdrawn: list[set[int]] = []
    manager = made.scheduler.kv_cache_manager
    evict_blocks = manager.evict_blocks
    manager.evict_blocks = lambda blocks: (withdrawn.append(blocks), evict_blocks(blocks))[1]
    made.run()
    assert made.outcome().problems == () and len(withdrawn) > 0


@pytest.mark.parametrize("cache", ["off", "cost", "python:tests.careless:Careless"])
def test_an_engine_that_is_given_up_leaves_nothing_behind(
    cache: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its observers outlive it, to be closed; they must not hold all the rest."""
    request.addfinalizer(partial(logging.disable, logging.NOTSET))
    logging.disable(logging.ERROR)  # pytest keeps what is logged, with its frames
    made = fuzz.Schedule(Setup.draw(28, **PRESSED | {"cache": cache, "host_gib": 0.25}), write_llama(tmp_path))
    made.run()
    assert made.outcome().problems == ()
    scheduler = weakref.ref(made.scheduler)
    del made
    gc.collect()
    assert scheduler() is None


def test_every_claimed_version_is_soaked() -> None:
    minors = [tuple(map(int, version.split(".")[:2])) for version in CLAIMED]
    assert minors == [(0, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]
    assert f'"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"' in (ROOT / "pyproject.toml").read_text()
    claims = re.findall(r"vLLM (\d+\.\d+) to (\d+\.\d+)", (ROOT / "README.md").read_text())
    assert claims and set(claims) == {(f"{OLDEST[0]}.{OLDEST[1]}", f"{NEWEST[0]}.{NEWEST[1]}")}


# ---- the setups ----


def test_a_setup_is_made_from_its_repr() -> None:
    drawn = [Setup.draw(seed) for seed in range(50)]
    assert [Setup.parse(repr(setup)) for setup in drawn] == drawn
    assert [Setup.parse(soak.quoted(repr(setup))) for setup in drawn] == drawn
    assert Setup.draw(3, scheduling="fcfs", spare_blocks=1) == replace(drawn[3], scheduling="fcfs", spare_blocks=1)
    assert {setup.scheduling for setup in drawn} == {"fcfs", "priority"}
    assert sum(setup.spare_blocks <= 8 for setup in drawn) > 25, "memory is tight in most of them"


@pytest.mark.parametrize(
    ("text", "named"), [("Setup(seed=1, sede=2)", "sede"), ("Setup(policy='x')", "no seed"), ("Setup(", "form")]
)
def test_a_setup_that_is_none_is_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Setup.parse(text)


# ---- taking up and replaying ----


def outcome(setup: Setup, *problems: str) -> dict[str, Any]:
    return {
        "setup": repr(setup),
        "problems": problems,
        "steps": 1,
        "preemptions": 2,
        "swaps": 1,
        "displaced": 1,
        "waits": [0, 3],
    }


def test_what_is_done_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def pretend(version: str, source: str, job: Path, results: Path) -> None:
        missing = [Setup.parse(text) for text in json.loads(job.read_text())["setups"]]
        asked.append(len(missing))
        lines = [json.dumps(outcome(setup)) + "\n" for setup in missing]
        with results.open("a") as file:
            file.write("".join(lines) if len(asked) > 1 else "".join(lines)[:-20])  # cut off in the last line

    monkeypatch.setattr(soak, "_run_process", pretend)
    setups = [Setup.draw(seed) for seed in range(5)]
    for expected in (4, 5, 5):
        assert len(soak.run(INSTALLED, setups, tmp_path).outcomes) == expected
    assert asked == [5, 1]


def test_a_failure_comes_with_its_replay(tmp_path: Path) -> None:
    failed = Setup.draw(7)
    summary = soak.Summary("0.30.0", (outcome(Setup.draw(1)), outcome(failed, "nothing scheduled")))
    assert "0.30.0: 2 schedules, 1 failed; 2 steps, 2 swaps of 4 preemptions, 2 of them displaced" in str(summary)
    (line,) = summary.replays()
    assert "nothing scheduled" in line and "--versions 0.30.0" in line
    assert Setup.parse(re.search(r"--replay '(.*)'", line)[1]) == failed  # type: ignore[index]


def test_a_schedule_comes_out_alike_when_it_is_replayed(tmp_path: Path) -> None:
    """Also where the policy draws, and where copies fail until swapping is suspended."""
    setups = [Setup.draw(seed, **PRESSED | {"policy": "random:0.7", "copies_fail": True}) for seed in (5, 6)]
    first, second = (soak.run(INSTALLED, setups, tmp_path / name) for name in ("first", "second"))
    assert first.outcomes == second.outcomes
    assert sum(outcome["swaps"] for outcome in first.outcomes) > 10


# ---- the fuzz sees what it looks for ----


def lose_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostStore, "release", lambda store, copy: store._copies.remove(copy))


def save_in_reverse(patch: pytest.MonkeyPatch) -> None:
    begin_save = SymbolicWorker._begin_save

    def reversed_save(worker: SymbolicWorker, job: Job) -> Any:
        return begin_save(worker, replace(job, slots=job.slots[::-1]))

    patch.setattr(SymbolicWorker, "_begin_save", reversed_save)


def name_no_overwritten_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(controller, "written_by_step", lambda scheduler, blocks: set())


def count_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MetricsCounter, "executed", lambda counter, pending: None)


def never_say_that_a_load_is_done(patch: pytest.MonkeyPatch) -> None:
    finished = SymbolicWorker._finished

    def silent(worker: SymbolicWorker, done: list[Any]) -> Any:
        said = finished(worker, done)
        said.finished_recving = None
        return said

    patch.setattr(SymbolicWorker, "_finished", silent)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (lose_slots, "host slots left"),
        (save_in_reverse, "read a wrong position"),
        (name_no_overwritten_block, "read a wrong position"),
        (count_nothing, "preemptions, 0 counted"),
        (never_say_that_a_load_is_done, "nothing scheduled for"),
    ],
)
def test_a_fault_is_seen(fault: Any, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_llama(tmp_path)
    setup = Setup.draw(1, **PRESSED)
    assert fuzz.run(setup, model).problems == ()
    fault(monkeypatch)
    assert any(seen in problem for problem in fuzz.run(setup, model).problems)


# ---- and so of the cache of prompts ----

CACHED: dict[str, Any] = PRESSED | {
    "prefix_caching": True, "cache": "cost", "host_gib": 0.005, "max_prompt_tokens": 300, "max_output_tokens": 30,
}  # fmt: skip


def find_what_is_elsewhere(patch: pytest.MonkeyPatch) -> None:
    def keys(cache: PromptCache, request: Any, first: int, end: int) -> list[Any]:
        return [cache._key_of(value) for value in request.block_hashes[: end - first]]

    patch.setattr(PromptCache, "_keys", keys)


def evict_what_is_loaded(patch: pytest.MonkeyPatch) -> None:
    def freed(store: HostStore, copy: Any) -> None:
        for block in [block for block in copy.blocks if block.slot is not None and block.holders == [copy]]:
            store._unused.append(block.slot)

    hold = HostStore.hold
    patch.setattr(HostStore, "hold", lambda store, copy, keys: (hold(store, copy, keys), freed(store, copy))[0])


def remember_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostStore, "forget_keys", lambda store: None)


def watch_what_is_not_computed(patch: pytest.MonkeyPatch) -> None:
    watch = HostStore.watch

    def shifted(store: HostStore, chain: Any, places: Any) -> list[int]:
        moved = [*places.values()]
        return watch(store, chain, dict(zip(places, [*moved[1:], *moved[:1]], strict=True)))

    patch.setattr(HostStore, "watch", shifted)


def save_too_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostBlock, "cached", property(lambda block: False))


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (find_what_is_elsewhere, "read a wrong position"),
        (evict_what_is_loaded, ""),
        (remember_after_a_reset, "read a wrong position"),
        (watch_what_is_not_computed, ""),
        (save_too_late, ""),
    ],
)
def test_a_fault_of_the_cache_is_seen(fault: Any, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``seen``: what is said of it; nothing where it may show in more than one way."""
    model = write_llama(tmp_path)
    resets = {"resets": "weights"} if fault is remember_after_a_reset else {}
    setup = Setup.draw(2, **CACHED | resets)
    clean = fuzz.run(setup, model)
    assert clean.problems == () and clean.cache_hits > 10 and clean.cache_evicted > 0
    fault(monkeypatch)
    assert any(seen in problem for problem in fuzz.run(setup, model).problems)
