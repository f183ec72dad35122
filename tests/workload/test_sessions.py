"""Sessions: who may arrive when, what prompts repeat, and that no request overtakes its predecessor."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.workload import (
    AZURE_CONVERSATION,
    AgentSessions,
    Care,
    Conversations,
    Even,
    Poisson,
    Request,
    Session,
    ShareGPT,
    Starting,
    Think,
    Turn,
    Users,
    WorkloadError,
    served,
)
from kvpolicy.workload.sessions import history
from kvpolicy.workload.sharegpt import items
from tests.fuzzing import examples
from tests.workload import written

HAND = [
    Session("a", (Turn(5, 1, 0.0, 0.0), Turn(9, 2, 4.0, 6.0), Turn(12, 1, 1.0, 8.0))),
    Session("b", (Turn(7, 1, 0.0, 0.0), Turn(11, 1, 0.5, 2.5))),
    Session("c", (Turn(3, 3, 0.0, 0.0),)),
]


def times(requests: list[Request]) -> list[tuple[str, float, float | None]]:
    return [(request.session, request.arrival_s, request.think_s) for request in requests]


def test_a_closed_loop_by_hand() -> None:
    """Sessions begin at 1, 2, 3 s; a later request can come after the pauses before it at the earliest."""
    begun = Starting(Even(1.0)).start(HAND, _rng())
    assert times(list(served(begun))) == [
        ("a", 1.0, None),
        ("b", 2.0, None),
        ("b", 2.5, 0.5),
        ("c", 3.0, None),
        ("a", 5.0, 4.0),
        ("a", 6.0, 1.0),
    ]


def test_recorded_times_by_hand() -> None:
    begun = Starting(Even(1.0)).start(HAND, _rng())
    assert times(list(served(begun, closed=False))) == [
        ("a", 1.0, None),
        ("b", 2.0, None),
        ("c", 3.0, None),
        ("b", 4.5, None),
        ("a", 7.0, None),
        ("a", 9.0, None),
    ]


def test_two_people_by_hand() -> None:
    """The third session goes to whoever waits least between requests, after a pause of 2 s: user 1, at 0.5 + 2."""
    begun = Users(2, Think(2.0, 0.0)).start(HAND, _rng())
    assert times(list(served(begun))) == [
        ("user-0", 0.0, None),
        ("user-1", 0.0, None),
        ("user-1", 0.5, 0.5),
        ("user-1", 2.5, 2.0),
        ("user-0", 4.0, 4.0),
        ("user-0", 5.0, 1.0),
    ]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(WorkloadError, match="users is 0"):
        Users(0)
    with pytest.raises(WorkloadError, match="session x: no recorded times"):
        list(served([(Session("x", (Turn(1, 1, 0.0),)), 0.0, None)], closed=False))


def test_only_sessions_that_overlap_are_held() -> None:
    """Sessions of 2 s begin every second, without an end: no more than three are read before one is over."""
    read = 0

    def endless() -> Iterator[Session]:
        nonlocal read
        while True:
            read += 1
            yield Session(str(read), (Turn(5, 1, 0.0), Turn(9, 1, 1.0), Turn(11, 1, 1.0)))

    for given_so_far, _ in enumerate(served(Starting(Even(1.0)).start(endless(), _rng())), 1):
        assert read <= given_so_far / 3 + 4
        if given_so_far == 3000:
            break
    assert read > 900


CONVERSATIONS = st.builds(
    Conversations,
    lengths=st.just(AZURE_CONVERSATION),
    count=st.integers(0, 8),
    seed=st.integers(0, 10**6),
    mean_turns=st.floats(1, 5),
    think=st.builds(Think, st.floats(0, 30), st.sampled_from((0.0, 0.5, 2.0))),
    beginning=st.one_of(
        st.builds(Starting, st.builds(Poisson, st.floats(0.01, 10))), st.builds(Users, st.integers(1, 5))
    ),
    block_tokens=st.integers(8, 64),
    system_tokens=st.integers(0, 100),
    context_tokens=st.one_of(st.none(), st.integers(102, 5000)),
)


@given(CONVERSATIONS)
@examples(40)
def test_conversations_grow_and_share_what_they_repeat(source: Conversations) -> None:
    requests = list(source)
    assert requests == list(source)
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    by_prefix: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        assert len(request.prefix) == -(-request.total_tokens // source.block_tokens)
        assert source.context_tokens is None or request.total_tokens <= source.context_tokens
        by_prefix[request.prefix[-1] >> 32].append(request)
    assert len(by_prefix) == source.count
    for turns in by_prefix.values():
        for earlier, later in pairwise(turns):
            # All that was said before, the answer included, is the beginning of the next prompt.
            assert later.prompt_tokens > earlier.total_tokens
            assert later.prefix[: len(earlier.prefix)] == earlier.prefix
            assert later.session == earlier.session
            assert later.think_s is not None


def test_a_system_prompt_is_shared_by_whole_blocks() -> None:
    source = Conversations(AZURE_CONVERSATION, 2, 0, 1.0, Think(1.0), block_tokens=16, system_tokens=40)
    first, second = source
    assert first.prefix[:2] == second.prefix[:2] == (0, 1)
    assert not set(first.prefix[2:]) & set(second.prefix[2:])


def test_the_mean_number_of_turns_is_the_one_asked_for() -> None:
    source = Conversations(AZURE_CONVERSATION, 3000, 0, 4.0, Think(0.0))
    assert sum(1 for _ in source) / 3000 == pytest.approx(4.0, rel=0.06)


def test_history_by_hand() -> None:
    assert history(0, 33, 16) == (1 << 32, (1 << 32) + 1, (1 << 32) + 2)
    assert history(1, 32, 16, shared_blocks=1) == (0, (2 << 32) + 1)


@pytest.mark.parametrize(
    "bad", [{"mean_turns": 0.5}, {"block_tokens": 0}, {"system_tokens": 50, "context_tokens": 51}, {"count": -1}]
)
def test_conversations_that_cannot_be_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(WorkloadError, match=r"conversations: \w+ is "):
        Conversations(
            **{"lengths": AZURE_CONVERSATION, "count": 1, "seed": 0, "mean_turns": 1, "think": Think(1)} | bad
        )


# Coding agents


def test_agents_by_hand(tmp_path: Path) -> None:
    path = written.put(tmp_path, "agents.jsonl.gz", written.AGENTIC)
    source = AgentSessions(path, Starting(Even(0.1)))
    found = list(source)
    assert times(found) == [
        ("a", 10.0, None),
        ("a", 14.0, 4.0),
        ("b", 20.0, None),
        ("b", 21.0, 1.0),
        ("a", 34.0, 20.0),
    ]
    assert [(request.prompt_tokens, request.output_tokens) for request in found][:2] == [(130, 7), (200, 8)]
    one, two = 1 << 32, 2 << 32
    assert [request.prefix for request in found[:4]] == [
        (one + 1, one + 2),
        (one + 1, one + 2, one + 3),
        (two + 1,),
        (two + 1,),
    ]
    assert {request.prefix_block_tokens for request in found} == {64}
    assert times(list(AgentSessions(path, Starting(Even(0.1)), closed=False)))[1] == ("a", 19.0, None)
    assert {request.session for request in AgentSessions(path, count=1)} == {"a"}
    assert (source.counts.rows, source.counts.requests, source.counts.empty) == (5, 5, 0)


def test_a_pause_that_counts_from_an_earlier_answer_is_mended(tmp_path: Path) -> None:
    """The second answer's time is unknown, so the third call's think_time counts from the first answer."""
    calls = [
        written.agent_call("a", 0.0, 64, 1, 0.0, api_time=5.0),
        written.agent_call("a", 10.0, 64, 1, 5.0, api_time=None),
        written.agent_call("a", 18.0, 64, 1, 13.0, api_time=2.0),
        written.agent_call("a", 25.0, 64, 1, None, api_time=2.0),
    ]
    found = list(AgentSessions(written.put(tmp_path, "a.jsonl", calls)))
    assert [request.think_s for request in found] == [None, 5.0, 8.0, 5.0]


def test_a_call_without_answer_lengthens_the_pause(tmp_path: Path) -> None:
    calls = [
        written.agent_call("a", 0.0, 64, 1, 0.0, api_time=5.0),
        written.agent_call("a", 10.0, 64, 0, 5.0, api_time=1.0),
        written.agent_call("a", 18.0, 64, 1, 7.0, api_time=2.0),
    ]
    source = AgentSessions(written.put(tmp_path, "a.jsonl", calls))
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
    rows = [*written.AGENTIC[:2], written.AGENTIC[2] | call, *written.AGENTIC[3:]]
    path = written.put(tmp_path, "agents.jsonl", rows)
    with pytest.raises(WorkloadError, match=rf"agents\.jsonl, {reason}"):
        list(AgentSessions(path))
    source = AgentSessions(path, care=Care(skip_damaged=True))
    assert len(list(source)) == 4
    assert source.counts.damaged == 1


def test_users_do_not_replay_recorded_times(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="users wait for their answers"):
        AgentSessions(tmp_path / "a.jsonl", Users(2), closed=False)


def test_a_session_in_two_places_is_refused(tmp_path: Path) -> None:
    path = written.put(tmp_path, "agents.jsonl", [*written.AGENTIC, written.AGENTIC[2]])
    with pytest.raises(WorkloadError, match=r"line 6: session a was over; its lines should be together"):
        list(AgentSessions(path))


# ShareGPT


def test_sharegpt_by_hand(tmp_path: Path) -> None:
    """At one token a word; the whole history is the next prompt, and what was never answered is left out."""
    path = written.put(tmp_path, "sg.json.gz", _json(written.SHAREGPT))
    source = ShareGPT(path, Think(3.0, 0.0), Starting(Even(1.0)), tokens_per_word=1.0, block_tokens=4)
    found = list(source)
    assert [(r.session, r.arrival_s, r.think_s, r.prompt_tokens, r.output_tokens) for r in found] == [
        ("first", 1.0, None, 3, 3),
        ("second", 2.0, None, 3, 3),
        ("first", 4.0, 3.0, 10, 3),
    ]
    base = 1 << 32
    assert [found[0].prefix, found[2].prefix] == [(base, base + 1), tuple(base + block for block in range(4))]
    assert (source.counts.rows, source.counts.requests, source.counts.empty) == (3, 3, 1)
    assert "1 a word" in source.source


def test_a_tokenizer_counts_instead(tmp_path: Path) -> None:
    path = written.put(tmp_path, "sg.json", _json(written.SHAREGPT))
    found = list(ShareGPT(path, Think(0.0), tokenizer=len, count=1))
    assert [(request.prompt_tokens, request.output_tokens) for request in found] == [(13, 13), (50, 17)]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 64, 1 << 16])
def test_conversations_are_found_whatever_the_pieces(tmp_path: Path, chunk_bytes: int) -> None:
    path = written.put(tmp_path, "sg.json", "\ufeff" + json.dumps(written.SHAREGPT, indent=1))
    found = list(items(path, chunk_bytes))
    assert [json.loads(text) for _, text in found] == written.SHAREGPT
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    assert [where for where, _ in found] == [
        f"line {1 + place}, conversation {number}"
        for number, place in enumerate((n for n, line in enumerate(lines) if line == " {"), 1)
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"id": "x"}]', "line 1, conversation 1: conversations is missing"),
        ('[["id", "conversations"]]', "line 1, conversation 1: should be a JSON object, is"),
        ('[{"conversations": 3}]', "conversation 1: conversations should be a list"),
        ('[{"conversations": [3]}]', "conversation 1: message 0 should be an object"),
        ('[{"conversations": [{"from": "robot", "value": "x"}]}]', "conversation 1: message 0 is from 'robot', known"),
        ('[{"conversations": [{"from": "gpt", "value": null}]}]', "conversation 1: message 0: value should be text"),
        ('[{"conversations": [', "line 1: the list breaks off after 0 conversations"),
        ('[{"conversations": []},\n{"conversations": [', "line 2: the list breaks off after 1 conversations"),
        ('[{"conversations": nil}]', "conversation 1: not JSON"),
    ],
)
def test_a_damaged_conversation_is_refused_or_skipped(tmp_path: Path, text: str, reason: str) -> None:
    path = written.put(tmp_path, "sg.json", text)
    with pytest.raises(WorkloadError, match=rf"sg\.json, .*{reason}"):
        list(ShareGPT(path, Think(1.0)))
    source = ShareGPT(path, Think(1.0), care=Care(skip_damaged=True))
    assert list(source) == []
    assert source.counts.damaged == 1


@pytest.mark.parametrize("text", ["", "{}", '"x"', 'x [{"conversations": []}]'])
def test_what_is_no_list_of_conversations_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(WorkloadError, match="should be a JSON list of conversations"):
        list(ShareGPT(written.put(tmp_path, "sg.json", text), Think(1.0), care=Care(skip_damaged=True)))


def test_conversations_are_read_as_they_are_needed(tmp_path: Path) -> None:
    path = written.put(tmp_path, "sg.json", _json(written.SHAREGPT * 5_000))
    source = ShareGPT(path, Think(0.0), Starting(Even(1.0)))
    assert len(list(islice(source, 10))) == 10
    assert source.counts.rows < 20


def _json(value: object) -> str:
    return json.dumps(value)


def _rng() -> random.Random:
    return random.Random(0)
