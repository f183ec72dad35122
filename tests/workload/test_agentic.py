"""Logs of agents: calls, pauses and what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.workload import (
    AgentSessions,
    Care,
    Even,
    Starting,
    Users,
    WorkloadError,
)
from tests.workload import published_files
from tests.workload.drawn_times import times


def test_agents_by_hand(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "agents.jsonl.gz", published_files.AGENTIC)
    source = AgentSessions(path, Starting(Even(0.1)))
    result = list(source)
    assert times(result) == [
        ("a", 10.0, None),
        ("a", 14.0, 4.0),
        ("b", 20.0, None),
        ("b", 21.0, 1.0),
        ("a", 34.0, 20.0),
    ]
    assert [(request.prompt_tokens, request.output_tokens) for request in result][:2] == [(130, 7), (200, 8)]
    one, two = 1 << 32, 2 << 32
    assert [request.prefix for request in result[:4]] == [
        (one + 1, one + 2),
        (one + 1, one + 2, one + 3),
        (two + 1,),
        (two + 1,),
    ]
    assert {request.prefix_block_tokens for request in result} == {64}
    assert times(list(AgentSessions(path, Starting(Even(0.1)), closed=False)))[1] == ("a", 19.0, None)
    assert {request.session for request in AgentSessions(path, count=1)} == {"a"}
    assert (source.counts.rows, source.counts.requests, source.counts.empty) == (5, 5, 0)


def test_a_pause_that_counts_from_an_earlier_answer_is_mended(tmp_path: Path) -> None:
    """The second answer's time is unknown, so the third call's think_time counts from the first answer."""
    calls = [
        published_files.agent_call("a", 0.0, 64, 1, 0.0, api_time=5.0),
        published_files.agent_call("a", 10.0, 64, 1, 5.0, api_time=None),
        published_files.agent_call("a", 18.0, 64, 1, 13.0, api_time=2.0),
        published_files.agent_call("a", 25.0, 64, 1, None, api_time=2.0),
    ]
    result = list(AgentSessions(published_files.put(tmp_path, "a.jsonl", calls)))
    assert [request.think_s for request in result] == [None, 5.0, 8.0, 5.0]


def test_a_call_without_answer_lengthens_the_pause(tmp_path: Path) -> None:
    calls = [
        published_files.agent_call("a", 0.0, 64, 1, 0.0, api_time=5.0),
        published_files.agent_call("a", 10.0, 64, 0, 5.0, api_time=1.0),
        published_files.agent_call("a", 18.0, 64, 1, 7.0, api_time=2.0),
    ]
    source = AgentSessions(published_files.put(tmp_path, "a.jsonl", calls))
    assert [request.think_s for request in source] == [None, 13.0]
    assert (source.counts.rows, source.counts.requests, source.counts.empty) == (3, 2, 1)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"t": 0.5}, r"line 3: t is 0\.5, before the call above it"),
        ({"think_time": -1}, "line 3: think_time is -1.0, should be 0 or more"),
        ({"session": 3}, "line 3: session is 3, should be a name"),
        ({"in": 63}, "line 3: hash_ids holds 5 ids, 63 tokens are 0 full blocks"),
        ({"hash_ids": [1 << 32]}, "line 3: hash_ids holds 4294967296, should be under"),
        ({"out": "many"}, "line 3: out is 'many', should be a number"),
    ],
)
def test_a_damaged_call_is_refused_or_skipped(tmp_path: Path, call: dict[str, object], reason: str) -> None:
    rows = [*published_files.AGENTIC[:2], published_files.AGENTIC[2] | call, *published_files.AGENTIC[3:]]
    path = published_files.put(tmp_path, "agents.jsonl", rows)
    with pytest.raises(WorkloadError, match=rf"agents\.jsonl, {reason}"):
        list(AgentSessions(path))
    source = AgentSessions(path, care=Care(skip_damaged=True))
    assert len(list(source)) == 4
    assert source.counts.damaged == 1


def test_users_do_not_replay_recorded_times(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="users wait for their answers"):
        AgentSessions(tmp_path / "a.jsonl", Users(2), closed=False)


def test_a_session_in_two_places_is_refused(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "agents.jsonl", [*published_files.AGENTIC, published_files.AGENTIC[2]])
    with pytest.raises(WorkloadError, match=r"line 6: session a was over; its lines should be together"):
        list(AgentSessions(path))
