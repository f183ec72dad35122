"""Where a run writes its trace: memory, a folder, nowhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy import policy, trace
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.simulator import Builtin, FolderSink, Link, MemorySink, Server, Times
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.sinks import Identity
from kvpolicy.study.machine import Behind
from kvpolicy.workload import Request, Workload
from tests.simulator.worlds import LINEAR, SMALL, random_workload, run, workload

SERVER = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=100)


def test_a_sink_is_given_the_header_before_any_row() -> None:
    events: list[str] = []

    class Listening(MemorySink):
        def begin(self, core: str, header: trace.Header) -> None:
            events.append(f"begin {header.run_id == core}")
            super().begin(core, header)

        def add(self, table: str, rows: list[trace.Row]) -> None:
            events.append("add")
            super().add(table, rows)

    Builtin().run(random_workload(5, 10, 60.0), policy.load("always-swap"), SERVER, LINEAR, sink=Listening())
    assert events[0] == "begin True" and set(events[1:]) == {"add"}


def test_a_folder_holds_what_memory_does(tmp_path: Path) -> None:
    source = random_workload(5, 40, 60.0)
    part = run(source, SERVER, "always-swap")[1]
    sink = FolderSink(tmp_path / "trace", part_rows=50)
    done = Builtin(wall=lambda: 0.0).run(source, policy.load("always-swap"), SERVER, LINEAR, seed=1, sink=sink)
    assert done.trace is None
    assert trace.read(tmp_path / "trace").digest() == part.digest()
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


def test_the_header_names_rules_and_times() -> None:
    (header,) = run(workload(Request(0.0, 4, 2)), SMALL)[1].headers.values()
    assert header.source == "simulation" and "0.32" in header.engine and "made up" in header.notes
    assert (header.device_blocks, header.host_blocks, header.token_budget) == (6, 8, 8192)


def test_runs_that_differ_in_times_or_link_alone_have_cores_of_their_own() -> None:
    """Their traces are read together by the names of their cores."""
    server, rule = Server(16, 1, 10, 10), policy.load("always-swap")
    source = Workload("w", (Request(0.0, 10, 5),), seed=0)
    several = [ConstantTimes(), ConstantTimes(source="others"), *(behind(link) for link in ("1e9", "2e9", "1e9,0.1"))]

    def core(server: Server, times: Times) -> str:
        return Identity(source, rule, server, times, 0).core("sim")

    assert len({core(server, times) for times in several}) == len(several)
    assert len({core(one, several[0]) for one in (server, replace(server, link=Link(slowdown=0.1)))}) == 2
    assert core(server, behind("1e9")) == core(server, behind("1e9"))


def behind(link: str) -> Behind:
    return Behind(ConstantTimes(), SimulatedLink.parse(link))
