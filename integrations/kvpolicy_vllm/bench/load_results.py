"""What runs of a load amount to: figures of one run, and the tokens of arms compared. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvpolicy.latency import ClassTally, Slo
from kvpolicy.stats import mean_and_percentiles
from kvpolicy_vllm.bench.analytics_load import AnalyticsRun
from kvpolicy_vllm.bench.chat_load import ChatRun, Message
from kvpolicy_vllm.bench.openai_api import Answer
from kvpolicy_vllm.bench.rate_load import RateRun, Sent

QUERIES = "vllm:prefix_cache_queries_total"
HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
"""Tokens that were looked up, and those found on the device and by a connector."""
OWN = "vllm:kvpolicy_"
PRICED = ("recompute_microseconds", "recomputed_tokens", "beside_recompute_microseconds", "beside_recompute_tokens")
"""Counters of what recomputed tokens add to steps, and of the decodes beside them."""


def chat_figures(run: ChatRun, warmup_s: float = 0.0, seconds: float | None = None) -> dict[str, Any]:
    """One run of a chat, for a file. Latencies are of the answers without an error: of all, and of the messages that
    were sent before the first chatter was idle (``steady_``), as the rate is. ``warmup_s``: from the begin of the run;
    what was sent, answered and in use until then does not count, and is in the rows; counters grow from the first
    reading after it on (``counted_from_s``). ``seconds``: in which messages are sent; ``ran_out_s`` is when somebody
    had no conversation left before they were over, None where nobody did, or without them."""
    rows = [_row(message, run.begin_s) for message in run.messages]
    good = [row for row in rows if not row["error"] and row["sent_s"] >= warmup_s]
    makespan_s = max((row["sent_s"] + row["e2e_s"] for row in rows), default=0.0)
    until_s = makespan_s if run.first_idle_s is None else min(run.first_idle_s, makespan_s)
    steady_s = max(0.0, until_s - warmup_s)
    ends_s = [row["sent_s"] + row["e2e_s"] for row in rows if not row["error"]]
    ran_out = run.first_idle_s is not None and seconds is not None and run.first_idle_s < seconds
    last = run.samples[-1][1]
    counted_from_s, first = next(((at_s, read) for at_s, read in run.samples if at_s >= warmup_s), run.samples[-1])
    return {
        "makespan_s": makespan_s,
        "warmup_s": warmup_s,
        "until_s": until_s,
        "ran_out_s": run.first_idle_s if ran_out else None,
        "counted_from_s": counted_from_s,
        "messages": len(good),
        "steady_s": steady_s,
        "messages_s": sum(warmup_s <= end_s <= until_s for end_s in ends_s) / steady_s if steady_s else None,
        **steady_latencies(good, until_s),
        "ttft_s": _summary(row["ttft_s"] for row in good),
        "begun": sum(not row["turn"] for row in good),
        "first_ttft_s": _summary(row["ttft_s"] for row in good if not row["turn"]),
        "later_ttft_s": _summary(row["ttft_s"] for row in good if row["turn"]),
        "e2e_s": _summary(row["e2e_s"] for row in good),
        "window_tokens": _summary(float(row["window_tokens"]) for row in good),
        "message_tokens": _summary(later_messages(rows, warmup_s)),
        "open_tokens": open_tokens(rows, until_s, warmup_s),
        "hit_rate": hit_rate(first, last),
        "lookups": [[at_s, *_looked_up(run.samples[0][1], counters)] for at_s, counters in run.samples],
        "counters": _grown(first, last),
        "price_ratio": lost_price_ratio(_grown(first, last)),
        "errors": _errors(message.answer for message in run.messages),
        "missed_readings": run.missed_readings,
        "rows": rows,
    }


def _row(message: Message, begin_s: float) -> dict[str, Any]:
    answer = message.answer
    return {
        "conversation": message.conversation,
        "turn": message.turn,
        "window_tokens": message.window_tokens,
        "goes_on": message.goes_on,
        "sent_s": answer.sent_s - begin_s,
        "ttft_s": answer.ttft_s,
        "e2e_s": answer.e2e_s,
        "token_ids": list(answer.token_ids),
        "error": answer.error,
    }


def _by_conversation(rows: Iterable[Mapping[str, Any]]) -> Iterable[list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if not row["error"]:
            found.setdefault(row["conversation"], []).append(row)
    return found.values()


def later_messages(rows: Iterable[Mapping[str, Any]], from_s: float = 0.0) -> Iterator[float]:
    """Tokens of each message of a chat but the first ones, sent at ``from_s`` or later: what no cache can have of its
    window."""
    for messages in _by_conversation(rows):
        for before, message in pairwise(messages):
            if message["sent_s"] >= from_s:
                yield message["window_tokens"] - before["window_tokens"] - len(before["token_ids"])


def open_tokens(rows: Sequence[Mapping[str, Any]], until_s: float, from_s: float = 0.0) -> float | None:
    """Tokens of the windows that are in use, on average over a chat from ``from_s`` up to ``until_s``: those of
    conversations between their first message and their last answer. Those of an answer count as they come, as many in
    each second from its first one to its end. A person between two conversations has none."""
    if until_s <= from_s:
        return None
    token_s = 0.0
    given_up = {row["conversation"] for row in rows if row["error"]}
    for messages in _by_conversation(rows):
        last = messages[-1]
        goes_on = last["goes_on"] and last["conversation"] not in given_up
        end_s = until_s if goes_on else last["sent_s"] + last["e2e_s"]
        ends_s = [*(after["sent_s"] for after in messages[1:]), end_s]
        for message, end_s in zip(messages, ends_s, strict=True):
            token_s += _token_seconds(message, min(end_s, until_s)) - _token_seconds(message, min(end_s, from_s))
    return token_s / (until_s - from_s)


def _token_seconds(message: Mapping[str, Any], until_s: float) -> float:
    """The integral up to ``until_s`` of the tokens of a message's window and of its answer."""
    sent_s: float = message["sent_s"]
    answered_s = _answered_s(sent_s + message["ttft_s"], sent_s + message["e2e_s"], until_s)
    window_tokens: int = message["window_tokens"]
    return max(0.0, until_s - sent_s) * window_tokens + answered_s * len(message["token_ids"])


def _answered_s(first_s: float, last_s: float, until_s: float) -> float:
    """The integral up to ``until_s`` of the share of an answer that is there: none before ``first_s``, all of it from
    ``last_s`` on, and rising evenly between."""
    rising_s = max(0.0, min(last_s, until_s) - first_s)
    risen = rising_s**2 / (2 * (last_s - first_s)) if rising_s else 0.0
    return risen + max(0.0, until_s - last_s)


def steady_latencies(rows: Iterable[Mapping[str, Any]], until_s: float) -> dict[str, Any]:
    """Latencies of the messages of a chat that were sent up to ``until_s``, until when everybody chats: as many people
    wait for answers then as the load says, and fewer later on. ``rows``: those that count, of one run."""
    sent = [row for row in rows if not row["error"] and row["sent_s"] <= until_s]
    return {f"steady_{name}": _summary(row[name] for row in sent) for name in ("ttft_s", "e2e_s")}


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
        "price_ratio": lost_price_ratio(_grown(run.before, run.after)),
        "errors": _errors([run.first, *answers]),
        "rows": [
            {"conversation": str(number), "turn": 0, "token_ids": list(answer.token_ids), "error": answer.error}
            for number, answer in enumerate(answers)
        ],
    }


LEFT_OUT = ("prefix_hits", "steady_tok_s", "by_prompt_length")
"""Of a class's summary: what a client does not see, and bins, which a report makes of the rows of all runs."""
MIN_STEADY = 8
"""Requests from which on the rate in the middle of a run is taken."""


def rate_figures(run: RateRun, slo: Slo) -> dict[str, Any]:
    """One run at a rate, for a file. Latencies count from the arrival, of the answers without an error. ``slo``:
    deadlines for requests that bring none."""
    good = [one for one in run.sent if not one.answer.error]
    ends_s = sorted(one.sent_s + one.answer.e2e_s for one in good)
    whole = _service(run.sent, slo)
    names = sorted({one.request.class_name for one in run.sent})
    return {
        **whole,
        "requests_s": len(good) / whole["makespan_s"] if whole["makespan_s"] else None,
        "offered_s": steady_rate([one.due_s for one in run.sent]),
        "finished_s": steady_rate(ends_s),
        "most_at_once": _most_at_once(run.sent),
        "lag_s": _summary(one.lag_s for one in run.sent),
        "classes": {name: _service([o for o in run.sent if o.request.class_name == name], slo) for name in names},
        "hit_rate": hit_rate(run.before, run.after),
        "counters": _grown(run.before, run.after),
        "errors": _errors(one.answer for one in run.sent),
        "rows": [
            {
                "conversation": str(one.number),
                "turn": 0,
                "class": one.request.class_name,
                "prompt_tokens": one.request.prompt_tokens,
                "due_s": one.due_s,
                "sent_s": one.sent_s,
                "ttft_s": None if one.answer.ttft_s is None else one.waited_s + one.answer.ttft_s,
                "e2e_s": one.waited_s + one.answer.e2e_s,
                "token_ids": list(one.answer.token_ids),
                "error": one.answer.error,
            }
            for one in run.sent
        ],
    }


def _service(sent: Sequence[Sent], slo: Slo) -> dict[str, Any]:
    """As :class:`kvpolicy.latency.ClassSummary`, but a request that failed has missed its deadlines."""
    tally, missed = ClassTally(slo), 0
    for one in sent:
        request, answer = one.request, one.answer
        if answer.error or not answer.token_s:
            missed += slo.met(0.0, 0.0, request.ttft_s, request.tpot_s) is not None
            continue
        gaps_s = [later - earlier for earlier, later in pairwise(answer.token_s)]
        tally.itl.extend(gaps_s, 1)
        first_s, last_s = (one.sent_s + answer.token_s[at] for at in (0, -1))
        tally.finished(
            one.due_s, first_s, last_s, len(answer.token_s), max(gaps_s, default=0.0), request.ttft_s, request.tpot_s
        )
    found = {name: value for name, value in tally.summary().to_dict().items() if name not in LEFT_OUT}
    if missed:
        met = (found["slo_share"] or 0.0) * found["deadline_requests"]
        found["deadline_requests"] += missed
        found["slo_share"] = met / found["deadline_requests"]
        found["goodput_req_s"] = found["goodput_req_s"] or 0.0
    return found


def steady_rate(times_s: Sequence[float]) -> float | None:
    """Events per second between the quarter and three quarters of them, so that neither the begin nor the end of a run
    counts; None for fewer than :data:`MIN_STEADY`, or all at once."""
    if len(times_s) < MIN_STEADY:
        return None
    ordered = sorted(times_s)
    low, high = len(ordered) // 4, 3 * len(ordered) // 4
    seconds = ordered[high] - ordered[low]
    return (high - low) / seconds if seconds > 0 else None


def _most_at_once(sent: Iterable[Sent]) -> int:
    """Requests that were at the server at the same time."""
    changes = sorted((at_s, change) for one in sent
                     for at_s, change in ((one.sent_s, 1), (one.sent_s + one.answer.e2e_s, -1)))  # fmt: skip
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


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


def lost_price_ratio(grown: Mapping[str, float]) -> float | None:
    """p / d of the tokens that preemptions lost, by the plugin's counters: seconds that one adds to its step over those
    of a token decoded there. None without such a token, or without a cost model that prices steps."""
    added_us, tokens, beside_us, decoded = (grown.get(f"{OWN}{name}_total", 0.0) for name in PRICED)
    return added_us / tokens / (beside_us / decoded) if tokens and added_us and beside_us and decoded else None


def differences(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tokens of two arms in the same round, conversation by conversation, up to its first difference or error:
    after it the windows differ. Those before it are counted. ``one`` and ``other``: their rows."""
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
        at = next((at for at, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
        compared += len(expected) if at is None else at
        if at is not None:
            over.add(name)
            different.append({"conversation": name, "turn": row["turn"], "token": at})
    return {"tokens": compared, "different": different}
