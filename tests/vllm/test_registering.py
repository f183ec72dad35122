"""The worker's side is given its KV caches, once or again: whatever was under way ends, and nothing stale is loaded."""

from __future__ import annotations

import gc
import pickle
import shutil
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from kvpolicy.errors import InputError
from kvpolicy.settings import GIB
from kvpolicy.tiers import FileTier, block_format
from kvpolicy_vllm.plugin import connector as connectors
from kvpolicy_vllm.plugin.messages import FileEvent, FileJob, FileReport, Job, StepJobs
from kvpolicy_vllm.plugin.versions import UnsupportedEngine
from tests.vllm import harness

BLOCKS = 8
LAYERS = ("one", "two")
BLOCK_BYTES = len(LAYERS) * 4 * 32 * 64 * 4


def worker(model: str, *tensors: KVCacheTensor, role: KVConnectorRole = KVConnectorRole.WORKER, **extra: Any) -> Any:
    """A connector as a worker makes it, or another ``role``, without an engine around it. ``tensors``: where its layers
    lie."""
    args = EngineArgs(model=model, dtype="float32", skip_tokenizer_init=True, **harness.plugin("always-swap", **extra))
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[*tensors], kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)]
    )
    return KVConnectorFactory.create_connector(args.create_engine_config(), role, cache)


def caches(start: float) -> dict[str, torch.Tensor]:
    """Each block of each layer with a value of its own."""
    by_name = {name: torch.zeros(BLOCKS, 4, 32, 64) for name in LAYERS}
    for number, tensor in enumerate(by_name.values()):
        tensor += start + number * BLOCKS + torch.arange(BLOCKS).reshape(-1, 1, 1, 1)
    return by_name


def step(connector: Any, number: int, **jobs: Any) -> tuple[set[str], int]:
    """One engine step of the worker's side: whose loads it reports, and how many of them failed, of a block each."""
    connector.bind_connector_metadata(StepJobs(number, **jobs))
    connector.start_load_kv(None)
    _, received = connector.get_finished(set())
    connector.clear_connector_metadata()
    # vLLM takes failures by request or, before 0.32, by block.
    failed = len(connector._failed_requests) + len(connector.get_block_ids_with_load_errors())
    return received or set(), failed


def test_the_same_caches_again_change_nothing(model: str) -> None:
    connector, kv = worker(model), caches(1.0)
    connector.register_kv_caches(kv)
    step(connector, 0, saves=(Job(1, "a", (2,), (0,)),))
    copier = connector.copier
    connector.register_kv_caches(dict(kv))
    assert connector.copier is copier
    assert step(connector, 1, loads=(Job(1, "a", (5,), (0,)),)) == ({"a"}, 0)
    assert all(torch.equal(tensor[5], tensor[2]) for tensor in kv.values())


def test_files_are_given_up_by_the_policy_of_the_settings(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was used last goes before what two prompts have asked for, by ``lfu``."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    block = BLOCK_BYTES + block_format.PAGE
    settings = {"cache": "lru", "cache_files": str(tmp_path / "kv"), "cache_files_gib": 2.5 * block / GIB}
    connector = worker(model, **settings, cache_files_policy="lfu")
    connector.register_kv_caches(caches(1.0))
    tier = connector.files._tier
    connector.copier.save(Job(1, "a", (1, 2, 3), (0, 1, 2)))
    for number, prompt in enumerate([b"a", b"a", b"b", b"c"]):
        store = FileJob(number, (prompt,), (number % 3,), (prompt,))
        connector.files.begin(StepJobs(number, file_events=(FileEvent((prompt,)),), file_stores=(store,)))
        tier.wait_idle()
        connector.files.reports()
    assert [tier.lookup([key]) for key in (b"a", b"b", b"c")] == [1, 0, 1]
    connector.files.close()


def test_files_are_given_up_by_lru_where_ones_own_policy_fails(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's side hears of it."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    block = BLOCK_BYTES + block_format.PAGE
    settings = {"cache": "lru", "cache_files": str(tmp_path / "kv"), "cache_files_gib": 2.5 * block / GIB}
    own = {"cache_files_policy": "python:tests.caching.raising:Raising", "allow_python_policies": True}
    connector = worker(model, **settings, **own)
    connector.register_kv_caches(caches(1.0))
    connector.copier.save(Job(1, "a", (1, 2, 3), (0, 1, 2)))
    told: list[FileReport] = []
    for number, prompt in enumerate([b"a", b"b", b"c"]):
        store = FileJob(number + 1, (prompt,), (number,), (prompt,))
        connector.files.begin(StepJobs(number, file_events=(FileEvent((prompt,)),), file_stores=(store,)))
        connector.files._tier.wait_idle()
        told += connector.build_connector_worker_meta().files
    assert [report.policy_failed for report in told if report.policy_failed] == ["evict"]
    assert [connector.files._tier.lookup([key]) for key in (b"a", b"b", b"c")] == [0, 1, 1]
    connector.files.close()


@pytest.mark.parametrize("changes", [False, True])
def test_files_of_weights_that_changed_while_they_were_loaded_are_nobody_elses(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changes: bool
) -> None:
    """Between vLLM's configuration, which goes to the workers, and the caches, which are made with the weights in
    memory."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    llm = shutil.copytree(model, tmp_path / "llm")
    settings = {"cache": "lru", "cache_files": str(tmp_path / "kv"), "cache_files_gib": 0.1}
    found = []
    for server in range(2):
        connector = worker(str(llm), **settings)
        connector._vllm_config = pickle.loads(pickle.dumps(connector._vllm_config))
        if changes and not server:
            weights = next(llm.glob("*.safetensors"))
            weights.write_bytes(weights.read_bytes())
        connector.register_kv_caches(caches(1.0))
        found.append(len(connector.files._tier.digests()))
        connector.copier.save(Job(1, "a", (1,), (0,)))
        connector.files.begin(StepJobs(0, file_stores=(FileJob(0, (b"a",), (0,), (b"a",)),)))
        connector.files._tier.wait_idle()
        connector.files.close()
    assert found == ([0, 0] if changes else [0, 1])
    assert ("found by this server alone" in caplog.text) == changes


def test_what_files_cannot_be_told_apart_by_is_refused_before_weights_are_read(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    plugin = harness.plugin("always-swap", cache="lru", cache_files=str(tmp_path / "kv"), cache_files_gib=0.1)
    args = EngineArgs(model=model, dtype="float32", skip_tokenizer_init=True, enable_lora=True, **plugin)
    with pytest.raises(ValueError, match=r"cache_files: the hash of a block .* leave out --enable-lora"):
        args.create_engine_config()


class Group:
    """The ranks of an engine, one after the other."""

    told: list[Any]

    def __init__(self, rank: int) -> None:
        self.rank_in_group = rank

    def broadcast_object(self, what: Any, src: int) -> Any:
        if self.rank_in_group == src:
            self.told.append(what)
        return self.told[-1]


def test_ranks_have_folders_of_one_number_where_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of another engine has come before this one's, and rank 1 has not."""
    monkeypatch.setattr(connectors, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(Group, "told", [], raising=False)

    def opened(rank: int) -> FileTier:
        monkeypatch.setattr(connectors, "get_tp_group", lambda: Group(rank))
        opening = partial(FileTier.open, tmp_path, {"rank": rank}, 4096, 1 << 20)
        return connectors.in_folders_of_one_number(lambda number: opening(number=number))

    other = FileTier.open(tmp_path, {"rank": 0}, 4096, 1 << 20)
    tiers = [opened(0), opened(1), opened(1)]
    assert [tier.number for tier in tiers] == [1, 1, 0], "the last one finds its number taken"
    for tier in (other, *tiers):
        tier.close()


def test_no_rank_waits_for_the_folder_of_one_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(connectors, "get_tp_group", lambda: Group(0))
    monkeypatch.setattr(Group, "told", [], raising=False)

    def fail(number: int | None) -> FileTier:
        raise InputError("made up")

    with pytest.raises(InputError, match="made up"):
        connectors.in_folders_of_one_number(fail)
    assert Group.told == [None]


def test_files_that_hold_no_block_are_told_by_the_name_of_the_setting(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with pytest.raises(InputError, match=r"cache_files_gib 1e-06 holds no file of a KV block"):
        worker(model, cache="lru", cache_files=str(tmp_path / "kv"), cache_files_gib=1e-6)


def test_a_folder_for_files_that_cannot_be_made_is_told_with_what_would_be_right(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    (tmp_path / "file").write_text("")
    connector = worker(model, cache="lru", cache_files=str(tmp_path / "file" / "kv"), cache_files_gib=0.1)
    with pytest.raises(InputError, match=r"cache_files: nothing can be written to .*file/kv .*give another folder"):
        connector.register_kv_caches(caches(1.0))


def test_other_caches_end_what_was_under_way(model: str) -> None:
    """A load into memory that is given up fails, and so does one of a copy that was made before."""
    connector = worker(model, link="1e9,3600")
    connector.register_kv_caches(caches(1.0))
    step(connector, 0, saves=(Job(1, "a", (2,), (0,)), Job(2, "b", (3,), (1,))))
    assert step(connector, 1, loads=(Job(1, "a", (5,), (0,)),)) == (set(), 0)
    earlier, other = weakref.ref(connector.copier), caches(100.0)
    connector.register_kv_caches(other)
    gc.collect()
    assert earlier() is None, "two host pools at once"
    assert step(connector, 2, loads=(Job(2, "b", (6,), (1,)),)) == ({"a", "b"}, 2)
    assert all(
        torch.equal(tensor, before) for tensor, before in zip(other.values(), caches(100.0).values(), strict=True)
    )
    done = connector.build_connector_worker_meta().done
    assert [(transfer.copy_id, transfer.direction, transfer.ok) for transfer in done] == [
        (1, "save", False), (2, "save", False), (1, "load", False), (2, "load", False),
    ]  # fmt: skip
    assert "registered anew" in done[2].error


def test_files_let_go_of_the_host_pool_before_there_is_another_one(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    connector = worker(model, cache="lru", cache_files=str(tmp_path / "kv"), cache_files_gib=0.1)
    connector.register_kv_caches(caches(1.0))
    store = FileJob(1, (b"a",), (0,), (b"a",))
    step(connector, 0, saves=(Job(1, "a", (2,), (0,)),), file_stores=(store,))
    make, found = connector._make_copier, list[object]()
    before = [weakref.ref(connector.copier), *map(weakref.ref, connector.files._memory)]

    def made(segments: list[torch.Tensor]) -> Any:
        gc.collect()
        found.extend(one() for one in before)
        return make(segments)

    monkeypatch.setattr(connector, "_make_copier", made)
    kv = caches(100.0)
    connector.register_kv_caches(kv)
    assert found == [None] * len(before) and len(found) > 1, "two host pools at once"
    reports = [*connector.build_connector_worker_meta().files]  # a load is asked for when the store is known
    step(connector, 1, file_loads=(FileJob(2, (b"a",), (5,)),))
    connector.files._tier.wait_idle()
    reports += connector.build_connector_worker_meta().files
    assert [(report.number, report.failed) for report in reports if report.number] == [(1, ()), (2, ())]
    assert step(connector, 2, loads=(Job(2, "a", (6,), (5,)),)) == ({"a"}, 0)
    assert kv["one"][6, 0, 0, 0] == 3.0
    connector.files.close()


def test_other_caches_are_served_from_then_on(model: str) -> None:
    connector, kv = worker(model), caches(100.0)
    connector.register_kv_caches(caches(1.0))
    connector.register_kv_caches(kv)
    step(connector, 0, saves=(Job(1, "a", (2,), (0,)),))
    assert step(connector, 1, loads=(Job(1, "a", (5,), (0,)),)) == ({"a"}, 0)
    assert kv["one"][5, 0, 0, 0] == 102.0


PAGE = 4 * 32 * 64
"""Numbers in a block of a layer."""


@pytest.mark.parametrize("layout", ["blocks outermost", "split for the kernel", "a region for each layer"])
def test_blocks_are_found_in_every_layout_that_is_said(model: str, layout: str) -> None:
    """From vLLM 0.31 on. A kernel may take smaller blocks than the scheduler, which are half of its here."""
    packed, memory = layout == "blocks outermost", torch.arange(2 * BLOCKS * PAGE, dtype=torch.float32)
    layer_stride, block_stride = (PAGE, 2 * PAGE) if packed else (BLOCKS * PAGE, PAGE)
    connector = worker(
        model,
        KVCacheTensor(
            size=4 * memory.numel(), layers=list(LAYERS), layer_stride=4 * layer_stride, block_stride=4 * block_stride
        ),
    )
    blocks = memory.as_strided((2, BLOCKS, PAGE), (layer_stride, block_stride, 1))
    shape = (2 * BLOCKS, 4, 16, 64) if layout == "split for the kernel" else (BLOCKS, 4, 32, 64)
    views = [layer.reshape(shape) if not packed else layer.unflatten(1, shape[1:]) for layer in blocks]
    connector.register_kv_caches(dict(zip(LAYERS, views, strict=True)))
    before = blocks.clone()
    step(connector, 0, saves=(Job(1, "a", (2,), (0,)),))
    blocks[:, 2] = 0.0
    assert step(connector, 1, loads=(Job(1, "a", (5,), (0,)),)) == ({"a"}, 0)
    before[:, 5] = before[:, 2]
    before[:, 2] = 0.0
    assert torch.equal(blocks, before)


def test_a_layout_that_takes_blocks_apart_is_refused_when_the_connector_is_made(model: str) -> None:
    """Before the memory is there. Heads are outside of the blocks here, each of which has a quarter of a page there."""
    layer_stride, block_stride = 4 * BLOCKS * PAGE, 4 * PAGE // 4
    apart = KVCacheTensor(
        size=2 * layer_stride, layers=list(LAYERS), layer_stride=layer_stride, block_stride=block_stride
    )
    with pytest.raises(UnsupportedEngine, match="VLLM_KV_CACHE_LAYOUT"):
        worker(model, apart)


def test_workers_compare_their_machines_before_there_is_a_copier(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They alone: the scheduler has no group to ask."""

    def refuse(vllm_config: Any) -> None:
        raise UnsupportedEngine("on several machines")

    monkeypatch.setattr("kvpolicy_vllm.plugin.connector.refuse_several_machines", refuse)
    monkeypatch.setattr("kvpolicy_vllm.plugin.connector.controller_for", lambda *_: None)
    with pytest.raises(UnsupportedEngine, match="on several machines"):
        worker(model)
    worker(model, role=KVConnectorRole.SCHEDULER)


def test_the_machine_may_be_noted_while_the_configuration_is_made(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    monkeypatch.setattr("kvpolicy_vllm.plugin.config_refusals.note_machine", noted.append)
    connector = worker(model)
    assert any(config is connector._vllm_config for config in noted)


def test_forward_passes_are_timed_where_the_scheduler_asks_and_copies_in_between_left_out(model: str) -> None:
    connector = worker(model)
    connector.register_kv_caches(caches(0.0))
    copier = connector.copier

    def slow(job: Job) -> None:
        time.sleep(0.2)
        type(copier).load(copier, job)

    connector.copier.load = slow
    step(connector, 1, saves=(Job(1, "r", (2,), (0,)),))
    assert not connector.build_connector_worker_meta().forwards, "nobody asked"
    connector.bind_connector_metadata(StepJobs(2, loads=(Job(2, "r", (3,), (0,)),), timed=2))
    begin_s = time.perf_counter()
    connector.start_load_kv(None)
    time.sleep(0.05)
    connector.finish_forward()
    without_copies_s = time.perf_counter() - begin_s - 0.2  # at most: a sleep takes as long as it says or longer
    for hook in (connector.wait_for_save, lambda: connector.get_finished(set())):
        time.sleep(0.1)
        hook()
    (forward,) = connector.build_connector_worker_meta().forwards
    assert forward.step == 2 and 0.05 <= forward.seconds <= without_copies_s
