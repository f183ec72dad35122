"""Conversations: how they are drawn and cut, and that a chatter sends the whole window, with the answers in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from kvpolicy.bench_settings import ChatLoad
from kvpolicy.errors import InputError
from kvpolicy.request_marks import Hints, read_marks
from kvpolicy.workload import Request
from kvpolicy.workload.lengths import SHAREGPT, length_at
from kvpolicy.workload.scaling import Resized
from kvpolicy_vllm.bench import chat_load
from kvpolicy_vllm.bench.chat_load import (
    MIN_MESSAGE_TOKENS,
    Chat,
    ChatRun,
    Conversation,
    Turn,
    begun_midway,
    drawn,
    fitted,
    of_requests,
    prefixed,
)
from kvpolicy_vllm.bench.openai_api import Answer
from tests.bench.live_http import next_tokens

LOAD = ChatLoad(think_s=0.0)


class Counting:
    """A server that answers at once and counts who waits. ``fails``: at the request of that number."""

    def __init__(self, fails: int | None = None) -> None:
        self.sent: list[tuple[list[int], dict[str, Any] | None]] = []
        self.fails = fails
        self.at_once = self.most_at_once = 0

    async def complete(
        self, prompt: Sequence[int], output_tokens: int, salt: str = "", said: dict[str, Any] | None = None
    ) -> Answer:
        number = len(self.sent)
        self.sent.append((list(prompt), said))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        error = "HTTP 503: full" if number == self.fails else ""
        return Answer(0.0, 0.1, 0.2, tuple(next_tokens(prompt, output_tokens)), error)

    async def counters(self) -> dict[str, float]:
        return {"vllm:prefix_cache_queries_total": float(len(self.sent))}


def chatted(server: Counting, conversations: Sequence[Conversation], chatters: int, hints: bool = False) -> ChatRun:
    chat = Chat(server, LOAD, range(100, 200), [1, 2, 3, 4], "salt", 7, hints, lambda: 0.0)
    return asyncio.run(chat.run(conversations, chatters))


def talk(name: str, *turns: tuple[int, int], is_prefixed: bool = False) -> Conversation:
    return Conversation(name, tuple(Turn(message, answer, 0.0) for message, answer in turns), is_prefixed)


def test_every_turn_sends_the_whole_window_with_the_answers() -> None:
    server = Counting()
    run = chatted(server, [talk("a", (5, 3), (6, 2), is_prefixed=True)], 1)
    (first, _), (second, _) = server.sent
    assert first[:4] == [1, 2, 3, 4] and len(first) == 9 and set(first[4:]) <= set(range(100, 200))
    assert second[:12] == [*first, *next_tokens(first, 3)] and len(second) == 18
    assert [(message.turn, message.window_tokens) for message in run.messages] == [(0, 9), (1, 18)]


def test_the_first_message_of_a_conversation_met_midway_brings_what_was_said_before() -> None:
    whole = talk("a", (5, 3), (6, 2), (7, 4), (8, 1), is_prefixed=True)
    midway, from_its_begin = Counting(), Counting()
    run = chatted(midway, [replace(whole, said_turns=2)], 1)
    chatted(from_its_begin, [whole], 1)
    (first, _), (second, _) = midway.sent
    assert [len(first), len(second)] == [4 + 5 + 3 + 6 + 2 + 7, len(first) + 4 + 8]
    said = from_its_begin.sent[2][0]
    of_answers = {*range(9, 12), *range(18, 20)}
    assert all((at in of_answers) or first[at] == said[at] for at in range(len(first))), "messages are the same"
    assert set(first[9:12]) | set(first[18:20]) <= set(range(100, 200)), "answers that nobody gave are drawn"
    assert first[9:12] != first[4:7], "and are no messages"
    assert second[: len(first) + 4] == [*first, *next_tokens(first, 4)]
    assert [(message.turn, message.window_tokens) for message in run.messages] == [(2, 27), (3, 39)]


def test_conversations_are_met_midway_by_their_number_of_turns_and_the_rest_from_their_begin() -> None:
    short, long = ([talk(f"{kind}-{number}", *[(1, 1)] * turns) for number in range(40)]
                   for kind, turns in (("short", 1), ("long", 9)))  # fmt: skip
    found = begun_midway([*short, *long], 30, 0.0, random.Random(3))
    met, rest = found[:30], found[30:]
    assert sorted(one.name for one in found) == sorted(one.name for one in [*short, *long])
    assert sum(one.name.startswith("long") for one in met) > 20, "one that lasts nine times as long is met more often"
    assert {one.said_turns for one in met if one.name.startswith("long")} <= set(range(9))
    assert len({one.said_turns for one in met}) > 4
    assert not any(one.said_turns for one in rest)
    assert [one.name for one in rest] == [one.name for one in [*short, *long] if one.name in {o.name for o in rest}]


def test_who_is_met_midway_sends_the_first_message_during_the_warm_up() -> None:
    talks = [Conversation(str(number), (Turn(1, 1, 500.0),) * 6) for number in range(40)]
    met = begun_midway(talks, 30, 100.0, random.Random(5))[:30]
    first_s = [one.turns[one.said_turns].think_s for one in met]
    assert 0 <= min(first_s) < 20 and 80 < max(first_s) <= 100
    later = [turn.think_s for one in met for turn in one.turns[one.said_turns + 1 :]]
    assert set(later) == {500.0}, "the other pauses are as long as they were"
    without = begun_midway(talks, 30, 0.0, random.Random(5))[:30]
    assert {turn.think_s for one in without for turn in one.turns} == {500.0}
    assert [one.said_turns for one in without] == [one.said_turns for one in met]


def test_conversations_of_a_single_turn_have_no_middle() -> None:
    with pytest.raises(InputError, match=r"--midway: no conversation has a second turn.*--turns"):
        begun_midway([talk("a", (5, 3)), talk("b", (5, 3))], 1, 10.0, random.Random(0))


def test_conversations_are_dealt_to_so_many_people() -> None:
    server = Counting()
    run = chatted(server, [talk(str(number), (5, 2), (5, 2)) for number in range(9)], 3)
    assert server.most_at_once == 3 and len(run.messages) == 18 and run.first_idle_s is not None
    order = [message.conversation for message in run.messages]
    assert set(order[:3]) == {"0", "1", "2"} and "8" not in order[:6]


def test_the_texts_are_those_of_the_seed_whoever_comes_first() -> None:
    talks = [talk("a", (5, 2)), talk("b", (5, 2))]
    one, other = Counting(), Counting()
    chatted(one, talks, 1)
    chatted(other, talks[::-1], 2)
    assert sorted(prompt for prompt, _ in one.sent) == sorted(prompt for prompt, _ in other.sent)


def test_a_conversation_ends_at_its_first_error_and_others_go_on() -> None:
    run = chatted(Counting(fails=0), [talk("a", (5, 2), (5, 2)), talk("b", (5, 2), (5, 2))], 1)
    assert [(message.conversation, bool(message.answer.error)) for message in run.messages] == [
        ("a", True),
        ("b", False),
        ("b", False),
    ]


@pytest.mark.parametrize(("think_s", "sent"), [(0.0, ["a", "a", "b"]), (6.0, ["a", "a"]), (30.0, [])])
def test_nobody_sends_a_message_after_the_seconds_of_a_run(think_s: float, sent: list[str]) -> None:
    """Every answer takes 10 s; a pause that would end too late ends with the run, here at once."""
    server = Counting()
    turns = (Turn(5, 2, think_s), Turn(5, 2, 0.0))
    load = ChatLoad(seconds=25.0)
    chat = Chat(server, load, range(100, 200), [], "salt", 7, False, lambda: 10.0 * len(server.sent))
    with patch("asyncio.sleep", lambda seconds, sleep=asyncio.sleep: sleep(0)):
        run = asyncio.run(chat.run([Conversation("a", turns), Conversation("b", turns)], 1))
    assert [message.conversation for message in run.messages] == sent
    assert run.first_idle_s == 10.0 * len(sent)


class Unread(Counting):
    """Its counters cannot be read at these readings, counted from 1."""

    def __init__(self, *missed: int) -> None:
        super().__init__()
        self.missed, self.readings = missed, 0

    async def counters(self) -> dict[str, float]:
        self.readings += 1
        if self.readings in self.missed:
            raise InputError("/metrics cannot be read")
        return await super().counters()


def test_a_reading_that_fails_ends_no_others() -> None:
    """But for the first one, which growth is taken from."""
    talks = [talk("a", *[(5, 2)] * 20)]
    with patch("asyncio.sleep", lambda seconds, sleep=asyncio.sleep: sleep(0)):
        run = chatted(server := Unread(2, 4), talks, 1)
        with pytest.raises(InputError, match="cannot be read"):
            chatted(Unread(1), talks, 1)
    assert run.missed_readings == 2 and len(run.samples) == server.readings - 2 > 10
    assert [counters["vllm:prefix_cache_queries_total"] for _, counters in run.samples[::len(run.samples) - 1]] == [
        0.0, 20.0
    ]  # fmt: skip


def test_hints_say_whose_window_it_is_what_is_shared_and_nothing_that_is_known_later_alone() -> None:
    server = Counting()
    chatted(server, [talk("a", (5, 2), (5, 2), is_prefixed=True), talk("b", (5, 2))], 1, hints=True)
    said = [read_marks(marks["kvpolicy"]).hints for _, marks in server.sent if marks]
    assert said == [
        Hints(LOAD.keep_s, pin_tokens=4, session="chatter-0"),
        Hints(LOAD.keep_s, pin_tokens=4, session="chatter-0"),
        Hints(LOAD.keep_s, session="chatter-0"),
    ]
    chatted(server := Counting(), [talk("a", (5, 2)), talk("b", (5, 2))], 2, hints=True)
    assert {read_marks(marks["kvpolicy"]).hints.session for _, marks in server.sent if marks} == {
        "chatter-0", "chatter-1"
    }  # fmt: skip
    chatted(server := Counting(), [talk("a", (5, 2))], 1)
    assert server.sent[0][1] is None


def test_drawn_windows_fit_and_have_the_lengths_of_sharegpt() -> None:
    load = ChatLoad(conversations=400, turns=4.0)
    talks = drawn(load, 100_000, random.Random(0))
    windows = sorted(
        sum(turn.message_tokens + turn.answer_tokens for turn in talk.turns) - talk.turns[-1].answer_tokens
        for talk in talks
    )
    assert 1_200 < windows[200] < 2_400, "the table's median is 1,739"
    assert 2.0 < sum(len(talk.turns) for talk in talks) / 400 < 4.5
    short = drawn(load, 600, random.Random(0))
    assert all(talk.turns[0].message_tokens <= 600 for talk in short)
    with pytest.raises(InputError, match="a context of 8 tokens is too short"):
        drawn(load, 8, random.Random(0))


@pytest.mark.parametrize("context_tokens", [600, 4_096, 100_000])
def test_messages_and_answers_but_the_last_one_sum_up_to_the_drawn_window(
    context_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the answers: those that leave no room for a message after them are the last ones."""
    drawn_tokens: list[int] = []

    def noted(quantiles: Sequence[int], level: float) -> float:
        length = length_at(quantiles, level)
        if quantiles == SHAREGPT.prompt_tokens:
            drawn_tokens.append(max(MIN_MESSAGE_TOKENS, round(length)))
        return length

    monkeypatch.setattr(chat_load, "length_at", noted)
    talks = drawn(ChatLoad(conversations=400), context_tokens, random.Random(0))
    windows = [
        sum(turn.message_tokens for turn in talk.turns) + sum(turn.answer_tokens for turn in talk.turns[:-1])
        for talk in talks
    ]
    assert windows == drawn_tokens[-400:], "after the quantiles, which are asked for first"
    for talk in talks:
        lengths = {turn.message_tokens for turn in talk.turns}
        assert min(lengths) >= MIN_MESSAGE_TOKENS and max(lengths) - min(lengths) <= 1


def test_a_conversation_ends_where_the_context_does() -> None:
    (cut,) = fitted([talk("a", (30, 20), (30, 20), (30, 20))], 120)
    assert [turn.message_tokens for turn in cut.turns] == [30, 30]
    (first,) = fitted([talk("a", (500, 20))], 120)
    assert first.turns == (Turn(100, 20, 0.0),)
    assert fitted([talk("a", (5, 5))], 1) == []


def test_so_many_conversations_are_prefixed() -> None:
    talks = [talk(str(number), (1, 1)) for number in range(8)]
    for share in (0.0, 0.25, 0.5, 1.0):
        assert sum(one.is_prefixed for one in prefixed(talks, share, random.Random(1))) == 8 * share


class Sessions:
    """A workload that was recorded with these requests."""

    name = source = "made up"
    seed = 0

    def __init__(self, *requests: Request) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def test_sessions_of_a_workload_become_conversations() -> None:
    requests = Sessions(
        Request(0.0, 10, 5, session="a"),
        Request(0.0, 7, 3),
        Request(1.0, 20, 6, session="a", think_s=2.5),
        Request(1.0, 20, 6, session="late"),
    )
    talks = of_requests(requests, 2, 0.0, random.Random(0))
    assert [one.name for one in talks] == ["a", "request-1"]
    assert talks[0].turns == (Turn(10, 5, 0.0), Turn(5, 6, 2.5)) and talks[1].turns == (Turn(7, 3, 0.0),)
    later = of_requests(requests, 2, 0.0, random.Random(0), first=2)
    assert [one.name for one in later] == ["late", "a"], "after the last one it goes on with the first"
    assert len(of_requests(requests, 9, 0.0, random.Random(0), first=2)) == 3, "each of them once"


@pytest.mark.parametrize(("prompts", "outputs", "said"), [(1.0, 4.0, (10, 5)), (2.0, 2.0, (20, 10))])
def test_messages_stay_as_long_where_answers_are_longer(prompts: float, outputs: float, said: tuple[int, int]) -> None:
    requests = Sessions(Request(0.0, 10, 5, session="a"), Request(1.0, 20, 6, session="a"))
    (talk,) = of_requests(Resized(requests, prompts, outputs), 1, 0.0, random.Random(0))
    assert tuple(turn.message_tokens for turn in talk.turns) == said
    assert [turn.answer_tokens for turn in talk.turns] == [5 * outputs, 6 * outputs]
