"""The benchmark scripts run as a user runs them; what they measure is not judged here."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest

from kvpolicy.cost.intervals import unbounded
from kvpolicy.events import Option
from kvpolicy.policy import NoState
from kvpolicy.trace import Trace, from_rows, with_core
from tests.priced import Priced
from tests.synthetic import fitted_model, make_trace, options_for, situation

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = os.pathsep.join(map(str, (ROOT, ROOT / "integrations")))
FAMILIES = {"physics x trees", "physics alone", "trees alone", "raw boosting", "random forest", "linear"}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    rows = [{"layer": "qkv_proj", "tokens": n, "time_us": max(30.0, 0.5 * n) + 0.1 * n} for n in range(1, 400, 3)]
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), folder / "some_gpu.csv")
    pyarrow.csv.write_csv(pa.table({"size_bytes": [1, 2]}), folder / "other.csv")
    return folder


def test_overflow_victims_judges_a_factor_on_held_out_states(tmp_path: Path) -> None:
    trace = make_trace(states=48)
    rows = trace.rows("decisions")
    several = {row["state_id"] for row in rows if int(row["computed_tokens"]) % 3 == 0}
    second = [
        row | {"preemption_id": f"second-{number}", "decision_id": f"second-{number}-0"}
        for number, row in enumerate(rows)
        if row["state_id"] in several
    ]
    cores = {core: [row for row in (*rows, *second) if row["core"] == core] for core in trace.headers}
    decisions = pa.concat_tables([with_core(from_rows("decisions", some), core) for core, some in cores.items()])
    Trace(trace.headers, dict(trace.tables) | {"decisions": decisions}).write(tmp_path / "several")
    done = run("overflow_victims.py", "--trace", str(tmp_path / "several"))
    assert done.returncode == 0, done.stderr
    assert (
        "48 states; victims before: {0:" in done.stdout and "recompute: mean |log(measured / predicted)|" in done.stdout
    )
    trace.write(tmp_path / "alone")
    assert (
        "no overflow of this profile had several victims"
        in run("overflow_victims.py", "--trace", str(tmp_path / "alone")).stderr
    )


def test_cost_accuracy_judges_tables_and_traces_beside_others(profiles: Path, tmp_path: Path) -> None:
    make_trace(states=60).write(tmp_path / "trace")
    out = tmp_path / "out" / "figures.json"
    done = run(
        "cost_accuracy.py",
        "--quick",
        "--profiles",
        str(profiles),
        "--trace",
        str(tmp_path / "trace"),
        "--json",
        str(out),
    )
    assert done.returncode == 0, done.stderr
    assert "qkv_proj" in out.read_text() and "some_gpu.csv" in done.stdout
    assert "passed over: other.csv" in done.stdout
    values = json.loads(out.read_text())
    (table,) = values["tables"]
    assert set(table["in_range"]["families"]) == set(table["extrapolated"]["families"]) == FAMILIES
    assert table["in_range"]["families"]["physics x trees"]["mean"] < 0.05
    assert table["extrapolated"]["trained_up_to"] * 4 <= table["extrapolated"]["longest"]
    assert all(row["n"] > 0 for row in table["in_range"]["coverage"])
    (trace,) = values["traces"]
    scores = trace["in_range"]["families"]
    assert {"boosted", "linear", "analytic", "raw boosting", "random forest", "best threshold"} <= set(scores)
    assert scores["boosted"]["swap"]["mean"] < 0.1 and scores["boosted"]["sign_accuracy"] > 0.9
    assert sum(row["n"] for row in scores["boosted"]["coverage"]["ratio"]) == 60
    assert values["made_up_copies"]["with"]["physics x trees"]["mean"] < 0.03
    assert values["bars"]["in_range"] == {"at_least": 0.05, "aimed": 0.02}


def test_cost_accuracy_judges_its_bars(tmp_path: Path) -> None:
    """Times that no column explains miss every bar; without the flag the figures alone are told."""
    rows = [{"layer": "a", "tokens": n, "time_us": 100.0 * 3.0 ** (n * 7919 % 5)} for n in range(1, 200)]
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), tmp_path / "wild.csv")
    asked = ("cost_accuracy.py", "--quick", "--profiles", str(tmp_path))
    assert run(*asked).returncode == 0
    done = run(*asked, "--bars")
    assert done.returncode == 1, done.stderr
    assert "bar missed: wild.csv, in range: mean error" in done.stdout


def test_cost_accuracy_says_what_is_wrong(tmp_path: Path) -> None:
    assert "give at least one" in run("cost_accuracy.py").stderr
    table = pa.table({"layer": ["a", "a"], "tokens": [1, 2], "time_us": [1.0, -1.0]})
    pyarrow.csv.write_csv(table, tmp_path / "bad.csv")
    done = run("cost_accuracy.py", "--profiles", str(tmp_path))
    assert done.returncode == 2
    assert "bad.csv, row 1: time_us is -1.0, should be a time above 0" in done.stderr


def test_training_scale_exits_by_its_bars() -> None:
    small = ("--rows", "4000")
    done = run("training_scale.py", *small)
    assert done.returncode == 0, done.stderr
    assert "4000 rows x 8 columns" in done.stdout
    assert run("training_scale.py", *small, "--gigabytes", "0.001").returncode == 1


def test_training_scale_times_train_itself() -> None:
    done = run("training_scale.py", "--train", "--rows", "800")
    assert done.returncode == 0, done.stderr
    assert "kvpolicy.train, 800 decision rows, 100 states" in done.stdout
    assert run("training_scale.py", "--train", "--rows", "800", "--seconds", "0").returncode == 1
    drawn = run("training_scale.py", "--draws", "--rows", "800")
    assert drawn.returncode == 0, drawn.stderr
    assert "25 states held out" in drawn.stdout and "     75 states: recompute" in drawn.stdout
    refused = run("training_scale.py", "--train", "--rows", "8")
    assert refused.returncode == 2 and "--rows is 8" in refused.stderr


def test_decision_latency_measures_all_contenders_in_the_same_rounds(tmp_path: Path) -> None:
    out = tmp_path / "latency.json"
    done = run(
        "decision_latency.py", "--rounds", "2", "--calls", "20", "--situations", "5", "--no-state", "--json", str(out)
    )  # fmt: skip
    # 1 where the bar is missed, as it may be on a machine that tests run on.
    assert done.returncode in (0, 1), done.stderr
    values = json.loads(out.read_text())
    ours = values["contenders"]["decision"]
    assert values["trees"] == {"recompute": 100, "swap": 100}
    assert {"decision, plain", "LightGBM Booster.predict", "roofline alone, plain"} <= set(values["contenders"])
    assert {"decision, cheapest, online", "decision, explore, online"} <= set(values["contenders"])
    assert values["bar_not_measured"] == ["collecting the state per block"]
    assert "not measured: collecting the state per block" in " ".join(done.stdout.split())
    assert ours["p50_us"]["low"] <= ours["p50_us"]["value"] <= ours["p99_us"]["high"]
    assert ours["p50_ratio"]["value"] == 1.0
    assert bool(values["missed"]) == bool(done.returncode)
    assert "ONNX Runtime" in done.stdout


def test_decision_latency_compares_whole_costs_and_varies_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    latency = import_module("decision_latency")
    model, rng = fitted_model("analytic"), random.Random(0)
    situations = [latency.made_up(model, rng) for _ in range(40)]
    assert 0 < sum(victim.queued_save_bytes > 0 for victim in situations) < 40
    assert 0 < sum(victim.queued_load_bytes > 0 for victim in situations) < 40
    options = (Option("recompute"), Option("swap", situations[0].computed_tokens, "host"))
    latency._refuse_difference(model, replace(model), situations[0], options)
    for other, name in (
        (replace(model, intervals=unbounded()), "low_s"),
        (replace(model, others_share={"recompute": 9.0, "swap": 9.0}), "stall_s"),
    ):
        with pytest.raises(ValueError, match=f"compiled {name} "):
            latency._refuse_difference(model, other, replace(situations[0], running_requests=2), options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "1"], "--rounds is 1"),
        (["--calls", "3"], "--calls is 3"),
        (["--cpu", "100000"], "--cpu is 100000"),
    ],
)
def test_decision_latency_refuses_wrong_values_by_flag(arguments: list[str], said: str) -> None:
    done = run("decision_latency.py", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_transfer_carries_between_traces_and_between_tables(tmp_path: Path) -> None:
    for number, slower in enumerate((1.0, 3.0)):
        make_trace(seed=number, states=60, name=f"place{number}").write(tmp_path / f"trace{number}")
        layers = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        rows = [
            {"layer": layer, "tokens": tokens, "time_us": slower * (30.0 + 0.5 * tokens)}
            for layer in layers
            for tokens in range(1, 400, 10)
        ]
        pyarrow.csv.write_csv(pa.Table.from_pylist(rows), tmp_path / f"gpu{number}.csv")
    out, traces = tmp_path / "figures.json", [str(tmp_path / f"trace{number}") for number in (0, 1)]
    done = run(
        "transfer.py", "--trace", traces[0], "--trace", traces[1], "--profiles", str(tmp_path), "--draws", "2",
        "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = {(line["carry"], line["measured"]): line["carried"] for line in json.loads(out.read_text())}
    there = "LLMServingSim: gpu0 -> gpu1"
    assert lines[there, 0]["prefill"] > 1.0
    assert lines[there, 1]["prefill"] < 0.1
    assert set(lines["trace trace0 -> trace1", 4]) == {"recompute", "swap"}


def test_overflow_matrix_compares_policies_on_the_same_runs(tmp_path: Path) -> None:
    """Shipped lengths and a trace, one machine, memory so short that requests are preempted."""
    rng, rows = random.Random(0), ["arrival_s,prompt_tokens,output_tokens"]
    rows += [f"{number / 10},{rng.randint(100, 900)},{rng.randint(200, 700)}" for number in range(120)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "azure2023_conv_some.csv").write_text("\n".join(rows) + "\n")
    out = tmp_path / "matrix.json"
    line = "--requests 60 --repeats 2 --machine A100-SXM-80GB --shipped deepseek-r1 --share 0.2 --jobs 0"
    where = ("--cache", str(tmp_path / "cache"), "--data", str(tmp_path / "data"), "--json", str(out))
    done = run("overflow_matrix.py", *line.split(), *where)
    assert done.returncode in (0, 1), done.stderr  # 1 where a bar is missed, as with few requests it may be
    values = json.loads(out.read_text())
    assert (done.returncode == 1) == any(bar["verdict"] == "missed" for bar in values["bars"])
    assert any(bar["bar"] == "steady rate over vLLM's, geometric mean" for bar in values["bars"])
    assert [one["workload"].partition("?")[0] for one in values["cells"]] == [
        "deepseek-r1",
        str(tmp_path / "data" / "azure2023_conv_some.csv"),
    ]
    for cell in values["cells"]:
        policies = cell["policies"]
        assert list(policies) == [
            "always-recompute", "always-swap", "best threshold", "minwaste:analytic", "cheapest:analytic"
        ]  # fmt: skip
        assert policies["always-recompute"]["preemptions"]["recompute"] > 0
        assert policies["always-swap"]["preemptions"]["swap"] > 0
        assert policies["always-recompute"]["throughput over always-recompute"]["value"] == 1.0
    summary = values["summary"]["A100-SXM-80GB"]["cheapest:analytic"]
    assert summary["over always-recompute"]["pairs"] == 2
    assert "where" in summary["worst over the better fixed action"]
    for word in (
        "at most 2048 tokens a step and 256 requests, scheduling one step ahead",
        "measured by nobody",
        "PCI Express Base Specification 4.0",
        "geometric mean",
    ):
        assert word in done.stdout


def test_overflow_matrix_compares_end_to_end_times_near_capacity(tmp_path: Path) -> None:
    out = tmp_path / "poisson.json"
    line = "--requests 40 --repeats 2 --machine A100-SXM-80GB --shipped deepseek-r1 --share 0.2 --jobs 0 --poisson 1.1"
    done = run("overflow_matrix.py", *line.split(), "--cache", str(tmp_path), "--json", str(out))
    assert done.returncode in (0, 1), done.stderr
    values = json.loads(out.read_text())
    (cell,) = values["cells"]
    assert cell["capacity_per_s"] > 0 and cell["load"] == 1.1 and len(cell["preemptions"]) == 2
    assert [bar["limit"] for bar in values["bars"]] == [1.005, 1.01]


def in_benchmarks(code: str) -> str:
    """What a script prints that imports from the benchmarks' folder."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{PACKAGES}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_bar_within_the_interval_is_not_told() -> None:
    code = """
from matrix_bars import Verdict, exit_status
from kvpolicy.stats import Ratio
for at_most in (True, False):
    verdicts = [Verdict("b", "w", Ratio(v, lo, hi, 9), 1.0, at_most) for v, lo, hi in
                ((0.9, 0.8, 0.95), (1.1, 1.05, 1.2), (1.0, 1.0, 1.0), (1.01, 0.99, 1.03), (1.1, None, None))]
    print([one.text for one in verdicts], [one.beyond for one in verdicts], [exit_status([one]) for one in verdicts])
"""
    at_most, at_least = in_benchmarks(code).splitlines()
    assert at_most == (
        "['met', 'missed', 'met', 'undecided', 'undecided'] [False, True, False, True, True] [0, 1, 0, 0, 0]"
    )
    assert at_least == (
        "['missed', 'met', 'met', 'undecided', 'undecided'] [True, False, False, False, False] [1, 0, 0, 0, 0]"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--poisson", "0"), "--poisson is 0.0: should be above 0"),
        (("--poisson", "1", "--requests", "1"), "--requests is 1: should be 4 or more with --poisson"),
        (("--requests", "0"), "--requests is 0"),
        (("--share", "-1"), "--share is -1"),
        (("--share", "nan"), "--share is nan"),
        (("--jobs", "-1"), "--jobs is -1"),
    ],
)
def test_overflow_matrix_refuses_what_cannot_be(wrong: tuple[str, str], said: str) -> None:
    done = run("overflow_matrix.py", *wrong)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_headroom_compares_what_was_said_with_what_was_reached(tmp_path: Path) -> None:
    """One place, memory so short that requests are preempted."""
    out = tmp_path / "headroom.json"
    line = "--requests 60 --repeats 2 --machine A100-SXM-80GB --shipped deepseek-r1 --share 0.2 --jobs 0"
    done = run("headroom.py", *line.split(), "--cache", str(tmp_path / "cache"), "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    places = json.loads(out.read_text())["places"]
    assert [one["prefix_caching"] for one in places] == [True, False]
    for one in places:
        assert one["preemptions"] > 0 and set(one["reached"]) == {"always-swap", "cheapest:analytic"}
        assert all(0 < said <= most for said, most in zip(one["forecasts"], one["bounds"], strict=True))
    for word in ("of the bound, 95%", "forecast less reached: mean", "measured by nobody"):
        assert word in done.stdout
    done = run("headroom.py", "--repeats", "1")
    assert done.returncode == 2 and "--repeats is 1: should be 2 or more" in done.stderr


def test_headroom_judges_its_bars() -> None:
    """More than the bound cannot be won, and less than 60% of a large one is too little."""
    script = "import headroom; f = headroom.Figures('m', 'w', 0.2, True, 9.0, 0.5, 0.1, {bounds}, [0.0] * 3, {reached})"
    for bounds, reached, words in (
        ([0.03, 0.04, 0.05], [0.029, 0.041, 0.049], "[]"),
        ([0.01, 0.01, 0.01], [0.02, 0.021, 0.022], "above the bound of 1.00%"),
        ([0.03, 0.04, 0.05], [0.01, 0.02, 0.02], "of the bound of 4.00%, at least 60%"),
        ([0.01, 0.01, 0.01], [0.001, 0.002, 0.001], "[]"),
        ([0.06, 0.05, 0.0], [0.01, 0.01, 0.0], "reached 18% of the bound of 3.67%, at least 60%"),
    ):
        code = script.format(bounds=bounds, reached={"always-swap": reached}) + "; print(f.missed())"
        assert words in in_benchmarks(code)


def test_estimator_coverage_takes_up_what_was_noted(tmp_path: Path) -> None:
    small = ["--seeds", "2", "--records", "3000", "--truth-draws", "20000", "--resume", str(tmp_path / "notes")]
    first = run("estimator_coverage.py", *small, "--json", str(tmp_path / "one.json"))
    assert first.returncode in (0, 1), first.stderr
    assert "worst coverage" in first.stdout
    again = run("estimator_coverage.py", *small, "--json", str(tmp_path / "two.json"))
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text(), again.stderr
    rows = json.loads((tmp_path / "one.json").read_text())["rows"]
    assert {row["interval"] for row in rows} == {"bootstrap", "bernstein", "sequence"}


def test_estimator_scale_prints_its_bar() -> None:
    done = run("estimator_scale.py", "--records", "20000", "--repeats", "1", "--seconds", "1000")
    assert done.returncode == 0, done.stderr
    assert "20000 records x 12 columns, 7 estimators" in done.stdout


def test_laws_of_what_was_lost_are_compared_with_laws_of_what_was_expected(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = run("lost_tokens.py", "--requests", "400", "--noise", "0.1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    values = json.loads(out.read_text())
    assert "error at resume" in done.stdout and 0 < values["survived"] < 1
    rows = {(row["learned"], row["family"], row["option"]): row["error at resume"] for row in values["rows"]}
    assert len(rows) == 8
    assert rows["found", "analytic", "recompute"] < rows["expected", "analytic", "recompute"]


def test_exploration_compares_estimates_with_what_was_served(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = run("exploration.py", "--requests", "200", "--workloads", "1", "--replays", "2", "--json", str(out))
    assert done.returncode == 0, done.stderr
    values = json.loads(out.read_text())
    assert {row["policy"] for row in values["rows"]} == {"always-recompute", "always-swap"}
    (within,) = {
        row["budget"]["spent_s"] / row["budget"]["cheapest_s"] for row in values["rows"] if "spent_s" in row["budget"]
    }
    assert within <= 0.02
    shares = {row["way"]: row["left_to_chance"] for row in values["rows"]}
    assert shares["trained on noise"] > 0.2 and shares["trained on noise"] > shares["as trained"]


def test_exploration_without_requests_is_refused() -> None:
    done = run("exploration.py", "--requests", "0")
    assert done.returncode == 2 and "'0', should be a whole number, 1 or more" in done.stderr
    done = run("exploration.py", "--requests", "1")
    assert done.returncode == 2 and "error: --requests 1: too few to train on" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_decision_turned_leaves_all_others_and_its_own_cost_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned to what was done, it costs what the log says; turned to the other option, what came before is the same."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    exploration = import_module("exploration")
    work = exploration.made_up(1, 150)
    _, trace = exploration.served(work, "random:0.5", 1)
    log = exploration.log_from_traces({"log": trace})
    turn = exploration.ReplayedRun(work, exploration.asked_for("random:0.5"), 1, exploration._numbers(trace))
    assert len(log) > 10
    for record in (0, len(log) // 2, len(log) - 1):
        done = int(log.action[record])
        assert turn.cost_s(record, done) == pytest.approx(float(log.cost_s[record]), rel=1e-9)
        assert turn.cost_s(record, 1 - done) != pytest.approx(float(log.cost_s[record]), rel=1e-9)


def test_the_simulators_speed_is_printed_case_by_case() -> None:
    done = run("simulator_speed.py", "--requests", "40", "--repeats", "1")
    assert done.stdout.count(" us a step") == 8, done.stderr
    flat = run("simulator_speed.py", "--flat", "30")
    assert "30 requests: " in flat.stdout and flat.returncode == 0


def test_a_workload_that_the_smaller_memory_cannot_hold_is_refused_before_anything_runs(tmp_path: Path) -> None:
    lengths = tmp_path / "long.csv"
    lengths.write_text("prompt_tokens,output_tokens\n90000,10000\n")
    for workload, reason in (
        (f"lengths:{lengths}?n=2&arrivals=at-once", "its longest request has 100000 tokens"),
        ("nonsense", "no such file, and no workload of that name"),
    ):
        done = run("simulator_speed.py", "--workload", workload)
        assert done.returncode == 2 and not done.stdout
        assert reason in done.stderr and done.stderr.count("\n") == 1


def test_served_blocks_are_separated_by_time_and_compared_with_estimates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three runs of the simulator put one after the other in one record, as an engine that changes policy writes it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    exploration, served = import_module("exploration"), import_module("exploration_served")
    decisions: list[dict[str, object]] = []
    outcomes: list[dict[str, object]] = []
    parts, counts = [], {}
    for number, policy in enumerate(("random:0.5", "always-recompute", "always-swap")):
        run, trace = exploration.served(exploration.made_up(1, 900), policy, 1)
        begin_s, middle_s = 1e4 * number, 1e4 * number + run.summary.makespan_s / 2
        for row in trace.rows("decisions"):
            ids = {name: f"{policy}/{row[name]}" for name in ("preemption_id", "overflow_id")}
            decisions.append(row | ids | {"time_s": row["time_s"] + begin_s})
        outcomes += [row | {"preemption_id": f"{policy}/{row['preemption_id']}"} for row in trace.rows("outcomes")]
        parts += [served.Part(policy, 0, begin_s, middle_s, 1.0), served.Part(policy, 1, middle_s, begin_s + 9e3, 3.0)]
        counts[policy] = len(trace.rows("decisions"))
    (core,) = trace.headers
    tables = {"decisions": decisions, "outcomes": outcomes}
    for row in (*decisions, *outcomes):
        del row["core"]
    made = Trace(trace.headers, {name: with_core(from_rows(name, rows), core) for name, rows in tables.items()})
    assert served._without_costs(made).table("outcomes")["engine_s"].null_count == len(outcomes)
    made.write(tmp_path / "trace")
    (tmp_path / "parts.json").write_text(json.dumps([asdict(part) for part in parts]))
    monkeypatch.setattr(
        served, "_without_costs", lambda trace: trace
    )  # the simulator tells costs, and no steps are here
    rows = served.compare(tmp_path, "random:0.5", 0)
    served.show(rows)
    assert [row["policy"] for row in rows] == ["always-recompute", "always-swap"]
    for row in rows:
        assert row["explored"]["preemptions"] == counts["random:0.5"]
        assert row["served"]["preemptions"] == counts[row["policy"]]
        assert row["served"]["throughput_tok_s"] == 2.0
        assert row["served"]["low_s"] < row["served"]["value_s"] < row["served"]["high_s"]
        for estimate in row["estimates"]:
            assert (
                estimate["gap_low_s"]
                < estimate["gap_s"]
                == estimate["value_s"] - row["served"]["value_s"]
                < estimate["gap_high_s"]
            )
            assert abs(estimate["gap_s"]) < 0.5 * row["served"]["value_s"]


def test_swap_place_exits_by_its_bar(tmp_path: Path) -> None:
    asked = ("swap_place.py", "--cell", "2k", "--engine", "builtin", "--machine", "H100-SXM")
    done = run(*asked, "--json", str(tmp_path / "place.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "place.json").read_text())
    assert {(cell["asynchronous"], cell["prefix_caching"]) for cell in cells} == {
        (a, b) for a in (0, 1) for b in (0, 1)
    }
    assert all(cell["victims"] == [1, 2, 3, 4, 5, 6, 7] for cell in cells)
    missed = run(*asked, "--bar", "0.5")
    assert missed.returncode == 1 and "bar missed: 2k H100-SXM builtin" in missed.stdout


def test_survival_is_judged_beside_simpler_rules(tmp_path: Path) -> None:
    out = tmp_path / "survival.json"
    asked = ("survival.py", "--tuned", "--requests", "120", "--share", "0.1", "--json", str(out))
    done = run(*asked, "--bar", "0.9")
    assert done.returncode == 0 and "bar met" in done.stdout, done.stderr
    values = json.loads(out.read_text())
    for row in (*values["places"], values["all"]):
        errors = row["errors"]
        assert all(0 <= error <= 1 for error in errors.values()) and row["preemptions"] >= 20
        assert errors["nothing"] == pytest.approx(row["found"])
    assert values["all"]["errors"]["survival"] < values["all"]["errors"]["mean so far"]
    assert run(*asked, "--bar", "0.01").returncode == 1


def test_swap_bandwidth_compares_every_way_with_one_large_copy(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "bandwidth.json"
    done = run("swap_bandwidth.py", "--tokens", "64", "--block-size", "16", "--turns", "2", "--json", str(out))
    assert done.returncode == 0, done.stderr
    settings = json.loads(out.read_text())["settings"]
    assert [setting["order"] for setting in settings] == ["coalesced", "scattered"]
    for setting in settings:
        assert (setting["bytes"], setting["turns"]) == (64 * 131072, 2)
        for row in setting["rows"]:
            assert row["gb_per_s"] > 0 and ("of_large" in row) == (row["way"] != "large")
    assert "too few: 2 of at least 5" in done.stdout
    done = run("swap_bandwidth.py", "--tokens", "8")
    assert done.returncode == 2 and "--tokens is 8" in done.stderr


def test_live_pairs_are_compared_over_starts_of_the_engines() -> None:
    """Two pairs a start, of which one is twice as far off; few starts have no half width."""
    code = """
from types import SimpleNamespace
from live_pairs import LEARNED, STOCK, Comparison, Figures, Pair, forecast_of
def figures(starts, price_ratio, slower=1.0):
    pairs = [Pair(start, 0, {LEARNED: slower * learned * (1 + (start - 2) / 100), STOCK: 2.0}, {}, {}, {}, 1.0)
             for start in range(starts) for learned in (1.0, 4.0)]
    return Figures(True, price_ratio, "", None, 9, pairs, Comparison(10))
four, five = figures(4, 0.3), figures(5, 0.3)
print(round(five.ratio("cpu_s").value, 4), five.ratio("cpu_s").pairs, four.half_width())
print(0.01 < five.half_width() < 0.03, bool(five.wide(0.03)), four.wide(0.03)[:37], bool(five.wide(0.01)))
print(five.missed(), figures(5, 0.1).missed(), len(figures(5, None, 2.0).missed()))
five.comparison += Comparison(10, 0, ("token 3 is 4, should be 5",))
print(five.missed())
saving = SimpleNamespace(mean_s=36.0, low_s=-18.0, high_s=90.0)
for busy in (0.5, None):  # half of the 2 hours' time in steps: 1,800 s of each hour
    print(forecast_of(SimpleNamespace(per_hour=saving, hours=2.0, busy_hours=busy and 2 * busy)))
"""
    pytest.importorskip("torch")
    first, enough, second, third, *forecasts = in_benchmarks(code).splitlines()
    assert forecasts == ["(0.98, 0.95, 1.01)", "None"]
    assert (first, enough) == ("0.9999 5 None", "True False the interval's half width is unknown, True")
    assert second == "[] ['p / d is 0.100, should be at least 0.2'] 2"
    assert third == "['token 3 is 4, should be 5']"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--max-pairs", "0"), "--max-pairs is 0"),
        pytest.param(("--memory-share", "2"), "--memory-share is 2.0", marks=pytest.mark.slow),
    ],
)
def test_live_pairs_refuses_what_cannot_be(wrong: tuple[str, str], said: str) -> None:
    done = run("live_pairs.py", "--out", "unused", *wrong)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_live_windows_compares_a_swap_with_every_baseline() -> None:
    """By start of the engines; a run that swapped nothing shows nothing."""
    code = """
from live_windows import DENSE, STOCK, SWAP, Comparison, Found, Request, Run, blocks_of
def found(price_ratio, moved_bytes):
    seconds = {STOCK: 4.0, DENSE: 3.0, SWAP: 2.0}
    runs = [(start, Run(arm, start, made * (1 + start / 50), (0.5,), ((0.1,),), ((1, 2),), (),
                        {"recompute": 0, "swap": 3 * (arm == SWAP)}, 0, moved_bytes, made))
            for start in range(3) for arm, made in seconds.items()]
    return Found(price_ratio, "", 9, runs, Comparison(10))
one = found(0.3, 8)
print(one.arms, [round(one.ratio("CPU time", SWAP, over).value, 4) for over in (STOCK, DENSE)], one.missed())
print(found(0.1, 0).missed())
print([blocks_of(Request(0.0, 20, tokens)) for tokens in (12, 44, 108, 300)])
kept = one.to_dict()
print(len(kept["runs"]), kept["runs"][0] == {"start": 0, "arm": STOCK, "tok/s": 0.5, "CPU time": 4.0, "e2e": 0.6,
      "TTFT": 0.5, "preemptions": {"recompute": 0, "swap": 0}, "recomputed_tokens": 0, "moved_bytes": 8})
print(list(kept["ratios"]), round(kept["ratios"][f"{SWAP} over {DENSE}"]["CPU time"]["value"], 4))
"""
    pytest.importorskip("torch")
    first, second, third, fourth, fifth = in_benchmarks(code).splitlines()
    assert first == "['vllm', 'retention None', 'always-swap'] [0.5, 0.6667] []"
    assert "'p / d is 0.1, should be at least 0.2', 'always-swap swapped nothing" in second
    assert third == "[2, 4, 7, 13]"
    assert fourth == "9 True"
    assert fifth == ("['retention None over vllm', 'always-swap over vllm', 'always-swap over retention None'] 0.6667")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--requests", "0"), "--requests is 0"),
        pytest.param(("--minutes", "-1"), "--minutes is -1.0", marks=pytest.mark.slow),
    ],
)
def test_live_windows_refuses_what_cannot_be(wrong: tuple[str, str], said: str) -> None:
    done = run("live_windows.py", "--out", "unused", *wrong)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_orders_study_prints_what_the_figures_belong_to(tmp_path: Path) -> None:
    asked = ("--machine", "H100-SXM", "--requests", "40", "--kv-blocks", "4000", "--seeds", "2", "--load", "1.2")
    written = tmp_path / "study.json"
    done = run(
        "orders_study.py",
        *asked,
        "--order",
        "mlfq:base=64",
        "--jobs",
        "0",
        "--cache",
        str(tmp_path),
        "--json",
        str(written),
    )
    assert done.returncode == 0, done.stderr  # no bar is set for this order
    assert "4,000 blocks of 16 tokens, 128 GiB of host memory, 40 requests of deepseek-r1: capacity " in done.stdout
    assert done.stdout.count("fcfs, recompute") == 2, "stock vLLM, and the best watermark"
    (place,) = json.loads(written.read_text())["places"]
    assert [(arm["order"], arm["how"]) for arm in place["arms"]][-3:] == [
        ("mlfq:base=64", how) for how in ("recompute", "swap", "learned")
    ]
    assert run("orders_study.py", "--seeds", "1").returncode == 2


def test_orders_host_prints_the_host_memory_of_each_order(tmp_path: Path) -> None:
    asked = ("--requests", "60", "--kv-blocks", "3100", "--load", "4", "--seeds", "1")
    written = tmp_path / "host.json"
    done = run("orders_host.py", *asked, "--order", "fcfs", "--order", "mlfq:base=64", "--json", str(written))
    assert done.returncode == 0, done.stderr
    stock, ordered = json.loads(written.read_text())["rows"]
    assert 0 < stock["peak_host_blocks"][0] < ordered["peak_host_blocks"][0] < ordered["host_blocks"]
    assert run("orders_host.py", "--seeds", "0").returncode == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--order", "mlqf"), "argument --order: order 'mlqf' is no order (did you mean mlfq?); the orders are fcfs"),
        (("--order", "mlfq:base=0"), "has base=0, should be 1 or more"),
        (("--kv-blocks", "10"), "--kv-blocks is 10: should be 3028 or more, which the longest request needs"),
        (("--host-gib", "-1"), "--host-gib is -1: should be 0 or more"),
        (("--host-gib", "nan"), "--host-gib is nan: should be 0 or more"),
    ],
)
def test_orders_study_refuses_what_cannot_be(
    wrong: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    with pytest.raises(SystemExit) as refused:
        import_module("orders_study").main(["--requests", "60", "--seeds", "2", *wrong])
    assert refused.value.code == 2 and said in capsys.readouterr().err


def test_orders_classes_judges_urgent_requests_and_the_batch(tmp_path: Path) -> None:
    asked = ("--urgent", "40", "--batch", "12", "--kv-blocks", "4000", "--seeds", "2", "--jobs", "0")
    done = run("orders_classes.py", *asked, "--cache", str(tmp_path))
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    assert "4,000 blocks, urgent ones twelve at a time" in done.stdout
    assert (
        done.stdout.count("urgent TTFT p99") == 2
        and done.stdout.count("batch tok/s 1.") + done.stdout.count("batch tok/s 0.") == 2
    )


def test_live_orders_takes_rates_in_the_steady_part_and_compares_over_starts() -> None:
    code = """
from live_orders import FIGURES, LEARNED, STOCK, Found, Run
from kvpolicy.workload import Request
def served(gap_s, ttft_s):
    requests = (Request(0.0, 8, 41, class_name="batch"), Request(1.0, 8, 1, priority=-1, class_name="urgent"))
    times = (1.0, ttft_s), ((gap_s,) * 40, ())
    return Run("arm", 0, 50.0, *times, ((1,) * 41, (1,)), (), {"swap": 0}, 0, 0, 1.0, (0.0, 1.0), requests)
found = Found("two", 0.5, "", 1.0, 1.0, 100)
for start in (0, 1):
    found.runs += [(start, STOCK, served(1.0, 4.0)), (start, LEARNED, served(0.5, 1.0 + start / 9))]
    found.runs += [(start, name, served(0.5, 0.5)) for name in ("always-recompute", "always-swap", "fcfs, always-swap")]
from live_orders import table
print(found.extra, [line.split("  ")[0] for line in table(found)[:-1]])
print(FIGURES["two"]["batch tok/s"](found.runs[0][2]), found.ratio("batch tok/s", LEARNED).value)
print(round(found.ratio("urgent TTFT p99", LEARNED).value, 3), [worse for _, _, worse in found.over_fixed()])
"""
    pytest.importorskip("torch")
    rows = ["over unmodified vLLM", "unmodified vLLM, means", "urgent, always-recompute", "urgent, always-swap"]
    arms = f"['fcfs, always-swap'] {[*rows, 'urgent, learned', 'fcfs, always-swap']}"
    assert in_benchmarks(code).splitlines() == [arms, "1.0 2.0", "0.264 [True, False, True, False]"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--starts", "1"), "--starts is 1: should be 2 or more"),
        pytest.param(("--load", "0"), "--load is 0.0: should be above 0", marks=pytest.mark.slow),
    ],
)
def test_live_orders_refuses_what_cannot_be(wrong: tuple[str, str], said: str) -> None:
    done = run("live_orders.py", "--out", "unused", *wrong)
    assert done.returncode == 2 and said in done.stderr


TAIL = {"mean": 2.0, "p50": 2.0, "p99": 4.0}


@pytest.mark.parametrize(("pause_s", "status"), [(40.0, 0), (60.0, 1)])
def test_a_study_of_orders_fails_where_promotion_bounds_no_pause(
    pause_s: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    study = import_module("orders_study")
    result = dict.fromkeys(("e2e_per_token_s", "e2e_s", "ttft_s", "longest_gap_s"), TAIL) | {
        "steady_tok_s": 9.0, "throughput_tok_s": 8.0, "longest_pause_s": pause_s, "preemptions": {"swap": 1},
        "recomputed_tokens": 1, "moved_bytes": 1,
    }  # fmt: skip
    place = study.Place("H100-SXM", "h", 26_000, 800, 0.7, 1.0, 2)
    monkeypatch.setattr(study, "places_of", lambda options: [place])
    monkeypatch.setattr(study, "run_cells", lambda wanted, *_: [{arm: [result] * 2 for arm in wanted[0]}])
    assert study.main(["--order", study.PROMOTED, "--load", "0.7", "--cache", str(tmp_path)]) == status
    assert (
        f"longest pause {pause_s:.1f} s, at most 1.6 x 30 s: {'missed' if status else 'met'}" in capsys.readouterr().out
    )


def test_a_watermark_that_slows_the_batch_down_is_not_what_its_rate_is_judged_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best watermark for urgent requests may be one under which the batch is slow."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    classes = import_module("orders_classes")

    def runs(ttft_s: float, tok_s: float) -> list[dict[str, object]]:
        urgent = {"ttft_s": {"p99": ttft_s}}
        return [{"classes": {"urgent": urgent, "batch": {"steady_tok_s": tok_s + seed}}} for seed in (0.0, 0.1)]

    marked = {arm: runs(5.0, 80.0) for arm in classes.MARKED}
    place = classes.Place("Poisson", 8_000, 2, 40, 12)
    found = classes.verdicts(place, {classes.STOCK: runs(9.0, 100.0), classes.JUDGED: runs(1.0, 90.0), **marked})
    assert [one.text for one in found] == ["met", "met", "missed"]
    assert "over priority, recompute: batch tok/s" in found[2].bar
    found = classes.verdicts(place, {classes.STOCK: runs(4.0, 80.0), classes.JUDGED: runs(1.0, 90.0), **marked})
    assert len(found) == 2, "without a watermark is the best"


def test_a_live_scenario_tells_its_own_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    live = import_module("live_orders")
    bench = live.Bench.__new__(live.Bench)
    bench._options = live._arguments(["--out", "x", "--urgent-rate", "3"])
    assert bench.arrivals("one", 1.5) == "arrivals at 1.5 of it"
    assert bench.arrivals("two", 1.5) == "all there at once, urgent ones 3.00/s, 6 at a time"


def test_a_live_scenario_serves_the_arms_that_are_added(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unmodified vLLM has no plugin, with a watermark or without, and shares no engine with an arm that has it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    live = import_module("live_orders")
    texts = ["fcfs, always-swap", "fcfs, watermark 0.05", "priority, watermark 0.1", "mlfq:base=8,promote=9, learned"]
    bench = live.Bench.__new__(live.Bench)
    bench._options = live._arguments(["--out", str(tmp_path), *(part for text in texts for part in ("--arm", text))])
    bench._link, bench.policy = None, "cheapest:mine"
    stock, *arms = bench.arm(live.STOCK, "fcfs", None), *bench.extra_arms()
    assert [arm.name for arm in arms] == texts
    assert [arm.policy for arm in arms] == ["always-swap", None, None, "cheapest:mine"]
    assert len({arm.engine for arm in (stock, *arms)}) == 5
    assert stock.arguments() == {}
    assert [arm.arguments() for arm in arms[1:3]] == [
        {"watermark": 0.05},
        {"watermark": 0.1, "scheduling_policy": "priority"},
    ]
    assert arms[3].order == "mlfq:base=8,promote=9"
    for wrong in ("fcfs", "fcfs, swap", "mlfq, watermark 0.1", "fcfs, watermark 2", "gitins, learned"):
        with pytest.raises(SystemExit):
            live._arguments(["--out", str(tmp_path), "--arm", wrong])
        named = (
            "'gitins' is no order (did you mean gittins?)" if "gitins" in wrong else f"--arm is '{wrong}', should be"
        )
        assert named in capsys.readouterr().err


def test_caching_policies_compares_them_on_prompts_that_share_prefixes(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows: list[dict[str, Any]] = []
    for number in range(400):
        talk = rng.randrange(40)
        ids = [0, *(100 * talk + block for block in range(1, 2 + number // 100))]
        rows.append({"timestamp": 3000 * number, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids})
    (tmp_path / "traces").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "traces" / "mooncake_made.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    done = run("caching_policies.py", "--data", str(tmp_path), "--shares", "0.3,1", "--json", str(tmp_path / "out"))
    assert done.returncode in (0, 1), done.stderr
    assert "cost/lru" in done.stdout and "of the best of lru, arc, s3fifo" in done.stdout
    assert "all traces" not in done.stdout
    small, whole = json.loads((tmp_path / "out").read_text())["rows"]
    blocks = len({block for row in rows for block in row["hash_ids"]})
    assert whole["capacity"] == whole["blocks"] == blocks > small["capacity"]
    saved, of_all = small["saved"], whole["saved"]
    assert 1 > of_all["lru"] == of_all["cost"] == of_all["hindsight"] >= saved["hindsight"] >= saved["lru"] > 0
    flags = ("--data", str(tmp_path), "--shares", "0.3", "--parts", "4", "--json")
    parts = run("caching_policies.py", *flags, str(tmp_path / "parts"))
    made = json.loads((tmp_path / "parts").read_text())
    # A row that the file has is not made again: this one is told from any that would be.
    made["rows"] = [made["rows"][0] | {"whole_s": 1e9}]
    (tmp_path / "parts").write_text(json.dumps(made))
    again = run("caching_policies.py", *flags, str(tmp_path / "parts"))
    kept = json.loads((tmp_path / "parts").read_text())["rows"]
    assert [row["draw"] for row in kept] == [f"part {part} of 4" for part in (1, 2, 3, 4)]
    assert {row["trace"] for row in kept} == {"mooncake_made"}
    assert parts.returncode == again.returncode and kept[0]["whole_s"] == 1e9 > kept[1]["whole_s"] > 0
    other = run("caching_policies.py", *flags[:-1], "--think", "5", "--json", str(tmp_path / "parts"))
    assert other.returncode == 2 and "was made with think 60.0, not 5.0" in other.stderr


def test_caching_policies_takes_tables_of_lengths_and_the_prices_of_a_cost_model(tmp_path: Path) -> None:
    """Conversations of six turns; what a hit saves is less the load, by a cost model."""
    rows = [f"{300 * turn + talk % 7},{250}" for talk in range(120) for turn in range(1, 12, 2)]
    (tmp_path / "lengths").mkdir()
    lines = "prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n"
    (tmp_path / "lengths" / "sharegpt_made.csv.gz").write_bytes(gzip.compress(lines.encode()))
    out, flags = tmp_path / "out", ("--shares", "0.1", "--seeds", "1")
    found = []
    for number, more in enumerate(((), ("--cost-model", "cpu-llama-native"))):
        done = run("caching_policies.py", "--data", str(tmp_path), *flags, *more, "--json", f"{out}-{number}")
        assert done.returncode in (0, 1), done.stderr
        assert "no rows of Mooncake and agentic sessions" in done.stdout and ": all traces: " in done.stdout
        (one,) = json.loads(Path(f"{out}-{number}").read_text())["rows"]
        found.append(one)
    assert found[0]["blocks"] == found[1]["blocks"] > 1000
    assert 0 < found[0]["saved"]["lru"] < 1 and found[0]["whole_s"] != found[1]["whole_s"]


@pytest.fixture
def long_prompts(tmp_path: Path) -> Path:
    """A folder with a trace of nine prompts of 64,000 tokens in turn, three times."""
    write_prompts(tmp_path, [number % 9 for number in range(27)])
    return tmp_path


def write_prompts(folder: Path, prompts: Sequence[int]) -> None:
    """A trace of prompts of 64,000 tokens, those of one number the same."""
    rows = [
        {"timestamp": 20000 * at, "input_length": 512 * 125, "output_length": 5,
         "hash_ids": [1000 * number + block for block in range(125)]}
        for at, number in enumerate(prompts)
    ]  # fmt: skip
    (folder / "traces").mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "traces" / "mooncake_conversation_made.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def test_caching_study_serves_prompts_by_every_policy(long_prompts: Path, tmp_path: Path) -> None:
    """Over memory of seven prompts: whatever is lost is found in host memory."""
    done = run("caching_study.py", "--data", str(long_prompts), "--host-gib", "64", "--json", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    found = {one["arm"]["cache"]: one["found"] for one in json.loads((tmp_path / "out").read_text())["rows"]}
    assert set(found) == {"none", "lru", "lfu", "arc", "s3fifo", "cost", "hindsight"}
    assert found["none"]["prefix_hits"]["host_tokens"] == 0 < found["lru"]["prefix_hits"]["loaded_tokens"]
    assert found["lru"]["ttft_s"]["mean"] < found["none"]["ttft_s"]["mean"]


def test_caching_study_compares_hints_beyond_capacity_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Host memory of one prompt, and files of all. In each draw nine prompts come, and four of them again, for the last
    time in the whole file."""
    write_prompts(tmp_path, [number % 13 % 9 + 9 * (number // 13) for number in range(26)])
    out = tmp_path / "out"
    command = [
        "caching_study.py", "--data", str(tmp_path), "--host-gib", "8", "--file-gib", "128", "--policies", "lru",
        "--hints", "sessions,hindsight", "--load", "1.2", "--requests", "13", "--json", str(out),
    ]  # fmt: skip
    first, second = run(*command), run(*command, "--seeds", "2")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    runs = json.loads(out.read_text())["rows"]
    assert [(one["arm"]["hints"], one["seed"]) for one in runs if one["arm"]["cache"] == "lru"] == [
        (hints, seed) for seed in (0, 1) for hints in ("none", "sessions", "hindsight")
    ]
    assert [line.split()[6] for line in first.stdout.splitlines()[1:]] == ["none", "none", "sessions", "hindsight"]
    hits = {(one["arm"]["hints"], one["seed"]): one["found"]["prefix_hits"] for one in runs}
    assert hits["sessions", 0]["file_tokens"] > 0 and hits["sessions", 0] != hits["hindsight", 0]
    assert len(out.read_text().splitlines()) == len(runs) + 2 and {one["arm"]["count"] for one in runs} == {13}
    out.write_text(json.dumps({"settings": {"keep": 7.0}, "rows": []}))
    assert "was made with keep 7.0, not 600.0" in run(*command).stderr
    assert "'s4fifo': should be of lru" in run(*command[:7], "--policies", "s4fifo").stderr


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """A folder with the lengths of thirty conversations of three turns."""
    (tmp_path / "lengths").mkdir()
    rows = "".join(f"{500 * turn + talk},{100 + talk}\n" for talk in range(30) for turn in (1, 2, 3))
    table = gzip.compress(b"prompt_tokens,output_tokens\n" + rows.encode())
    (tmp_path / "lengths" / "sharegpt_made.csv.gz").write_bytes(table)
    return tmp_path


def test_orders_by_hints_are_those_by_classes(talks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the page has is what the raw numbers come to."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    asked = ("orders_hints.py", "--data", str(talks), "--requests", "40", "--seeds", "2", "--load", "1.2")
    done, again = (run(*asked, "--json", str(talks / "out")) for _ in range(2))
    assert done.returncode == 0, done.stderr
    assert done.stdout == again.stdout and len(json.loads((talks / "out").read_text())["rows"]) == 20
    lines = [line.split()[3:] for line in done.stdout.splitlines()[1:]]
    assert len(lines) == 10 and lines[3] == lines[4] and lines[8] == lines[9]
    assert "has no lengths/sharegpt" in run(*asked[:2], str(talks / "none")).stderr
    orders, page = import_module("orders_hints"), (ROOT / "docs" / "requests.md").read_text()
    found = orders.Results(import_module("row_file").RowFile.read(ROOT / "docs" / "orders-hints.json", {}))
    for cache in orders.CACHES:
        for order in orders.ORDERS:
            cells = orders.row(orders.Arm(1000, 1.2, cache, order), found, range(3))
            shown = [f"`{cache}`", f"`{order}`", *cells[3:9], *cells[10:12]]
            assert f"| {' | '.join(one.replace('-', ' to ') if '(' in one else one for one in shown)} |" in page


def test_a_hint_that_makes_saves_cheaper_only_turns_recomputes_into_swaps(talks: Path) -> None:
    """Over a link on which a load takes longer than computing. And what changes nothing is the same run."""
    asked = (
        "preemption_hints.py", "--data", str(talks), "--requests", "40", "--seeds", "2", "--blocks", "60",
        "--link", "1e7", "--hints", "sessions,hindsight",
    )  # fmt: skip
    done, again = (run(*asked, "--json", str(talks / "out")) for _ in range(2))
    assert done.returncode == 0, done.stderr
    rows = json.loads((talks / "out").read_text())["rows"]
    assert done.stdout == again.stdout and len(rows) == 2 * 2 * 4
    found = {(one["arm"]["hints"], one["seed"], one["arm"]["rule"]): one["found"] for one in rows}
    for hints, seed in {key[:2] for key in found}:
        runs = {rule: found[hints, seed, rule] for rule in ("as-today", "half", "free", "swap")}
        assert all(one["kept"]["recomputed"] > 0 for rule, one in runs.items() if rule != "swap")
        assert runs["as-today"]["kept"]["changed"] == 0 == runs["swap"]["kept"]["recomputed"]
        assert runs["swap"]["kept"]["changed"] > 0
        for one in runs.values():
            assert one["kept"]["changed"] > 0 or one == runs["as-today"]
    assert "none: holds none of" in run(*asked[:2], str(talks / "none")).stderr


def test_the_page_has_what_hints_change_at_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    hints, page = import_module("preemption_hints"), (ROOT / "docs" / "requests.md").read_text()
    found = hints.Results(import_module("row_file").RowFile.read(ROOT / "docs" / "preemption-hints.json", {}))
    links = {"native": "data sheet's", "5e8": "0.5 GB/s", "2.5e8": "0.25 GB/s"}
    shares = set()
    for blocks, link in product((7000, 3500), links):
        arms = [
            hints.Arm("ShareGPT, conversations", 2000, 1.2, blocks, "lru", "cheapest:analytic", link, "sessions", rule)
            for rule in hints.RULES
        ]
        today, half, free, swap = (hints.row(arm, found, range(3)) for arm in arms)
        ratios = [cell.replace("-", " to ") for cell in (swap[15], swap[13])]
        shown = [f"{blocks:,}", links[link], *today[8:10], half[10], free[10], swap[10], *ratios]
        assert f"| {' | '.join(shown)} |" in page
        shares.add(f"{float(today[11].rstrip('%')):.1f}" if link != "native" else "")
    assert shares == {"", "0.1", "0.2"} and "it is 0.1 to 0.2% of the price" in " ".join(page.split())


def test_the_save_of_a_window_to_keep_counts_as_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prices by which a victim is recomputed as of today, and swapped where half of its save counts."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    hints = import_module("preemption_hints")
    one, cut = situation(500), Priced(block_s=2e-3)
    for rule, kept in product(hints.RULES, (False, True)):
        ruled = hints.Ruled(cut, rule, hints.Kept(is_next=kept))
        shares, costs = ruled.assess(one, options_for(one), NoState())
        assert shares == ((0.0, 1.0) if kept and rule != "as-today" else (1.0, 0.0))
        assert costs == cut.costs(one, options_for(one), NoState()) and costs[0].engine_s < costs[1].engine_s
        assert ruled.kept.other is (kept and rule != "as-today")
        assert ruled.assess(one, options_for(one)[:1], NoState())[0] == (1.0,)


def test_caching_study_compares_what_decides_on_a_link_where_a_load_takes_longer(
    long_prompts: Path, tmp_path: Path
) -> None:
    """Over it a block is loaded in 84 ms, and computed in a few."""
    out = tmp_path / "out"
    done = run(
        "caching_study.py", "--data", str(long_prompts), "--host-gib", "64", "--policies", "lru", "--link", "1e8",
        "--policy", "always-swap", "cheapest:analytic", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {(one["arm"]["policy"], one["arm"]["cache"]): one["found"] for one in json.loads(out.read_text())["rows"]}
    assert {one["arm"]["link"] for one in json.loads(out.read_text())["rows"]} == {"1e8"} and len(found) == 4
    loaded = {policy: found[policy, "lru"]["prefix_hits"]["loaded_tokens"] for policy, _ in found}
    assert loaded["always-swap"] > 0 == loaded["cheapest:analytic"]
    first_s = {policy: found[policy, "lru"]["ttft_s"]["mean"] for policy in loaded}
    assert first_s["cheapest:analytic"] < first_s["always-swap"]


def test_caching_policies_says_where_there_is_nothing(tmp_path: Path) -> None:
    done = run("caching_policies.py", "--data", str(tmp_path))
    assert done.returncode == 2 and "holds no traces/mooncake_*.jsonl.gz" in done.stderr


def test_the_tier_of_files_is_timed_beside_one_large_read(tmp_path: Path) -> None:
    """Where the folder has direct reads, and is left as it was; elsewhere nothing is measured, and it says so."""
    out, folder = tmp_path / "out.json", tmp_path / "folder"
    folder.mkdir()
    small = ("--block-kib", "64", "--mib", "1", "--pairs", "2")
    done = run("file_tier.py", "--directory", str(folder), *small, "--json", str(out))
    assert not list(folder.iterdir())
    if "has no direct reads" in done.stderr:
        assert done.returncode == 1 and not out.exists()
        return
    assert done.returncode == 0, done.stderr
    assert "16 blocks of 64 KiB, 1 MiB, 4 threads, 2 pairs" in done.stdout and "median ratio" in done.stdout
    (row,) = json.loads(out.read_text())["rows"]
    pairs = row["seconds"]
    assert len(pairs) == 2 and all(pair["tier"] > 0 and pair["large"] > 0 for pair in pairs)
    none = run("file_tier.py", "--directory", str(folder), "--block-kib", "2048", "--mib", "1")
    assert none.returncode == 2 and "--mib 1 holds no block of 2048 KiB" in none.stderr


def test_a_node_that_only_decodes_is_simulated(tmp_path: Path) -> None:
    """With as few tokens in a step as requests a recompute takes long; with vLLM's own budget it does not."""
    file = tmp_path / "out.json"
    done = run("decode_node.py", "--seats=16", "--repeats=3", f"--json={file}")
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["asked"] == {"seats": 16, "repeats": 3} and len(written["runs"]) == 2 * 2 * 3
    ratios = {(one["figure"], one["budget"]): one["ratio"]["value"] for one in written["ratios"]}
    assert ratios["steps", 16] < 0.97 < ratios["steps", None]
    assert ratios["mean delay of victims", 16] < ratios["mean delay of victims", None]


def test_a_page_says_of_a_decode_node_what_was_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the file's ratios are those of its runs."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    node = import_module("decode_node")
    raw = json.loads((ROOT / "docs" / "decode-node-simulated.json").read_text())
    found = node.ratios([node.Run(**one) for one in raw["runs"]])
    assert [one | {"ratio": asdict(one["ratio"])} for one in found] == raw["ratios"]
    asked = raw["asked"]
    throughput = {one["budget"]: one["ratio"] for one in found if one["figure"] == "throughput"}
    few, default = throughput[asked["seats"]], throughput[None].text()
    assert (
        f"{asked['seats']} requests and as many tokens in a step, always-swap has {few.value:.3f} times the throughput "
        f"of always-recompute ({few.low:.3f} to {few.high:.3f} over {asked['repeats']} seeds), with vLLM's own token "
        f"budget {default}"
    ) in decode_node_page()


def decode_node_page() -> str:
    return " ".join((ROOT / "docs" / "other-connectors.md").read_text().split())


def test_a_decode_node_without_a_token_to_spare_is_refused() -> None:
    done = run("decode_node_engine.py", "--seats", "8", "--running", "8")
    assert done.returncode == 2 and "--running 8" in done.stderr


def test_a_decode_nodes_medians_are_of_each_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    node = import_module("decode_node_engine")
    made = [(0, "swap", 0.02, 3), (1, "swap", 0.04, 3), (2, "swap", 0.5, 9), (0, "recompute", 3.0, 250)]
    found = node.medians([node.Return(pair, kind, seconds, seconds / 2, steps) for pair, kind, seconds, steps in made])
    assert found["swap"] == {"seconds": 0.04, "cpu_s": 0.02, "steps": 3.0}
    line = node.median_line("recompute", found["recompute"])
    assert line == "median of a recompute: 3.0000 s (3,000.0 ms), 1,500.0 ms of CPU time, 250 steps"


def test_a_page_says_of_a_decode_node_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    node = import_module("decode_node_engine")
    raw = json.loads((ROOT / "docs" / "decode-node.json").read_text())
    found = [node.Return(**one) for one in raw["returns"]]
    asked, page = raw["asked"], decode_node_page()
    assert node.medians(found) == raw["medians"] and len(found) == 2 * asked["pairs"]
    assert {*asked} == {*node.ASKED} and {*raw["versions"]} == {"kvpolicy", "vllm"} and len(raw["loads"]) == 2
    assert (
        f"decode_node_engine.py --pairs {asked['pairs']}` measures one victim with a prompt of {asked['prompt']:,} "
        f"tokens on vLLM's CPU engine with DecodeBenchConnector, {asked['seats']} tokens a step and "
        f"{asked['running']} requests beside it"
    ) in page
    assert f"medians of {asked['pairs']} alternating pairs on {raw['machine']['cores']} cores;" in page
    recompute, swap = raw["medians"]["recompute"], raw["medians"]["swap"]
    ratio = node.ratios(found)["seconds"]
    assert (
        f"a recompute takes {recompute['seconds']:.2f} s and {recompute['steps']:g} steps, a swap "
        f"{1e3 * swap['seconds']:.1f} ms and {swap['steps']:g} steps"
    ) in page
    assert f"takes {ratio.value:.1f} times as long ({ratio.low:.1f} to {ratio.high:.0f})" in page


def test_a_page_says_of_the_time_of_a_check_what_was_measured() -> None:
    """`python benchmarks/check_time.py --json docs/check-time.json` measures it again."""
    raw = json.loads((ROOT / "docs" / "check-time.json").read_text())
    cpu_s = {
        what: median(one["cpu_s"] for one in raw["runs"] if one["what"] == what)
        for what in ("kvpolicy check", "importing vLLM")
    }
    assert raw["asked"]["llm"] is None and raw["asked"]["vllm_flags"] == [] and len(raw["loads"]) == 2
    assert len(raw["runs"]) == 2 * raw["asked"]["runs"]
    page = " ".join((ROOT / "docs" / "own-server.md").read_text().split())
    assert (
        f"importing vLLM: {cpu_s['importing vLLM']:.1f} of {cpu_s['kvpolicy check']:.1f} s of CPU time (medians of "
        f"{raw['asked']['runs']} runs, "
    ) in page
