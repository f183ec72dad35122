"""Means over runs, class by class, and the table that they make; and the whole way from a text to the JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.latency import Slo
from kvpolicy.request_marks import Classes
from kvpolicy.study.class_report import (
    class_rows,
    class_warnings,
    has_classes,
    has_lengths,
    length_rows,
    service_means,
)
from tests.study.grids import simulate

TWO = (
    "(azure-conversation-2023?class=urgent&share=.5&ttft=0.5 + azure-conversation-2023?class=batch&share=.5)"
    "?n=30&rate=40&context=1024"
)


def run(**classes: float) -> dict[str, Any]:
    """A run whose classes have the same figure everywhere; without deadlines."""
    latencies = ("e2e_s", "ttft_s", "itl_s", "longest_gap_s", "e2e_per_token_s")

    def told(value: float) -> dict[str, Any]:
        tails = {name: {"mean": value, "p50": value, "p99": value} for name in latencies}
        rest = {"throughput_tok_s": value, "fairness": value, "deadline_requests": 0}
        return {"requests": 2, **tails, **rest, "slo_share": None, "goodput_req_s": None}

    return {**told(1.0), "classes": {name: told(value) for name, value in classes.items()}}


def test_means_are_over_the_runs_that_have_the_class() -> None:
    means = service_means([run(a=1.0, b=5.0), run(a=3.0)])
    assert means["classes"]["a"]["ttft_s"]["p99"] == 2.0 and means["classes"]["b"]["fairness"] == 5.0
    assert means["classes"]["a"]["slo_share"] is None and means["e2e_s"]["mean"] == 1.0


def test_bins_by_prompt_length_are_means_bin_by_bin() -> None:
    def binned(*edges: int) -> dict[str, Any]:
        tail = {"mean": edges[0], "p50": None, "p99": None}
        return {"by_prompt_length": [
            {"min_tokens": edge - 9, "max_tokens": edge, "requests": 2, "ttft_s": tail, "e2e_s": tail} for edge in edges
        ]}  # fmt: skip

    head, *rows = length_rows({"p": [binned(10, 20), binned(30)], "q": [binned(7)]})
    assert [dict(zip(head, row, strict=True)) for row in rows][1] == {
        "policy": "p", "prompt tok": "11 to 20", "requests": "2", "e2e s": "10", "e2e p99": "", "ttft s": "10",
        "ttft p99": "",
    }  # fmt: skip
    assert [row[:3] for row in rows] == [["p", "11 to 20", "2"], ["p", "11 to 20", "2"], ["q", "-2 to 7", "2"]]
    assert has_lengths([binned(1, 2)]) and not has_lengths([binned(1)])


def test_a_cell_and_the_text_have_their_requests_by_prompt_length(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", policies=["always-swap", "always-recompute"])
    for one in report.results:
        bins = one["by_prompt_length"]
        assert sum(found["requests"] for found in bins) == one["requests"] == 30 and len(bins) == 4
        assert all(low["max_tokens"] + 1 == high["min_tokens"] for low, high in pairwise(bins))
        mean = sum(found["requests"] * found["ttft_s"]["mean"] for found in bins) / 30
        assert mean == pytest.approx(one["ttft_s"]["mean"])
    head, *rows = report.text().partition("by prompt length\n")[2].splitlines()[:9]
    assert head.split()[:3] == ["policy", "prompt", "tok"] and all(" to " in row for row in rows)


def test_a_single_class_without_deadlines_needs_no_table() -> None:
    assert not has_classes([run(default=1.0)])
    assert has_classes([run(default=1.0), run(default=1.0, b=1.0)])
    assert has_classes([run(default=1.0) | {"deadline_requests": 1}])


def test_a_row_for_each_class_of_each_policy() -> None:
    head, *rows = class_rows({"p": [run(a=1.0, b=2.0)], "q": [run(a=0.5)]})
    assert [row[:2] for row in rows] == [["p", "a"], ["p", "b"], ["q", "a"]]
    (first, *_) = [dict(zip(head, row, strict=True)) for row in rows]
    assert (first["ttft s"], first["itl ms"], first["ms/token"], first["in time"]) == ("1", "1e+03", "1e+03", "")


def test_a_cell_has_its_classes_and_the_deadlines_it_was_judged_by(hardware: str, tmp_path: Path) -> None:
    """Those of the run count for the batch, which brings none; they change no time."""
    values: dict[str, Any] = {"workloads": [TWO], "policies": ["always-swap"]}
    plain = simulate(hardware, tmp_path / "c", **values)
    judged = simulate(hardware, tmp_path / "c", **values, slo=Slo(tpot_s=0.02))
    (one,), (other,) = plain.results, judged.results
    assert "slo" not in one["inputs"] and other["inputs"]["slo"] == {"ttft_s": None, "tpot_s": 0.02}
    assert list(one["classes"]) == ["batch", "urgent"]
    assert sum(told["requests"] for told in one["classes"].values()) == one["requests"] == 30
    assert one["classes"]["batch"]["slo_share"] is None and one["classes"]["urgent"]["deadline_requests"] == 15
    assert other["deadline_requests"] == 30 and 0.0 <= other["classes"]["batch"]["slo_share"] <= 1.0
    assert other["e2e_s"] == one["e2e_s"] and other["classes"]["urgent"]["e2e_s"] == one["classes"]["urgent"]["e2e_s"]
    assert "by class" in plain.text() and "batch" in plain.text()
    assert json.loads(json.dumps(judged.to_dict(), allow_nan=False))["cells"][0]["classes"] == other["classes"]
    again = simulate(hardware, tmp_path / "c", **values)
    assert again.taken_up == 1 and again.results[0]["classes"] == one["classes"]


def test_one_class_is_told_all_the_same(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", policies=["always-swap"])
    (one,) = report.results
    (told,) = one["classes"].values()
    assert list(one["classes"]) == ["default"] and "by class" not in report.text()
    for name in ("e2e_s", "ttft_s", "itl_s", "longest_gap_s", "e2e_per_token_s", "fairness", "throughput_tok_s"):
        assert told[name] == one[name]
    assert told["fairness"] == pytest.approx(one["fairness"]) and 0 < told["fairness"] <= 1


def granting(classes: str, order: str, *names: str) -> dict[str, Any]:
    """A run of requests of the classes ``names``, on a server that grants ``classes``."""
    inputs = {"workload": "w", "serving": {"order": order} | ({"classes": classes} if classes else {})}
    return run(**dict.fromkeys(names, 1.0)) | {"inputs": inputs}


def test_classes_that_nobody_is_of_are_warned_of() -> None:
    order = "classes:urgent+chat/mlfq"
    warnings = class_warnings([granting("chat+batch", order, "default"), granting("chat+batch", order, "batch")])
    assert warnings == [
        "w: no request is of the class chat, which --classes lists",
        "order classes:urgent+chat/mlfq ranks by the class urgent, which --classes does not list: no request is of it",
    ]
    order = "classes:urgent+default+chat/mlfq"
    assert class_warnings([granting("", order, "default"), granting("", order, "default", "chat")]) == [
        f"w: no request is of the class urgent, by which order {order} ranks"
    ]


def test_no_warning_where_all_are_there_or_the_order_is_ones_own() -> None:
    assert class_warnings([granting("", "classes:urgent/mlfq", "default", "urgent")]) == []
    assert class_warnings([granting("chat+default", "classes:chat+default", "chat", "default")]) == []
    assert class_warnings([granting("chat", "python:module:order/mlfq", "chat")]) == []


def test_no_warning_for_an_order_that_names_refuse_today() -> None:
    assert class_warnings([granting("", "urgent/mlfq:base=8,promote=1e-6", "default")]) == []


def test_a_report_shows_the_warning(hardware: str, tmp_path: Path) -> None:
    classes = Classes.parse("urgent+chat")
    report = simulate(hardware, tmp_path / "c", workloads=[TWO], policies=["always-swap"], classes=classes)
    assert "warning: " + TWO + ": no request is of the class chat, which --classes lists" in report.text()
    assert "of the class urgent" not in report.text()
