"""Prompts in files: a server that is started anew finds what an earlier one computed, and no token changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy.settings import GIB
from tests.tiers.blocks import files_of
from tests.vllm import harness
from tests.vllm.conftest import SCARCE, job
from tests.vllm.test_faults import BLOCK_BYTES

CONVERSATIONS = 6
KEEPS: tuple[dict[str, Any], ...] = tuple({"keep_s": 60, "session": f"s{n}"} if n % 2 else {} for n in range(18))
"""Every second one asks to keep its window."""
EVERY_HINT: tuple[dict[str, Any], ...] = (
    {}, {}, {"keep_s": 60}, {}, {"pin": 64}, {}, {"once": True}, {}, {}, {"once": True, "pin": 96}, {},
    {"session": "a", "keep_s": 60}, {"session": "a", "ended": True},
)  # fmt: skip
"""First turns are all worth storing. A conversation says something else in every turn."""
POLICIES: dict[str, dict[str, Any]] = {
    "lru": {},
    "cost": {
        "policy": "python:tests.priced:dear", "allow_python_policies": True, "cache": "cost",
        "cache_files_policy": "cost", "hints": EVERY_HINT,
    },
    **{name: {"cache": name, "cache_files_policy": name} for name in ("lfu", "arc", "s3fifo")},
}  # fmt: skip
"""Settings of servers by the caching policy of their host memory; prices are such that a load always pays."""
FLEETING: dict[str, Any] = {"host_gib": 50.5 * BLOCK_BYTES / GIB}
"""Host memory in which hardly anything stays until it is asked for again, so that files have to give it."""


@pytest.fixture(scope="module")
def first() -> list[dict[str, Any]]:
    return harness.prompts(CONVERSATIONS, (180, 300), (40, 90), seed=4)


@pytest.fixture(scope="module")
def second(first: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Further turns, each of which begins with a first one."""
    more = harness.prompts(CONVERSATIONS, (20, 60), (30, 60), seed=6)
    return [b | {"prompt": a["prompt"] + b["prompt"]} for a, b in zip(first, more, strict=True)]


@pytest.fixture(scope="module")
def stock(
    model: str, first: list[dict[str, Any]], second: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Unmodified vLLM with memory enough and no prefix caching."""
    workloads = {"first": first, "second": second}
    engine = {"num_gpu_blocks_override": 800}
    work = job(model, [], engine, scenario="several", workloads=workloads, gaps=True)
    return harness.run(work, tmp_path_factory.mktemp("stock"))


class Servers:
    """Engines that are started one after the other with the same folder for files."""

    def __init__(self, model: str, folder: Path, stock: dict[str, dict[str, Any]]) -> None:
        self.files, self._model, self._folder, self._stock = folder / "kv", model, folder, stock
        self.half_written: list[str] = []
        """What engines had half-written in files, and nothing under way, when they were about to end."""

    def job(
        self,
        requests: list[dict[str, Any]],
        policy: str = "always-swap",
        hints: Sequence[dict[str, Any]] = KEEPS,
        **extra: Any,
    ) -> dict[str, Any]:
        """``hints``: what requests say of their windows, in turn."""
        settings = {"cache": "lru", "cache_files": str(self.files), "cache_files_gib": 0.25} | extra
        said = [hints[number % len(hints)] for number in range(len(requests))]
        say = [request | ({"says": hint} if hint else {}) for request, hint in zip(requests, said, strict=True)]
        return job(
            self._model, say, SCARCE | {"enable_prefix_caching": True}, scenario="waves",
            plugin=harness.plugin(policy, **settings), waves=[[*range(len(requests))]], overwrite=True,
            files=str(self.files),
        )  # fmt: skip

    def serve(self, name: str, requests: list[dict[str, Any]], ranks: int = 1, **extra: Any) -> dict[str, Any]:
        """Serve requests in an engine of its own; compare every token; return its counters."""
        work = self.job(requests, **extra)
        if ranks > 1:
            work["engine"] = work["engine"] | {"tensor_parallel_size": ranks}
            work |= {"overwrite": False, "only_files": True}  # workers have the device's memory
        return self.judged(name, harness.run(work, self._folder, workers=ranks))

    def judged(self, name: str, result: dict[str, Any]) -> dict[str, Any]:
        """The counters of an engine that has served these requests, every token of which is compared."""
        harness.assert_exact(self._stock[name], result)
        harness.assert_nothing_left(result)
        self.half_written += result["half_written"]
        stats = dict(result["stats"])
        failed = {event: harness.total(stats, event) for event in ("hints_failed", "cache_undecided", "cache_failed")}
        assert not any(failed.values()), failed
        return stats


def counted(stats: dict[str, Any], event: str) -> float:
    return harness.total(stats, "cache_blocks", tier="files", event=event)


@pytest.mark.feature("prompts in files, beyond restarts")
def test_a_server_finds_what_an_earlier_one_computed(
    model: str, first: list[dict[str, Any]], second: list[dict[str, Any]], stock: dict[str, Any], tmp_path: Path
) -> None:
    servers = Servers(model, tmp_path, stock)
    before = servers.serve("first", first)
    assert counted(before, "stored") > 20 and counted(before, "loaded") == 0
    assert len(files_of(servers.files)) >= counted(before, "stored")
    assert not servers.half_written and not list(servers.files.rglob("writing/*"))
    left = len(files_of(servers.files))
    after = servers.serve("second", second)
    assert counted(before, "found") == 0 and counted(after, "found") == left
    for tier in ("host", "files"):
        assert harness.total(before, "hinted_blocks", tier=tier, event="held") > 0
    assert counted(after, "loaded") > 20 and counted(after, "load_failed") == 0
    assert harness.total(after, "cache_loaded_tokens") >= 32 * 10


@pytest.mark.slow
def test_damaged_and_lost_files_are_computed(
    model: str, first: list[dict[str, Any]], second: list[dict[str, Any]], stock: dict[str, Any], tmp_path: Path
) -> None:
    servers = Servers(model, tmp_path, stock)
    servers.serve("first", first)
    for number, path in enumerate(files_of(servers.files)):
        if number % 3 == 0:
            data = bytearray(path.read_bytes())
            data[5000] ^= 16
            path.write_bytes(data)
        elif number % 3 == 1:
            os.truncate(path, 4096)
    after = servers.serve("second", second)
    assert counted(after, "load_failed") > 0


@pytest.mark.slow
@pytest.mark.feature("tensor parallelism")
def test_two_ranks_find_their_parts_of_blocks(
    model: str, first: list[dict[str, Any]], second: list[dict[str, Any]], stock: dict[str, Any], tmp_path: Path
) -> None:
    """Each has files of its own."""
    servers = Servers(model, tmp_path, stock)
    before = servers.serve("first", first, ranks=2)
    assert counted(before, "stored") > 20 and counted(before, "store_failed") == 0
    namespaces = {path.relative_to(servers.files).parts[0] for path in files_of(servers.files)}
    assert len(namespaces) == 2, "a rank's part of a block is no other rank's"
    left = len(files_of(servers.files))
    after = servers.serve("second", second, ranks=2)
    assert 20 < counted(after, "found") <= left / 2
    assert counted(after, "loaded") > 20 and counted(after, "load_failed") == 0


@pytest.mark.slow
def test_another_number_of_ranks_finds_nothing(
    model: str, first: list[dict[str, Any]], second: list[dict[str, Any]], stock: dict[str, Any], tmp_path: Path
) -> None:
    servers = Servers(model, tmp_path, stock)
    before = servers.serve("first", first, ranks=2)
    after = servers.serve("second", second)
    assert counted(before, "stored") > 20
    assert counted(after, "found") == counted(after, "loaded") == counted(after, "load_failed") == 0
