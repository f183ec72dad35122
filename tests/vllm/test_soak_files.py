"""Drawn schedules with a cache of prompts, files below it and hints: in orders of service, over two ranks, with resets,
aborts, forced preemptions, and copies and files that fail, are lost or come late.

vLLM's scheduler alone drives the worker: every position that a step reads is compared with what has to be there.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy.caching import KINDS
from kvpolicy_vllm.plugin import file_index
from kvpolicy_vllm.plugin.file_index import SHARE, FileIndex
from kvpolicy_vllm.plugin.file_reads import MAX_WAIT_S
from kvpolicy_vllm.plugin.messages import FileJob, FileReport
from tests.vllm import fuzz, harness
from tests.vllm.models import write_llama
from tests.vllm.setups import Setup
from tests.vllm.symbolic_files import SymbolicFiles
from tests.vllm.test_soak import CACHED

pytestmark = pytest.mark.scheduler

HINTS: tuple[dict[str, Any], ...] = (
    {}, {}, {"keep_s": 100, "session": "a"}, {"keep_s": 1, "session": "b"}, {"session": "a", "ended": True},
    {"once": True}, {"once": True, "pin": 40}, {"pin": True},
)  # fmt: skip
DEAR, RELUCTANT = "python:tests.priced:dear", "python:tests.caching.reluctant:Reluctant"
"""A policy by whose prices a load always pays, and a caching policy that never makes room for newcomers."""
FILE_POLICIES = tuple(KINDS)
FEW, MANY = range(3), range(3, 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def setup_of(seed: int, **fixed: Any) -> Setup:
    rng = random.Random(f"files {seed}")
    drawn: dict[str, Any] = {
        "cache": rng.choice([*KINDS, "cost", RELUCTANT]), "host_gib": rng.choice([0.001, 0.002, 0.005]),
        "ranks": rng.choice([1, 1, 2]), "resets": rng.choice(["none", "weights", "cache"]),
        "harried": rng.random() < 0.5, "copies_fail": rng.random() < 0.5, "asynchronous": rng.random() < 0.5,
        "order": rng.choice(["fcfs", "urgent", "mlfq:base=4", "reserve:.2"]),
        "policy": rng.choice(["always-swap", "threshold:64", DEAR]), "adapters": 0, "pictures": 0,
    }  # fmt: skip
    return Setup.draw(seed, **CACHED | drawn | fixed)


class HangingFiles(SymbolicFiles):
    """A third of the jobs end long after nobody waits for them, and a fifth are not reported before the end."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.withheld: list[FileReport] = []

    def _later(self) -> int:
        late = round(self._chance.uniform(1, 3) * MAX_WAIT_S / fuzz.STEP_S) if self._chance.random() < 1 / 3 else 0
        return super()._later() + late

    def _do(self, job: FileJob) -> FileReport:
        report = super()._do(job)
        if random.Random(job.number).random() >= 0.2:
            return report
        self.withheld.append(report)
        return FileReport()


def served(
    setup: Setup, model: Path, folder: Path, patch: pytest.MonkeyPatch, worker: type[SymbolicFiles] = SymbolicFiles
) -> tuple[list[str], fuzz.Schedule]:
    """What was wrong, and the schedule, at whose end no file is being read or written."""
    plugin = harness.plugin
    below = {"cache_files": str(folder), "cache_files_policy": FILE_POLICIES[setup.seed % len(FILE_POLICIES)]}
    patch.setenv("PYTHONHASHSEED", "0")
    patch.setattr(fuzz, "SymbolicWorker", worker)
    patch.setattr(file_index, "RENEWED_S", 10 * fuzz.STEP_S)  # after a store that failed others are tried soon
    patch.setattr(harness, "plugin", lambda policy, **more: plugin(policy, **more | below))
    made = fuzz.Schedule(setup, model)
    controller, rng = made.scheduler.kvpolicy, random.Random(f"hints {setup.seed}")
    files = controller.prompts.files
    for request in made.requests:
        request.kv_transfer_params = {"kvpolicy": rng.choice(HINTS)}
    made.run()
    for _ in range(100 if worker is SymbolicFiles else 1000):
        output = made.scheduler.schedule()
        made.scheduler.update_from_output(output, made._execute(output, {}))
    for held_back in made.workers if worker is HangingFiles else ():
        assert 0 < files._held == sum(len(under.blocks) for under in files._late.values()) <= files._pool.total // SHARE
        files.acknowledge(held_back.withheld)
    problems = [*made.problems()]
    left = {"slots": files._held, "jobs": files._under, "stores": files._storing, "loads": files._coming}
    left["contents"] = files._of_digest
    problems += [f"{what} of files left: {value}" for what, value in left.items() if value]
    counted = {name: harness.total(controller.stats(), name) for name in ("hints_failed", "cache_undecided")}
    return problems + [f"counted {name}" for name, count in counted.items() if count], made


@pytest.mark.feature("prompts in files, beyond restarts")
@pytest.mark.feature("hints about KV")
@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)])
def test_nothing_wrong_is_found_and_nothing_stays(
    seed: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems, made = served(setup_of(seed), model, tmp_path, monkeypatch)
    assert problems == []
    assert sum(worker.stored for worker in made.workers) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_come_from_files(ranks: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sure: dict[str, Any] = {"resets": "none", "policy": "always-swap", "copies_fail": False, "harried": False}
    setup = setup_of(3, host_gib=0.005, cache="lru", ranks=ranks, requests=60, **sure)
    problems, made = served(setup, model, tmp_path, monkeypatch)
    assert problems == [] and all(worker.brought > 5 for worker in made.workers)


@pytest.mark.parametrize("cache", ["cost", RELUCTANT])
@pytest.mark.parametrize("seed", [7, 10])
def test_what_passes_through_host_memory_to_files_is_whole(
    seed: int, cache: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caching policy would leave it out, in the place of what it gives up first; copies and files fail, and both
    are late."""
    handed_on: list[Hashable] = []
    takes = FileIndex.takes

    def watched(index: FileIndex, key: Hashable, blocks: int) -> bool:
        taken = takes(index, key, blocks)
        handed_on.extend([key] * taken)
        return taken

    monkeypatch.setattr(FileIndex, "takes", watched)
    faulty: dict[str, Any] = {"copies_fail": True, "max_late_steps": 4, "harried": True, "resets": "cache"}
    setup = setup_of(seed, host_gib=0.002, cache=cache, policy=DEAR, requests=60, **faulty)
    problems, made = served(setup, model, tmp_path, monkeypatch)
    assert problems == [] and len(handed_on) > 20
    assert all(worker.stored > 20 for worker in made.workers)


@pytest.mark.parametrize("seed", [2, 5])
def test_slots_of_jobs_that_hang_are_not_used_meanwhile(
    seed: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sure: dict[str, Any] = {"resets": "none", "policy": "always-swap", "copies_fail": False, "harried": False}
    setup = setup_of(seed, host_gib=0.002, cache="lru", requests=60, **sure)
    problems, made = served(setup, model, tmp_path, monkeypatch, HangingFiles)
    assert problems == []
    assert harness.total(made.scheduler.kvpolicy.stats(), "cache_blocks", event="late") > 0


def test_a_file_from_before_a_reset_is_seen(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileIndex, "forget", lambda index: None)
    setup = setup_of(1, host_gib=0.002, resets="weights", policy="always-swap", copies_fail=False)
    problems, _ = served(setup, model, tmp_path, monkeypatch)
    assert any("read a wrong position" in problem for problem in problems)
