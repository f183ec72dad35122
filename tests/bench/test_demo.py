"""What the demo decides before and after its engines run, by hand; no engine runs here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.stats import Ratio
from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.bench.breakeven import Costs, break_even_link
from kvpolicy_vllm.bench.demo_report import DemoReport, LinkReport
from kvpolicy_vllm.bench.exactness import Comparison
from kvpolicy_vllm.bench.overload import Run
from kvpolicy_vllm.bench.run_demo import DEMO_JSON, _clear_folder, _fitting_requests, demo, targets_of


def linear_costs(swap_share: float) -> list[Costs]:
    """Recompute at 10,000 tokens a second, swap at a share of that; lengths with median 400."""
    lengths = (100, 200, 300, 400, 533, 800, 1600)
    return [Costs(tokens, tokens / 1e4, swap_share * tokens / 1e4) for tokens in lengths]


def test_break_even_is_at_the_median_length() -> None:
    """The 5 states nearest 400 are all but the outermost; their mean is 446.6 tokens, 44.66 ms against 4.466 ms."""
    link = break_even_link(linear_costs(0.1), bytes_per_token=4096)
    assert link is not None
    extra_s = (200 + 300 + 400 + 533 + 800) / 5 / 1e4 * 0.9
    assert link.seconds(400 * 4096) == pytest.approx(extra_s, rel=0.05)  # two digits each
    assert link.latency_s == pytest.approx(extra_s / 2, rel=0.05)
    shorter, longer = link.seconds(100 * 4096), link.seconds(1600 * 4096)
    assert shorter > 0.9 * 100 / 1e4, "below the median recompute should win"
    assert longer < 0.9 * 1600 / 1e4, "above it swap should win"


def test_no_link_makes_a_dear_swap_even() -> None:
    assert break_even_link(linear_costs(1.1), bytes_per_token=4096) is None


def test_break_even_needs_states() -> None:
    with pytest.raises(ValueError, match="4 states"):
        break_even_link(linear_costs(0.1)[:4], bytes_per_token=4096)


def test_the_links_flag_is_read_back() -> None:
    link = SimulatedLink(2.3e8, 0.0071)
    assert SimulatedLink.parse(link.text) == link


def run(ttft_s: float, itl_s: tuple[tuple[float, ...], ...]) -> Run:
    return Run("x", 0, 1.0, (ttft_s,) * len(itl_s), itl_s, ((1,),) * len(itl_s), (), {}, 0, 0)


def test_targets_come_from_undisturbed_runs() -> None:
    found = targets_of([run(4.0, ((0.1, 0.3), ())), run(6.0, ((0.2,),))])
    assert found.ttft_s == pytest.approx(4.0 + 0.98 * 2.0)  # of 4, 4 and 6
    assert found.itl_s == pytest.approx(1.25 * 0.2)


def test_calm_requests_fit_into_memory_together() -> None:
    workload = Workload("by hand", tuple(Request(0.0, 60, 40) for _ in range(9)), 0)
    # 100 tokens take 4 blocks of 32, and one to spare.
    assert len(_fitting_requests(workload, 32, capacity=21, max_requests=6).requests) == 4
    assert len(_fitting_requests(workload, 32, capacity=100, max_requests=6).requests) == 6
    assert len(_fitting_requests(workload, 32, capacity=1, max_requests=6).requests) == 1


def test_a_finished_demo_makes_room_and_an_unfinished_one_is_kept(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    _clear_folder(tmp_path)
    assert (tmp_path / "traces").exists()
    (tmp_path / DEMO_JSON).write_text("{}")
    _clear_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / DEMO_JSON).write_text("{}")
    with pytest.raises(ValueError, match=r"holds thesis\.tex"):
        demo(tmp_path)
    assert (tmp_path / DEMO_JSON).exists()


def link_report(name: str, **more: Any) -> LinkReport:
    one = {"mean": 0.2, "p50": 0.1, "p99": 1.0}
    arm = {
        "throughput_tok_s": 1000.0,
        "goodput": 2.5,
        "ttft_s": one,
        "itl_s": one,
        "preemptions": {"recompute": 3, "swap": 4},
        "recomputed_tokens": 50,
        "moved_bytes": 6_000_000,
        "runs": 8,
    }
    values: dict[str, Any] = {
        "name": name,
        "link": {"kind": "native"},
        "policies": {"vllm": arm},
        "ratios": {"throughput a / b": Ratio(1.02, 0.99, 1.05, 8), "throughput c / d": Ratio(1.2, 1.1, 1.3, 8)},
        "no_pressure_ratio": Ratio(1.0, 0.99, 1.01, 8),
        "no_pressure_preemptions": 0,
        "evaluate": {},
        "train": {"always_wins": "swap"},
        "comparison": Comparison(1000),
        "targets": {},
        "workload": {},
        "makespan_s": {"vllm": (1.0,)},
    }
    return LinkReport(**values | more)


def test_a_tie_is_called_a_tie_and_a_constant_policy_constant() -> None:
    text = DemoReport((link_report("native"),), "demo.json").text()
    assert "throughput a / b: tie (1.020, 0.990 to 1.050)" in text
    assert "throughput c / d: 1.200 (1.100 to 1.300)" in text
    assert "the learned policy is constant" in text
    assert "no simulated link" in text


def test_what_is_not_exact_is_said_loudly() -> None:
    wrong = Comparison(1000, 0, ("always-swap, block 0, request 3: token 1 is 2, should be 3",))
    report = DemoReport((link_report("native"), link_report("simulated", comparison=wrong)), "demo.json")
    assert not report.exact
    assert "NOT EXACT" in report.text()
    assert "request 3" in report.text()
    assert [found["exact"] for found in report.to_dict().values()] == [True, False]


def test_a_simulated_link_is_labelled() -> None:
    link = {"kind": "simulated", "bytes_per_s": 2e8, "latency_s": 0.01}
    assert "SIMULATED link: 2e+08 bytes/s, 0.01 s latency" in DemoReport((link_report("s", link=link),), "x").text()


def test_nothing_that_is_not_a_number_gets_into_the_json() -> None:
    found = link_report("native").to_dict()
    assert all(math.isfinite(value) for ratio in found["ratios"].values() for value in ratio.values())
