"""kvpolicy's tier of files below the host memory of vLLM's own manager of tiers, which needs no device."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure", reason="tiers of this vLLM have another interface")

from vllm import SamplingParams
from vllm.config import KVTransferConfig, LoRAConfig, SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvpolicy.caching import ByCost
from kvpolicy.errors import InputError
from kvpolicy.tiers import FileTier, digest_of_key
from kvpolicy.tiers.block_files import OUTDATED_NS
from kvpolicy.tiers.block_format import NO_PARENT
from kvpolicy_vllm.file_offloading import BoundedFileTier
from kvpolicy_vllm.plugin import file_namespace, register
from kvpolicy_vllm.plugin.file_reads import MAX_WAIT_S, RENEWED_S
from kvpolicy_vllm.plugin.kv_settings import settings_of
from tests.tiers.blocks import files_of
from tests.tiers.test_file_tier import Gate
from tests.vllm.alone import made_request
from tests.vllm.bare_configs import bare, bare_config, model_of
from tests.vllm.kv_caches import kv_cache
from tests.vllm.models import write_llama

pytestmark = pytest.mark.scheduler

ROW_BYTES = 8192
CHUNKS = 4
MAX_GIB = 20 * (ROW_BYTES + 4096) / (1 << 30)


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM seeds its hashes when an engine starts."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"seed", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", kv_cache_utils.DEFAULT_NONE_HASH_SEED)


def spec(model: Path, **more: Any) -> Any:
    """What a tier is told of the server."""
    group = SimpleNamespace(tokens_per_block=16, layer_names=("layer.0", "layer.1"))
    parallel = SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    config = SimpleNamespace(
        groups=(group,), model=SimpleNamespace(name=str(model), dtype="float16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=4), parallel=parallel,
        worker_kv_bytes_per_block=ROW_BYTES // 4, kv_cache_layout="NHD", replicated_layout=False,
        canonical_layout=False,
    )  # fmt: skip
    for name, value in more.items():
        setattr(config.model if hasattr(config.model, name) else config, name, value)
    return SimpleNamespace(config=config)


def tier_of(vllm_config: Any, settings: dict[str, Any], rows: memoryview, told: Any) -> Any:
    """As vLLM's connector makes it, which has the configuration at hand and passes a part of it."""
    return SecondaryTierFactory.create_secondary_tier(settings, rows, told)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """That of tiers which are made from now on."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(BoundedFileTier, "clock", staticmethod(lambda: clock.now_s))
    return clock


class Server:
    """vLLM's manager of tiers over host memory for a few chunks, and one request after the other."""

    def __init__(self, directory: Path, model: Path, chunks: int = CHUNKS, **more: Any) -> None:
        self._region = SharedOffloadRegion(f"test-{uuid.uuid4().hex}", chunks, None, ROW_BYTES, ROW_BYTES)
        primary = CPUPrimaryTierOffloadingManager(chunks, self._region)
        self.rows = np.asarray(primary.get_kv_memoryview()).view(np.uint8)
        settings = {
            "type": "BoundedFileTier", "module_path": "kvpolicy_vllm.file_offloading", "directory": str(directory),
            "max_gib": MAX_GIB, **more.pop("settings", {}),
        }  # fmt: skip
        config = bare_config(model, **more.pop("vllm", {}))
        try:
            tier = tier_of(config, settings, primary.get_kv_memoryview(), spec(model, **more))
        except (InputError, OSError):
            del self.rows
            primary.shutdown()  # which removes its file in /dev/shm
            raise
        assert isinstance(tier, BoundedFileTier)
        self.tier = tier
        if hasattr(kv_cache_utils, "NONE_HASH"):
            tier._opening.join()
        self.manager = TieringOffloadingManager(primary, [tier])
        self.requests = 0

    def step(self) -> None:
        if self.tier.tier is not None:
            self.tier.tier.wait_idle()
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def serve(self, keys: list[OffloadKey]) -> int:
        """Number of leading chunks that were loaded, with the bytes of each; the others are stored."""
        request = self.begin(keys)
        hits = 0
        for key in keys:
            while (found := self.manager.lookup(key, request)) in (LookupResult.HIT_PENDING, LookupResult.RETRY):
                self.step()
            if found != LookupResult.HIT:
                break
            hits += 1
            (chunk,) = self.manager.prepare_load([key], request).chunk_ids
            assert np.array_equal(self.rows[chunk], bytes_of(key)), "a wrong content was loaded"
            self.manager.complete_load([key], request)
        for key in keys[hits:]:
            assert self.save([key], request)
            self.step()
        self.manager.on_request_finished(request)
        self.step()
        assert not self.manager.has_pending_work()
        return hits

    def begin(self, keys: list[OffloadKey]) -> ReqContext:
        """A new request with these chunks."""
        self.requests += 1
        request = ReqContext(f"r{self.requests}")
        for position, key in enumerate(keys):
            request.set_offload_key_position(key, position + 1)
        self.manager.on_new_request(request)
        return request

    def save(self, keys: list[OffloadKey], request: ReqContext) -> bool:
        """Its chunks come to host memory, and from there to files; False where host memory has no room for them."""
        stored = self.manager.prepare_store(keys, request)
        if stored is None:
            return False
        for one, chunk in zip(stored.keys_to_store, stored.store_spec.chunk_ids, strict=True):
            self.rows[chunk] = bytes_of(one)
        self.manager.complete_store(stored.keys_to_store, request)
        return True

    def stop(self) -> None:
        del self.rows
        self.manager.shutdown()
        assert not self.tier._rows.size, "nobody has a view of host memory, which vLLM unmaps"


def bytes_of(key: OffloadKey) -> np.ndarray:
    return np.frombuffer(np.random.default_rng([*key]).bytes(ROW_BYTES), np.uint8)


def keys_of(prompt: str, chunks: int, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(f"{prompt}/{chunk}".encode(), group) for chunk in range(chunks)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def servers(tmp_path: Path, model: Path) -> Iterator[Any]:
    started: list[Server] = []

    def start(**more: Any) -> Server:
        started.append(Server(tmp_path / "kv", more.pop("model", model), **more))
        return started[-1]

    yield start
    for server in started:
        if hasattr(server, "rows"):
            server.stop()


@pytest.mark.feature("BoundedFileTier in vLLM's OffloadingConnector")
def test_chunks_that_left_host_memory_are_loaded_from_files(servers: Any) -> None:
    server = servers()
    prompts = [keys_of(name, 3) for name in "abcd"]
    assert [server.serve(keys) for keys in prompts] == [0, 0, 0, 0]
    assert [server.serve(keys) for keys in prompts] == [3, 3, 3, 3], "host memory holds four chunks"
    usage = server.tier.tier.usage()
    assert usage.counts["loaded"] >= 9 and usage.blocks == 12


@pytest.mark.parametrize("policy", ["lru", "lfu", "cost"])
def test_what_is_asked_for_again_stays_though_more_comes_than_files_hold(servers: Any, policy: str) -> None:
    """Twenty chunks; vLLM tells of no use, but that it looks them up."""
    server = servers(settings={"eviction_policy": policy})
    found = []
    for number in range(10):
        server.serve(keys_of(str(number), 3))
        found.append(server.serve(keys_of("a", 3)))
    assert found == [0, *[3] * 9]


def test_chunks_that_come_one_by_one_are_parts_of_one_prompt(servers: Any) -> None:
    """As those of a prompt that is computed in several steps: each follows the one before it."""
    server = servers()
    server.serve(keys_of("a", 3))
    names = server.tier.tier._there.values()
    first, second, third = (digest_of_key(key) for key in keys_of("a", 3))
    assert {name.key: name.parent for name in names} == {first: NO_PARENT, second: first, third: second}


class CountedKey(bytes):
    """A chunk's key. Counts how often any of them is put in a set or a dictionary, or looked up there."""

    lookups = 0

    def __hash__(self) -> int:
        CountedKey.lookups += 1
        return super().__hash__()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_store_costs_the_same_however_much_its_request_has_generated(servers: Any, groups: int) -> None:
    """On the scheduler's thread, where each chunk that is full is a job of its own."""
    server = servers(chunks=16)
    request, costs = server.begin([]), []
    for number in range(64):
        keys = [OffloadKey(CountedKey(make_offload_key(f"a/{number}".encode(), group))) for group in range(groups)]
        for key in keys:
            request.set_offload_key_position(key, number + 1)
        before = CountedKey.lookups
        server.tier.submit_store(TransferJob(number, keys, range(groups), False, request))
        costs.append(CountedKey.lookups - before)
        server.tier.tier.wait_idle()
        assert [(job.job_id, job.success) for job in server.tier.get_finished_jobs()] == [(number, True)]
    assert {*costs[1:]} == {costs[-1]}, "from the second on, which has one before it"


def test_no_more_of_a_prompt_is_found_than_host_memory_holds(servers: Any) -> None:
    """vLLM brings all that is found before it loads any: it would never have all of six chunks in memory of four."""
    server = servers()
    keys = keys_of("a", 6)
    server.serve(keys)
    server.serve(keys_of("b", 4))
    asked = server.begin(keys)
    assert [server.tier.lookup(key, asked) for key in keys] == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 2


def test_chunks_that_a_request_has_generated_have_their_places_in_host_memory(servers: Any) -> None:
    """vLLM names them as they come, and asks for them when the request comes back from a preemption."""
    server = servers()
    keys = keys_of("a", 6)
    server.serve(keys)
    server.serve(keys_of("b", 4))
    asked = server.begin(keys[:2])
    assert server.tier.lookup(keys[0], asked) is LookupResult.HIT
    for position, key in enumerate(keys[2:], 3):
        asked.set_offload_key_position(key, position)
    assert [server.tier.lookup(key, asked) for key in keys] == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 2


def test_a_prompt_has_no_room_in_what_stores_hold(servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives up none of these chunks for it, but those of its beginning, which it would have to bring again."""
    server = servers(chunks=16)
    keys = keys_of("a", 16)
    server.serve(keys)
    gate = Gate(monkeypatch, "writev")
    try:
        assert server.save(keys_of("b", 3), server.begin(keys_of("b", 3)))
        asked = server.begin(keys)
        assert [server.tier.lookup(key, asked) for key in keys] == [LookupResult.HIT] * 13 + [LookupResult.MISS] * 3
    finally:
        gate.open()
    server.tier.tier.wait_idle()
    server.tier._take_finished()
    assert server.tier.lookup(keys[-1], asked) is LookupResult.HIT


def test_it_is_found_by_its_name_alone_once_the_plugin_is_loaded(servers: Any) -> None:
    """Possibly twice, as vLLM may load it."""
    register()
    register()
    server = servers(settings={"type": "kvpolicy-files", "module_path": None})
    server.serve(keys_of("a", 3))
    server.serve(keys_of("b", 4))
    assert server.serve(keys_of("a", 3)) == 3 and server.tier.tier.usage().counts["loaded"] >= 3


def test_chunks_have_one_price_by_cost_as_well(servers: Any) -> None:
    """Nothing there predicts what a chunk costs to compute; how often one comes back decides."""
    server = servers(settings={"eviction_policy": "cost"})
    for number in range(12):
        server.serve(keys_of(str(number), 3))
    policy = server.tier.tier._policy
    assert isinstance(policy, ByCost) and len({policy._price(position) for position in range(1000)}) == 1
    assert server.tier.tier.usage().counts["evicted"] > 10


def test_a_restart_finds_the_files(servers: Any, tmp_path: Path) -> None:
    first = servers()
    keys = keys_of("a", 3)
    first.serve(keys)
    first.stop()
    assert servers().serve(keys) == 3 and len(files_of(tmp_path / "kv")) == 3


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {}, "seed": {}, "identity": {"settings": {"identity": "adapter 2"}},
    "dtype": {"dtype": "bfloat16"}, "layout": {"kv_cache_layout": "HND"},
    "block size": {"groups": (SimpleNamespace(tokens_per_block=32, layer_names=("layer.0", "layer.1")),)},
    "chunk size": {"cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2)},
    "tokens of a hash": {"cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=4)},
    "layers": {"groups": (SimpleNamespace(tokens_per_block=16, layer_names=("layer.0", "layer.2")),)},
    "ranks": {"parallel": SimpleNamespace(world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)},
    "bytes of a worker": {"worker_kv_bytes_per_block": ROW_BYTES // 8},
    "quantization": {"vllm": {"quantization": "fp8"}}, "rope": {"vllm": {"hf_config": model_of(5e5)}},
    "longest context": {"vllm": {"max_model_len": 8192}}, "drawn weights": {"vllm": {"load_format": "dummy"}},
    "drafter": {"vllm": {"speculative_config": bare(SpeculativeConfig, method="ngram")}}, "environment": {},
    "device": {},
}  # fmt: skip
"""What may differ between two servers whose chunks have the same keys and as many bytes. Of vLLM's settings these are
examples: all of them are in tests/vllm/test_kv_settings.py."""


@pytest.mark.parametrize("other", OTHERS)
def test_no_other_server_finds_them(servers: Any, model: Path, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = servers()
    first.serve(keys_of("a", 3))
    first.stop()
    if other == "weights":
        (model / "model.safetensors").write_bytes(b"WEIGHTS")
    elif other == "seed":
        monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"other")
    elif other == "environment":
        monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    elif other == "device":
        monkeypatch.setattr(file_namespace, "device_name", lambda: "another")
    assert servers(**OTHERS[other]).serve(keys_of("a", 3)) == 0


def test_groups_are_apart(servers: Any) -> None:
    server = servers()
    server.serve(keys_of("a", 2))
    server.serve(keys_of("b", 4))
    assert server.serve(keys_of("a", 2, group=1)) == 0


OWNERS: dict[str, list[dict[str, Any]]] = {
    "salts": [{"cache_salt": name} for name in ("mine", "another")],
    "adapters": [
        {"lora_request": LoRARequest(name, number, "/nowhere")} for number, name in enumerate(("mine", "another"), 1)
    ],
}


@pytest.mark.parametrize("kind", OWNERS)
def test_salts_and_adapters_are_apart(servers: Any, kind: str) -> None:
    """By vLLM's own hashes, which have the salt of the request and the name of its adapter."""

    def keys(owner: dict[str, Any]) -> list[OffloadKey]:
        request = made_request(0, [*range(48)], SamplingParams(), **owner)
        return [make_offload_key(one, 0) for one in request.block_hashes]

    keys({})  # which seeds the hashes
    server, (mine, another) = servers(), OWNERS[kind]
    assert server.serve(keys(mine)) == 0
    server.serve(keys_of("b", 4))
    assert [server.serve(keys(owner)) for owner in (another, {}, mine, another, {})] == [0, 0, 3, 3, 3]


def test_a_damaged_file_is_computed(servers: Any, tmp_path: Path) -> None:
    server = servers()
    server.serve(keys_of("a", 3))
    server.serve(keys_of("b", 4))
    for path in files_of(tmp_path / "kv"):
        os.truncate(path, 4096)
    assert server.serve(keys_of("a", 3)) == 0
    assert server.tier.tier.usage().counts["missed_truncated"] > 0


def test_the_bound_holds(servers: Any, tmp_path: Path) -> None:
    server = servers()
    for number in range(12):
        server.serve(keys_of(str(number), 3))
    assert sum(path.stat().st_size for path in files_of(tmp_path / "kv")) <= MAX_GIB * (1 << 30)
    assert server.tier.tier.usage().counts["evicted"] > 10


def test_a_slow_disk_holds_a_quarter_of_host_memory(servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives up no chunk of a store that has not ended: what exceeds that is not stored, and saves go on."""
    server = servers(chunks=16)
    gate = Gate(monkeypatch, "writev")
    one, two, three, many = (keys_of(name, chunks) for name, chunks in [("a", 3), ("b", 3), ("c", 1), ("d", 12)])
    requests = [server.begin(keys) for keys in (one, two, three, many)]
    try:
        for keys, request in zip((one, two, three), requests, strict=False):
            assert server.save(keys, request)
        assert server.tier.tier.usage().queued_blocks == 4, "the second one of three would hold too much"
        server.manager.on_schedule_end(ScheduleEndContext((), ()))  # vLLM hears what was refused
        assert server.save(many, requests[3]), "host memory has room but for what stores hold"
    finally:
        gate.open()
    for request in requests:
        server.manager.on_request_finished(request)
    server.step()
    server.step()
    assert not server.manager.has_pending_work()
    assert [[server.tier.tier.lookup([key]) for key in keys] for keys in (one, two, three)] == [[1] * 3, [0] * 3, [1]]


def hang(server: Server, gate: Gate, keys: list[OffloadKey]) -> ReqContext:
    """A request that waits for these chunks, which are being read."""
    request = server.begin(keys)
    assert {server.manager.lookup(key, request) for key in keys} == {LookupResult.HIT_PENDING}
    server.manager.on_schedule_end(ScheduleEndContext((), ()))
    assert gate.began.wait(60.0)
    return request


def test_on_a_disk_that_hangs_new_requests_go_on_and_it_is_used_again_once_it_does(
    servers: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = servers(chunks=8)
    one, two = keys_of("a", 3), keys_of("b", 3)
    for keys in (one, two, keys_of("c", 8)):
        server.serve(keys)
    gate = Gate(monkeypatch, "readv")
    try:
        waiting = hang(server, gate, one)
        clock.now_s += MAX_WAIT_S - 0.1
        assert server.manager.lookup(two[0], server.begin(two)) is LookupResult.HIT_PENDING
        server.manager.on_schedule_end(ScheduleEndContext((), ()))
        clock.now_s += 0.1
        new = server.begin(two)
        assert [server.manager.lookup(key, new) for key in two[1:]] == [LookupResult.MISS] * 2
        assert server.manager.lookup(one[0], waiting) is LookupResult.HIT_PENDING, "its memory may still be written to"
        clock.now_s += MAX_WAIT_S
        assert server.manager.lookup(two[1], new) is LookupResult.MISS
        assert len(server.tier._began) == 2, "nothing is tried as long as a load is under way"
    finally:
        gate.open()
    server.step()
    server.step()
    assert [server.manager.lookup(key, waiting) for key in one] == [LookupResult.HIT] * 3
    assert not server.tier.has_pending_work()
    assert server.manager.lookup(two[1], new) is LookupResult.MISS, "both came late"
    assert server.tier.has_pending_work(), "vLLM steps until the trial has ended, though it has no request"
    server.step()
    server.step()
    assert not server.tier.has_pending_work()
    assert server.manager.lookup(two[1], new) is LookupResult.HIT_PENDING, "a load has come in time, which was a trial"
    server.step()
    server.step()
    assert server.manager.lookup(two[1], new) is LookupResult.HIT
    (chunk,) = server.manager.prepare_load([two[1]], new).chunk_ids
    assert np.array_equal(server.rows[chunk], bytes_of(two[1]))
    server.manager.complete_load([two[1]], new)
    logged = [record.getMessage() for record in caplog.records if "no request waits" in record.getMessage()]
    assert logged and not any("cache_blocks" in text for text in logged), "which vLLM's connector does not have"


def test_a_disk_that_hangs_is_tried_by_one_load_at_a_time(
    servers: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For which nobody waits, and which writes to no host memory of vLLM's."""
    server = servers(chunks=8)
    keys = keys_of("a", 3)
    server.serve(keys)
    server.serve(keys_of("b", 8))
    gate = Gate(monkeypatch, "readv")
    try:
        hang(server, gate, keys[:1])
        tried = []
        for _ in range(3):
            clock.now_s += RENEWED_S
            server.manager.on_schedule_end(ScheduleEndContext((), ()))
            before = server.rows.copy()
            assert [server.manager.lookup(key, server.begin(keys)) for key in keys[1:]] == [LookupResult.MISS] * 2
            tried.append(len(server.tier._began))
        assert tried == [2, 3, 4] and np.array_equal(server.rows, before)
    finally:
        gate.open()
    server.step()
    server.step()
    assert not server.tier._began and not server.manager.has_pending_work()


def test_a_trial_that_was_read_in_time_counts_however_late_vllm_asks(
    servers: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a step that takes long."""
    server = servers(chunks=8)
    keys = keys_of("a", 3)
    server.serve(keys)
    server.serve(keys_of("b", 8))
    gate = Gate(monkeypatch, "readv")
    try:
        hang(server, gate, keys[:1])
        clock.now_s += MAX_WAIT_S
        server.manager.on_schedule_end(ScheduleEndContext((), ()))
    finally:
        gate.open()
    server.step()
    new = server.begin(keys)
    assert server.manager.lookup(keys[1], new) is LookupResult.MISS and server.tier.has_pending_work()
    assert server.tier.tier.wait_idle(60.0)
    clock.now_s += MAX_WAIT_S
    server.step()
    assert server.manager.lookup(keys[1], new) is LookupResult.HIT_PENDING
    server.step()
    server.step()


def test_a_store_of_more_than_that_begins_alone_and_stores_its_first_chunks(servers: Any) -> None:
    server = servers(chunks=16)
    keys = keys_of("a", 6)
    request = server.begin(keys)
    assert server.save(keys, request)
    server.manager.on_request_finished(request)
    server.step()
    server.step()
    assert [server.tier.tier.lookup([key]) for key in keys] == [1] * 4 + [0] * 2
    assert not server.manager.has_pending_work()


def test_after_a_reset_nothing_old_is_found_here_and_nothing_new_elsewhere(servers: Any) -> None:
    server = servers()
    server.serve(keys_of("a", 3))
    server.manager.reset_cache()
    assert server.serve(keys_of("a", 3)) == 0
    server.serve(keys_of("b", 4))
    assert server.serve(keys_of("a", 3)) == 3
    server.serve(keys_of("c", 4))
    server.stop()
    assert servers().serve(keys_of("c", 4)) == 0


def test_what_was_stored_before_a_reset_goes_first(servers: Any) -> None:
    """Files for twenty chunks, sixteen of which two requests have used by then."""
    server = servers(settings={"eviction_policy": "lfu"})
    for _ in range(2):
        for name in "abcd":
            server.serve(keys_of(name, 4))
    server.manager.reset_cache()
    for name in "efgh":
        server.serve(keys_of(name, 4))
    assert server.tier.tier.usage().counts["evicted"] == 12 and server.tier.tier.usage().blocks == 20
    assert [server.serve(keys_of(name, 4)) for name in "efgh"] == [4, 4, 4, 4]


def test_settings_of_memory_and_batches_share_the_files(servers: Any) -> None:
    first = servers()
    first.serve(keys_of("a", 3))
    first.stop()
    others = {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 7, "served_model_name": "mine", "seed": 1}
    assert servers(vllm=others).serve(keys_of("a", 3)) == 3


def test_vllms_own_connector_makes_it_with_the_configuration_at_hand(tmp_path: Path, model: Path) -> None:
    """By no mock-up: settings that it does not pass are found all the same."""
    write_llama(model)
    tier = {"type": "kvpolicy-files", "directory": str(tmp_path / "kv"), "max_gib": 1.0}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 22, "secondary_tiers": [tier]}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    arguments = EngineArgs(
        model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=512, block_size=16,
        kv_transfer_config=KVTransferConfig(**transfer),
    )  # fmt: skip
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = 8
    register()
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_cache("full", 8, 16, True))
    namespace = connector.scheduler.manager.secondary_tiers[0]._namespace
    connector.shutdown()
    assert namespace["settings"] == settings_of(config)


def test_without_the_configuration_it_is_refused(tmp_path: Path, model: Path) -> None:
    settings = {"type": "kvpolicy-files", "directory": str(tmp_path / "kv"), "max_gib": 1.0}
    register()
    with pytest.raises(InputError, match="without its configuration at hand"):
        SecondaryTierFactory.create_secondary_tier(settings, np.zeros((CHUNKS, ROW_BYTES), np.uint8).data, spec(model))


def test_adapters_are_refused_without_an_identity(servers: Any) -> None:
    """vLLM hashes the name and the path of an adapter, which may have other weights tomorrow."""
    adapters = {"lora_config": bare(LoRAConfig)}
    with pytest.raises(InputError, match=r"identity: .* --enable-lora .* whenever the weights of an adapter do"):
        servers(vllm=adapters)
    first = servers(vllm=adapters, settings={"identity": "adapters of Monday"})
    first.serve(keys_of("a", 3))
    first.stop()
    assert servers(vllm=adapters, settings={"identity": "of Tuesday"}).serve(keys_of("a", 3)) == 0


def test_wrong_settings_are_errors_of_the_start(servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="model_files: the server's model is 'some/llm'"):
        servers(model=Path("some/llm"))
    with pytest.raises(InputError, match=r"max_gib 1e-09 holds no file of a chunk, .* give at least 0.001"):
        servers(settings={"max_gib": 1e-9})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "blake3", None)
        with pytest.raises(InputError, match="needs blake3"):
            servers()
    (tmp_path / "kv").mkdir(mode=0o777)
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(InputError, match="chmod"):
        servers()


def test_files_are_open_before_the_first_request_once_hashes_are_seeded(
    servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes its tiers first. The scheduler, which asks for the first time with the first request, waits for no
    search of a directory."""
    before = servers()
    before.serve(keys_of("a", 3))
    before.stop()
    with monkeypatch.context() as patch:
        patch.delattr(kv_cache_utils, "NONE_HASH")
        server = servers()
        assert server.tier.tier is None
        assert server.tier.lookup(keys_of("a", 1)[0], ReqContext("r")) is LookupResult.MISS
    server.tier._opening.join()
    assert server.tier.tier.usage().blocks == 3 and server.serve(keys_of("a", 3)) == 3


def test_a_reset_before_files_are_open_counts_once_they_are(
    servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(kv_cache_utils, "NONE_HASH")
        server = servers()
        server.manager.reset_cache()
    server.tier._opening.join()
    server.serve(keys_of("a", 3))
    files = files_of(tmp_path / "kv")
    assert [path.stat().st_mtime_ns for path in files] == [OUTDATED_NS] * 3, "no other process can ask for these"


def test_files_are_of_no_use_once_another_engine_has_seeded_the_hashes_anew(
    servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two engines of one process with random seeds: keys of both have the second seed then."""
    errors: list[str] = []
    monkeypatch.setattr("kvpolicy_vllm.file_offloading.logger.error", lambda text, *_: errors.append(text))
    server = servers()
    server.serve(keys_of("a", 3))
    assert errors == []
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"of another engine of this process")
    assert server.tier.tier is None, "these are files of other keys"
    for prompt in "bca":
        assert server.serve(keys_of(prompt, 4)) == 0
    assert len(errors) == 1 and "another engine" in errors[0] and "PYTHONHASHSEED" in errors[0]


def test_a_server_that_ends_before_hashes_are_seeded_opens_no_files(
    servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
    server = servers()
    server.stop()
    assert not server.tier._opening.is_alive() and not [*(tmp_path / "kv").iterdir()]


def test_the_end_does_not_wait_for_files_that_hang_while_they_are_opened(
    servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And files that are open later are closed again."""
    begun, gate, open_tier = threading.Event(), threading.Event(), FileTier.open
    closed: list[FileTier] = []

    def hanging(*arguments: Any, **options: Any) -> FileTier:
        begun.set()
        gate.wait()
        tier = open_tier(*arguments, **options)
        monkeypatch.setattr(tier, "close", lambda close=tier.close: (closed.append(tier), close()))
        return tier

    monkeypatch.setattr("kvpolicy_vllm.file_offloading.MAX_HANG_S", 0.01)
    monkeypatch.setattr("kvpolicy_vllm.file_offloading.FileTier.open", hanging)
    with monkeypatch.context() as patch:
        patch.delattr(kv_cache_utils, "NONE_HASH")
        server = servers()
    assert begun.wait(60.0)
    server.tier.shutdown()
    assert server.tier._opening.is_alive()
    gate.set()
    server.tier._opening.join()
    assert server.tier._opened is None and len(closed) == 1


@pytest.mark.parametrize("call", ["writev", "readv"])
def test_the_end_does_not_fail_where_a_disk_hangs(servers: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """vLLM releases its view of host memory and unmaps that, which must stay as long as the disk may read or write
    it."""
    monkeypatch.setattr("kvpolicy_vllm.file_offloading.MAX_HANG_S", 0.01)
    server = servers()
    keys = keys_of("a", 2)
    server.serve(keys)
    server.serve(keys_of("b", 4))
    gate = Gate(monkeypatch, call)
    request = server.begin(keys if call == "readv" else keys_of("c", 1))
    try:
        if call == "readv":
            assert server.manager.lookup(keys[0], request) is LookupResult.HIT_PENDING
            server.manager.on_schedule_end(ScheduleEndContext((), ()))
        else:
            assert server.save(keys_of("c", 1), request)
        assert gate.began.wait(60.0)
        tier = server.tier.tier
        server.stop()
    finally:
        gate.open()
    assert tier.wait_idle(60.0)


def test_a_second_end_does_nothing(servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of files that the first one has closed are others' by then."""
    server = servers()
    server.serve(keys_of("a", 1))
    tier, closed = server.tier.tier, []
    monkeypatch.setattr(tier, "close", lambda *limit_s, close=tier.close: (closed.append(tier), close(*limit_s)))
    server.tier.shutdown()
    server.tier.shutdown()
    assert closed == [tier]


def test_what_has_left_files_is_not_listed_without_end(servers: Any) -> None:
    """Nobody else keeps an account of them."""
    server = servers()
    for number in range(12):
        server.serve(keys_of(str(number), 3))
    assert server.tier.tier.usage().counts["evicted"] > 10 and not server.tier.tier._gone


def test_a_directory_that_is_lost_before_files_are_open_serves_without_them(
    servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(kv_cache_utils, "NONE_HASH")
        server = servers()
        (tmp_path / "kv").rmdir()
        (tmp_path / "kv").write_text("")
    server.tier._opening.join()
    assert server.serve(keys_of("a", 3)) == 0 and server.serve(keys_of("a", 3)) == 3
    assert server.serve(keys_of("b", 4)) == 0 and server.serve(keys_of("a", 3)) == 0


def test_a_random_seed_is_said(servers: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "0123")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    messages: list[str] = []
    monkeypatch.setattr("kvpolicy_vllm.file_offloading.logger.warning", lambda text, *_: messages.append(text))
    servers().serve(keys_of("a", 1))
    assert len(messages) == 1 and "PYTHONHASHSEED" in messages[0]
