"""The built-in engine: requests and servers it refuses, its watermark, its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvpolicy import policy
from kvpolicy.fields import WrongValue
from kvpolicy.simulator import MemorySink, Server
from kvpolicy.simulator.builtin.simulator import Builtin
from kvpolicy.workload import Request, Workload
from tests.simulator.random_runs import engine_of
from tests.simulator.worlds import LINEAR, random_workload, run


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_model_len": 50}, "request 0 has .* max_model_len is 50"),
        ({"device_blocks": 2}, "request 0 needs .* device_blocks is 2"),
        ({"rules": "0.1"}, "rules is '0.1'"),
        ({"token_budget": 0}, "token_budget is 0"),
        ({"host_blocks": -1}, "host_blocks is -1"),
    ],
)
def test_impossible_requests_and_servers_are_refused(changed: dict[str, Any], message: str) -> None:
    source = random_workload(5, 5, 60.0)
    server = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=100)
    with pytest.raises(ValueError, match=message):
        run(source, replace(server, **changed))


def test_a_source_is_read_as_time_goes_on() -> None:
    """Nobody is read much before arriving and nothing is kept of who is through: a million fit as well."""
    read = 0

    class Watched:
        name, source, seed = "watched", "", 0

        def __iter__(self) -> Iterator[Request]:
            nonlocal read
            for request in random_workload(7, 400, 50.0).requests:
                read += 1
                yield replace(request, session="", think_s=None)

    server = Server(block_size=16, block_bytes=1, device_blocks=500, host_blocks=0)
    engine = engine_of(Watched(), server, "always-swap")
    assert read == 2
    engine.run()
    assert read == engine.tallied.summary(0.0).requests == 400
    assert not engine.arrivals._latest and not engine.arrivals._followers


@pytest.mark.parametrize("watermark", [-0.1, 1.0, math.nan])
def test_a_watermark_that_is_no_share_is_refused(watermark: float) -> None:
    with pytest.raises(WrongValue, match=r"watermark is .*, should be a share of the blocks, from 0, below 1"):
        Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=0, watermark=watermark)


def test_a_watermark_keeps_blocks_free_beside_running_requests() -> None:
    """A fifth of 21 blocks (the null block counted) is 4. The first prompt takes 10 of 20: alone, it need not leave
    any. The second would take 7 and leave 3: it waits until the first is through."""
    server = Server(block_size=16, block_bytes=1, device_blocks=20, host_blocks=0, prefix_caching=False)
    both = Workload("two", (Request(0.0, 150, 5), Request(0.0, 100, 5)), 0)
    for watermark, together in ((0.0, 2), (0.2, 1)):
        run = Builtin().run(
            both, policy.load("always-recompute"), replace(server, watermark=watermark), LINEAR, 0, MemorySink()
        )
        assert run.trace is not None
        assert max(row["running_requests"] for row in run.trace.rows("steps")) == together
