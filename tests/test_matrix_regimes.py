"""The matrix in regimes: its verdicts, its designs, and a run of it as a user runs it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.stats import Ratio
from tests.test_benchmarks import ROOT, run


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("matrix_regimes")


@pytest.fixture
def regimes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("regimes")


def figures(matrix: Any, how: str, headline: tuple[float, float, float], rate: tuple[float, float, float]) -> Any:
    ratios = (Ratio(*values, 4) for values in (headline, rate))
    return matrix.Figures(matrix.Arm(how=how), *ratios, {}, 0.0, 0.0)


SAME = (1.0, 0.99, 1.01)


@pytest.mark.parametrize(
    ("learned", "order", "verdict"),
    [
        ((SAME, SAME), (SAME, SAME), "do not"),
        (((0.98, 0.97, 0.99), SAME), (SAME, SAME), "on"),
        (((0.98, 0.97, 1.01), SAME), (SAME, SAME), "undecided"),  # not beyond its interval
        (((1.02, 0.97, 1.05), SAME), (SAME, SAME), "do not"),
        ((SAME, SAME), ((0.7, 0.4, 1.2), SAME), "undecided, with an order"),
        ((SAME, SAME), ((0.7, 0.4, 1.2), (0.95, 0.8, 1.1)), "do not"),
        (((0.995, 0.994, 0.996), SAME), (SAME, SAME), "do not"),  # less than 1%
        (((1.0, 0.9, 1.1), (1.05, 1.02, 1.08)), (SAME, SAME), "on"),
        (((0.98, 0.97, 0.99), (0.97, 0.96, 0.98)), (SAME, SAME), "do not"),  # it costs throughput
        ((SAME, SAME), ((0.7, 0.6, 0.8), SAME), "only with an order"),
        ((SAME, SAME), ((0.7, 0.6, 0.8), (0.9, 0.85, 0.95)), "do not"),
        ((SAME, SAME), ((0.97, 0.96, 0.98), SAME), "do not"),  # an order changes who waits: it has to gain 5%
        (((0.9, 0.8, 0.95), SAME), ((0.7, 0.6, 0.8), SAME), "on, more with an order"),
        (((0.7, 0.6, 0.8), SAME), ((0.68, 0.6, 0.8), SAME), "on"),  # the order adds next to nothing
    ],
)
def test_a_verdict_goes_by_intervals_of_headline_and_rate(matrix: Any, learned: Any, order: Any, verdict: str) -> None:
    arms = {"learned": figures(matrix, "learned", *learned), "order, learned": figures(matrix, "learned", *order)}
    assert matrix.verdict_of(arms) == verdict


def test_a_rival_is_as_good_that_is_at_most_one_percent_behind(matrix: Any) -> None:
    arms = {
        "watermark": figures(matrix, "recompute", (0.81, 0.7, 0.9), SAME),
        "threshold": figures(matrix, "threshold:512", (0.807, 0.7, 0.9), SAME),
        "swap": figures(matrix, "swap", (0.7, 0.6, 0.8), (0.98, 0.97, 0.99)),
        "learned": figures(matrix, "learned", (0.8, 0.7, 0.9), SAME),
        "order, learned": figures(matrix, "learned", SAME, SAME),
    }
    assert matrix.as_good(arms, "on") == ("threshold",)
    assert matrix.as_good(arms, "do not") == ()


def test_every_axis_that_is_told_is_in_the_default_design(regimes: Any) -> None:
    design = regimes.default_design()
    assert len(set(design)) == len(design)
    assert {one.machine for one in design} == set(regimes.MACHINES)
    assert {one.kind for one in design} == set(regimes.KINDS)
    assert {one.load for one in design} == set(regimes.LOADS)
    assert {one.shape for one in design} == {"plain", "MLA"}
    assert {one.caching for one in design} == {True, False}
    full = regimes.full_design()
    assert set(design) <= set(full) and len(full) > 4 * len(design)
    hybrid = regimes.hybrid_design()
    assert {one.shape for one in hybrid} == {"hybrid"} and set(hybrid) <= set(full)


def test_hybrid_models_come_on_request(matrix: Any) -> None:
    def shapes(*arguments: str) -> list[str]:
        return [one.shape for one in matrix.chosen(matrix._arguments(arguments))]

    assert "hybrid" not in shapes()
    assert shapes("--hybrid").count("hybrid") == 2 and "MLA" in shapes("--hybrid")
    assert shapes("--shape", "hybrid", "--load", "0") == ["hybrid", "hybrid"]
    assert shapes("--full", "--hybrid", "--shape", "MLA").count("hybrid") == 0


def test_a_batch_of_short_requests_on_an_h20_has_the_highest_price_ratio(
    matrix: Any, regimes: Any, tmp_path: Path
) -> None:
    """In both regimes of an H20 with all there at once; bound by compute, a decoded token costs as much as another."""
    ratios = {}
    for kind in ("one class", "short requests"):
        chosen = regimes.regime("H20", kind, regimes.AT_ONCE, False)
        hardware, workload = matrix.hardware_of(chosen, tmp_path), chosen.together(0)
        cell = chosen.cell(matrix.Arm(), hardware, workload, 0)
        (runs,) = matrix.run_cells([{matrix.Arm(): [cell]}], 0, tmp_path)
        ratios[kind] = runs[matrix.Arm()][0]["headroom"]["price_ratio"]
    assert ratios["one class"] < 0.3 < 0.7 < ratios["short requests"] < 1


def test_rollouts_share_their_prompts_within_a_group(regimes: Any) -> None:
    requests = list(regimes.rollouts(40, seed=0))
    groups = [requests[:16], requests[16:32], requests[32:]]
    assert all(len({(one.prompt_tokens, one.prefix) for one in group}) == 1 for group in groups)
    assert len({one.prefix for one in requests}) == 3
    assert not set(groups[0][0].prefix) & set(groups[1][0].prefix)
    assert len(groups[0][0].prefix) * 16 <= groups[0][0].prompt_tokens
    assert max(one.output_tokens for one in regimes.rollouts(4000, seed=0)) == regimes.MAX_OUTPUT


def test_loads_are_shares_of_capacity_and_urgent_ones_come_while_the_batch_is_there(regimes: Any) -> None:
    half, whole = (
        regimes.regime(load=load, requests=64).workload(0, 2.0).requests[-1].arrival_s for load in (0.7, 1.2)
    )
    assert 64 / half == pytest.approx(0.7 * 2.0, rel=0.5) and half > whole
    two = regimes.regime(kind="two classes", load=0.0, requests=60).workload(0, 10.0)
    arrivals = {name: [one.arrival_s for one in two if one.class_name == name] for name in ("urgent", "batch")}
    assert len(arrivals["urgent"]) == 4 * len(arrivals["batch"]) and set(arrivals["batch"]) == {0.0}
    assert len(arrivals["urgent"]) / max(arrivals["urgent"]) == pytest.approx(8.0, rel=0.5)


def test_a_run_prints_and_writes_every_regime_and_is_taken_up_again(tmp_path: Path) -> None:
    out = tmp_path / "regimes.json"
    asked = ("--machine", "H100-SXM", "--kind", "rollouts", "--requests", "32", "--seeds", "2")
    where = ("--cache", str(tmp_path / "cache"), "--json", str(out))
    done = run("matrix_regimes.py", *asked, *where)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["regime"]["kind"], row["regime"]["caching"]) for row in rows] == [
        ("rollouts", True), ("rollouts", False)
    ]  # fmt: skip
    assert {"watermark", "threshold", "swap", "learned", "order, learned"} <= set(rows[0]["arms"])
    assert done.stdout.count("H100-SXM, plain, rollouts, at once") == 4, "each with its arms, and in the table"
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.json")}
    again = run("matrix_regimes.py", *asked, *where)
    assert again.stdout == done.stdout
    kept = [path for path in cells if path.parent.name != "configs"]
    assert kept and all(path.stat().st_mtime_ns == cells[path] for path in kept), "nothing is simulated twice"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--seeds", "1"), "--seeds is 1: should be 2 or more"),
        (("--load", "0.5"), "argument --load"),
        (("--machine", "cpu", "--kind", "rollouts"), "no regime with these axes in the default design; try --full"),
    ],
)
def test_what_cannot_be_is_refused(matrix: Any, wrong: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        matrix.main(list(wrong))
    assert said in f"{refused.value.code} {capsys.readouterr().err}"
