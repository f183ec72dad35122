"""What documents say of live benches is what docs/bench-rounds.json comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_environment import tool

ROOT = Path(__file__).resolve().parent.parent
RAW: dict[str, Any] = json.loads((ROOT / "docs" / "bench-rounds.json").read_text())
rounds = tool("bench_rounds")


BOTH = ("README.md", "docs/caching.md")
SAID = [
    *(("chat", figure, "cost", {}, BOTH) for figure in ("ttft_s", "e2e_s", "messages_s")),
    *(("chat", figure, "cost", {}, ("docs/caching.md",)) for figure in ("later_ttft_s", "steady_ttft_s")),
    ("rate", "ttft_s", "mlfq", {"rate": 4.0}, ("docs/bench.md",)),
    *(("rates-above", "ttft_s", "mlfq", {"rate": rate}, ("docs/bench.md",)) for rate in (16.0, 24.0, 32.0)),
    *(("rates-above", "e2e_s", "mlfq", {"rate": rate}, ("docs/bench.md",)) for rate in (24.0, 32.0)),
    ("rates-above", "ttft_s", "orca-max", {"rate": 24.0}, ("docs/bench.md",)),
    *(("analytics-103m", figure, "kvpolicy", {}, ("docs/bench.md",)) for figure in ("requests_s", "cpu_s")),
]


@pytest.mark.parametrize(("bench", "figure", "arm", "cell", "pages"), SAID)
def test_ratios_are_those_of_the_runs(
    bench: str, figure: str, arm: str, cell: dict[str, Any], pages: tuple[str, ...]
) -> None:
    text = rounds.ratio(RAW[bench], figure, arm, **cell).text()
    assert all(text in " ".join((ROOT / page).read_text().split()) for page in pages), text


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


def test_what_is_gathered_is_what_stands_there(tmp_path: Path) -> None:
    """Neither requests nor folders of the machine."""
    run = {"cell": {"n": 1}, "round": 0, "arm": "vllm", "ttft_s": {"mean": 1 / 3}, "rows": [1], "lookups": [[2]]}
    bench = {
        "kind": "chat", "versions": {}, "load": {"workload": "lengths:/a/b/c.csv?think=1", "rounds": 1},
        "prices": {"price_ratio": 0.123456789, "unknown": ""}, "runs": [run],
    }  # fmt: skip
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    found = rounds.gathered(tmp_path / "bench.json")
    assert found["runs"] == [{"cell": {"n": 1}, "round": 0, "arm": "vllm", "ttft_s": {"mean": 0.333333}}]
    assert (found["workload"], found["prices"]) == ("lengths:c.csv?think=1", {"price_ratio": 0.123457})
    assert json.loads(rounds.text_of({"one": found})) == {"one": found}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"load": {}, "kind": "chat"}'])
def test_anything_else_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(SystemExit, match=r"other\.json: should be the bench\.json"):
        rounds.gathered(tmp_path / "other.json")


def test_ratios_are_by_round_of_one_cell() -> None:
    runs = [
        {"cell": {"n": n}, "round": number, "arm": arm, "ttft_s": {"mean": factor * (number + n)}}
        for n in (1, 5) for number in range(3) for arm, factor in (("vllm", 2.0), ("other", 1.0 if n == 1 else 4.0))
    ]  # fmt: skip
    assert rounds.ratio({"runs": runs}, "ttft_s", "other", n=1).value == pytest.approx(0.5)
    assert rounds.ratio({"runs": runs}, "ttft_s", "other", n=5).value == pytest.approx(2.0)
