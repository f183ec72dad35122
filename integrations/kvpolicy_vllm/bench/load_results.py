"""What runs of a load amount to: figures of one run, and the tokens of arms compared. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvpolicy.stats import mean_and_percentiles
from kvpolicy_vllm.bench.analytics_load import AnalyticsRun
from kvpolicy_vllm.bench.chat_load import ChatRun
from kvpolicy_vllm.bench.openai_api import Answer

QUERIES = "vllm:prefix_cache_queries_total"
HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
"""Tokens that were looked up, and those found on the device and by a connector."""
OWN = "vllm:kvpolicy_"


def chat_figures(run: ChatRun) -> dict[str, Any]:
    """One run of a chat, for a file. Latencies are of the answers without an error."""
    good = [message for message in run.messages if not message.answer.error]
    ends_s = [message.answer.end_s - run.begin_s for message in run.messages]
    makespan_s = max(ends_s, default=0.0)
    steady_s = makespan_s if run.first_idle_s is None else min(run.first_idle_s, makespan_s)
    steady = sum(message.answer.end_s - run.begin_s <= steady_s for message in good)
    first, last = run.samples[0][1], run.samples[-1][1]
    return {
        "makespan_s": makespan_s,
        "messages": len(good),
        "steady_s": steady_s,
        "messages_s": steady / steady_s if steady_s else None,
        "ttft_s": _summary(message.answer.ttft_s for message in good),
        "later_ttft_s": _summary(message.answer.ttft_s for message in good if message.turn),
        "e2e_s": _summary(message.answer.e2e_s for message in good),
        "window_tokens": _summary(float(message.window_tokens) for message in good),
        "hit_rate": hit_rate(first, last),
        "lookups": [[at_s, *_looked_up(first, counters)] for at_s, counters in run.samples],
        "counters": _grown(first, last),
        "errors": _errors(message.answer for message in run.messages),
        "rows": [
            {
                "conversation": message.conversation,
                "turn": message.turn,
                "window_tokens": message.window_tokens,
                "sent_s": message.answer.sent_s - run.begin_s,
                "ttft_s": message.answer.ttft_s,
                "e2e_s": message.answer.e2e_s,
                "token_ids": list(message.answer.token_ids),
                "error": message.answer.error,
            }
            for message in run.messages
        ],
    }


def analytics_figures(run: AnalyticsRun) -> dict[str, Any]:
    """One run of an analysis, for a file."""
    answers = [answer for answer in run.answers if answer is not None]
    good = [answer for answer in answers if not answer.error]
    makespan_s = max((answer.end_s - run.begin_s for answer in good), default=0.0)
    return {
        "makespan_s": makespan_s,
        "requests": len(good),
        "requests_s": len(good) / makespan_s if makespan_s else None,
        "ttft_s": _summary(answer.ttft_s for answer in good),
        "e2e_s": _summary(answer.e2e_s for answer in good),
        "prefix_s": run.first.e2e_s,
        "hit_rate": hit_rate(run.before, run.after),
        "counters": _grown(run.before, run.after),
        "errors": _errors([run.first, *answers]),
        "rows": [
            {"conversation": str(number), "turn": 0, "token_ids": list(answer.token_ids), "error": answer.error}
            for number, answer in enumerate(answers)
        ],
    }


def _summary(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return mean_and_percentiles(known) if known else None


def _errors(answers: Iterable[Answer]) -> dict[str, int]:
    return dict(Counter(answer.error for answer in answers if answer.error))


def _looked_up(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float]:
    """Tokens looked up between the readings, and those found."""
    found = sum(after.get(name, 0.0) - before.get(name, 0.0) for name in HITS)
    return after.get(QUERIES, 0.0) - before.get(QUERIES, 0.0), found


def hit_rate(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Share of the tokens looked up that were found, on the device or by a connector; None where none were."""
    looked_up, found = _looked_up(before, after)
    return found / looked_up if looked_up > 0 else None


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value}


def differences(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tokens of two arms in the same round, conversation by conversation, up to its first difference or error:
    after it the windows differ. ``one`` and ``other``: their rows."""
    turns = {(row["conversation"], row["turn"]): row for row in other}
    over: set[str] = set()
    compared, different = 0, []
    for row in sorted(one, key=lambda row: (row["conversation"], row["turn"])):
        name = row["conversation"]
        same = turns.get((name, row["turn"]))
        if name in over:
            continue
        if same is None or row["error"] or same["error"]:
            over.add(name)
            continue
        expected, actual = row["token_ids"], same["token_ids"]
        compared += len(expected)
        at = next((at for at, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
        if at is not None:
            over.add(name)
            different.append({"conversation": name, "turn": row["turn"], "token": at})
    return {"tokens": compared, "different": different}
