"""What documents say of live benches is what docs/bench-rounds.json comes to."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kvpolicy.bench_warnings import TIE_GAPS
from tests.test_environment import tool

ROOT = Path(__file__).resolve().parent.parent
RAW: dict[str, Any] = json.loads((ROOT / "docs" / "bench-rounds.json").read_text())
rounds = tool("bench_rounds")
SIX_ROUNDS, SIX_ROUNDS_FULL = (
    rounds.together(RAW[f"chat-midway{end}"], RAW[f"chat-midway-more{end}"]) for end in ("", "-full")
)
"""Of the chat met midway."""


SAID = [
    *(
        ("chat", figure, arm, {}, ("docs/caching.md",))
        for figure in ("ttft_s", "e2e_s", "messages_s", "later_ttft_s")
        for arm in ("cache", "both")
    ),
    ("rate", "ttft_s", "mlfq", {"rate": 4.0}, ("docs/bench.md",)),
    *(("rates-above", "ttft_s", "mlfq", {"rate": rate}, ("docs/bench.md",)) for rate in (16.0, 24.0, 32.0)),
    *(("rates-above", "e2e_s", "mlfq", {"rate": rate}, ("docs/bench.md",)) for rate in (24.0, 32.0)),
    ("rates-above", "ttft_s", "orca-max", {"rate": 24.0}, ("docs/bench.md",)),
    *(
        (bench, figure, "kvpolicy", {}, ("docs/bench.md",))
        for bench in ("analytics-103m", "analytics-103m-256")
        for figure in ("requests_s", "cpu_s")
    ),
    *(
        ("analytics-26m", figure, "kvpolicy", {"prefix_tokens": tokens}, ("docs/bench.md",))
        for figure in ("requests_s", "cpu_s")
        for tokens in (256, 1024)
    ),
]


@pytest.mark.parametrize(("bench", "figure", "arm", "cell", "pages"), SAID)
def test_ratios_are_those_of_the_runs(
    bench: str, figure: str, arm: str, cell: dict[str, Any], pages: tuple[str, ...]
) -> None:
    text = rounds.ratio(RAW[bench], figure, arm, **cell).text()
    assert all(text in said(page) for page in pages), text


def said(page: str) -> str:
    """The text of a page, without its line breaks."""
    return " ".join((ROOT / page).read_text().split())


def row(*values: str) -> str:
    return f"| {' | '.join(values)} |"


CHAT_ARMS = {
    "vLLM": "vllm", "always-swap, `--cache cost`, 1 GiB of host memory": "cache",
    "the same with `--order mlfq:base=256`": "both",
}  # fmt: skip
ONE_ROUND = CHAT_ARMS | {"always-swap and that order, without a cache": "mlfq"}
MIDWAY_ARMS = {"vLLM": "vllm", "always-swap, `--cache cost`, 0.5 GiB of host memory": "cache"}
MORE_ARMS = MIDWAY_ARMS | {"vLLM with 68 MiB more for the device": "wide"}
DECODING_ARMS = {"vLLM": "vllm", "always-swap, `--cache cost`, 128 MiB of host memory": "cache"}
WIDE_ARMS = DECODING_ARMS | {"vLLM with 128 MiB more for the device": "wide"}
TIER_ARMS = {
    "vLLM": "vllm", "`--cache lru`": "lru", "`--cache cost`": "cost", "`--cache cost`, files": "files",
    "`--cache cost`, hints": "hints",
}  # fmt: skip
RATES = {"rate": (2.0, 4.0, 6.0, 8.0, 12.0), "rates-above": (16.0, 24.0, 32.0)}
RATE_ROWS = [
    *((arm, "ms per output token end to end", "e2e_per_token_s") for arm in ("vllm", "mlfq", "orca-max")),
    *((arm, "TTFT, s", "ttft_s") for arm in ("vllm", "mlfq", "orca-max")),
    *((arm, "in time", "slo_share") for arm in ("vllm", "mlfq", "orca-max")),
    *((arm, "p99 of the longest gap, s", "longest_gap_s.p99") for arm in ("vllm", "mlfq")),
    *((arm, "most at the server at once", "most_at_once") for arm in ("vllm", "orca-max")),
]


def in_chats(bench: str, figures: tuple[str, ...], arm: str, **cell: Any) -> list[str]:
    """Seconds of these figures to three digits, messages per second, and the share of tokens that was found."""
    seconds = [f"{rounds.mean(RAW[bench], figure, arm, **cell):#.3g}" for figure in figures]
    rate, found = (rounds.mean(RAW[bench], figure, arm, **cell) for figure in ("messages_s", "hit_rate"))
    return [*seconds, f"{rate:.3f}", f"{found:.1%}"]


TIMES = ("ttft_s", "later_ttft_s", "e2e_s")


@pytest.mark.parametrize(
    ("bench", "arms"),
    [
        ("chat-midway", MIDWAY_ARMS),
        ("chat-midway-more", MORE_ARMS),
        ("chat", CHAT_ARMS),
        ("chat-order", ONE_ROUND),
        ("chat-decoding", DECODING_ARMS),
        ("chat-wide", WIDE_ARMS),
    ],
)
def test_the_tables_of_chats_are_those_of_the_runs(bench: str, arms: dict[str, str]) -> None:
    page = said("docs/caching.md")
    for name, arm in arms.items():
        assert row(name, *in_chats(bench, TIMES, arm)) in page, arm


def test_the_ratios_of_the_chat_are_on_every_page() -> None:
    page, readme, results = said("docs/caching.md"), said("README.md"), said("docs/results.md")
    of_page = (
        ("chat-midway", "cache"),
        ("chat-midway-more", "cache"),
        ("chat-midway-more", "wide"),
        ("chat", "cache"),
        ("chat", "both"),
        ("chat-decoding", "cache"),
        ("chat-wide", "cache"),
        ("chat-wide", "wide"),
    )
    for bench, arm in of_page:
        ttft, later, e2e, rate = (rounds.ratio(RAW[bench], figure, arm).text() for figure in (*TIMES, "messages_s"))
        assert f"{row('ratio, 95% over starts', ttft, later, e2e, rate)} |" in page, (bench, arm)
    chat, decoding = RAW["chat"], RAW["chat-decoding"]
    for of, arm in ((SIX_ROUNDS, "cache"), (chat, "cache"), (chat, "both"), (decoding, "cache")):
        ttft, e2e, rate = (rounds.ratio(of, figure, arm).text() for figure in ("ttft_s", "e2e_s", "messages_s"))
        assert f"mean time to first token {ttft}, mean end-to-end time {e2e}, messages/s {rate}" in readme, arm
        assert f"{ttft}, {rate}" in results and f"{ttft}, {e2e}, {rate}" in results, arm


def test_what_is_said_of_the_chat_met_midway_is_what_the_runs_had() -> None:
    page, chat, full = said("docs/caching.md"), RAW["chat-midway"], RAW["chat-midway-full"]
    load, of_full = chat["load"], full["load"]
    assert load["midway"] and of_full["midway"]
    assert (
        f"{load['chatters'][0]} people chat for {load['seconds']:.0f} s with pauses of {load['think_s']:.0f} s" in page
    )
    assert f"the first {load['warmup_s']:.0f} s do not count" in page
    figures = ("messages", "window_tokens", "message_tokens", "open_tokens")
    many, window, message, in_use = (rounds.mean(chat, figure, "vllm") for figure in figures)
    assert f"With vLLM, {many:.0f} messages of a run count on average, with windows of {window:,.0f} tokens" in page
    assert f"a message after the first one of its conversation has {message:.0f} of these" in page
    times = in_use / (384 * 32)
    assert f"the windows in use take {times:.1f} times the device's memory" in page and times > 3
    by_round = [value / (384 * 32) for value in rounds.by_round(chat, "open_tokens", "vllm").values()]
    assert f"({min(by_round):.1f} to {max(by_round):.1f} by rounds)" in page
    assert of_prices(chat) in page and f"tokens that preemptions lost {chat['prices']['lost_price_ratio']:.3f}" in page
    more = parts_of("chat-midway", "cache", "messages_s")
    by_rounds = "{}, {} and {} of vLLM's, and the messages per second {}, {} and {} times vLLM's: more in each"
    assert by_rounds.format(*parts_of("chat-midway", "cache"), *more) in page and min(map(float, more)) > 1
    assert f"at {rounds.ratio(chat, 'messages_s', 'cache').text()} times the messages" in page
    late = [
        [fmean(run["ttft_s_by_50_s"][4:]) for run in chat["runs"] if run["arm"] == arm] for arm in ("cache", "vllm")
    ]
    parts = [f"{ours / theirs:.3f}" for ours, theirs in zip(*late, strict=True)]
    assert "From 200 s on, when that queue is gone, the time to first token was {}, {} and {} of".format(*parts) in page
    compared = chat["compared"]
    gaps = [at["gap"] for at in compared["places"]]
    assert f"{compared['tokens']:,} tokens were those of vLLM. {len(gaps)} conversations differ" in page
    assert f"equal there ({gaps.count(0)}) or {max(gaps)} apart ({len(gaps) - gaps.count(0)})" in page
    assert compared["different"] == len(gaps) and max(gaps) < TIE_GAPS["bfloat16"]


def test_three_more_rounds_are_of_the_same_servers_and_load() -> None:
    for name, arms in (("chat-midway", 2), ("chat-midway-full", 1)):
        end = name.removeprefix("chat-midway")
        first, more = RAW[name], RAW[f"chat-midway-more{end}"]
        assert more["load"]["load_seed"] == 1 and more["arms"][:arms] == first["arms"]
        for part in ("target", "workload", "versions"):
            assert more[part] == first[part], (name, part)
    arms = RAW["chat-midway-more"]["arms"]
    assert arms[2]["flags"][-2:] == ["--num-gpu-blocks-override", "4736"] and (4736 - 384) * 16 / 1024 == 68
    assert 31 * -(-3400 // 32) < 4736, "31 windows of 3,400 tokens"


def test_what_is_said_of_three_more_rounds_is_what_the_runs_had() -> None:
    page, more = said("docs/caching.md"), RAW["chat-midway-more"]
    in_use = [value / (384 * 32) for value in rounds.by_round(more, "open_tokens", "vllm").values()]
    times = f"{fmean(in_use):.1f} times the smaller memory ({min(in_use):.1f} to {max(in_use):.1f} by rounds)"
    assert f"The windows in use take {times}" in page
    parts, rates = parts_of("chat-midway-more", "cache"), parts_of("chat-midway-more", "cache", "messages_s")
    by_rounds = "{}, {} and {} of vLLM's, and the messages per second {}, {} and {} times vLLM's"
    assert by_rounds.format(*parts, *rates) in page and min(map(float, rates)) > 1
    ends = {arm: [run["until_s"] for run in more["runs"] if run["arm"] == arm] for arm in ("vllm", "cache", "wide")}
    out = [f"{ends[arm][1]:.0f}" for arm in ("cache", "wide")]
    assert "after {} s with the cache and after {} s with more memory".format(*out) in page and ends["vllm"][1] > 419
    sent = parts_of("chat-midway-more", "cache", "messages")
    assert "messages sent after the warm-up, however long that took, the ratio is {}, {} and {}".format(*sent) in page
    late = [
        [fmean(run["ttft_s_by_50_s"][4:]) for run in more["runs"] if run["arm"] == arm] for arm in ("cache", "vllm")
    ]
    of_vllm = [f"{ours / theirs:.3f}" for ours, theirs in zip(*late, strict=True)]
    assert "From 200 s on the time to first token was {}, {} and {} of vLLM's".format(*of_vllm) in page
    queue = more["runs"][[(run["arm"], run["round"]) for run in more["runs"]].index(("vllm", 1))]["ttft_s_by_50_s"][4:]
    assert f"messages of the second round wait {min(queue):.0f} s and more to the end of it" in page


def test_what_is_said_of_the_load_of_three_more_rounds_is_what_the_runs_had() -> None:
    page, more, full = said("docs/caching.md"), RAW["chat-midway-more"], RAW["chat-midway-more-full"]
    served, carried = (rounds.mean(bench, "messages_s", "vllm") for bench in (more, full))
    loads, sent = loads_of(more, full)
    by_answers = f"a load of {served / carried:.0%} ({listed(loads)} by rounds)"
    by_sent = f"or {fmean(sent):.0%} by messages sent after the warm-up ({listed(sent)})"
    assert f"finished {served:.3f} messages per second here, of {carried:.3f} without pauses: {by_answers}, " in page
    assert by_sent in page
    prices = more["prices"]
    priced = f"p / d was {prices['price_ratio']:.3f}, at {prices['batch']:.1f} decodes a step, in one run"
    assert f"{priced}; of the tokens that preemptions lost {prices['lost_price_ratio']:.3f}" in page


def test_what_six_rounds_come_to_and_what_more_memory_does_is_what_the_runs_had() -> None:
    page, more = said("docs/caching.md"), RAW["chat-midway-more"]
    for of, over, begin in (
        (SIX_ROUNDS, "vllm", "the cache alone comes to"),
        (more, "wide", "Over vLLM with that much more memory for the device, the cache has"),
    ):
        ttft, e2e, rate = (
            rounds.ratio(of, figure, "cache", over).text() for figure in ("ttft_s", "e2e_s", "messages_s")
        )
        named = f"{ttft} of the time to first token, {e2e} of the end-to-end time and {rate} times the messages"
        assert f"{begin} {named} per second" in page
    fewer = parts_of("chat-midway-more", "cache", "messages_s", "wide")
    assert "per second, {}, {} and {} by rounds: fewer in each".format(*fewer) in page and max(map(float, fewer)) < 1
    places = more["compared"]["places"]
    cache, wide = (sum(at["arm"] == arm for at in places) for arm in ("cache", "wide"))
    assert f"{more['compared']['tokens']:,} tokens of the two were those of vLLM; {cache} conversations" in page
    assert f"and {wide} with more memory differ from some token on, at most 0.0625 apart" in page
    assert round(max(at["gap"] for at in places), 6) == 0.0625 and cache + wide == more["compared"]["different"]


def test_what_is_said_of_the_rounds_of_a_moderate_load_is_what_the_runs_had() -> None:
    found = []
    for name in ("chat-midway", "chat-midway-more"):
        _, sent = loads_of(RAW[name], RAW[f"{name}-full"])
        found += [
            *zip(
                sent,
                map(float, parts_of(name, "cache")),
                map(float, parts_of(name, "cache", "messages_s")),
                strict=True,
            )
        ]
    moderate = [(sent, part) for sent, part, _ in found if sent < 0.85]
    shares, parts = ([*of] for of in zip(*moderate, strict=True))
    assert (
        f"In the four rounds with a load of {min(shares):.0%} to {max(shares):.0%} by messages sent the time to first "
        f"token was {min(parts):.3f} to {max(parts):.3f} of vLLM's" in said("docs/caching.md")
    ) and len(parts) == 4
    rates = [rate for *_, rate in found]
    of_second, others = [rates[1], rates[4]], [rates[number] for number in (0, 2, 3, 5)]
    assert "({:.3f} and {:.3f} times in the second round of each seed, {:.3f} to {:.3f} in the others)".format(
        *of_second, min(others), max(others)
    ) in said("docs/caching.md")


def test_other_pages_say_what_vllm_does_with_that_memory() -> None:
    more, wide = RAW["chat-midway-more"], RAW["chat-wide"]
    ttft, rate = (rounds.ratio(more, figure, "cache", "wide").text() for figure in ("ttft_s", "messages_s"))
    assert f"the cache has {ttft} of its time to first token and {rate} times its messages per" in said("README.md")
    assert f"the cache has {ttft} of its time to first token, {rate} times its messages" in said("docs/results.md")
    in_use = rounds.mean(SIX_ROUNDS, "open_tokens", "vllm") / (384 * 32)
    window = rounds.mean(SIX_ROUNDS, "window_tokens", "vllm")
    assert f"windows in use {in_use:.1f} times the device's memory, six rounds" in said("docs/results.md")
    assert f"a chat with windows of {window:,.0f} tokens: " in said("docs/results.md")
    ours, theirs = (rounds.ratio(wide, "ttft_s", arm).text() for arm in ("cache", "wide"))
    assert f"in another chat vLLM with 128 MiB more comes to {theirs} of the time to first token" in said("README.md")
    assert f"and the cache to {ours}" in said("README.md")


def test_what_is_said_of_ties_in_bfloat16_is_what_the_runs_had() -> None:
    page, again, wide = said("docs/caching.md"), RAW["chat-midway-again"]["compared"], RAW["chat-midway-wide"]
    assert f"with the same memory none of {again['tokens']:,} tokens differs" in page and not again["different"]
    places = wide["compared"]["places"]
    blocks = [arm["flags"][arm["flags"].index("--num-gpu-blocks-override") + 1] for arm in wide["arms"]]
    assert blocks[:2] == ["384", "384"] and wide["arms"][2]["flags"][-1] == "4736"
    cache, more = (sum(at["arm"] == arm for at in places) for arm in ("cache", "wide"))
    assert f"{more} conversations differ after 8,024 equal tokens, where the plugin's differ in {cache} after" in page
    assert wide["compared"]["tokens"] == 8024 + 9455 and "9,455, all of them at most 0.0625 apart" in page
    assert max(at["gap"] for at in places) == 0.0625
    found = [rounds.mean(wide, "hit_rate", arm) for arm in ("cache", "wide")]
    assert max(found) - min(found) < 0.02, "both find as much"


def test_what_is_said_of_the_load_of_the_chat_met_midway_is_what_the_runs_had() -> None:
    page, chat, full = said("docs/caching.md"), RAW["chat-midway"], RAW["chat-midway-full"]
    load, of_full = chat["load"], full["load"]
    carried, served = (rounds.mean(bench, "messages_s", "vllm") for bench in (full, chat))
    assert f"vLLM alone finished {served:.3f} messages per second, of {carried:.3f} without pauses" in page
    assert (
        f"{of_full['chatters'][0]} people, {of_full['seconds']:.0f} s of which {of_full['warmup_s']:.0f} do not" in page
    )
    loads, shares = loads_of(chat, full)
    assert f"a load of {served / carried:.0%} ({min(loads):.0%} to {max(loads):.0%} by rounds)" in page
    sent = rounds.mean(chat, "messages", "vllm") / (load["seconds"] - load["warmup_s"])
    assert f"there are {sent:.3f} per second, {sent / carried:.0%}: " in page
    assert f"{listed(shares)} by rounds" in page
    # Of all six rounds, on the other pages.
    served, many = (rounds.mean(SIX_ROUNDS, figure, "vllm") for figure in ("messages_s", "messages"))
    carried = rounds.mean(SIX_ROUNDS_FULL, "messages_s", "vllm")
    sent = many / (load["seconds"] - load["warmup_s"])
    said_so = f"load {sent / carried:.0%} to {served / carried:.0%}, by how messages are counted, "
    conditions = said_so + "p / d {:.3f} and {:.3f}".format(
        *(RAW[name]["prices"]["price_ratio"] for name in ("chat-midway", "chat-midway-more"))
    )
    assert conditions in said("README.md") and conditions in said("docs/results.md")


def loads_of(chat: Any, full: Any) -> tuple[list[float], list[float]]:
    """Messages that vLLM alone answered, and those that it was sent, after the warm-up, over what it answers without
    pauses, by rounds."""
    answered, at_most = (rounds.by_round(bench, "messages_s", "vllm").values() for bench in (chat, full))
    counted_s = chat["load"]["seconds"] - chat["load"]["warmup_s"]
    sent = [many / counted_s for many in rounds.by_round(chat, "messages", "vllm").values()]
    shares = [[one / most for one, most in zip(of, at_most, strict=True)] for of in (answered, sent)]
    return shares[0], shares[1]


def test_what_is_said_of_the_chats_is_what_the_runs_had() -> None:
    page, chat, shown = said("docs/caching.md"), RAW["chat"], said("README.md")
    figures = ("messages", "window_tokens", "message_tokens", "open_tokens")
    many, window, message, in_use = (rounds.mean(chat, figure, "vllm") for figure in figures)
    device = 480 * 32
    assert "480 blocks of 32 tokens on the device" in page and "--num-gpu-blocks-override" in chat["arms"][0]["flags"]
    assert f"{chat['load']['chatters'][0]} people chat for {chat['load']['seconds']:.0f} s" in page
    assert f"and pauses of {chat['load']['think_s']:.0f} s on average" in page
    assert f"By vLLM a run has {many:.0f} messages, with windows of {window:,.0f} tokens on average" in page
    assert f"first one of its conversation has {message:.0f} of these" in page
    assert f"take {in_use / device:.1f} times the device's memory" in page
    prices = chat["prices"]
    assert of_prices(chat) in page
    carried, served, sent = (
        rounds.mean(RAW[name], "later_messages_s", arm)
        for name, arm in (("chat-full", "vllm"), ("chat", "vllm"), ("chat", "cache"))
    )
    assert f"vLLM alone finished {carried:.3f} messages per second" in page
    assert f"and {served:.3f} with them: a load of {served / carried:.0%}" in page
    assert f"the server with the cache finished {sent:.3f}, {sent / carried:.0%}" in page
    whole = rounds.mean(chat, "messages_s", "vllm") / rounds.mean(RAW["chat-full"], "messages_s", "vllm")
    first = rounds.by_round(chat, "later_messages_s", "vllm")[0] / carried
    assert f"Over whole runs it is {whole:.0%}, and {first:.0%} after the first minute of the first round alone" in page
    assert f"load {served / carried:.0%}, p / d {prices['price_ratio']:.3f})" in shown
    compared = [RAW[name]["compared"] for name in ("chat", "chat-order", "chat-34m")]
    assert not any(one["different"] for one in compared)
    assert (
        "All {:,} tokens of the three rounds were those of vLLM, and {:,} of the one".format(
            *(one["tokens"] for one in compared)
        )
        in page
    )
    begun = sum(run["begun"] for run in chat["runs"]) / sum(run["messages"] for run in chat["runs"])
    assert f"{begun:.0%} of the messages begin a conversation" in page
    for arm in ("cache", "both"):
        assert "{}, {} and {}".format(*parts_of("chat", arm)) in page
    smaller = RAW["chat-34m"]
    assert "{} and {} of vLLM's time to first token".format(*parts_of("chat-34m", "kvpolicy")) in page
    assert f"p / d was {smaller['prices']['price_ratio']:.3f} at {smaller['prices']['batch']:.1f} decodes" in page


def of_prices(bench: dict[str, Any]) -> str:
    prices = bench["prices"]
    decoded_ms, prompt_ms = 1e3 * prices["decoded_token_s"], 1e3 * prices["prompt_token_s"]
    return (
        f"p / d was {prices['price_ratio']:.3f}, at {prices['batch']:.1f} decodes a step, of which a decoded token "
        f"takes {decoded_ms:.2f} ms and a token of a prompt adds {prompt_ms:.3f} ms"
    )


def test_what_is_said_of_the_chats_on_another_machine_is_what_the_runs_had() -> None:
    page, decoding, wide = said("docs/caching.md"), RAW["chat-decoding"], RAW["chat-wide"]
    for bench in (decoding, wide):
        assert f"Here {of_prices(bench)}" in page
        assert f"{bench['load']['chatters'][0]} people" in page and f"{bench['load']['conversations']} conv" in page
    in_use = (
        rounds.mean(decoding, "open_tokens", "vllm") / (480 * 32),
        rounds.mean(wide, "open_tokens", "vllm") / (640 * 32),
    )
    assert f"The windows in use took {in_use[0]:.1f} times the device's memory" in page
    assert f"whose windows take {in_use[1]:.1f} times the device's 640 blocks" in page
    blocks = [arm["flags"][arm["flags"].index("--num-gpu-blocks-override") + 1] for arm in wide["arms"]]
    assert blocks[0] == blocks[1] == "640" and wide["arms"][2]["flags"][-1] == "4736"
    carried, served = (
        rounds.mean(RAW[name], "later_messages_s", "vllm") for name in ("chat-decoding-full", "chat-decoding")
    )
    whole = rounds.mean(decoding, "messages_s", "vllm") / rounds.mean(RAW["chat-decoding-full"], "messages_s", "vllm")
    assert f"finished {served:.3f} messages per second after the first minute, of {carried:.3f} without pauses" in page
    assert f"a load of {served / carried:.0%}, and of {whole:.0%} over whole runs" in page
    slower = decoding["prices"]["decoded_token_s"] / RAW["chat"]["prices"]["decoded_token_s"]
    assert f"a decoded token takes {slower:.1f} times as long" in page
    lost = f"tokens that preemptions lost {decoding['prices']['lost_price_ratio']:.3f}"
    assert lost.replace("lost ", "lost it was ") in page and lost in said("docs/results.md")
    for name, arm in (("chat-decoding", "cache"), ("chat-wide", "cache"), ("chat-wide", "wide")):
        assert "{}, {} and {}".format(*parts_of(name, arm)) in page, (name, arm)
    late, early = sent_at("chat-decoding", 5), sent_at("chat-decoding", 0, 2)
    assert (
        f"waits {min(early):.1f} to {max(early):.1f} s with the cache, and {min(late):.1f} to {max(late):.1f} s" in page
    )
    late, early = sent_at("chat-wide", 5), sent_at("chat-wide", 0, 3)
    assert (
        f"{min(late):.1f} to {max(late):.1f} s from 250 s on where it was {min(early):.1f} to {max(early):.1f}" in page
    )
    at_most, finished = (rounds.mean(RAW[name], "messages_s", "vllm") for name in ("chat-wide-full", "chat-wide"))
    assert f"finished {finished:.3f} messages per second over whole runs, and {at_most:.3f} without pauses" in page
    assert f"a load of {finished / at_most:.0%}. Of" in page
    rival, cache = (rounds.ratio(wide, "ttft_s", arm).text() for arm in ("wide", "cache"))
    assert f"{rival}, where the cache came to {cache}" in said("docs/results.md")
    ratio = rounds.mean(wide, "ttft_s", "wide") / rounds.mean(wide, "ttft_s", "cache")
    assert round(1 / ratio) == 7 and not rounds.ratio(wide, "ttft_s", "cache").significant
    assert f"{decoding['compared']['tokens']:,} tokens, all those of vLLM" in page
    assert not decoding["compared"]["different"]
    assert f"Of {wide['compared']['tokens']:,} tokens" in page
    places = wide["compared"]["places"]
    of_arms = [
        {(at["round"], at["conversation"], at["turn"], at["token"]) for at in places if at["arm"] == arm}
        for arm in ("cache", "wide")
    ]  # fmt: skip
    assert of_arms[0] == of_arms[1] and len(of_arms[0]) == 3
    assert f"at most {max(at['gap'] for at in places):.6f} apart" in page


def sent_at(bench: str, first: int, last: int | None = None) -> list[float]:
    """By round, the cache's time to first token in these steps of 50 s."""
    runs = [run for run in RAW[bench]["runs"] if run["arm"] == "cache"]
    return [seconds for run in runs for seconds in run["ttft_s_by_50_s"][first:last]]


def listed(shares: list[float]) -> str:
    """Three of them."""
    return "{:.0%}, {:.0%} and {:.0%}".format(*shares)


def parts_of(bench: str, arm: str, figure: str = "ttft_s", over: str = "vllm") -> list[str]:
    """A figure over that of another arm, by round."""
    ours, theirs = (rounds.by_round(RAW[bench], figure, one) for one in (arm, over))
    return [f"{ours[number] / theirs[number]:.3f}" for number in theirs]


@pytest.mark.parametrize("people", [4, 8])
def test_the_table_by_tier_and_policy_is_that_of_the_runs(people: int) -> None:
    page, tiers = said("docs/caching.md"), RAW["tiers"]
    for name, arm in TIER_ARMS.items():
        figures = in_chats("tiers", TIMES, arm, chatters=people)
        over = [rounds.ratio(tiers, figure, arm, chatters=people).text() for figure in ("ttft_s", "messages_s")]
        shown = row(str(people), name, *figures) + (" | |" if arm == "vllm" else f" {over[0]} | {over[1]} |")
        assert shown in page, arm
    assert f"{rounds.mean(tiers, 'messages', 'vllm', chatters=people):.0f} messages on average" in page


def test_what_is_said_by_tier_and_policy_is_what_the_runs_had() -> None:
    page, tiers = said("docs/caching.md"), RAW["tiers"]

    def over(figure: str, arm: str, other: str, people: int) -> str:
        return str(rounds.ratio(tiers, figure, arm, over=other, chatters=people).text())

    assert f"time to first token {over('ttft_s', 'hints', 'cost', 8)} and the tokens found" in page
    assert f"tokens found {over('hit_rate', 'hints', 'cost', 8)} times those of the same cache without them" in page
    assert f"they change nothing: {over('ttft_s', 'hints', 'cost', 4)}" in page
    assert f"is {over('ttft_s', 'cost', 'lru', 4)} times with 4 people and {over('ttft_s', 'cost', 'lru', 8)}" in page
    assert f"either, {over('ttft_s', 'files', 'cost', 4)} and {over('ttft_s', 'files', 'cost', 8)}:" in page
    compared, device = tiers["compared"], 184 * 32
    assert f"All {compared['tokens']:,} tokens were those of vLLM" in page and not compared["different"]
    in_use = [rounds.mean(tiers, "open_tokens", "vllm", chatters=people) / device for people in (4, 8)]
    assert "take {:.1f} and {:.1f} times the device's memory".format(*in_use) in page


def test_each_ratio_stands_at_its_rate() -> None:
    page = said("docs/bench.md")

    def over(figure: str, rate: float, arm: str = "mlfq") -> str:
        (bench,) = (bench for bench, rates in RATES.items() if rate in rates)
        return f"{rounds.ratio(RAW[bench], figure, arm, rate=rate).text()} at {rate:g}"

    first = [over("ttft_s", rate) for rate in (4.0, 16.0, 24.0, 32.0)]
    reserved = over("ttft_s", 24.0, "orca-max")
    assert f"of `mlfq` is {', '.join(first[:-1])} and {first[-1]}, that of `orca-max` {reserved};" in page
    whole = [over("e2e_s", rate).replace(")", ") times as long", rate == 24.0) for rate in (24.0, 32.0)]
    assert f"the whole request takes `mlfq` {' and '.join(whole)}" in page
    assert "between 6 and 12 the interval of every ratio of `mlfq` holds 1." in page
    figures = ("e2e_per_token_s", "ttft_s", "goodput_req_s", "e2e_s")
    between = [rounds.ratio(RAW["rate"], figure, "mlfq", rate=rate) for figure in figures for rate in (6.0, 8.0, 12.0)]
    assert not any(ratio.significant for ratio in between)
    assert row("arriving per second", *(f"{rate:g}" for rates in RATES.values() for rate in rates)) in page
    for bench, cell in (("analytics-103m", {}), ("analytics-103m-256", {}), ("analytics-26m", {"prefix_tokens": 256})):
        assert f"{len(rounds.by_round(RAW[bench], 'requests_s', 'vllm', **cell))} rounds behind each prefix" in page
    compared = [RAW[bench]["compared"] for bench in ("analytics-26m", "analytics-103m-256")]
    assert "All {:,} and twice {:,} tokens were the same".format(*(one["tokens"] for one in compared)) in page
    assert not any(one["different"] for one in compared)
    alone = rounds.by_round(RAW["analytics-103m-256"], "requests_s", "vllm").values()
    assert f"of vLLM alone by up to {max(alone) / min(alone) - 1:.0%} behind 256 tokens" in page


@pytest.mark.parametrize(("arm", "name", "figure"), RATE_ROWS)
def test_the_table_by_rate_is_that_of_the_runs(arm: str, name: str, figure: str) -> None:
    values = [rounds.mean(RAW[bench], figure, arm, rate=rate) for bench, rates in RATES.items() for rate in rates]
    factor, form = {"slo_share": (1.0, ".0%"), "most_at_once": (1.0, ".0f"), "e2e_per_token_s": (1e3, ".3g")}.get(
        figure, (1.0, ".3g")
    )
    assert row(f"`{arm}`, {name}", *(f"{factor * value:{form}}" for value in values)) in said("docs/bench.md")


def test_what_was_finished_of_what_arrived_is_that_of_the_runs() -> None:
    def share(arm: str, rate: float) -> str:
        finished, offered = (
            rounds.by_round(RAW["rates-above"], figure, arm, rate=rate) for figure in ("finished_s", "offered_s")
        )
        return f"{fmean(finished[number] / offered[number] for number in offered):.0%}"

    assert (
        f"at 16 it finished {share('vllm', 16.0)} of what arrived. `mlfq` served 16, and finished "
        f"{share('mlfq', 24.0)} at 24."
    ) in said("docs/bench.md")


def test_a_start_of_the_servers_counts_once() -> None:
    runs = [
        {"cell": {"n": 1}, "round": number, "arm": arm, "start": number // 2, "cpu_s": seconds}
        for number, factor in enumerate((2.0, 8.0, 3.0, 3.0, 5.0))
        for arm, seconds in (("vllm", 7.0), ("a", 7 * factor))
    ]  # fmt: skip
    found = rounds.ratio({"runs": runs}, "cpu_s", "a", n=1)
    assert found.pairs == 3 and found.value == pytest.approx((4.0 * 3.0 * 5.0) ** (1 / 3))
    for run in runs:
        del run["start"]
    assert rounds.ratio({"runs": runs}, "cpu_s", "a", n=1).pairs == 5


def test_rounds_with_the_same_conversations_count_once() -> None:
    def bench(
        seed: int, *factors: float, seconds: float = 60.0, workload: str | None = "lengths:a.csv"
    ) -> dict[str, Any]:
        runs = [
            {"cell": {"n": 1}, "round": number, "start": number, "arm": arm, "cpu_s": value}
            for number, factor in enumerate(factors)
            for arm, value in (("vllm", 7.0), ("a", 7 * factor))
        ]  # fmt: skip
        return {"workload": workload, "load": {"seconds": seconds, "load_seed": seed}, "runs": runs}

    one, other = bench(0, 2.0, 3.0), bench(1, 8.0, 3.0)
    other["runs"] += [{**run, "arm": "b"} for run in other["runs"] if run["arm"] == "a"]
    whole = rounds.together(one, other)
    assert [*rounds.by_round(whole, "cpu_s", "a")] == [0, 1, 2, 3]
    found = rounds.ratio(whole, "cpu_s", "a")
    assert found.pairs == 2 and found.value == pytest.approx((4.0 * 3.0) ** 0.5)
    assert [*rounds.by_round(whole, "cpu_s", "b")] == [2, 3]
    with pytest.raises(ValueError, match="b was run in rounds"):
        rounds.ratio(whole, "cpu_s", "b")
    assert one["runs"][0]["round"] == other["runs"][0]["round"] == 0, "what was given stays as it was"
    for wrong in (bench(0, 2.0), bench(1, 2.0, seconds=30.0), bench(1, 2.0, workload="lengths:b.csv")):
        with pytest.raises(ValueError, match=r"should be of one load by different seeds"):
            rounds.together(one, wrong)
    with pytest.raises(ValueError, match=r"should be of a workload, whose conversations are the same by every seed"):
        rounds.together(bench(0, 2.0, workload=None), bench(1, 2.0, workload=None))


def test_what_is_gathered_is_what_stands_there(tmp_path: Path) -> None:
    """Neither requests nor folders of the machine."""
    run = {"cell": {"n": 1}, "round": 0, "arm": "vllm", "ttft_s": {"mean": 1 / 3}, "rows": [1], "lookups": [[2]]}
    bench = {
        "kind": "chat", "versions": {}, "load": {"workload": "lengths:/a/b/c.csv?think=1", "rounds": 1},
        "prices": {"price_ratio": 0.123456789, "unknown": ""}, "runs": [run], "target": "/models/llama",
        "arms": [
            {"name": "vllm", "hints": False, "command": ["/bin/vllm", "serve", "/models/llama", "--dtype", "float32"]},
            {"name": "ours", "hints": True, "command": ["vllm", "serve", "llama", '{"files": "/nvme/kv", "gib": 1}']},
        ],
        "comparisons": [
            {"round": 0, "tokens": {"ours": {"tokens": 10, "different": [{"turn": 0}]}}},
            {"round": 1, "tokens": {"ours": {"tokens": 5, "different": []}}},
        ],
    }  # fmt: skip
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    found = rounds.gathered(tmp_path / "bench.json")
    assert found["runs"] == [{"cell": {"n": 1}, "round": 0, "arm": "vllm", "ttft_s": {"mean": 0.333333}}]
    assert (found["workload"], found["prices"]) == ("lengths:c.csv?think=1", {"price_ratio": 0.123457})
    places = [{"arm": "ours", "round": 0, "turn": 0}]
    assert (found["target"], found["compared"]) == ("llama", {"tokens": 15, "different": 1, "places": places})
    assert [arm["flags"] for arm in found["arms"]] == [["--dtype", "float32"], ['{"files": "kv", "gib": 1}']]
    assert json.loads(rounds.text_of({"one": found})) == {"one": found}


def test_the_first_minute_of_a_chat_does_not_count_for_its_later_rate() -> None:
    rows = [{"sent_s": sent_s, "e2e_s": 5.0, "error": ""} for sent_s in (0.0, 54.0, 56.0, 80.0, 114.0, 116.0)]
    rows[3]["error"] = "timed out"
    assert rounds.later_rate({"steady_s": 120.0, "rows": rows}) == {"later_messages_s": 2 / 60}
    warm = {"warmup_s": 80.0, "steady_s": 40.0, "until_s": 120.0, "rows": rows}
    assert rounds.later_rate(warm) == {"later_messages_s": 1 / 40}
    assert rounds.later_rate({"steady_s": 60.0, "rows": rows}) == rounds.later_rate({"rows": rows}) == {}


def test_a_chat_has_its_time_to_first_token_by_when_messages_were_sent() -> None:
    sent = ((0.0, 1.0), (49.0, 3.0), (149.0, 5.0), (151.0, 7.0), (60.0, 100.0))
    rows = [{"sent_s": sent_s, "ttft_s": ttft_s, "error": ""} for sent_s, ttft_s in sent]
    rows[-1]["error"] = "timed out"
    assert rounds.by_time({"steady_s": 150.1, "rows": rows}) == {"ttft_s_by_50_s": [2.0, None, 6.0]}
    assert rounds.by_time({"steady_s": 20.0, "rows": rows[:1]}) == {"ttft_s_by_50_s": [1.0]}
    warm = {"warmup_s": 100.0, "steady_s": 50.1, "until_s": 150.1, "rows": rows}
    assert rounds.by_time(warm) == {"ttft_s_by_50_s": [2.0, None, 6.0]}, "with those of the warm-up"
    assert rounds.by_time({"rows": rows}) == rounds.by_time({"steady_s": 60.0, "rows": []}) == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"load": {}, "kind": "chat"}'])
def test_anything_else_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(SystemExit, match=r"other\.json: should be the bench\.json"):
        rounds.gathered(tmp_path / "other.json")


RUNS = [
    {"cell": {"n": n, "m": 0}, "round": number, "arm": arm, "ttft_s": {"mean": factor * (number + n), "p99": 9.0 + n}}
    for n in (1, 5) for number in range(3) for arm, factor in (("vllm", 2.0), ("other", 1.0 if n == 1 else 4.0))
]  # fmt: skip


def test_ratios_are_by_round_of_one_cell() -> None:
    bench = {"runs": RUNS[::-1]}
    assert rounds.ratio(bench, "ttft_s", "other", n=1).value == pytest.approx(0.5)
    assert rounds.ratio(bench, "ttft_s", "other", n=5).value == pytest.approx(2.0)
    assert rounds.ratio(bench, "ttft_s.p99", "other", n=5).value == 1.0
    assert rounds.mean(bench, "ttft_s", "vllm", n=5) == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("runs", "cell", "message"),
    [
        (RUNS, {}, "should be of one cell, and is of .*'n': 1.*'n': 5"),
        (RUNS, {"n": 2}, r"should be of one cell, and is of \[\]"),
        ([*RUNS, RUNS[3]], {"n": 1}, "round 1: ttft_s should be there once"),
        (RUNS[1:], {"n": 1}, r"other was run in rounds \[0, 1, 2\], vllm in \[1, 2\]"),
        ([RUNS[0] | {"ttft_s": {"mean": None}}, *RUNS[1:]], {"n": 1}, "round 0: ttft_s should be there once"),
    ],
)
def test_no_run_is_left_out_and_none_counts_twice(runs: list[Any], cell: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rounds.ratio({"runs": runs}, "ttft_s", "other", **cell)
