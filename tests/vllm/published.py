"""What an engine publishes about its prefix cache, read as another process would read it: from a ZMQ endpoint."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from tests.vllm import scenarios

PATIENCE_MS = 60_000


class Reader(threading.Thread):
    """Collects all batches of events until it is told how many there are."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.batches: dict[int, list[Any]] = {}
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._wanted: int | None = None
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def run(self) -> None:
        waited_ms = 0
        while self._wanted is None or len(self.batches) < self._wanted:
            if not self._socket.poll(100):
                waited_ms = waited_ms + 100 if self._wanted is not None else 0
                if waited_ms > PATIENCE_MS:
                    return
                continue
            _, number, payload = self._socket.recv_multipart()
            self.batches[int.from_bytes(number, "big")] = self._decoder.decode(payload).events

    def all_of(self, count: int) -> list[Any]:
        """The events of the first ``count`` batches, once they are here."""
        self._wanted = count
        self.join()
        assert sorted(self.batches) == list(range(count)), "batches of events were lost"
        return [event for number in range(count) for event in self.batches[number]]


def published(job: dict[str, Any]) -> dict[str, Any]:
    """All requests at once, to the end; then what a reader of the events believes, and what is so."""
    reader = Reader(job["endpoint"])
    reader.start()
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=job["endpoint"])
    run = scenarios.Run(job | {"engine": job["engine"] | {"kv_events_config": events}})
    publisher, count = run.scheduler.kv_event_publisher, 0
    publish = publisher.publish

    def counted(batch: Any) -> None:
        nonlocal count
        count += 1
        publish(batch)

    publisher.publish = counted
    for i, request in enumerate(job["requests"]):
        run.add(f"r{i}", request)
    run.serve()
    said = [request["prompt"] + run.tokens[f"r{i}"] for i, request in enumerate(job["requests"])]
    return run.result() | account(reader.all_of(count), run.scheduler.kv_cache_manager.block_pool, said)


def account(events: list[Any], pool: Any, texts: list[list[int]]) -> dict[str, Any]:
    """A reader that keeps a set of hashes, against the pool and the texts of the requests."""
    there: set[Any] = set()
    prefixes: dict[Any, list[int]] = {None: []}
    stored = removed = unknown = 0
    foreign: list[int] = []
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for number, key in enumerate(event.block_hashes):
                size = event.block_size
                tokens = list(event.token_ids[number * size : (number + 1) * size])
                prefixes[key] = prefixes[parent] + tokens
                parent = key
                there.add(key)
                stored += 1
        elif isinstance(event, BlockRemoved):
            unknown += sum(key not in prefixes for key in event.block_hashes)
            there -= set(event.block_hashes)
            removed += len(event.block_hashes)
    for key, prefix in prefixes.items():
        if key is not None and not any(text[: len(prefix)] == prefix for text in texts):
            foreign.append(len(prefix))
    held = [block.block_hash for block in pool.blocks if block.block_hash is not None]
    cached = {maybe_convert_block_hash(get_block_hash(key)) for key in held}
    return {
        "events": len(events), "stored": stored, "removed": removed, "removed_unknown": unknown, "foreign": foreign,
        "believed_and_gone": len(there - cached), "there_and_not_believed": len(cached - there),
        "held_twice": len(held) - len(cached),
    }  # fmt: skip
