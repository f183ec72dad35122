"""Advice worked by hand from made-up runs, and the whole way on a small workload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.errors import InputError
from kvpolicy.stats import student_ratio
from kvpolicy.study.config import Criterion
from kvpolicy.study.recommend import (
    DEFAULT,
    advise,
    candidates,
    depends_on_seed,
    is_closed_loop,
    whole_run_summary,
)
from kvpolicy.workload import Request, Workload
from tests.study.conftest import grouped
from tests.study.grids import TIGHT, WORKLOAD

SERVING: dict[str, Any] = {"token_budget": 2048, "max_num_seqs": 256, "asynchronous": True}


TAIL = {"mean": 1.0, "p50": 1.0, "p99": 2.0}
GOODPUT: dict[str, Any] = {"fairness": 0.5, "deadline_requests": 0, "slo_share": None, "goodput_req_s": None}
SERVICE: dict[str, Any] = {"longest_gap_s": TAIL, "e2e_per_token_s": TAIL, **GOODPUT, "classes": {}}


def result(
    policy: str, e2e_s: float, extrapolated: int = 0, preempted: int = 5, beyond: int | None = None
) -> dict[str, Any]:
    tail = {"mean": e2e_s, "p50": e2e_s, "p99": 2 * e2e_s}
    return {
        "inputs": {"workload": "w", "hardware": "h", "kv_blocks": 100, "policy": policy, "part": 0, "serving": SERVING},
        "device": "NVIDIA H100",
        "rows": None,
        "throughput_tok_s": 100.0 / e2e_s,
        "e2e_s": tail,
        "ttft_s": tail,
        "itl_s": tail,
        **SERVICE,
        "preemptions": {"recompute": preempted, "swap": 0},
        "recomputed_tokens": 10,
        "moved_bytes": 0,
        "makespan_s": 10.0,
        "simulator_wall_s": 0.1,
        "choices": preempted,
        "extrapolated": extrapolated,
        "steps": 50,
        "extrapolated_steps": beyond,
        "warnings": ["as the model warned"],
        "unmeasured": ["the link"],
    }


def runs(**seconds: Sequence[float]) -> Mapping[str, Sequence[dict[str, Any]]]:
    named = {policy.replace("_", "-"): some for policy, some in seconds.items()}
    return {policy: [result(policy, one) for one in some] for policy, some in named.items()}


def test_a_clear_gain_is_deployed() -> None:
    advice = advise(
        runs(always_recompute=[10.0, 20.0, 40.0], always_swap=[9.0, 18.1, 35.9], random=[10.5, 20.4, 41.0]),
        Criterion(),
        8.0,
    )
    assert (advice.best, advice.deploy) == ("always-swap", "always-swap")
    assert advice.config_line == "kvpolicy config --policy always-swap --host-gib 8"
    gain = next(row.gain for row in advice.compared if row.policy == "always-swap")
    assert gain.value == pytest.approx(1.11, abs=0.01) and gain.significant
    assert f"deploy this: always-swap: e2e {gain.text()} times better" in advice.text()
    assert "warning: not measured: the link" in advice.text() and "as the model warned" in advice.text()


@pytest.mark.parametrize(
    ("order", "flags"),
    [
        ("fcfs", ""),
        ("mlfq:base=64,promote=30", "--order mlfq:base=64,promote=30 "),
        ("urgent/python:mine:Mine", "--order urgent/python:mine:Mine --allow-python-policies "),
    ],
)
def test_what_is_deployed_serves_by_the_order_that_was_judged(
    order: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SERVING, "order", order)
    advice = advise(runs(always_recompute=[10.0, 20.0, 40.0], always_swap=[9.0, 18.1, 35.9]), Criterion(), 8.0)
    assert advice.config_line == f"kvpolicy config --policy always-swap {flags}--host-gib 8"
    baseline = "vLLM's default" if order == "fcfs" else f"always-recompute under the order {order}"
    assert advice.reason.endswith(f"times better than {baseline}")


def test_an_order_is_deployed_whatever_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock vLLM would serve in another order, so the advice is not to leave it as it is."""
    monkeypatch.setitem(SERVING, "order", "urgent")
    monkeypatch.setitem(SERVING, "classes", "chat:priority=-1+batch")
    advice = advise(runs(always_recompute=[10.0, 20.0, 40.0], always_swap=[9.0, 21.0, 37.0]), Criterion(), 4.0)
    line = "kvpolicy config --policy always-recompute --order urgent --classes chat:priority=-1+batch --host-gib 4"
    assert (advice.deploy, advice.config_line) == ("always-recompute", line)
    assert "keep always-recompute under the order urgent" in advice.reason and "vLLM's default" not in advice.text()
    assert advice.server.endswith(", order urgent, classes chat:priority=-1+batch")


def test_an_insignificant_gain_keeps_the_default() -> None:
    advice = advise(runs(always_recompute=[10.0, 20.0, 40.0], always_swap=[9.0, 21.0, 37.0]), Criterion(), 4.0)
    assert (advice.best, advice.deploy, advice.config_line) == ("always-swap", "always-recompute", "")
    assert "keep vLLM's default" in advice.reason and "but not significantly" in advice.reason


def test_the_default_may_be_the_best() -> None:
    advice = advise(runs(always_recompute=[9.0, 18.0], always_swap=[10.0, 20.0]), Criterion("throughput"), 4.0)
    assert advice.deploy == advice.best == "always-recompute"
    assert "no other policy had a better mean" in advice.reason


def test_a_significant_gain_goes_before_a_larger_mean() -> None:
    some = runs(always_recompute=[10.0, 20.0, 40.0], always_swap=[9.5, 19.0, 38.01], random=[6.0, 24.0, 36.0])
    advice = advise(some, Criterion(), 4.0)
    means = {row.policy: row.gain.value for row in advice.compared}
    assert means["random"] > means["always-swap"]
    assert (advice.best, advice.deploy) == ("always-swap", "always-swap")


def test_the_oracle_is_shown_and_never_deployed() -> None:
    advice = advise(runs(always_recompute=[10.0, 20.0, 40.0], oracle=[5.0, 10.0, 20.0]), Criterion(), 4.0)
    assert (advice.best, advice.deploy) == ("always-recompute", "always-recompute")
    assert [row.policy for row in advice.compared] == ["always-recompute", "oracle"]


def test_the_whole_workload_is_reported_beside_its_parts() -> None:
    parts = [result("always-recompute", one) for one in (5.0, 5.5)]
    outcome, warning = whole_run_summary([result("always-recompute", 5.5), result("always-swap", 5.0)], parts, "e2e")
    assert outcome == "always-recompute 5.5 s, 5 preemptions; always-swap 5 s, 1.100 times better"
    assert warning == ""
    outcome, warning = whole_run_summary([result("always-recompute", 20.0)], parts, "e2e")
    assert outcome == "always-recompute 20 s, 5 preemptions"
    assert "takes 20 s in one run, and 5.25 s in parts: every part begins with an empty server" in warning


def test_looking_for_the_best_of_many_asks_for_more() -> None:
    """What two policies tell apart, is not told where it is the most favourable of twenty."""
    seconds = {"always_recompute": [10.0, 20.0, 40.0, 80.0], "always_swap": [9.0, 18.3, 37.0, 73.5]}
    others = {f"other{number}": seconds["always_recompute"] for number in range(19)}
    assert advise(runs(**seconds), Criterion(), 4.0).deploy == "always-swap"
    assert advise(runs(**seconds, **others), Criterion(), 4.0).deploy == "always-recompute"


def classed(policy: str, urgent_s: float, batch_s: float, slo_share: float) -> dict[str, Any]:
    """A run with two classes, of which one has deadlines; better for one may be worse for the other."""
    latencies = ("e2e_s", "ttft_s", "itl_s", "longest_gap_s", "e2e_per_token_s")

    def told(seconds: float, **goodput: float) -> dict[str, Any]:
        tails = {name: {"mean": seconds, "p50": seconds, "p99": 3 * seconds} for name in latencies}
        return {"requests": 4, "throughput_tok_s": 10.0 / seconds, **tails, **GOODPUT, **goodput}

    urgent = told(urgent_s, deadline_requests=4, slo_share=slo_share, goodput_req_s=slo_share / urgent_s)
    return result(policy, 10.0) | {"deadline_requests": 4, "classes": {"batch": told(batch_s), "urgent": urgent}}


def test_policies_are_compared_by_one_class() -> None:
    """Swapping is a fifth better for the urgent, and a tenth worse for the batch."""
    some = {
        DEFAULT: [
            classed(DEFAULT, 6.0, 10.0, 0.5), classed(DEFAULT, 12.0, 20.0, 0.25), classed(DEFAULT, 3.0, 5.0, 0.8),
        ],
        "always-swap": [
            classed("always-swap", 5.0, 11.0, 0.6), classed("always-swap", 10.0, 22.1, 0.3),
            classed("always-swap", 2.5, 5.5, 0.97),
        ],
    }  # fmt: skip
    urgent = advise(some, Criterion("ttft.p99:urgent"), 4.0)
    (gain,) = (one.gain for one in urgent.compared if one.policy == "always-swap")
    assert gain.value == pytest.approx(1.2) and urgent.deploy == "always-swap"
    assert "deploy this: always-swap: ttft.p99:urgent 1.200" in urgent.text()
    batch = advise(some, Criterion("per-token:batch"), 4.0)
    assert batch.deploy == batch.best == DEFAULT
    goodput = advise(some, Criterion("slo:urgent"), 4.0).compared[1].gain
    assert goodput.value == pytest.approx((1.2 * 1.2 * 0.97 / 0.8) ** (1 / 3)), "more is better"
    with pytest.raises(InputError, match="workload w: has no class 'chat' to compare by; it has batch, urgent"):
        advise(some, Criterion("ttft:chat"), 4.0)
    with pytest.raises(InputError, match="workload w: class batch has no goodput_req_s, so that they cannot"):
        advise(some, Criterion("goodput:batch"), 4.0)


def test_each_policy_is_shown_class_by_class() -> None:
    some = {policy: [classed(policy, 6.0, 10.0, 0.5), classed(policy, 12.0, 20.0, 0.25)] for policy in (DEFAULT, "p")}
    advice = advise(some, Criterion(), 4.0)
    (row,) = (line for line in advice.text().splitlines() if line.startswith("p ") and " urgent " in line)
    assert "37.5%" in row and len([line for line in advice.text().splitlines() if " batch " in line]) == 2
    told = json.loads(json.dumps(advice.to_dict(), allow_nan=False))["compared"][1]
    assert told["classes"]["urgent"]["ttft_s"] == {"mean": 9.0, "p50": 9.0, "p99": 27.0}
    assert told["classes"]["urgent"]["slo_share"] == 0.375 and told["classes"]["batch"]["slo_share"] is None
    assert told["longest_gap_s"] == TAIL and told["e2e_s"]["p99"] == 20.0 and "service" not in told
    alone = advise(runs(always_recompute=[10.0], p=[9.0]), Criterion(), 4.0)
    assert "by class" not in alone.text() and alone.to_dict()["compared"][0]["classes"] == {}


def test_copies_of_one_run_are_one_pair() -> None:
    """Five seeds of a recorded file are one run five times over: no interval, no advice but the default."""
    copies = runs(always_recompute=[10.0] * 5, always_swap=[9.0, 9.0, 9.01, 9.0, 9.0])
    assert advise(copies, Criterion(), 4.0).deploy == "always-swap", "as pairs of their own they would tell a lot"
    advice = advise(copies, Criterion(), 4.0, seeds_differ=False)
    assert (advice.deploy, advice.config_line) == ("always-recompute", "")
    assert all(row.gain.pairs == 1 for row in advice.compared)
    assert "with one run there is no interval" in advice.reason and "the runs of a part count as one" in advice.text()


def test_seeds_of_a_part_are_averaged() -> None:
    some = runs(always_recompute=[10.0, 10.0, 20.0, 20.0], random=[8.0, 12.5, 16.0, 25.0])
    for results in some.values():
        for number, one in enumerate(results):
            one["inputs"]["part"] = number // 2
    gain = advise(some, Criterion(), 4.0, seeds_differ=False).compared[1].gain
    assert gain.pairs == 2 and gain.value == pytest.approx(1.0) and gain.low == pytest.approx(1.0)


def test_whether_seeds_draw_the_requests(tmp_path: Path) -> None:
    file = tmp_path / "w.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,100,20\n0.5,50,30\n")
    assert depends_on_seed(WORKLOAD) and not depends_on_seed(str(file)) and not depends_on_seed(f"{WORKLOAD}&seed=3")


def test_a_closed_loop_is_known() -> None:
    loop = [Request(at_s, 10, 5, session=name, think_s=1.0) for at_s, name in ((0.0, "a"), (0.0, "b"), (1.0, "a"))]
    assert is_closed_loop(Workload("loop", tuple(loop), 0))
    later = [*loop, Request(2.0, 10, 5, session="c", think_s=None)]
    assert not is_closed_loop(Workload("arriving", tuple(later), 0))
    assert not is_closed_loop(
        Workload("timed", (Request(0.0, 10, 5, session="a"), Request(0.0, 10, 5, session="b")), 0)
    )


def test_a_recorded_file_counts_once(hardware: str, tmp_path: Path) -> None:
    file = tmp_path / "w.csv"
    rows = [f"0.0,{100 + 17 * number},{300 + number}" for number in range(12)]
    file.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    values: dict[str, Any] = {"hardware": hardware, "kv_blocks": 100, "jobs": 0, "cache": tmp_path / "c"}
    advice = kvpolicy.recommend(str(file), **grouped(**values, seeds=2, parts=2))
    assert all(row.gain.pairs == 2 for row in advice.compared)


def test_a_gain_has_to_be_worth_it() -> None:
    """Half a percent in every run is told from nothing, and worth nothing."""
    some = runs(always_recompute=[10.0, 20.0, 40.0], always_swap=[9.95, 19.9, 39.8])
    advice = advise(some, Criterion(), 4.0)
    assert advice.compared[1].gain.significant and advice.deploy == "always-recompute"
    assert "above the smallest gain worth a change, 1.0%" in advice.reason
    assert advise(some, Criterion(min_gain=0.0), 4.0).deploy == "always-swap"


def test_all_intervals_that_are_shown_hold_together() -> None:
    some = runs(always_recompute=[10.0, 20.0, 40.0], always_swap=[9.0, 18.1, 35.9], random=[10.5, 20.4, 41.0])
    alone = student_ratio([10.0, 20.0, 40.0], [9.0, 18.1, 35.9], comparisons=4 * 2)
    assert advise(some, Criterion(), 4.0).compared[1].gain == alone


def test_missing_figures_are_not_judged() -> None:
    some = runs(always_recompute=[10.0, 20.0], always_swap=[9.0, 18.1])
    some["always-swap"][0]["itl_s"] = {"mean": None, "p50": None, "p99": None}
    with pytest.raises(ValueError, match=r"workload w: its runs have no itl_s\.mean"):
        advise(some, Criterion("itl"), 4.0)


def test_every_part_has_to_have_what_is_judged(hardware: str) -> None:
    """Before anything is simulated."""
    requests = [
        Request(float(at), 32, 8, class_name="rare" if at == 0 else "default", ttft_s=1.0 if at == 0 else None)
        for at in range(4)
    ]
    values: dict[str, Any] = {"workload": Workload("some", tuple(requests), 0), "hardware": hardware, "parts": 2}

    def never(*_: Any) -> None:
        raise AssertionError("simulated")

    for judge_by, why in (
        ("e2e:rare", "judge_by is e2e:rare; the classes of some part 2/2 are default; give fewer parts"),
        ("slo", "judge_by is slo, but no request in some part 2/2 has a deadline"),
    ):
        with pytest.raises(ValueError, match=why):
            kvpolicy.recommend(**grouped(**values, kv_blocks=64, judge_by=judge_by, progress=never))


def test_without_preemptions_there_is_nothing_to_choose() -> None:
    same = {policy: [result(policy, one, preempted=0) for one in (5.0, 6.0)] for policy in ("always-recompute", "x")}
    assert "nothing was preempted" in advise(same, Criterion(), 4.0).reason


def test_guesses_of_the_cost_model_are_warned_of() -> None:
    some = dict(runs(always_recompute=[10.0, 20.0, 40.0]))
    some["cheapest:m"] = [result("cheapest:m", one, extrapolated=2) for one in (8.0, 16.1, 32.2)]
    advice = advise(some, Criterion(), 4.0)
    assert advice.deploy == "cheapest:m"
    assert any("in 6 of 15 decisions (40%)" in warning for warning in advice.warnings)


def test_steps_beyond_the_tables_are_warned_of() -> None:
    some = {policy: [result(policy, one, beyond=2) for one in (8.0, 16.1)] for policy in ("always-recompute", "x")}
    advice = advise(some, Criterion(), 4.0)
    assert any("8 of 200 steps (4.0%) lie beyond the hardware model's tables" in one for one in advice.warnings)


def test_thresholds_lie_between_short_and_long_requests() -> None:
    source = Workload("w", tuple(Request(0.0, 10 * number, 6) for number in range(1, 102)), 0)
    assert candidates(source, None, 16) == [
        "always-recompute", "always-swap", "threshold:272", "threshold:512", "threshold:768", "threshold:912"
    ]  # fmt: skip
    assert candidates(source, "m", 16)[-2:] == ["minwaste:m", "cheapest:m"]
    with pytest.raises(ValueError, match="holds no request"):
        candidates(Workload("empty", (), 0), None, 16)


def test_the_whole_way(hardware: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"workload": WORKLOAD, "hardware": hardware, "kv_blocks": TIGHT, "jobs": 0}
    advice = kvpolicy.recommend(**grouped(**values, parts=2, cache=tmp_path / "c"))
    assert [row.policy for row in advice.compared][:2] == ["always-recompute", "always-swap"]
    assert {"minwaste:analytic", "cheapest:analytic"} <= {row.policy for row in advice.compared}
    assert all(row.gain.pairs == 2 for row in advice.compared)
    assert "deploy this:" in advice.text() and "not measured" in advice.text()
    assert advice.headroom is not None and f"under always-recompute, {advice.headroom.sentence()}" in advice.text()
    assert set(advice.to_dict()) >= {"deploy", "reason", "config_line", "compared", "warnings"}
    alone = kvpolicy.recommend(**grouped(**values, parts=1, cache=tmp_path / "c"))
    assert alone.deploy == "always-recompute" and not alone.config_line
    with pytest.raises(ValueError, match="min_gain is -1"):
        kvpolicy.recommend(**grouped(**values, min_gain=-1))
    with pytest.raises(ValueError, match="judge_by is 'speed'"):
        kvpolicy.recommend(**grouped(**values, judge_by="speed"))


def test_ratio_and_interval_by_hand() -> None:
    """Log ratios log 2 and log 8: mean log 4, standard error log(2); t of 1 degree at 97.5% is 12.706."""
    ratio = student_ratio([2.0, 8.0], [1.0, 1.0])
    assert ratio.value == pytest.approx(4.0)
    spread = 12.7062 * (log(8) - log(2)) / sqrt(2) / sqrt(2)
    assert (ratio.low, ratio.high) == (pytest.approx(4 * exp(-spread), 1e-4), pytest.approx(4 * exp(spread), 1e-4))
    assert not ratio.significant


def test_pairing_takes_out_what_pairs_share() -> None:
    """Runs differ tenfold, the policies by 5% in each of them: told, though the ranges overlap."""
    base = [1.0, 10.0, 3.0, 0.5]
    ratio = student_ratio([1.05 * one * (1 + 1e-3 * k) for k, one in enumerate(base)], base)
    assert ratio.significant and ratio.value == pytest.approx(1.05, rel=5e-3)
    assert student_ratio(base, base).significant is False


def test_more_comparisons_widen() -> None:
    ours, theirs = [1.1, 1.2, 1.15, 1.3], [1.0] * 4
    one, many = student_ratio(ours, theirs), student_ratio(ours, theirs, comparisons=6)
    assert many.low is not None and one.low is not None and many.low < one.low


def test_a_single_pair_has_no_interval() -> None:
    ratio = student_ratio([2.0], [1.0])
    assert (ratio.value, ratio.low, ratio.high, ratio.significant) == (2.0, None, None, False)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([0.0], [1.0]), ([1.0], [float("nan")])])
def test_values_without_a_ratio_are_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="numbers above 0"):
        student_ratio(ours, theirs)


def test_a_server_without_classes_grants_none(hardware: str, tmp_path: Path) -> None:
    """The advice says so where the runs granted what the workload claims, and its command has the classes else."""
    values: dict[str, Any] = {
        "workload": f"{WORKLOAD}&class=chat&ttft=1 + {WORKLOAD}&class=batch", "hardware": hardware, "kv_blocks": TIGHT,
        "cache": tmp_path, "jobs": 0, "parts": 1, "order": "classes:chat+batch",
    }  # fmt: skip
    advice = kvpolicy.recommend(**grouped(**values))
    assert (
        advice.config_line.endswith("--order classes:chat+batch --host-gib 4")
        and "give --classes here too" in advice.text()
    )
    limited = kvpolicy.recommend(**grouped(**values, classes="chat:ttft=1+batch"))
    assert limited.config_line.endswith("--order classes:chat+batch --classes chat:ttft=1.0+batch --host-gib 4")
    assert "give --classes" not in limited.text()
    with pytest.raises(ValueError, match=r"judge_by is e2e:batch; the classes of .* are chat, default"):
        kvpolicy.recommend(**grouped(**values, classes="chat:ttft=1", judge_by="e2e:batch"))
