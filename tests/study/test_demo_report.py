"""A demo's report: the headline, what is told and what is not, and sentences that follow from the figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpolicy.headroom import Work, headroom
from kvpolicy.study.demo_report import BETTER, OPEN, WORSE, DemoReport, ScenarioReport

BOUND = headroom(Work(1000, 200, 10.0, 0.5, 12.0), saved_s=0.25)
Values = dict[str, list[float]]


def scenario(learned: Values, judged: Values, name: str = "one class") -> ScenarioReport:
    figures = {"vllm": {"e2e": [10.0] * 4, "TTFT": [2.0] * 4, "tok/s": [100.0] * 4}, "learned": learned}
    figures["learned, mlfq"] = judged
    return ScenarioReport(
        name=name,
        served="by hand",
        headline="TTFT",
        arms=dict.fromkeys(figures, "what it is"),
        figures=figures,
        policies={key: {"preemptions": {"recompute": 2, "swap": 3}} for key in figures},
    )


def values(ttft: float, tok_s: float, e2e: float, noise: float = 0.01) -> Values:
    factors = [1 - noise, 1 + noise, 1 - noise, 1 + noise]
    of = {"e2e": 10.0 * e2e, "TTFT": 2.0 * ttft, "tok/s": 100.0 * tok_s}
    return {name: [value * factor for factor in factors] for name, value in of.items()}


PAYS = scenario(values(1.0, 1.0, 1.0), values(0.1, 1.1, 1.5))


def report(*scenarios: ScenarioReport, **more: Any) -> DemoReport:
    return DemoReport("live", scenarios, BOUND, {"model": 3.0, "profile": 60.4}, "out/demo", **more)


def test_every_figure_is_better_worse_or_open() -> None:
    judged = {figure: PAYS.verdict(figure, "learned, mlfq") for figure in PAYS.figures["vllm"]}
    assert judged == {"TTFT": BETTER, "tok/s": BETTER, "e2e": WORSE}, "more tokens a second, but longer times"
    assert {PAYS.verdict(figure, "learned") for figure in judged} == {OPEN}


def test_the_headline_is_the_last_arm_over_the_first_with_its_interval() -> None:
    (entry,) = report(PAYS).headline()
    assert entry["name"] == "one class: mean time to first token, learned, mlfq over vllm"
    assert entry["ratio"] == pytest.approx(0.1, rel=1e-3) and entry["low"] < 0.1 < entry["high"]


def test_where_it_pays_follows_from_the_figures() -> None:
    pays, not_told, costs = report(PAYS).where()
    assert pays.startswith("It pays: one class with learned, mlfq (mean time to first token x0.1 (0.0")
    assert not_told.startswith("It does not pay there, or could not be told to: one class with learned (mean time")
    assert costs.startswith("What it costs: one class with learned, mlfq (mean end-to-end time x1.5 (1.4")
    nothing = scenario(values(1.0, 1.0, 1.0), values(1.2, 1.0, 1.0))
    pays, not_told, costs = report(nothing).where()
    assert pays == "It pays: nowhere here."
    assert "one class with learned (" in not_told and "one class with learned, mlfq (" in not_told
    assert costs.startswith("What it costs: one class with learned, mlfq (mean time to first token x1.2 (1.1")
    assert len(report(scenario(values(0.5, 1, 1), values(0.5, 1, 1))).where()) == 1


def test_a_noisy_ratio_is_called_open_and_a_single_round_has_no_interval() -> None:
    noisy = scenario(values(1.0, 1.0, 1.0), values(0.8, 1.0, 1.0, noise=0.4))
    assert noisy.verdict("TTFT", "learned, mlfq") == OPEN
    assert "could not be told: learned, mlfq: mean time to first token" in report(noisy).text()
    single = {arm: {name: one[:1] for name, one in own.items()} for arm, own in PAYS.figures.items()}
    alone = ScenarioReport("one class", "by hand", "TTFT", PAYS.arms, single, PAYS.policies)
    assert alone.verdict("TTFT", "learned, mlfq") == OPEN and "(1 round)" in report(alone).text()


def test_the_text_has_the_table_the_bound_and_the_seconds() -> None:
    text = report(PAYS).text()
    head, stock = next(line for line in text.splitlines() if line.startswith("arm")), text.splitlines()[3]
    assert head.split("  ")[-1].strip() == "preempted, swapped" and head.index("TTFT s") < head.index("e2e s")
    assert stock.split() == ["vllm", "2", "10", "100", "5,", "3"]
    assert "20% of the decoded tokens were computed again" in text and "(p / d)" in text
    assert "can win at most 5% of throughput" in text
    assert (
        "seconds: model 3, profile 60; 63 in all\n\nheadline, fixed beforehand:\n  one class: mean" in text
        and text.endswith("written to out/demo")
    )


def test_differing_tokens_are_told_and_end_with_a_failure() -> None:
    exactness = {"exact": False, "tokens": 900, "ties": 0, "wrong": ["seed 1, learned, request 3: token 1 is 2"]}
    wrong = report(PAYS, exactness=exactness)
    assert not wrong.ok and "NOT EXACT: 900 tokens" in wrong.text() and "request 3" in wrong.text()
    assert wrong.where()[0].startswith("NOT EXACT: an arm's tokens are not stock vLLM's") and len(wrong.where()) == 4
    assert report(PAYS).ok and report(PAYS).exact is None and "EXACT" not in report(PAYS).text()


def test_the_json_has_the_promised_keys_and_no_nan() -> None:
    exactness = {"exact": True, "tokens": 9, "ties": 0, "wrong": []}
    whole = report(PAYS, exactness=exactness, details={"capacity_per_s": float("nan")})
    exactness = {"exact": True, "tokens": 9, "ties": 0, "wrong": []}
    whole = report(PAYS, exactness=exactness, details={"capacity_per_s": float("nan")})
    found = json.loads(json.dumps(whole.to_dict(), allow_nan=False))
    assert set(found) == {
        *("kind", "headline", "where", "bound", "seconds", "exact", "exactness", "capacity_per_s", "scenarios"),
    }
    assert set(found["headline"][0]) == {"name", "ratio", "low", "high"}
    assert found["bound"]["bound"] == pytest.approx(0.05) and found["bound"]["sentence"]
    assert found["seconds"]["in all"] == pytest.approx(63.4)
    one = found["scenarios"]["one class"]
    assert set(one["ratios"]) == {f"{f} {arm} / vllm" for f in ("TTFT", "e2e", "tok/s") for arm in list(PAYS.arms)[1:]}
    assert set(one["ratios"]["TTFT learned / vllm"]) == {"value", "low", "high"}
