"""Figures of a run, and the tokens of arms compared."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.latency import Slo
from kvpolicy.workload import Request
from kvpolicy_vllm.bench.chat_load import ChatRun, Message
from kvpolicy_vllm.bench.load_results import (
    PRICED,
    chat_figures,
    differences,
    hit_rate,
    lost_price_ratio,
    open_tokens,
    rate_figures,
    steady_rate,
)
from kvpolicy_vllm.bench.openai_api import Answer
from kvpolicy_vllm.bench.rate_load import RateRun, Sent


def test_of_a_conversation_the_first_difference_counts() -> None:
    def row(turn: int, *tokens: int, error: str = "", name: str = "a") -> dict[str, Any]:
        return {"conversation": name, "turn": turn, "token_ids": tokens, "error": error}

    one = [row(1, 4, 5), row(0, 1, 2), row(2, 6), row(0, 7, name="b"), row(1, 8, name="b")]
    other = [row(0, 1, 2), row(1, 4, 9), row(2, 7), row(0, 7, name="b", error="HTTP 500"), row(1, 9, name="b")]
    assert differences(one, other) == {"tokens": 3, "different": [{"conversation": "a", "turn": 1, "token": 1}]}


def test_the_rate_is_that_of_the_time_in_which_everybody_chats() -> None:
    """Three messages end within 10 s, after which somebody has no conversation left; one more takes until 40 s."""
    ends_s = (4.0, 6.0, 10.0, 40.0)
    messages = [Message("a", turn, 100, Answer(100.0, 1.0, end_s, (1, 2))) for turn, end_s in enumerate(ends_s)]
    messages.append(Message("b", 0, 50, Answer(100.0, None, 2.0, (), "HTTP 503: full")))
    queries, hits = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    samples = [(0.0, {queries: 1000.0, hits: 500.0}), (40.0, {queries: 1400.0, hits: 600.0, "vllm:kvpolicy_a": 1.0})]
    figures = chat_figures(ChatRun(100.0, messages, samples, first_idle_s=10.0))
    assert figures["messages_s"] == 0.3 and figures["messages"] == 4 and figures["makespan_s"] == 40.0
    assert figures["e2e_s"]["mean"] == 15.0 and figures["errors"] == {"HTTP 503: full": 1}
    assert figures["hit_rate"] == 0.25 and figures["lookups"] == [[0.0, 0.0, 0.0], [40.0, 400.0, 100.0]]
    assert figures["counters"]["vllm:kvpolicy_a"] == 1.0


def test_steady_latencies_are_of_the_messages_sent_while_everybody_chats() -> None:
    """By when a message was sent, not by when its answer was there."""
    answers = [Answer(100.0 + sent_s, ttft_s, e2e_s, (1, 2)) for sent_s, ttft_s, e2e_s in
               ((0.0, 1.0, 2.0), (9.0, 3.0, 6.0), (10.5, 0.25, 0.5), (30.0, 0.25, 0.5))]  # fmt: skip
    answers.append(Answer(101.0, 50.0, 60.0, (), "HTTP 503: full"))
    messages = [Message("a", turn, 100, answer) for turn, answer in enumerate(answers)]
    figures = chat_figures(ChatRun(100.0, messages, [(0.0, {})], first_idle_s=10.0))
    assert (figures["steady_ttft_s"]["mean"], figures["steady_e2e_s"]["mean"]) == (2.0, 4.0)
    assert (figures["ttft_s"]["mean"], figures["e2e_s"]["mean"]) == (1.125, 2.25), "with those of the end"


def test_windows_are_in_use_from_the_first_message_of_a_conversation_to_its_last_answer() -> None:
    """One from 10 to 60 s, of which 40 s count; one of 5 s; and one that the end of the run cut. Of what a failed
    message asked nothing is known. Tokens of an answer are there from when they came: first after 1 s, none before."""
    messages = [
        Message("a", 0, 100, Answer(10.0, 1.0, 5.0, (1,) * 20)),
        Message("a", 1, 150, Answer(30.0, 1.0, 30.0, (1,) * 29)),
        Message("b", 0, 400, Answer(20.0, 1.0, 5.0, (1,) * 8), goes_on=True),
        Message("b", 1, 900, Answer(40.0, None, 1.0, (), "HTTP 503: full")),
        Message("c", 0, 200, Answer(30.0, 1.0, 5.0, (1,) * 5), goes_on=True),
        Message("d", 0, 700, Answer(49.5, 1.0, 5.0, (1,) * 5)),
    ]
    figures = chat_figures(ChatRun(0.0, messages, [(0.0, {})], first_idle_s=50.0))
    assert figures["message_tokens"]["mean"] == 30
    windows = 20 * 100 + 20 * 150 + 5 * 400 + 20 * 200 + 0.5 * 700
    # 20 tokens that come over 4 s, and are there for another 15; 19 of 29 that come over 19 s until the run is over; 8
    # that come over 4 s, at whose end they are gone; 5 over 4 s, then there for another 15.
    answers = 20 * (2 + 15) + 19 * 19 / 2 + 8 * 2 + 5 * (2 + 15)
    assert figures["open_tokens"] == pytest.approx((windows + answers) / 50)


def test_what_was_sent_or_in_use_while_caches_filled_does_not_count() -> None:
    """Of a run of 50 s whose first 20 are a warm-up; rows have all."""
    messages = [
        Message("a", 0, 100, Answer(10.0, 5.0, 5.0, (1,) * 20), goes_on=True),
        Message("a", 1, 150, Answer(30.0, 1.0, 10.0, (1,) * 10)),
        Message("b", 3, 400, Answer(19.0, 7.0, 11.0, (1,) * 8), goes_on=True),
        Message("b", 4, 500, Answer(40.0, 2.0, 20.0, (1,) * 8)),
        Message("c", 0, 30, Answer(45.0, 6.0, 25.0, (1,) * 8)),
    ]
    queries, hits = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    priced = [f"vllm:kvpolicy_{name}_total" for name in PRICED]
    samples = [(at_s, {queries: 10 * at_s, hits: found} | dict.fromkeys(priced, 7.0))
               for at_s, found in ((0.0, 0.0), (19.5, 100.0), (20.5, 100.0))]  # fmt: skip
    samples[0][1].update(dict.fromkeys(priced, 0.0))
    last = {queries: 600.0, hits: 179.0} | dict(zip(priced, (27.0, 11.0, 57.0, 12.0), strict=True))
    figures = chat_figures(ChatRun(0.0, messages, [*samples, (60.0, last)], 50.0), 20.0)
    assert figures["price_ratio"] == pytest.approx((20 / 4) / (50 / 5)), "of what was lost after the warm-up"
    assert (figures["messages"], figures["begun"], len(figures["rows"])) == (3, 1, 5)
    assert figures["ttft_s"]["mean"] == figures["steady_ttft_s"]["mean"] == 3.0
    assert (figures["first_ttft_s"]["mean"], figures["later_ttft_s"]["mean"]) == (6.0, 1.5)
    assert (figures["warmup_s"], figures["steady_s"], figures["until_s"]) == (20.0, 30.0, 50.0)
    assert figures["messages_s"] == 2 / 30, "what was sent before and is answered within counts for the rate"
    assert figures["message_tokens"]["mean"] == (30 + 92) / 2
    assert figures["hit_rate"] == pytest.approx(79 / 395) and figures["counted_from_s"] == 20.5
    assert figures["lookups"][0] == [0.0, 0.0, 0.0]
    # From 20 s on: 120 tokens until 30 s, then 150 for 10 s and 10 that come over 9 s; 400 until 40 s and 8 that come
    # from 26 s to 30 s, and stay for 10; then 500 for 10 s and 8 that come from 42 s to 60; 30 for 5 s.
    in_use = 10 * 120 + 10 * 150 + 9 * 5 + 20 * 400 + 8 * (2 + 10) + 10 * 500 + 8 * 8**2 / (2 * 18) + 5 * 30
    assert figures["open_tokens"] == pytest.approx(in_use / 30)


def test_a_run_that_ended_while_caches_filled_has_no_figures() -> None:
    messages = [Message("a", 0, 100, Answer(1.0, 0.5, 5.0, (1, 2)))]
    samples = [(at_s, {"vllm:prefix_cache_queries_total": 10 * at_s}) for at_s in (0.0, 7.0)]
    figures = chat_figures(ChatRun(0.0, messages, samples, first_idle_s=6.0), 20.0)
    assert (figures["messages"], figures["messages_s"], figures["open_tokens"]) == (0, None, None)
    assert figures["ttft_s"] is None and figures["hit_rate"] is None and not figures["counters"]
    assert len(figures["rows"]) == 1 and figures["lookups"][-1] == [7.0, 70.0, 0.0]


@pytest.mark.parametrize(
    ("ttft_s", "e2e_s", "tokens"), [(10.0, 10.0, 0.0), (0.0, 10.0, 20.0), (4.0, 4.0, 24.0), (4.0, 20.0, 4.5)]
)
def test_an_answer_counts_as_it_comes(ttft_s: float, e2e_s: float, tokens: float) -> None:
    """Of 40 tokens on average over 10 s, beside a window of 1: as a line from the first one to the end, or at once."""
    message = Message("a", 0, 1, Answer(0.0, ttft_s, e2e_s, (1,) * 40), goes_on=True)
    rows = chat_figures(ChatRun(0.0, [message], [(0.0, {})]))["rows"]
    assert open_tokens(rows, 10.0) == pytest.approx(1 + tokens)


def test_a_run_without_an_answer_has_no_figures() -> None:
    figures = chat_figures(ChatRun(0.0, [], [(0.0, {})]))
    assert figures["messages_s"] is None and figures["ttft_s"] is None and figures["hit_rate"] is None
    assert figures["steady_ttft_s"] is None


def test_the_price_of_lost_tokens_is_read_from_the_plugins_counters() -> None:
    """40 lost tokens added 20 ms to steps in which 50 others took 100 ms."""
    names = ("recompute_microseconds", "recomputed_tokens", "beside_recompute_microseconds", "beside_recompute_tokens")
    grown = {f"vllm:kvpolicy_{name}_total": value for name, value in zip(names, (2e4, 40.0, 1e5, 50.0), strict=True)}
    assert lost_price_ratio(grown) == pytest.approx(0.25)
    assert (
        lost_price_ratio({}) is None
        and lost_price_ratio(grown | {"vllm:kvpolicy_recomputed_tokens_total": 0.0}) is None
    )


def test_what_a_connector_found_counts_too() -> None:
    after = {
        "vllm:prefix_cache_queries_total": 100.0, "vllm:prefix_cache_hits_total": 20.0,
        "vllm:external_prefix_cache_hits_total": 30.0,
    }  # fmt: skip
    assert hit_rate({}, after) == 0.5


def sent(number: int, due_s: float, sent_s: float, token_s: tuple[float, ...], error: str = "", **more: Any) -> Sent:
    answer = Answer(100.0 + sent_s, token_s[0] if token_s else None, token_s[-1] if token_s else 1.0,
                    tuple(range(len(token_s))), error, token_s)  # fmt: skip
    return Sent(number, Request(due_s, 10, max(1, len(token_s)), **more), due_s, 0.0, sent_s, answer)


def test_latency_counts_from_the_arrival_and_goodput_from_deadlines() -> None:
    """The second request waited 2 s in the client before it was sent; the third failed, and so missed its deadline."""
    run = RateRun(100.0, {}, {}, [
        sent(0, 0.0, 0.0, (0.5, 0.6, 0.8)),
        sent(1, 1.0, 3.0, (0.5, 1.5), class_name="urgent"),
        sent(2, 2.0, 2.0, (), "HTTP 503: full"),
    ])  # fmt: skip
    found = rate_figures(run, Slo(ttft_s=1.0))
    assert found["ttft_s"]["mean"] == pytest.approx((0.5 + 2.5) / 2)
    assert found["e2e_s"]["mean"] == pytest.approx((0.8 + 3.5) / 2)
    assert found["e2e_per_token_s"]["mean"] == pytest.approx((0.8 / 3 + 3.5 / 2) / 2)
    assert found["itl_s"]["mean"] == pytest.approx((0.1 + 0.2 + 1.0) / 3)
    assert found["slo_share"] == pytest.approx(1 / 3) and found["goodput_req_s"] == pytest.approx(1 / 4.5)
    assert found["requests_s"] == pytest.approx(2 / 4.5) and found["most_at_once"] == 1
    assert found["classes"]["urgent"]["slo_share"] == 0.0 and found["errors"] == {"HTTP 503: full": 1}
    assert [row["ttft_s"] for row in found["rows"]] == [0.5, 2.5, None]


def test_a_rate_without_an_answer_has_no_figures() -> None:
    found = rate_figures(RateRun(100.0, {}, {}, [sent(0, 0.0, 0.0, (), "HTTP 503: full")]), Slo(ttft_s=1.0))
    assert found["ttft_s"]["p50"] is None and found["requests_s"] is None
    assert (found["slo_share"], found["goodput_req_s"]) == (0.0, 0.0)


def test_the_steady_rate_leaves_out_begin_and_end() -> None:
    assert steady_rate([0.0, *range(100, 120), 1000.0]) == pytest.approx(1.0)
    assert steady_rate([1.0, 2.0]) is None and steady_rate([1.0] * 10) is None


@pytest.mark.parametrize(
    ("idle_s", "seconds", "said"),
    [(384.3, 420.0, 384.3), (420.0, 420.0, None), (421.5, 420.0, None), (384.3, None, None), (None, 420.0, None)],
)
def test_a_run_says_when_somebody_had_no_conversation_left(
    idle_s: float | None, seconds: float | None, said: float | None
) -> None:
    figures = chat_figures(ChatRun(0.0, [], [(0.0, {})], idle_s), seconds=seconds)
    assert figures["ran_out_s"] == said
