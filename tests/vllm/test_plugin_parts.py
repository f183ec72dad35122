"""The plugin's parts by themselves: copies, segments, the recorder on a bad disk."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.engine.arg_utils import EngineArgs

from kvpolicy import trace
from kvpolicy.hardware import Geometry
from kvpolicy.hardware.link import GivenLink
from kvpolicy.trace import Header
from kvpolicy_vllm.plugin import recording
from kvpolicy_vllm.plugin.connector import cores_here
from kvpolicy_vllm.plugin.copier import IDLE_NAP_S, IndexingCopier, segments_of, unique_segments
from kvpolicy_vllm.plugin.copies import CopyBook
from kvpolicy_vllm.plugin.jobs import Job, Transfer
from kvpolicy_vllm.plugin.metrics import KVPolicyStats, Tally
from kvpolicy_vllm.plugin.recording import Recorder
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.situation import geometry_of
from tests.shape.configs import LLAMA_31_8B, MIXTRAL_8X7B, QWEN3_30B_A3B


def ack(copy_id: int, direction: Any, ok: bool = True) -> Transfer:
    return Transfer(copy_id, direction, ok, 100, 1, 100, False, 0, 0.0, 1.0, 2.0)


class TestCopies:
    def test_a_whole_life(self) -> None:
        book = CopyBook(slots=4, ranks=1, block_bytes=100)
        copy = book.save("r", "p", 40, (7, 8, 9))
        assert book.pool.used == 3 and book.queued_bytes("save") == 300
        jobs = book.take_jobs(0, idle=False)
        assert jobs.saves == (Job(copy.copy_id, "r", (7, 8, 9), copy.slots),)
        assert [settled.ok for settled in book.acknowledge([ack(copy.copy_id, "save")])] == [True]
        assert book.queued_bytes("save") == 0
        assert book.loadable_tokens("r", 100, 16) == 24
        book.begin_load("r", 1, (1, 2), 24)
        assert book.loadable_tokens("r", 100, 0) == 0
        assert book.take_jobs(1, idle=False).loads == (Job(copy.copy_id, "r", (1, 2), copy.slots[1:]),)
        assert book.pool.used == 3
        book.acknowledge([ack(copy.copy_id, "load")])
        assert book.pool.used == 0 and len(book) == 0

    def test_all_ranks_must_finish(self) -> None:
        book = CopyBook(slots=4, ranks=2, block_bytes=100)
        copy = book.save("r", "p", 10, (1,))
        book.take_jobs(0, idle=False)
        assert book.acknowledge([ack(copy.copy_id, "save")]) == []
        assert [settled.ok for settled in book.acknowledge([ack(copy.copy_id, "save", ok=False)])] == [False]
        assert book.of("r") is None and book.pool.used == 0

    def test_a_forgotten_load_keeps_its_slots_until_it_is_done(self) -> None:
        book = CopyBook(slots=1, ranks=1, block_bytes=100)
        copy = book.save("r", "p", 10, (1,))
        book.take_jobs(0, idle=False)
        book.begin_load("r", 0, (2,), 10)
        book.forget("r")
        assert book.of("r") is None and book.pool.free == 0
        book.acknowledge([ack(copy.copy_id, "load")])
        assert book.pool.free == 1

    def test_a_save_that_is_forgotten_before_it_is_handed_over_is_not_made(self) -> None:
        book = CopyBook(slots=1, ranks=1, block_bytes=100)
        book.save("r", "p", 10, (1,))
        book.forget("r")
        assert book.take_jobs(0, idle=False).saves == ()

    def test_a_request_that_comes_back_gets_another_generation(self) -> None:
        book = CopyBook(slots=4, ranks=1, block_bytes=100)
        first = book.save("r", "p1", 10, (1,))
        book.take_jobs(0, idle=False)
        book.forget("r")
        second = book.save("r", "p2", 12, (1,))
        assert second.copy_id != first.copy_id
        assert book.acknowledge([ack(first.copy_id, "save", ok=False)]) == []
        assert book.of("r") is second


@pytest.mark.parametrize(("shape", "permuted"), [((6, 4, 8, 16), (0, 1, 2, 3)), ((2, 6, 8, 4, 16), (0, 1, 2, 3, 4))])
def test_segments_find_every_byte_of_a_block(shape: tuple[int, ...], permuted: tuple[int, ...]) -> None:
    """Blocks outermost, or keys and values apart: the segments of block 3 hold its bytes and no others."""
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).permute(permuted)
    segments = segments_of(tensor, 6)
    dim = shape.index(6)
    ours = torch.cat([segment[3] for segment in segments]).sort().values
    assert torch.equal(ours, tensor.select(dim, 3).reshape(-1).sort().values)


def test_shared_tensors_are_copied_once() -> None:
    tensor = torch.zeros(6, 4, 8)
    assert len(unique_segments({"a": tensor, "b": tensor, "c": torch.zeros(6, 4, 8)}, 6)) == 2


def test_no_dimension_for_the_blocks() -> None:
    with pytest.raises(ValueError, match="has no 7 blocks"):
        segments_of(torch.zeros(6, 4), 7)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_simulated_link_serves_one_transfer_at_a_time() -> None:
    clock = Clock()
    copier = IndexingCopier([torch.ones(8, 250)], 8, False, GivenLink(1000.0, 0.5), clock, clock.sleep)
    copier.save(Job(1, "a", (0, 1), (0, 1)))  # 2 blocks of 1000 bytes: 0.5 s + 2 s
    assert clock.now == 2.5
    copier.load(Job(1, "a", (2, 3), (0, 1)))
    copier.save(Job(2, "b", (4,), (2,)))
    assert clock.now == 4.0 and copier.poll() == []
    copier.load(Job(2, "b", (5,), (2,)))
    clock.sleep(1.0)
    assert [done.job.request_id for done in copier.poll()] == ["a"]
    clock.sleep(1.5)
    assert [done.job.request_id for done in copier.poll()] == ["b"]
    load = copier.transfers[-1]
    assert (load.submit_s, load.start_s, load.end_s, load.queued_bytes) == (4.0, 5.0, 6.5, 2000)


def test_an_idle_engine_naps_while_only_the_device_knows() -> None:
    """Without a simulated link nobody can tell when a load ends: a nap each time it is asked for, none when busy."""
    clock, there = Clock(), []

    class Slow(IndexingCopier):
        def copied_in(self, job: Job) -> bool:
            return bool(there)

    copier = Slow([torch.ones(8, 250)], 8, False, None, clock, clock.sleep)
    copier.save(Job(1, "a", (0,), (0,)))
    copier.load(Job(1, "a", (3,), (0,)))
    assert copier.poll() == [] and clock.now == 0.0
    assert copier.poll(idle=True) == [] and clock.now == IDLE_NAP_S
    there.append(True)
    assert [done.ok for done in copier.poll(idle=True)] == [True] and clock.now == IDLE_NAP_S


def test_a_copy_that_was_dropped_cannot_be_loaded() -> None:
    copier = IndexingCopier([torch.ones(8, 250)], 8, False, None)
    copier.save(Job(1, "a", (0,), (0,)))
    copier.drop([1])
    copier.load(Job(1, "a", (3,), (0,)))
    assert [done.ok for done in copier.poll()] == [False]


def header() -> Header:
    return Header(
        "run", "production", "2026-01-01T00:00:00Z", "vllm 0", {"device": "cpu"}, {}, 32, 100, 10, 4, "always-swap"
    )


ROW = {
    "request": "r", "arrival_s": 0.0, "first_token_s": None, "last_token_s": None, "prompt_tokens": 1,
    "output_tokens": 0, "preemptions": 0, "recomputed_tokens": 0, "loaded_tokens": 0, "finish": "abort",
}  # fmt: skip


class TestRecorder:
    def test_rows_come_back(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path / "trace" / "core", header(), part_rows=2)
        for _ in range(5):
            recorder.add("requests", ROW)
        recorder.close()
        assert trace.read(tmp_path / "trace").table("requests").num_rows == 5
        assert len(list((tmp_path / "trace" / "core" / "requests").iterdir())) == 3
        assert recorder.dropped == 0

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        recorder = Recorder(tmp_path / "file" / "core", header())
        recorder.add("requests", ROW)
        recorder.close()
        assert recorder.dropped == 1

    def test_a_disk_that_does_not_keep_up(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path / "trace" / "core", header(), most_waiting=3, part_s=1e9)
        with recorder._writing:  # the writer is stuck
            for _ in range(10):
                recorder.add("requests", ROW)
        recorder.close()
        assert recorder.dropped == 7
        assert trace.read(tmp_path / "trace").table("requests").num_rows == 3

    def test_a_disk_that_hangs_keeps_nobody_at_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As a network folder whose server is gone: neither raises nor returns."""
        back = threading.Event()
        monkeypatch.setattr(recording, "write_part", lambda *arguments: back.wait())
        recorder = Recorder(tmp_path / "trace" / "core", header(), part_rows=2, close_s=0.2)
        for _ in range(5):
            recorder.add("requests", ROW)
        with caplog.at_level(logging.WARNING):
            recorder.close()
        back.set()
        assert recorder.dropped == 5
        assert "dropping 5 records" in caplog.text


def test_counters_add_up_and_gauges_stand() -> None:
    tally = Tally()
    tally.add("fallbacks", reason="host_full")
    tally.set("host_slots_used", 3)
    first = tally.report()
    assert first is not None and tally.report() is None
    tally.add("fallbacks", 2, reason="host_full")
    tally.set("host_slots_used", 0)
    second = tally.report()
    assert second is not None
    both = first.aggregate(second)
    assert both.data == {"counters": {"fallbacks|reason=host_full": 3}, "gauges": {"host_slots_used": 0}}
    assert KVPolicyStats().is_empty() and not both.is_empty()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "policy"),
        ({"policy": "always-swap", "hostgib": 1}, "hostgib"),
        ({"policy": "always-swap", "shadow": "yes"}, "shadow"),
        ({"policy": "always-swap", "seed": 1.5}, "seed"),
        ({"policy": "always-swap", "host_gib": float("inf")}, "host_gib"),
        ({"policy": "always-swap", "link": "1e9,-1"}, "link"),
    ],
)
def test_settings_name_what_is_wrong(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings.read(extra)


class TestHostMemory:
    @pytest.fixture(autouse=True)
    def sixteen_gib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvpolicy_vllm.plugin.settings.available_memory_bytes", lambda: 16 << 30)

    def test_every_core_of_this_machine_has_a_pool(self) -> None:
        settings = Settings(policy="always-swap", host_gib=4.0)
        settings.refuse_too_much_memory(cores=2)
        with pytest.raises(ValueError, match=r"4 for each of 3 .* engine cores here, 12 in all, .* give at most 2.7"):
            settings.refuse_too_much_memory(cores=3)
        Settings(policy="always-swap", host_gib=4.0, force_host_gib=True).refuse_too_much_memory(cores=3)

    @pytest.mark.parametrize(("size_local", "rank_local", "cores"), [(1, None, 1), (4, 0, 4), (1, 3, 4), (0, None, 1)])
    def test_cores_are_counted_where_each_is_told_that_it_is_alone(
        self, size_local: int, rank_local: int | None, cores: int
    ) -> None:
        """Of a dense model vLLM tells every core that it is the only one, but leaves it its rank."""
        parallel = SimpleNamespace(data_parallel_size_local=size_local, data_parallel_rank_local=rank_local)
        config: Any = SimpleNamespace(parallel_config=parallel)
        assert cores_here(config) == cores


OPT = {
    "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
    "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (OPT, "OPTForCausalLM"),
        (LLAMA_31_8B, "LlamaForCausalLM"),
        (MIXTRAL_8X7B, "MixtralForCausalLM"),
        (QWEN3_30B_A3B, "Qwen3MoeForCausalLM"),
    ],
)
def test_an_engine_sees_the_geometry_of_the_models_shape(
    tmp_path: Path, config: dict[str, Any], architecture: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    made = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512).create_engine_config()
    assert geometry_of(made) == Geometry.from_config(config)
