"""Requests at a rate: which are sent when, and the sweep as a bench, with kvpolicy_vllm.bench.rate_kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.bench_settings import AnalyticsLoad, BenchTarget, RateLoad
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.latency import Slo
from kvpolicy.reporting.pipeline import report
from kvpolicy.workload import Request
from kvpolicy_vllm.bench import run_bench
from kvpolicy_vllm.bench.rate_kind import RateKind
from kvpolicy_vllm.bench.rate_load import prompt_of, requests_of
from tests.bench.live_http import Small, serving

SHORT = "sharegpt-8k?n=12&scale=0.02"
FAST = RateLoad(workload=SHORT, rate=(200.0, 400.0), rounds=2, slo=Slo(ttft_s=30.0))
"""A second on a small server, and no deadline that a slow machine could miss."""


def gaps(requests: Sequence[Request]) -> list[float]:
    times_s = [0.0, *(one.arrival_s for one in requests)]
    return [later - earlier for earlier, later in pairwise(times_s)]


def test_the_rate_and_the_process_are_those_asked_for() -> None:
    poisson = requests_of(RateLoad(seconds=100.0, requests=5000), 8192, 20.0, seed=1)
    assert len(poisson) == pytest.approx(2000, rel=0.1) and poisson[-1].arrival_s <= 100.0
    bursts = requests_of(RateLoad(seconds=100.0, requests=5000, arrivals="bursts&on=1&off=9"), 8192, 20.0, seed=1)
    assert max(gaps(bursts)) > 5 * max(gaps(poisson)), "pauses between bursts"
    even = requests_of(RateLoad(seconds=10.0, arrivals="even"), 8192, 2.0, seed=1)
    assert gaps(even) == pytest.approx([0.5] * 20)
    assert [one.prompt_tokens for one in even] == [one.prompt_tokens for one in poisson[:20]], "and the same requests"
    assert requests_of(RateLoad(), 8192, 0.001, seed=1)[0].arrival_s > 60.0, "one at least"
    assert len(requests_of(RateLoad(requests=70), 8192, None, seed=1)) == 70, "clients that wait have no rate"


def test_recorded_arrivals_keep_their_shape(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = "".join(f"{at_s},100,{10 + number}\n" for number, at_s in enumerate((50.0, 51.0, 57.0, 58.0, 60.0)))
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    load = RateLoad(workload=f"arrivals:{file}", arrivals="recorded", seconds=2.0)
    requests = requests_of(load, 1000, 4.0, seed=1)
    assert [one.arrival_s for one in requests] == pytest.approx([0.0, 0.1, 0.7, 0.8, 1.0])


def test_classes_come_mixed_and_sessions_are_taken_apart() -> None:
    load = RateLoad(workload=f"{SHORT}&class=urgent&priority=-1 + {SHORT}&class=batch", seconds=1e6)
    requests = requests_of(load, 500, 1.0, seed=2)
    names = [one.class_name for one in requests]
    assert sorted(names) == ["batch"] * 12 + ["urgent"] * 12 and names != sorted(names, reverse=True)
    assert max(one.total_tokens for one in requests) <= 500
    talks = requests_of(RateLoad(workload="sessions:sharegpt-8k?n=5&turns=4&think=3"), 4096, 10.0, seed=2)
    assert {(one.session, one.think_s) for one in talks} == {("", None)} and len(talks) > 5
    with pytest.raises(InputError, match="has a concurrency of its own: give --concurrency"):
        requests_of(RateLoad(workload=f"{SHORT}&concurrency=3"), 500, 1.0, seed=2)


def test_blocks_that_requests_share_have_the_same_tokens() -> None:
    shared = Request(0.0, 40, 1, prefix=(7, 8), prefix_block_tokens=16)
    one, other = (prompt_of(shared, number, range(1000), seed=3) for number in (0, 1))
    assert one[:32] == other[:32] and one[32:] != other[32:] and len(one) == 40
    cut = prompt_of(Request(0.0, 20, 1, prefix=(7, 9), prefix_block_tokens=16), 2, range(1000), seed=3)
    assert len(cut) == 20 and cut[:16] == one[:16] and cut[16:] != one[16:20]


def test_a_rate_is_measured_by_arm(tmp_path: Path) -> None:
    """Arms of one server and of another; one reserves. All get the same requests, and are compared token by token."""
    one, other = Small(), Small()
    other.wrong = True
    with serving(one) as url, serving(other) as second:
        at = BenchTarget(url, ("a", "orca-max", f'b={{"url": "{second}"}}'))
        found = run_bench.bench(tmp_path, FAST, at)
        assert not found.ok and found.text().startswith("TOKENS DIFFER"), "another text than the first arm's"
        assert [cell["rate"] for cell in found.cells()] == [200.0, 400.0]
        cell = found.to_dict()["cells"][0]
        for name in found.arms:
            figures = cell["arms"][name]
            assert figures["e2e_per_token_s.mean"] > 0 and figures["slo_share"] == 1.0 and figures["goodput_req_s"] > 0
        assert "e2e_per_token_s.mean orca-max / a" in cell["ratios"]
        runs = {run["arm"]: run for run in found.results["runs"]}
        assert runs["orca-max"]["memory_tokens"] == 1008 and runs["orca-max"]["most_at_once"] == 1008 // 512
        assert [row["prompt_tokens"] for row in runs["a"]["rows"]] == [
            row["prompt_tokens"] for row in runs["b"]["rows"]
        ]
        _, different, gap = found.compared()
        assert different == 2 * 2 * 12 and gap == 0.25, "all of b's, none of orca-max's"
        assert set(found.to_dict()["sustained"]) == set(found.arms) and "requests per second" in found.text()
        sent = len(one.bodies)
        assert run_bench.bench(tmp_path, FAST, at).results == found.results and len(one.bodies) == sent
    pages = report([tmp_path], tmp_path / "page.html", tmp_path / "figures")
    assert pages is not None and (tmp_path / "figures" / "e2e-per-token-s-mean.png").exists()


def test_clients_that_wait_send_so_many_at_once(tmp_path: Path) -> None:
    small = Small()
    with serving(small) as url:
        load = RateLoad(workload=f"{SHORT}&class=urgent&ttft=5&priority=2", concurrency=(1, 3), rounds=1)
        found = run_bench.bench(tmp_path, load, BenchTarget(url))
    most = {run["cell"]["concurrency"]: run["most_at_once"] for run in found.results["runs"]}
    assert most == {1: 1, 3: 3} and small.most_at_once == 3
    assert "sustained" not in found.to_dict() and "serves" not in found.text()
    body = next(body for body in small.bodies if body["cache_salt"] != "warm-up" and body.get("stream"))
    assert body["priority"] == 2 and body["kv_transfer_params"] == {"kvpolicy": {"class": "urgent", "ttft_s": 5.0}}


def test_an_arm_with_hints_sends_those_of_the_workload(tmp_path: Path) -> None:
    """Every request by its number of output tokens; the other arm sends none of them."""
    file, small = tmp_path / "a.csv", Small()
    file.write_text(
        "arrival_s,prompt_tokens,output_tokens,class,keep_s,once,pin,session,ended\n"
        "0,20,4,chat,60,,,u-1,\n1,20,5,,,true,16,,\n2,20,6,,,,,u-1,true\n3,20,7,,,,true,,\n4,20,8,,,,,,\n"
    )
    with serving(small) as url:
        load = RateLoad(workload=f"arrivals:{file}", rate=(200.0,), rounds=1)
        run_bench.bench(tmp_path / "out", load, BenchTarget(url, ("plain", "hints")))
    said: dict[str, dict[int, Any]] = {"plain": {}, "hints": {}}
    for body in small.bodies:
        if (arm := body["cache_salt"].partition(" ")[0]) in said:
            said[arm][body["max_tokens"]] = body.get("kv_transfer_params", {}).get("kvpolicy")
    assert said["plain"] == {4: {"class": "chat"}, 5: None, 6: None, 7: None, 8: None}
    assert said["hints"] == {
        4: {"class": "chat", "keep_s": 60.0, "session": "u-1"}, 5: {"once": True, "pin": 16},
        6: {"session": "u-1", "ended": True}, 7: {"pin": True}, 8: None,
    }  # fmt: skip


@pytest.mark.parametrize("workload", [None, SHORT, f"{SHORT}&hints=sessions"])
def test_an_arm_with_hints_is_refused_where_the_workload_has_none(workload: str | None, tmp_path: Path) -> None:
    """It would be the arm without them under another name. Lengths alone say of no request whose it is."""
    load, at = RateLoad(workload=workload, rate=(200.0,)), BenchTarget("http://there:8000", ("plain", "hints"))
    with pytest.raises(WrongValue, match=r"arm hints sends the hints of requests, .* have none: give --workload"):
        run_bench.bench(tmp_path / "out", load, at)
    assert not (tmp_path / "out").exists()


def test_a_sweep_ends_when_latency_explodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates that the first round found are those of every round, also where the bench is resumed."""

    async def run(self: RateKind, cell: Any, round_: int, terms: Any) -> dict[str, Any]:
        late = cell["rate"] > 3.0
        return {"ttft_s": {"p50": 9.0 if late else 0.1}, "finished_s": 3.0 if late else cell["rate"],
                "offered_s": cell["rate"], "requests_s": 1.0, "errors": {}, "rows": []}  # fmt: skip

    monkeypatch.setattr(RateKind, "run", run)
    with serving(Small()) as url:
        at, load = BenchTarget(url), RateLoad(rounds=2)
        found = run_bench.bench(tmp_path, load, at).results
        assert [run["cell"]["rate"] for run in found["runs"]] == [0.5, 1.0, 2.0, 2.83, 4.0] * 2
        (tmp_path / "runs" / "round-001-rate-2.83-arm-kvpolicy.json").unlink()
        assert run_bench.bench(tmp_path, load, at).results == found
    assert json.loads((tmp_path / "bench.json").read_text())["load"]["rate"] == []


def test_only_a_rate_reserves(tmp_path: Path) -> None:
    with pytest.raises(WrongValue, match="orca-max reserves memory, which is of `kvpolicy bench rate`"):
        run_bench.bench(tmp_path, AnalyticsLoad(), BenchTarget("http://there:8000", ("orca-max",)))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rate": (1.0, 0.0)}, "rate is .*, should be above 0 each"),
        ({"rate": (1.0,), "concurrency": (2,)}, "concurrency is given with --rate"),
        ({"arrivals": "recorded"}, "arrivals is recorded: give --workload"),
        ({"arrivals": "bursts&on=1"}, "arrivals is 'bursts&on=1': .*off"),
        ({"arrivals": "poisson&size=2"}, "arrivals is 'poisson&size=2': .*size"),
        ({"arrivals": "tides"}, "arrivals is 'tides', should be one of poisson, .*groups, recorded"),
        ({"explodes": 1.0}, "explodes is 1.0, should be a number above 1"),
        ({"slo": "fast"}, "slo 'fast': should be ttft="),
    ],
)
def test_a_wrong_load_says_what_would_be_right(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(WrongValue, match=problem):
        RateLoad(**values)
