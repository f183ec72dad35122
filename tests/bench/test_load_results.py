"""Figures of a run, and the tokens of arms compared."""

from __future__ import annotations

from typing import Any

from kvpolicy_vllm.bench.chat_load import ChatRun, Message
from kvpolicy_vllm.bench.load_results import chat_figures, differences, hit_rate
from kvpolicy_vllm.bench.openai_api import Answer


def test_of_a_conversation_the_first_difference_counts() -> None:
    def row(turn: int, *tokens: int, error: str = "", name: str = "a") -> dict[str, Any]:
        return {"conversation": name, "turn": turn, "token_ids": tokens, "error": error}

    one = [row(1, 4, 5), row(0, 1, 2), row(2, 6), row(0, 7, name="b"), row(1, 8, name="b")]
    other = [row(0, 1, 2), row(1, 4, 9), row(2, 7), row(0, 7, name="b", error="HTTP 500"), row(1, 9, name="b")]
    assert differences(one, other) == {"tokens": 4, "different": [{"conversation": "a", "turn": 1, "token": 1}]}


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


def test_a_run_without_an_answer_has_no_figures() -> None:
    figures = chat_figures(ChatRun(0.0, [], [(0.0, {})]))
    assert figures["messages_s"] is None and figures["ttft_s"] is None and figures["hit_rate"] is None


def test_what_a_connector_found_counts_too() -> None:
    after = {
        "vllm:prefix_cache_queries_total": 100.0, "vllm:prefix_cache_hits_total": 20.0,
        "vllm:external_prefix_cache_hits_total": 30.0,
    }  # fmt: skip
    assert hit_rate({}, after) == 0.5
