"""What README's table says of gains, and docs/headroom.md of every place, are the figures of the raw numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from kvpolicy.stats import Ratio, student_interval, student_ratio
from tests.test_environment import ROOT, tool

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
HEADROOM = (DOCS / "headroom.md").read_text()
PLACES: list[dict[str, Any]] = json.loads((DOCS / "headroom.json").read_text())["places"]
LEARNED = "cheapest:analytic"


# ---- measured on the CPU engine ----


def measured() -> Iterator[tuple[str, str, str]]:
    """Situation, gain, bound."""
    demo = tool("demo_runs")
    runs = demo.stored()
    one, two = runs[0]["scenarios"]

    def pooled(scenario: str, figure: str, arm: str) -> str:
        ratio: Ratio = demo.pooled(runs, scenario, figure, arm)
        return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"

    bounds = [100 * run["bound"]["bound"] for run in runs]
    yield (
        "over capacity (1.7), CPU engine, policy alone",
        f"mean end-to-end time {pooled(one, 'e2e', 'learned')}, tokens/s {pooled(one, 'tok/s', 'learned')}",
        f"{min(bounds):.1f} to {max(bounds):.1f}%",
    )
    order = "learned, mlfq:base=32"
    yield (
        "the same, order `mlfq:base=32` with the learned policy",
        f"mean time to first token {pooled(one, 'TTFT', order)}, mean end-to-end time {pooled(one, 'e2e', order)}; "
        f"its p99 {pooled(one, 'e2e p99', order)}",
        "-",
    )
    order = "learned, urgent"
    yield (
        "urgent requests beside a batch, CPU engine, order `urgent` with the learned policy",
        f"mean time to first token of the urgent {pooled(two, 'urgent TTFT', order)}, "
        f"batch tokens/s {pooled(two, 'batch tok/s', order)}",
        "-",
    )
    bench = tool("bench_rounds")
    raw = json.loads(bench.RAW.read_text())
    for end in ("", "-full"):
        raw[f"midway{end}"] = bench.together(raw[f"chat-midway{end}"], raw[f"chat-midway-more{end}"])
    midway, chat, decoding = (raw[name] for name in ("midway", "chat", "chat-decoding"))

    def of_load(served: float, name: str, figure: str = "later_messages_s") -> str:
        return f"{served / bench.mean(raw[f'{name}-full'], figure, 'vllm'):.0%}"

    def price(name: str) -> str:
        return f"p / d {raw[name]['prices']['price_ratio']:.3f}"

    def conditions(name: str, memory: str) -> str:
        window = bench.mean(raw[name], "window_tokens", "vllm")
        load = of_load(bench.mean(raw[name], "later_messages_s", "vllm"), name)
        return f"windows of {window:,.0f} tokens, {memory} times the memory; load {load}, {price(name)}"

    def over_vllm(of: Any, arm: str = "cache") -> str:
        first, whole, rate = (bench.ratio(of, figure, arm).text() for figure in ("ttft_s", "e2e_s", "messages_s"))
        return f"mean time to first token {first}, mean end-to-end time {whole}, messages/s {rate}"

    window, in_use, many, served = (
        bench.mean(midway, figure, "vllm") for figure in ("window_tokens", "open_tokens", "messages", "messages_s")
    )
    load = raw["chat-midway"]["load"]
    sent = many / (load["seconds"] - load["warmup_s"])
    loads = " to ".join(of_load(one, "midway", "messages_s") for one in (sent, served))
    twice = f"{price('chat-midway')} and {raw['chat-midway-more']['prices']['price_ratio']:.3f}"
    yield (
        f"a chat with windows of {window:,.0f} tokens, {in_use / (384 * 32):.1f} times the device's memory, CPU "
        "engine, `always-swap` with `--cache cost`",
        f"{over_vllm(midway)} (load {loads}, by how messages are counted, {twice}; six rounds); from first messages "
        f"on ({conditions('chat', 'about 3.0')}) {over_vllm(chat)}, with `--order mlfq:base=256` "
        f"{over_vllm(chat, 'both')}; on another machine ({conditions('chat-decoding', '3.0')}) {over_vllm(decoding)}",
        "-",
    )


# ---- orders, simulated ----


def of_orders() -> Iterator[tuple[str, str, str]]:
    tables = tool("order_tables")
    place = {"machine": "H100-SXM", "kv_blocks": 26000, "requests": 800, "seeds": 5}

    def arms(load: float) -> tuple[Any, Any]:
        asked = place | {"load": load}
        places = json.loads(tables.RAW.read_text())["places"]
        (found,) = (one["arms"] for one in places if asked.items() <= one["place"].items())
        return tables.arm_of(found, "mlfq:base=256", "learned"), tables.arm_of(found, "fcfs", "recompute")

    def gap(arm: Any) -> float:
        return float(tables.mean_of(arm, "longest_gap_s", "p99"))

    arm, stock = arms(1.5)

    def over(*path: str) -> float:
        return float(tables.over(arm, stock, *path))

    yield (
        "over capacity (1.5), H100, order `mlfq:base=256` with the learned policy",
        f"mean end-to-end time {over('e2e_s', 'mean'):.2f}, mean time to first token 1/{1 / over('ttft_s', 'mean'):.3g}"
        f", tokens/s {over('throughput_tok_s'):.2f} ({over('steady_tok_s'):.2f} in the steady part); p99 end-to-end "
        f"time {over('e2e_s', 'p99'):.2f}, p99 of the longest gap in a stream {gap(arm):.0f} s against {gap(stock):.0f}"
        f", longest pause {tables.longest_pause(arm):.0f} s",
        "-",
    )
    arm, stock = arms(0.7)
    assert not tables.preempted(arm) and f"{gap(arm):.2f}" == f"{gap(stock):.2f}"
    yield (
        "below capacity (0.7), memory is enough",
        f"{over('e2e_s', 'mean'):.2f}: nothing is preempted, every order gives the same; p99 of the longest gap "
        f"{gap(arm):.2f} s with and without",
        "0",
    )


# ---- the policy alone, simulated ----


def place_of(workload: str, share: float, caching: bool) -> Mapping[str, Any]:
    asked = {"machine": "H100-SXM", "workload": workload, "memory_share": share, "prefix_caching": caching}
    (found,) = (one for one in PLACES if asked.items() <= one.items())
    return found


def of_headroom() -> Iterator[tuple[str, str, str]]:
    for situation, workload, share, caching in (
        ("long answers (deepseek-r1), H100, memory for a fifth, policy alone", "deepseek-r1", 0.2, True),
        ("the same, prefix caching off", "deepseek-r1", 0.2, False),
        ("chat (Azure 2023), H100, memory for half, policy alone", "azure-conversation-2023", 0.5, True),
    ):
        one = place_of(workload, share, caching)
        yield situation, f"throughput {fmean(one['reached'][LEARNED]):+.2%}", f"{fmean(one['bounds']):.2%}"


def test_the_rows_of_the_readme_have_the_figures_of_the_raw_numbers() -> None:
    table = README.partition("| situation |")[2].partition("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in table.splitlines()[2:]]
    assert rows == [*of_orders(), *measured(), *of_headroom()]


def test_the_readme_says_what_an_order_with_recompute_loses() -> None:
    rows = json.loads((DOCS / "when-to-switch-on.json").read_text())["rows"]
    rates = [
        (row["regime"]["machine"], row["arms"]["order, recompute"]["rate"]["value"])
        for row in rows
        if row["regime"]["order"].startswith("mlfq") and "order, recompute" in row["arms"]
    ]
    lost = sorted((1 - rate, machine) for machine, rate in rates if rate < 0.95)
    assert [machine for _, machine in lost].count("H20") == 2 and {machine for _, machine in lost} == {"H20", "cpu"}
    assert re.search(
        rf"{lost[0][0]:.0%}".rstrip("%") + rf"\s+to\s+{lost[-1][0]:.0%}\s+of\s+the\s+tokens\s+per\s+second", README
    )


# ---- every place of docs/headroom.md ----


def row_of_place(one: Mapping[str, Any]) -> str:
    reached, bounds = one["reached"][one["best"]], one["bounds"]
    ratio = student_ratio([1 + share for share in reached], [1.0] * len(reached))
    assert ratio.low is not None and ratio.high is not None
    won = [value - 1 for value in (ratio.value, ratio.low, ratio.high)]
    share = share_of_bound(one)
    cells = [
        one["machine"].partition("-")[0],
        one["workload"],
        f"{one['memory_share']:g}",
        "on" if one["prefix_caching"] else "off",
        f"{one['preemptions']:.0f}",
        f"{one['tax']:.3f}",
        f"{one['price_ratio']:.3f}",
        f"{fmean(bounds):.2%}",
        f"{fmean(one['forecasts']):.2%}",
        f"{fmean(one['reached']['always-swap']):.2%}",
        f"{fmean(one['reached'][LEARNED]):.2%}",
        "{:.2%} ({:.2%}, {:.2%})".format(*won),
        "-" if share is None else "{:.0%} ({:.0%}, {:.0%})".format(*share),
    ]
    return f"| {' | '.join(cells)} |"


def share_of_bound(one: Mapping[str, Any]) -> tuple[float, float, float] | None:
    if not all(one["bounds"]):
        return None
    return student_interval([won / most for won, most in zip(one["reached"][one["best"]], one["bounds"], strict=True)])


def test_the_table_of_headroom_is_that_of_the_raw_numbers() -> None:
    table = HEADROOM.partition("| machine | workload |")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == [row_of_place(one) for one in PLACES] and len(PLACES) == 36


def test_what_is_said_of_all_places_is_that_of_the_raw_numbers() -> None:
    text = re.sub(r"\s+", " ", HEADROOM)
    errors = [100 * (fmean(one["forecasts"]) - fmean(one["reached"][one["best"]])) for one in PLACES]
    ends = f"from {-min(errors):.2f} below to {max(errors):.2f} above"
    mean = f"{fmean(errors):.2f} points of throughput above what was reached, on average over the {len(PLACES)} places"
    assert f"{mean} ({ends})" in text and f"{mean} below ({ends})" in text
    assert not any(one["over_bound"]["low"] > 1 for one in PLACES)
    large = [share for one in PLACES if fmean(one["bounds"]) > 0.02 and (share := share_of_bound(one))]
    shares = [share[0] for share in large]
    assert f"In the {len(large)} places with a bound above 2%, {min(shares):.0%} to {max(shares):.0%} of it is" in text
    assert f"{fmean(shares):.0%} on average" in text
