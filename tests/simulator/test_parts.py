"""The simulator's parts: summary, sinks, times, blocks, victims."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvpolicy import cost, policy, trace
from kvpolicy.simulator import LOAD, Builtin, FolderSink, MemorySink, Server, StepLoad, law_times
from kvpolicy.simulator.builtin.blocks import CachingPool, CountedPool, shared_keys
from kvpolicy.simulator.builtin.host_copies import HostPool
from kvpolicy.simulator.builtin.live_request import Account, Copy, LiveRequest, Status, Step
from kvpolicy.simulator.builtin.scheduler import Scheduler, VllmVictims
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.summary import Histogram
from kvpolicy.workload import Request
from tests.shape.configs import LLAMA_31_8B
from tests.simulator.worlds import LINEAR, SECONDS, SMALL, random_workload, run, workload

SERVER = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=100)


def test_quantiles_are_within_half_a_percent() -> None:
    values = np.exp(np.random.default_rng(0).normal(-4, 2, 20_000))
    histogram = Histogram()
    for value in values[:5000]:
        histogram.add(float(value))
    histogram.extend(values[5000:].tolist(), 1)
    for level in (0.01, 0.5, 0.9, 0.99, 0.999):
        assert histogram.quantile(level) == pytest.approx(np.quantile(values, level), rel=5e-3)
    assert histogram.count == 20_000


def test_weights_count_as_often() -> None:
    histogram = Histogram()
    histogram.add(1.0, 99)
    histogram.add(2.0, 1)
    assert histogram.quantile(0.98) == pytest.approx(1.0, rel=5e-3)
    assert histogram.quantile(0.995) == pytest.approx(2.0, rel=5e-3)
    assert np.isnan(Histogram().quantile(0.5))


def test_a_sink_is_given_the_header_before_any_row() -> None:
    told: list[str] = []

    class Listening(MemorySink):
        def begin(self, core: str, header: trace.Header) -> None:
            told.append(f"begin {header.run_id == core}")
            super().begin(core, header)

        def add(self, table: str, rows: list[trace.Row]) -> None:
            told.append("add")
            super().add(table, rows)

    Builtin().run(random_workload(5, 10, 60.0), policy.load("always-swap"), SERVER, LINEAR, sink=Listening())
    assert told[0] == "begin True" and set(told[1:]) == {"add"}


def test_a_folder_holds_what_memory_does(tmp_path: Path) -> None:
    source = random_workload(5, 40, 60.0)
    kept = run(source, SERVER, "always-swap")[1]
    sink = FolderSink(tmp_path / "trace", part_rows=50)
    done = Builtin(wall=lambda: 0.0).run(source, policy.load("always-swap"), SERVER, LINEAR, seed=1, sink=sink)
    assert done.trace is None
    assert trace.read(tmp_path / "trace").digest() == kept.digest()
    assert len(list((tmp_path / "trace").glob("*/steps/part-*.parquet"))) > 1
    again = FolderSink(tmp_path / "trace")
    with pytest.raises(FileExistsError, match="folder of its own"):
        Builtin().run(source, policy.load("always-swap"), SERVER, LINEAR, seed=1, sink=again)


def test_without_a_sink_there_are_no_rows() -> None:
    source = random_workload(5, 40, 60.0)
    done = Builtin(wall=lambda: 0.0).run(source, policy.load("always-swap"), SERVER, LINEAR, seed=1)
    assert done.trace is None
    assert done.summary == run(source, SERVER, "always-swap")[0].summary


def test_a_sink_takes_one_run() -> None:
    with pytest.raises(ValueError, match="one run"):
        MemorySink().finish()


def test_the_header_tells_whose_rules_and_times() -> None:
    (header,) = run(workload(Request(0.0, 4, 2)), SMALL)[1].headers.values()
    assert header.source == "simulation" and "0.32" in header.engine and "made up" in header.notes
    assert (header.device_blocks, header.host_blocks, header.token_budget) == (6, 8, 8192)


@pytest.mark.parametrize("name", ["cpu-llama-native", "analytic:H100-SXM"])
def test_step_times_of_a_cost_model(name: str, tmp_path: Path) -> None:
    """Numbers and arrays come out alike; more of anything never takes less."""
    if name.startswith("analytic"):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
        name = f"{name}:{tmp_path}"
    times = law_times(cost.load(name))
    base = StepLoad(100, 100, 50_000, 0, 0, 0)
    loads = [base, StepLoad(612, 100, 50_000, 512 * 513 // 2, 1, 0), base._replace(kv_read_tokens=90_000)]
    found = times.steps_s(np.array(loads, dtype=np.float64))
    assert found.tolist() == [times.step_s(load) for load in loads]
    assert found[1] > found[0] and found[2] > found[0] and "save" in times.source
    assert times.copy_s("save", 2 << 20, 10, 1 << 19) > times.copy_s("save", 1 << 20, 10, 1 << 19) > 0


def test_constant_times_want_a_number_for_each_part() -> None:
    with pytest.raises(ValueError, match=f"should hold {len(LOAD)} numbers"):
        ConstantTimes(per_part_s=(1.0,))
    assert SECONDS.step_s(StepLoad(8, 0, 0, 36, 1, 0)) == pytest.approx(1.08)


def test_keys_follow_from_all_ids_before() -> None:
    one = shared_keys(Request(0.0, 40, 1, prefix=(1, 2, 3, 4), prefix_block_tokens=10), 16)
    same = shared_keys(Request(9.0, 64, 1, prefix=(1, 2, 3, 4), prefix_block_tokens=10), 16)
    other = shared_keys(Request(0.0, 40, 1, prefix=(1, 9, 3, 4), prefix_block_tokens=10), 16)
    assert len(one) == 2 and same == one
    assert other[0] != one[0] and other[1] != one[1]
    late = shared_keys(Request(0.0, 40, 1, prefix=(1, 2, 3, 9), prefix_block_tokens=10), 16)
    assert late[:1] == one[:1] and late[1] != one[1]
    assert shared_keys(Request(0.0, 40, 1), 16) == ()


def test_cached_blocks_go_last_and_tails_first() -> None:
    """Of six free blocks three are taken, two of them full and cached; the partial one is the next to be had."""
    pool = CachingPool(6, 4)
    live = LiveRequest(0, Request(0.0, 10, 5), 0.0, computed=10)
    pool.grow(live, 3)
    pool.cache(live, 10)
    live.preemptions = 1
    pool.release(live, preempted=True)
    assert pool.free == 6 and len(pool.hits(live)) == 2
    other = LiveRequest(1, Request(0.0, 30, 5), 0.0)
    pool.grow(other, 4)
    assert len(pool.hits(live)) == 2
    pool.grow(other, 1)
    assert len(pool.hits(live)) == pool.idle(pool.hits(live)) == 1
    pool.adopt(live, pool.hits(live))
    assert pool.free == 0 and pool.shared(live, 1) == 0 and pool.references == 1


def test_what_was_used_last_goes_last_even_where_nobody_can_look_for_it() -> None:
    """Full blocks of a finished request join the queue behind those of the victim before it."""
    pool = CachingPool(4, 4)
    victim, finished, new = (LiveRequest(number, Request(0.0, 9, 5), 0.0, preemptions=1) for number in range(3))
    for live in (victim, finished):
        pool.grow(live, 2)
        pool.cache(live, 8)
    pool.release(victim, preempted=True)
    pool.release(finished, preempted=False)
    assert len(pool.hits(victim)) == 2
    pool.grow(new, 2)
    assert pool.hits(victim) == []


def test_blocks_of_equal_content_are_found_first_come_first() -> None:
    """Two that computed the same prefix at the same time both keep it; the one that got it first is found."""
    pool = CachingPool(8, 4)
    ids = Request(0.0, 9, 5, prefix=(1, 2, 3), prefix_block_tokens=4)
    first, second, third = (LiveRequest(number, ids, 0.0, shared_keys(ids, 4)) for number in range(3))
    for live in (first, second):
        pool.grow(live, 3)
        pool.cache(live, 9)
    assert pool.hits(third) == first.keyed_blocks
    pool.adopt(third, pool.hits(third))
    assert pool.shared(third, 2) == 2 and pool.shared(second, 2) == 0
    pool.release(first, preempted=False)
    assert pool.free == 3 and pool.shared(third, 2) == 0


class Longest:
    """Takes the request that holds most."""

    def choose(self, running: Sequence[LiveRequest]) -> int:
        return max(range(len(running)), key=lambda i: running[i].held)


def test_victims_are_a_policy_too() -> None:
    source = workload(Request(0.0, 9, 8), Request(0.0, 4, 8))
    server = replace(SMALL, device_blocks=4)
    assert run(source, server)[1].rows("decisions")[0]["request"] == "1"
    assert run(source, server, victims=Longest())[1].rows("decisions")[0]["request"] == "0"


@pytest.mark.parametrize(("tokens", "admitted"), [(16, True), (20, False)])
def test_a_load_leaves_prefills_the_blocks_they_still_need(tokens: int, admitted: bool) -> None:
    """Of ten free blocks a prefill on its way will need five, and the loaded request its next one: a load of four fits,
    one of five does not."""
    server = Server(block_size=4, block_bytes=1, device_blocks=11, host_blocks=10, token_budget=4)
    copies = HostPool(server)
    told: list[int] = []
    scheduler = Scheduler(
        server, CountedPool(11), copies, VllmVictims("fcfs"), lambda live: None, lambda *about: told.append(about[1])
    )
    scheduler.arrive(LiveRequest(0, Request(0.0, 24, 1), 0.0))
    scheduler.schedule(Step(0))
    victim = LiveRequest(1, Request(0.0, tokens, 5), 0.0, status=Status.PREEMPTED, outputs=1, preemptions=1)
    victim.copy = Copy(1, victim, cast(Account, SimpleNamespace(busy=0)), tokens, tokens // 4)
    scheduler.waiting.append(victim)
    scheduler.admit(Step(1), 4)
    assert (victim.status is Status.LOADING) is admitted
    assert told == ([0, tokens] if admitted else [0])
