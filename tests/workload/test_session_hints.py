"""Hints by sessions: what a client knows, and what only the whole trace shows."""

from __future__ import annotations

import pytest

from kvpolicy.request_marks import NO_HINTS, Hints, read_marks
from kvpolicy.workload import Hinting, Request, Workload, WorkloadError, open_workload
from kvpolicy.workload.session_hints import with_sessions

BLOCK = 10


def asked(*ids: int, session: str = "", at_s: float = 0.0) -> Request:
    return Request(at_s, BLOCK * max(1, len(ids)), 5, ids, BLOCK if ids else 0, session)


def hints_of(kind: str, *requests: Request) -> list[Hints]:
    return [request.hints for request in Hinting(Workload("w", requests, 0), kind, 30.0)]


def test_a_client_knows_its_session_and_not_which_turn_is_the_last() -> None:
    turns = [asked(session=name) for name in "aba"]
    assert hints_of("sessions", *turns) == [Hints(30.0, session=name) for name in ("s0", "s1", "s0")]


def test_hindsight_knows_the_end() -> None:
    turns = [asked(session=name) for name in "abaa"]
    kept, ended = Hints(30.0, session="s0"), Hints(session="s0", ended=True)
    assert hints_of("hindsight", *turns) == [kept, Hints(once=True), kept, ended]


def test_prompts_that_begin_with_another_whole_one_continue_it() -> None:
    first, other, second, edited = asked(1, 2), asked(1, 3), asked(1, 2, 4), asked(1, 9)
    third = asked(1, 2, 4, 5, 6)
    found = [session for _, session in with_sessions([first, other, second, edited, third, asked()])]
    assert found == [0, 1, 0, 2, 0, None]
    assert hints_of("hindsight", asked()) == hints_of("sessions", asked()) == [NO_HINTS]


def test_a_prompt_is_continued_once() -> None:
    """What all begin with, as a system prompt, is no conversation of theirs."""
    prompts = [asked(1), asked(1, 2), asked(1, 3), asked(1, 2, 4), asked(1, 3, 5), asked(1, 6), asked(1, 2)]
    assert [session for _, session in with_sessions(prompts)] == [0, 0, 1, 0, 1, 2, 3]


def test_a_block_that_the_prompt_does_not_fill_is_none_of_it() -> None:
    """Ids may go on with what is generated, and the next prompt has other tokens in the last block."""
    first = Request(0.0, 2 * BLOCK + 5, 5, (1, 2, 3), BLOCK)
    assert [session for _, session in with_sessions([first, asked(1, 2, 4)])] == [0, 0]


def test_they_are_an_option_of_a_workload_and_apart_in_a_join() -> None:
    part = "sessions:sharegpt-8k?n=3&turns=2&think=5&hints=sessions&keep=45"
    requests = [*open_workload(f"{part} + {part}")]
    assert {request.hints.keep_s for request in requests} == {45.0}
    by_session = {(request.session, request.hints.session) for request in requests}
    assert len(by_session) == len({name for name, _ in by_session}) == len({name for _, name in by_session}) == 6
    said = [{"keep_s": one.keep_s, "session": one.session} for one in (request.hints for request in requests)]
    assert [read_marks(one).hints for one in said] == [request.hints for request in requests]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(WorkloadError, match="hints is 'all', should be sessions or hindsight"):
        open_workload("sharegpt-8k?n=3&hints=all")
    with pytest.raises(WorkloadError, match="keep is 0, should be above 0, in seconds"):
        open_workload("sharegpt-8k?n=3&hints=sessions&keep=0")
    with pytest.raises(WorkloadError, match="keep is no option"):
        open_workload("sharegpt-8k?n=3&keep=5")
    users = "sessions:sharegpt-8k?n=8&turns=2&think=5&users=2"
    with pytest.raises(WorkloadError, match="hints=hindsight: should be sessions where there are users"):
        open_workload(f"{users}&hints=hindsight")
    assert {one.hints.session for one in open_workload(f"{users}&hints=sessions")} == {"s0", "s1"}
