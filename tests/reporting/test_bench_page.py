"""The page of a bench over HTTP, from what one writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.errors import InputError
from kvpolicy.reporting import bench_page
from kvpolicy.reporting.pipeline import report
from kvpolicy.stats import student_ratio

ARMS = ("vllm", "kvpolicy")
FIRST_SENTENCES = (
    "Conversations whose whole window",
    "Short texts behind one long prefix",
    "Requests that arrive at a rate",
    "Each client sends its next request",
)


def run(arm: str, round_: int, prefixed: float, rate: float) -> dict[str, Any]:
    latency = {"mean": 1.0 / rate, "p50": 0.5, "p99": 2.0}
    return {
        "cell": {"chatters": 2, "prefixed": prefixed}, "round": round_, "arm": arm, "messages_s": rate,
        "ttft_s": latency, "e2e_s": latency, "hit_rate": 0.5, "errors": {"HTTP 503: <full>": 2} if prefixed else {},
        "lookups": [[0.0, 0.0, 0.0], [5.0, 100.0, 10.0], [10.0, 200.0, 90.0]],
    }  # fmt: skip


def bench(folder: Path) -> Path:
    runs = [
        run(arm, round_, share, 1.0 + number + 0.1 * round_)
        for number, arm in enumerate(ARMS)
        for round_ in range(2)
        for share in (0.0, 0.5)
    ]
    differs = {"kvpolicy": {"tokens": 70, "different": [{"gap": 1e-5}, {"gap": None}]}}
    values = {
        "kind": "chat", "target": "llm", "model": "small", "runs": runs, "comparisons": [{"tokens": differs}],
        "arms": [{"name": name, "url": "", "command": ["serve", "llm"], "hints": False} for name in ARMS],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(values))
    return folder


def test_a_page_shows_the_bench(tmp_path: Path) -> None:
    folder = bench(tmp_path / "a")
    report([folder], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<svg") == 5 and "hit rate over the run, 2 people" in text and "serve llm" in text
    assert "messages per second, kvpolicy over vllm: 1.95" in text
    assert "70 tokens compared, 2 conversations differ, where the two best log-probabilities are at most 1e-05" in text
    assert "2 x HTTP 503: &lt;full&gt;" in text
    head = text.index("Tokens found in a cache, by part of the run")
    cells = "<td>2</td><td>0.5</td><td>vllm</td><td></td><td></td><td>10.0%</td><td></td><td>80.0%</td>"
    assert cells in text[head:] and "<th>to 60%</th>" in text[head:] and "p / d" not in text


def test_every_name_with_several_values_has_its_figures(tmp_path: Path) -> None:
    """By people at the largest share, and by share at the most people; each with all arms, hit rates over time too."""
    runs = [
        run(arm, 0, share, rate) | {"cell": {"chatters": people, "prefixed": share}}
        for arm in ARMS
        for people, rate in ((2, 1.0), (4, 2.0), (8, 3.0))
        for share in (0.0, 0.5)
    ]
    folder = bench(tmp_path / "a")
    values = json.loads((folder / "bench.json").read_text())
    (folder / "bench.json").write_text(json.dumps(values | {"runs": runs}))
    report([folder], tmp_path / "page.html", tmp_path / "figures")
    figures = ("messages-s", "ttft-s", "e2e-s", "hit-rate", "hit-rate-over-the-run")
    assert {file.stem for file in (tmp_path / "figures").glob("*.svg")} == {
        f"{figure}-by-{axis}" for figure in figures for axis in ("chatters", "prefixed")
    }
    text = (tmp_path / "page.html").read_text()
    for title in (
        "messages per second, by people who chat", "messages per second, by share that is prefixed",
        "tokens found in a cache, by people who chat", "hit rate over the run, 50% prefixed",
        "hit rate over the run, 8 people",
    ):  # fmt: skip
        assert f"<h3>{title}</h3>" in text, title
    drawings = dict(bench_page._drawings(values | {"runs": runs}))
    for axis, xs, fixed in (("chatters", [2, 4, 8], "prefixed: 0.5"), ("prefixed", [0.0, 0.5], "people who chat: 8")):
        (axes,) = drawings[f"messages-s-by-{axis}"][1].axes
        assert [list(bars.lines[0].get_xdata()) for bars in axes.containers] == [xs, xs]
        assert axes.get_xlabel().endswith(fixed)
    for panel in drawings["hit-rate-over-the-run-by-chatters"][1].axes:
        assert [line.get_label() for line in panel.lines] == ["2 people", "4 people", "8 people"]


def test_no_two_of_many_arms_look_the_same() -> None:
    looks = [tuple(bench_page._look(number).values()) for number in range(25)]
    assert len({*looks}) == 25
    assert len({colour for colour, _ in looks[:5]}) == len({mark for _, mark in looks[:5]}) == 5
    arms = [f"arm-{number}" for number in range(6)]
    runs = [run(arm, 0, 0.0, 1.0 + number) for number, arm in enumerate(arms)]
    results = {"kind": "chat", "runs": runs, "arms": [{"name": arm} for arm in arms]}
    drawing = bench_page._by_cell(results, "messages_s", "chatters", {"prefixed": 0.0}, "messages per second")
    (axes,) = drawing.axes
    lines = [bars.lines[0] for bars in axes.containers]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 6


def with_changes(folder: Path, changes: dict[str, Any]) -> str:
    """The page of a bench whose file has other values, on one line."""
    values = json.loads((folder / "bench.json").read_text())
    (folder / "bench.json").write_text(json.dumps(values | changes))
    report([folder], folder / "page.html")
    return " ".join((folder / "page.html").read_text().split())


@pytest.mark.parametrize("unknown", [0.0, None])
def test_a_figure_that_is_0_or_unknown_in_some_round_has_no_ratio(unknown: float | None, tmp_path: Path) -> None:
    """The other rounds alone would say that the second arm is as good as in its better rounds."""
    runs = [run(arm, round_, 0.0, 2.0) for arm in ARMS for round_ in range(3)]
    runs[4] |= {"messages_s": unknown}
    text = with_changes(bench(tmp_path / "a"), {"runs": runs})
    assert "messages per second, kvpolicy over vllm" not in text
    assert "mean time to first token, s, kvpolicy over vllm: 1.000" in text


def test_a_page_says_first_that_tokens_differ_and_cores_do(tmp_path: Path) -> None:
    text = with_changes(bench(tmp_path / "a"), {})
    said = "TOKENS DIFFER: 1 conversations are not those of vllm"
    assert text.index(said) < text.index("<svg") and "UNEQUAL CORES" not in text
    runs = [run(arm, 0, 0.0, 1.0) | {"cores": cores} for arm, cores in zip(ARMS, (["0"], ["0-1"]), strict=True)]
    text = with_changes(tmp_path / "a", {"runs": runs, "comparisons": []})
    assert text.index("UNEQUAL CORES: ") < text.index("vllm: 0; kvpolicy: 0-1") < text.index("<svg")
    assert "TOKENS DIFFER" not in text


def test_a_page_has_the_latencies_while_everybody_chats_and_the_time_of_processors(tmp_path: Path) -> None:
    """Where they are known: not of a run by an earlier version, nor of a server that ran already."""
    steady = {"steady_ttft_s": {"mean": 0.25}, "steady_e2e_s": {"mean": 4.0}}
    runs = [run(arm, round_, 0.0, 1.0) | steady for arm in ARMS for round_ in range(3)]
    text = with_changes(bench(tmp_path / "a"), {"runs": runs})
    assert text.count("<svg") == 7 and "<td>0.25</td><td>4</td>" in text
    assert "mean time to first token while everybody chats, s, kvpolicy over vllm: 1.000" in text
    cell = {"cell": {"prefix_tokens": 40}, "requests_s": 2.0}
    known = [one | cell | {"cpu_s": 12.5} for one in runs]
    text = with_changes(tmp_path / "a", {"kind": "analytics", "runs": known})
    assert text.count("<svg") == 3 and "<td>12.5</td>" in text
    text = with_changes(tmp_path / "a", {"kind": "analytics", "runs": [one | {"cpu_s": None} for one in known]})
    assert text.count("<svg") == 2 and "processors, kvpolicy over vllm" not in text


def test_a_page_has_the_prices_of_tokens(tmp_path: Path) -> None:
    folder = bench(tmp_path / "a")
    values = json.loads((folder / "bench.json").read_text())
    prices = {"price_ratio": 0.52, "prompt_token_s": 1.3e-3, "decoded_token_s": 2.5e-3, "batch": 7.25}
    (folder / "bench.json").write_text(json.dumps(values | {"prices": prices}))
    report([folder], tmp_path / "page.html")
    assert "<dd>0.52: a prompt's token adds 1.3 ms" in (tmp_path / "page.html").read_text()


def test_a_page_says_what_a_server_was_switched_to(tmp_path: Path) -> None:
    folder = bench(tmp_path / "a")
    values = json.loads((folder / "bench.json").read_text())
    values["arms"][1] |= {"control": "/run/control", "order": "las"}
    (folder / "bench.json").write_text(json.dumps(values))
    report([folder], tmp_path / "page.html")
    assert "switched by /run/control to las</dd>" in (tmp_path / "page.html").read_text()


def test_a_page_has_intervals_over_starts_of_the_servers(tmp_path: Path) -> None:
    """Three starts of two rounds, over which one arm is 2, 1 and 0.5 times as fast as the other."""
    folder = bench(tmp_path / "a")
    values = json.loads((folder / "bench.json").read_text())
    runs = [
        run(arm, round_, 0.0, 3.0 * factor) | {"start": round_ // 2}
        for round_, factor_of_start in enumerate((2.0, 2.0, 1.0, 1.0, 0.5, 0.5))
        for arm, factor in (("vllm", 1.0), ("kvpolicy", factor_of_start))
    ]
    (folder / "bench.json").write_text(json.dumps(values | {"runs": runs}))
    report([folder], tmp_path / "page.html")
    text = " ".join((tmp_path / "page.html").read_text().split())
    assert "brackets 95% intervals over 3 starts of the servers." in text
    over_starts = student_ratio([2.0, 1.0, 0.5], [1.0] * 3).text()
    assert f"messages per second, kvpolicy over vllm: {over_starts}" in text
    (folder / "bench.json").write_text(json.dumps(values))
    report([folder], tmp_path / "page.html")
    assert "intervals over rounds of one process each." in " ".join((tmp_path / "page.html").read_text().split())


def test_bars_are_over_starts_of_the_servers() -> None:
    runs = [run("vllm", round_, 0.0, rate) | {"start": round_ // 2} for round_, rate in enumerate((1.0, 3.0, 7.0))]
    assert bench_page._by_start(runs, "messages_s") == [2.0, 7.0]
    assert bench_page._by_start(runs[:2], "messages_s") == [1.0, 3.0], "of one start its rounds"


@pytest.mark.parametrize(
    ("kind", "cell", "title", "lead"),
    [
        ("chat", {"chatters": 2, "prefixed": 0.0}, "A chat on small", "Conversations whose whole window"),
        ("analytics", {"prefix_tokens": 40}, "An analysis on small", "Short texts behind one long prefix"),
        ("rate", {"rate": 2.0}, "Latency by rate on small", "Requests that arrive at a rate"),
        ("rate", {"concurrency": 4}, "Latency by clients on small", "Each client sends its next request"),
    ],
)
def test_each_kind_has_its_own_title_and_lead(
    kind: str, cell: dict[str, Any], title: str, lead: str, tmp_path: Path
) -> None:
    folder = bench(tmp_path / "a")
    values = json.loads((folder / "bench.json").read_text())
    more = {"itl_s": {"mean": 0.1}, "e2e_per_token_s": {"mean": 0.1}, "requests_s": 2.0, "goodput_req_s": 1.0}
    runs = [one | more | {"cell": cell} for one in values["runs"] if not one["cell"]["prefixed"]]
    (folder / "bench.json").write_text(json.dumps(values | {"kind": kind, "runs": runs}))
    report([folder], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert f"<h1>{title}</h1>" in text
    first_sentences = {sentence for sentence in FIRST_SENTENCES if sentence in text}
    assert first_sentences == {lead}


def test_what_is_no_bench_is_named(tmp_path: Path) -> None:
    folder = bench(tmp_path / "a")
    with pytest.raises(InputError, match="a page shows one bench"):
        report([folder, folder], tmp_path / "page.html")
    (folder / "bench.json").write_text("{}")
    with pytest.raises(InputError, match=r"bench\.json: field runs is missing; should be what `kvpolicy bench` writes"):
        report([folder], tmp_path / "page.html")
