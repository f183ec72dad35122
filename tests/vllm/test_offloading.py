"""kvpolicy's caching policy in vLLM's own manager of host memory, which needs no device."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.cpu.policies.factory", reason="this vLLM has no caching policies to choose")
pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure", reason="caching policies have another interface")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from kvpolicy_vllm.offloading import CostCachePolicy
from kvpolicy_vllm.plugin import offloading_names, register
from tests.caching.test_by_cost import conversations

pytestmark = pytest.mark.scheduler

OURS = ("CostCachePolicy", "kvpolicy_vllm.offloading")
CHUNK_TOKENS = 64


def manager(chunks: int, policy: str = OURS[0]) -> CPUOffloadingManager:
    module = OURS[1] if policy == OURS[0] else None
    return CPUOffloadingManager(chunks, cache_policy=policy, cache_policy_module_path=module)


def keys_of(chain: list[tuple[int, int]], group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(repr(block).encode(), group) for block in chain]


def serve(host: CPUOffloadingManager, number: int, keys: list[OffloadKey]) -> int:
    """One request alone: it loads the leading chunks that are there, as many as are returned, and stores the others."""
    request = ReqContext(f"r{number}")
    for position, key in enumerate(keys):
        request.set_offload_key_position(key, (position + 1) * CHUNK_TOKENS)
    host.on_new_request(request)
    hits = 0
    while hits < len(keys) and host.lookup(keys[hits], request) == LookupResult.HIT:
        hits += 1
    if hits:
        host.prepare_load(keys[:hits], request)
        host.complete_load(keys[:hits], request)
    # In two parts, as a prompt is computed in chunks.
    for part in (keys[hits : (hits + len(keys)) // 2], keys[(hits + len(keys)) // 2 :]):
        stored = host.prepare_store(part, request) if part else None
        if stored is not None:
            host.complete_store(stored.keys_to_store, request)
    host.on_request_finished(request)
    return hits


def hits_of(policy: str, chunks: int, chains: list[list[tuple[int, int]]]) -> int:
    host = manager(chunks, policy)
    return sum(serve(host, number, keys_of(chain)) for number, chain in enumerate(chains))


@pytest.mark.feature("CostCachePolicy in vLLM's OffloadingConnector")
@pytest.mark.parametrize(
    ("seed", "loaded"),
    [
        (0, {OURS[0]: 5958, "lru": 2111, "arc": 2427}),
        (1, {OURS[0]: 6056, "lru": 2326, "arc": 2867}),
        (2, {OURS[0]: 5842, "lru": 2110, "arc": 2622}),
    ],
)
def test_it_is_found_by_its_module_and_keeps_conversations_before_other_prompts(
    seed: int, loaded: dict[str, int]
) -> None:
    """The numbers of chunks that docs/caching.md has."""
    chains = conversations(seed)
    assert {policy: hits_of(policy, 150, chains) for policy in loaded} == loaded
    page = (Path(__file__).parents[2] / "docs" / "caching.md").read_text()
    assert all(f"{chunks:,}" in page for chunks in loaded.values())


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's registry of caching policies, with its own alone, as in a process that has loaded no plugin."""
    known = {name: loader for name, loader in CachePolicyFactory._registry.items() if name != offloading_names.POLICY}
    monkeypatch.setattr(CachePolicyFactory, "_registry", known)
    return known


def test_it_is_found_by_its_name_alone_once_the_plugin_is_loaded(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin is loaded in several processes, and possibly twice in one."""
    with monkeypatch.context() as fresh:
        fresh.delitem(sys.modules, "kvpolicy_vllm.offloading")
        register()
        register()
        assert "kvpolicy_vllm.offloading" not in sys.modules, "imported where nobody has asked for it"
    host = CPUOffloadingManager(8, cache_policy="kvpolicy-cost")
    assert type(host._policy) is CostCachePolicy
    assert serve(host, 0, keys_of([(0, block) for block in range(4)])) == 0
    assert serve(host, 1, keys_of([(0, block) for block in range(6)])) == 4


def test_a_vllm_whose_policies_are_others_starts_as_before(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that tells a policy less, as 0.30, has no such name; neither has one whose registry takes other arguments,
    nor one without a registry."""
    with monkeypatch.context() as older:
        older.delattr(CachePolicy, "on_request_finished")
        register()
    with monkeypatch.context() as newer:
        newer.setattr(CachePolicyFactory, "register_cache_policy", lambda name: None)
        register()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "vllm.v1.kv_offload.cpu.policies.factory", None)
        register()
    assert offloading_names.POLICY not in names
    with pytest.raises(ValueError, match="Unknown cache policy: 'kvpolicy-cost'"):
        CPUOffloadingManager(8, cache_policy="kvpolicy-cost")
    register()
    assert offloading_names.POLICY in names


def test_a_longer_prompt_than_the_memory_holds_what_it_can() -> None:
    host = manager(8)
    assert serve(host, 0, keys_of([(0, block) for block in range(8)])) == 0
    assert serve(host, 1, keys_of([(0, block) for block in range(12)])) == 8
    assert serve(host, 2, keys_of([(1, block) for block in range(20)])) == 0
    assert serve(host, 3, keys_of([(2, block) for block in range(4)])) == 0


def chunk(policy: CostCachePolicy, key: OffloadKey, uses: int = 0) -> None:
    status = ChunkStatus(0)
    status.ref_cnt = uses
    policy.insert(key, status)


def test_nothing_changes_where_not_all_can_be_given_up() -> None:
    policy = CostCachePolicy(4)
    keys = keys_of([(0, block) for block in range(4)])
    for key in keys:
        chunk(policy, key)
    policy.mark_non_evictable(keys[3])
    assert policy.evict(3, {keys[0]}) is None
    assert all(policy.get(key) is not None for key in keys)
    gone = policy.evict(2, {keys[0]})
    assert gone is not None and [key for key, _ in gone] == [keys[2], keys[1]], "of new chunks the last one first"
    assert policy.get(keys[3]) is not None and policy.get(keys[1]) is None


def test_a_chunk_before_one_in_use_goes_only_where_nothing_else_can() -> None:
    policy = CostCachePolicy(4)
    keys, other = keys_of([(0, block) for block in range(3)]), keys_of([(1, 0)])
    for key in (*keys, *other):
        chunk(policy, key)
    request = ReqContext("r")
    policy.on_request_finished((tuple(keys),), set(keys), set(), request)
    policy.on_request_finished((tuple(other),), set(other), set(), request)
    policy.mark_non_evictable(keys[2])
    gone = policy.evict(2, set())
    assert gone is not None and next(key for key, _ in gone) == other[0]
    assert {key for key, _ in gone[1:]} < set(keys[:2])
    policy.mark_evictable(keys[2])
    rest = policy.evict(2, set())
    assert rest is not None and {key for key, _ in (*gone, *rest)} == {*keys, *other} and policy.evict(1, set()) is None


@pytest.mark.parametrize("seed", range(3))
def test_it_gives_up_exactly_what_is_asked_for_whatever_happens(seed: int) -> None:
    """Against a plain account of which chunks are there and in use."""
    rng, policy = random.Random(seed), CostCachePolicy(24)
    there: dict[OffloadKey, int] = {}
    for number in range(1500):
        chain = keys_of([(rng.randrange(6), block) for block in range(rng.randint(1, 9))], rng.randrange(2))
        missing = [key for key in dict.fromkeys(chain) if key not in there]
        excess = len(there) + len(missing) - 24
        if excess > 0:
            protected = set(chain)
            free = [key for key, uses in there.items() if not uses and key not in protected]
            gone = policy.evict(excess, protected)
            assert (gone is None) == (len(free) < excess)
            if gone is None:
                missing = []
            else:
                names = [key for key, _ in gone]
                assert len(set(names)) == excess and set(names) <= set(free)
                there = {key: uses for key, uses in there.items() if key not in names}
        for key in missing:
            uses = rng.choice([0, 0, -1])
            chunk(policy, key, uses)
            there[key] = uses
        if rng.random() < 0.7:
            policy.on_request_finished((tuple(dict.fromkeys(chain)),), set(missing), set(), ReqContext(f"{number}"))
        for key in rng.sample(sorted(there), min(3, len(there))):
            if there[key]:
                if rng.random() < 0.3 and there[key] < 0:
                    policy.remove(key)
                    del there[key]
                else:
                    policy.mark_evictable(key)
                    there[key] = 0
            elif rng.random() < 0.5:
                policy.mark_non_evictable(key)
                there[key] = 1
        assert all((policy.get(key) is not None) == (key in there) for key in {*chain, *there})
    policy.clear()
    assert policy.get(next(iter(there))) is None
