"""The bench over HTTP: arms in alternation, results that are resumed, tokens that are compared, errors that count.

Its parts kvpolicy_vllm.bench.load_kinds, kvpolicy_vllm.bench.analytics_load and kvpolicy_vllm.bench.load_report are
tried with it, as are the commands of kvpolicy.cli.bench.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvpolicy.bench_settings import AnalyticsLoad, BenchTarget, ChatLoad, RateLoad
from kvpolicy.cli import main
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.reporting.pipeline import report
from kvpolicy.settings import ServerSettings
from kvpolicy.stats import student_ratio
from kvpolicy.stored_values import read_sealed, sealed
from kvpolicy.workload import WorkloadError
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench import chat_load, idle_servers, live_arms, run_bench
from kvpolicy_vllm.bench.load_report import LoadReport
from tests.bench.live_http import Small, serving

CHAT = ChatLoad(
    chatters=(2,),
    prefixed=(0.0, 0.5),
    prefix_tokens=32,
    conversations=6,
    turns=2.0,
    think_s=0.0,
    rounds=2,
    context_tokens=300,
)
ANALYTICS = AnalyticsLoad(prefix_tokens=(40, 80), texts=10, rounds=2, concurrency=3)
WARM_UP = run_bench.WARM_UP_REQUESTS


@pytest.fixture
def two() -> Iterator[tuple[Small, Small, BenchTarget]]:
    """Two servers, and a bench of both and of the second one with hints."""
    one, other = Small(), Small()
    with ExitStack() as stack:
        url, second = (stack.enter_context(serving(small)) for small in (one, other))
        arms = ("first", f'second={{"url": "{second}"}}', f'hints={{"url": "{second}"}}')
        yield one, other, BenchTarget(url, arms)


def test_a_chat_is_measured_by_arm_and_share(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    one, other, at = two
    found = run_bench.bench(tmp_path, CHAT, at)
    assert found.ok and found.arms == ["first", "second", "hints"]
    assert [dict(cell) for cell in found.cells()] == [
        {"chatters": 2, "prefixed": 0.0},
        {"chatters": 2, "prefixed": 0.5},
    ]
    plain, shared = found.to_dict()["cells"]
    for name in found.arms:
        assert plain["arms"][name]["messages_s"] > 0 and plain["arms"][name]["ttft_s.mean"] > 0
        assert plain["arms"][name]["steady_e2e_s.mean"] >= plain["arms"][name]["steady_ttft_s.mean"] > 0
        assert plain["arms"][name]["hit_rate"] < shared["arms"][name]["hit_rate"] < 1
    assert {"messages_s second / first", "steady_ttft_s.mean second / first"} <= set(shared["ratios"])
    tokens, different, _ = found.compared()
    assert tokens > 100 and different == 0
    said = [body for body in other.bodies if "kv_transfer_params" in body]
    assert 2 * len(said) == len([body for body in other.bodies if body["cache_salt"] != "warm-up"])
    assert not [body for body in one.bodies if "kv_transfer_params" in body]
    assert "hit rate" in found.text() and "0 conversations differ" in found.text()
    for cell in found.to_dict()["cells"]:
        rates = cell["hit_rate_over_run"]["first"]
        assert len(rates) == 5 and any(rate is not None for rate in rates)
    assert "tokens found in a cache, by fifth of the run's time" in found.text() and "to 80%" in found.text()
    assert found.to_dict()["prices"] is None, "nothing is recorded of a server that runs already"


def test_a_chat_says_how_many_conversations_were_prefixed(
    two: tuple[Small, Small, BenchTarget], tmp_path: Path
) -> None:
    """The share that was asked for may lie between two numbers of conversations: 1.5 of 6 are 2, and 2.52 are 3."""
    found = run_bench.bench(tmp_path, replace(CHAT, prefixed=(0.0, 0.25, 0.42), rounds=1), two[-1])
    counts = {
        (run["cell"]["prefixed"], run["prefixed_conversations"], run["conversations"]) for run in found.results["runs"]
    }
    assert counts == {(0.0, 0, 6), (0.25, 2, 6), (0.42, 3, 6)}
    assert "chatters 2, prefixed 0.25: 2 of 6 conversations begin with the prefix" in found.text()
    assert "chatters 2, prefixed 0.42: 3 of 6 conversations begin with the prefix" in found.text()
    assert "prefixed 0: 0 of 6" not in found.text()


def test_no_two_runs_share_a_cached_prefix(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    _, other, at = two
    run_bench.bench(tmp_path, ANALYTICS, at)
    salts = {body["cache_salt"] for body in other.bodies} - {"warm-up"}
    assert len(salts) == 2 * 2 * 2, "by arm, cell and round"
    run_bench.bench(tmp_path / "once-more", ANALYTICS, at)
    both = {body["cache_salt"] for body in other.bodies} - {"warm-up"}
    assert len(both) == 2 * len(salts), "by bench, too: the server or its files may have what an earlier one computed"


def test_an_analysis_finds_its_prefix(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    found = run_bench.bench(tmp_path, ANALYTICS, two[-1])
    assert [dict(cell) for cell in found.cells()] == [{"prefix_tokens": 40}, {"prefix_tokens": 80}]
    short, long = (cell["arms"]["first"] for cell in found.to_dict()["cells"])
    assert 0.4 < short["hit_rate"] < long["hit_rate"] < 0.9
    for run in found.results["runs"]:
        assert run["cpu_s"] is run["cores"] is None, "nobody knows what a server took that runs already"
        assert run["requests"] == 10 and all(len(row["token_ids"]) == 2 for row in run["rows"])


def test_what_has_been_run_is_not_repeated(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    one, _, at = two
    before = run_bench.bench(tmp_path, ANALYTICS, at)
    sent = len(one.bodies)
    gone = next((tmp_path / "runs").glob("round-001-prefix_tokens-80-arm-first.json"))
    gone.unlink()
    after = run_bench.bench(tmp_path, ANALYTICS, at)
    assert len(one.bodies) == sent + WARM_UP + 11, "the run that was missing, and no other"
    repeated = [run for run in before.results["runs"] if run not in after.results["runs"]]
    assert [(run["arm"], run["round"], run["cell"]) for run in repeated] == [("first", 1, {"prefix_tokens": 80})]
    assert run_bench.bench(tmp_path, ANALYTICS, at).results == after.results
    report([tmp_path], tmp_path / "page.html", tmp_path / "figures")
    assert len(list((tmp_path / "figures").glob("*.png"))) == 2


def with_turns(folder: Path) -> ChatLoad:
    """Six conversations of four turns each, which are begun in the middle."""
    said = [{"from": who, "value": f"some words {number}"} for number in range(4) for who in ("human", "gpt")]
    (folder / "turns.json").write_text(json.dumps([{"id": name, "conversations": said} for name in "abcdef"]))
    return replace(CHAT, workload=f"sharegpt:{folder / 'turns.json'}", midway=True)


def test_pauses_that_a_workload_does_not_say_are_those_of_think_s(
    two: tuple[Small, Small, BenchTarget], tmp_path: Path
) -> None:
    """A file in ShareGPT's format has no pauses, and needs none in its text."""
    messages = [{"from": who, "value": "some words"} for who in ("human", "gpt") * 2]
    (tmp_path / "chats.json").write_text(json.dumps([{"id": "a", "conversations": messages}]))
    load = replace(
        CHAT, workload=f"sharegpt:{tmp_path / 'chats.json'}", think_s=0.02, rounds=1, prefixed=(0.0,), chatters=(1,)
    )
    found = run_bench.bench(tmp_path / "out", load, two[-1])
    (run, *_) = found.results["runs"]
    assert found.ok and [row["turn"] for row in run["rows"]] == [0, 1]
    assert run["rows"][1]["sent_s"] > run["rows"][0]["sent_s"] + run["rows"][0]["e2e_s"]


def test_a_folder_with_another_bench_is_refused(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    at = two[-1]
    run_bench.take_up(tmp_path, {"kind": "chat", "load": {"rounds": 1}})
    (tmp_path / "runs" / "round-000-arm-first.json").write_text("{}")
    with pytest.raises(InputError, match=r"has a bench with other settings \(.*kind.*load.*\): give --out another"):
        run_bench.bench(tmp_path, ANALYTICS, at)


def test_a_new_bench_does_not_take_the_prices_of_one_whose_runs_were_removed(tmp_path: Path) -> None:
    (tmp_path / run_bench.PRICES).write_text(json.dumps(sealed({"price_ratio": 0.1})))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "round-000-arm-first.json").write_text("{}")
    run_bench.write(tmp_path / "plan.json", sealed({"kind": "chat"}))
    run_bench.take_up(tmp_path, {"kind": "chat"})
    assert (tmp_path / run_bench.PRICES).exists(), "those of the bench that goes on"
    (tmp_path / "runs" / "round-000-arm-first.json").unlink()
    run_bench.take_up(tmp_path, {"kind": "chat"})
    assert not (tmp_path / run_bench.PRICES).exists()


def test_damaged_prices_are_refused_in_one_line(tmp_path: Path) -> None:
    kind, at = run_bench.kind_of(ANALYTICS), BenchTarget("some/llm", ("vllm",))
    written = json.dumps(sealed({"price_ratio": 0.1, "unknown": ""}))
    (tmp_path / run_bench.PRICES).write_text(written)
    assert run_bench.priced(kind, {"prefix_tokens": 96}, 1, at, tmp_path) == {"price_ratio": 0.1, "unknown": ""}
    for damaged, why in ((written[:-9], "is no JSON"), (written.replace("0.1", "0.2"), "was damaged or changed")):
        (tmp_path / run_bench.PRICES).write_text(damaged)
        with pytest.raises(InputError, match=f"prices.json: {why}.*give --out another folder"):
            run_bench.priced(kind, {"prefix_tokens": 96}, 1, at, tmp_path)


def test_a_bench_whose_server_never_answered_may_be_begun_anew_otherwise(tmp_path: Path) -> None:
    nobody = BenchTarget("http://127.0.0.1:9", ("first",))
    for load in (ANALYTICS, replace(ANALYTICS, rounds=ANALYTICS.rounds + 1)):
        with pytest.raises(InputError, match="does not answer as an OpenAI server"):
            run_bench.bench(tmp_path, load, nobody)


def test_what_is_wrong_is_said_before_a_server_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nobody = BenchTarget("http://127.0.0.1:9", ("first",))
    with pytest.raises(InputError, match="is a file, should be a folder"):
        run_bench.bench(tmp_path / "file", ANALYTICS, nobody)
    for load in (replace(CHAT, workload="nonsense"), RateLoad(workload="nonsense")):
        with pytest.raises(WorkloadError, match="nonsense: no such file, and no workload of that name"):
            run_bench.bench(tmp_path / "out", load, nobody)
    assert not (tmp_path / "out").exists()


def test_errors_are_counted_by_name_and_arm(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    one, _, at = two
    one.fault = {WARM_UP + 4: "status", WARM_UP + 6: "no end"}
    found = run_bench.bench(tmp_path, ANALYTICS, at)
    assert found.errors() == {"first: HTTP 503: the pool is full": 1, "first: the stream broke off": 1}
    assert not found.ok and "errors: 1 x first: HTTP 503: the pool is full" in found.text()


def test_readings_of_metrics_that_fail_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_load, "SAMPLE_S", 0.0)
    load = replace(CHAT, prefixed=(0.0,), rounds=1)
    with serving(Small(unread=(2, 3))) as url:
        found = run_bench.bench(tmp_path / "some", load, BenchTarget(url))
        whole = run_bench.bench(tmp_path / "none", load, BenchTarget(url))
    assert [run["missed_readings"] for run in found.results["runs"]] == [2] and found.ok
    assert "missed: 2 readings of the servers' metrics failed" in found.text() and "missed" not in whole.text()


@pytest.mark.parametrize("midway", [False, True])
def test_tokens_that_differ_are_counted_with_how_close_it_was(
    midway: bool, two: tuple[Small, Small, BenchTarget], tmp_path: Path
) -> None:
    one, other, at = two
    other.wrong = True
    found = run_bench.bench(tmp_path / "out", with_turns(tmp_path) if midway else CHAT, at)
    met = [row for run in found.results["runs"] for row in run["rows"] if not _begins(row, run["rows"])]
    assert bool(met) is midway, "conversations whose first message is not of their first turn"
    tokens, different, gap = found.compared()
    assert tokens > 0 and different == 2 * 2 * 2 * 6, "every conversation of both cells, rounds and arms"
    assert gap == 0.25 and "at most 0.25 apart" in found.text()
    asked = [body for body in one.bodies if not body.get("stream")]
    streamed = {(tuple(body["prompt"]), body["max_tokens"]) for body in one.bodies if body.get("stream")}
    for body in asked:  # the prompt and all but the last token of an answer, which differs
        assert any(
            body["prompt"][: len(prompt)] == list(prompt) and len(body["prompt"]) == len(prompt) + tokens - 1
            for prompt, tokens in streamed
        )


def _begins(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run has the first turn of the row's conversation."""
    return any(not other["turn"] for other in rows if other["conversation"] == row["conversation"])


def test_messages_of_the_warm_up_are_sent_and_not_counted(
    two: tuple[Small, Small, BenchTarget], tmp_path: Path
) -> None:
    load = replace(with_turns(tmp_path), prefixed=(0.0,), rounds=1, think_s=0.05, warmup_s=0.06)
    found = run_bench.bench(tmp_path / "one", load, two[-1])
    assert found.results["runs"] and "messages of the first 0.06 s do not count; the table" in found.text()
    for run in found.results["runs"]:
        late = [row for row in run["rows"] if row["sent_s"] >= 0.06]
        assert run["messages"] == len(late) < len(run["rows"]) and late
        sent_s: dict[str, float] = {}
        for row in run["rows"]:
            sent_s[row["conversation"]] = min(row["sent_s"], sent_s.get(row["conversation"], 1e9))
        assert sum(first_s < 0.09 for first_s in sent_s.values()) >= 2, "both people begin in the warm-up"
    with pytest.raises(InputError, match=r"--warmup-s 60: somebody had no conversation left after \d+ s"):
        run_bench.bench(tmp_path / "other", replace(load, warmup_s=60.0, midway=False), two[-1])
    pauses = replace(load, warmup_s=0.2, seconds=0.4, think_s=500.0)
    with pytest.raises(InputError, match=r"--warmup-s 0.2: no message was sent after it: give shorter --think-s"):
        run_bench.bench(tmp_path / "pauses", pauses, two[-1])
    for server in two[:2]:
        server.fault = dict.fromkeys(range(len(server.bodies) + WARM_UP, 10_000), "status")
    found = run_bench.bench(tmp_path / "errors", replace(load, warmup_s=60.0, midway=False), two[-1])
    assert "first: HTTP 503: the pool is full" in found.errors() and not found.ok


def test_a_run_without_conversations_before_its_seconds_are_over_is_warned_of(
    two: tuple[Small, Small, BenchTarget], tmp_path: Path
) -> None:
    load = replace(CHAT, prefixed=(0.0,), rounds=1)
    found = run_bench.bench(tmp_path / "short", replace(load, seconds=500.0), two[-1])
    assert all(0 < run["ran_out_s"] < 500 for run in found.results["runs"])
    said = " ".join(found.text().split())
    assert "OUT OF CONVERSATIONS: somebody had none left" in said and "After round 1, first: 0 s; round 1, " in said
    whole = run_bench.bench(tmp_path / "whole", load, two[-1])
    assert {run["ran_out_s"] for run in whole.results["runs"]} == {None} and "OUT OF" not in whole.text()


def test_results_are_whole(tmp_path: Path) -> None:
    run_bench.write(tmp_path / "a.json", {"a": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="JSON"):
        run_bench.write(tmp_path / "a.json", {"a": float("nan")})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_commands_measure_and_warm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, prompt = tmp_path / "out", tmp_path / "prompt.json"
    prompt.write_text("[1, 2, 3, 4]")
    small = Small()
    with serving(small) as url:
        options = ["--prefix-tokens", "40", "--texts", "5", "--rounds", "2", "--concurrency", "2", "--seed", "3"]
        with pytest.raises(SystemExit) as ended:
            main(["bench", "analytics", url, "--out", str(out), *options, "--arm", "a", "--arm", "hints"])
        assert ended.value.code == 0 and (out / "bench.html").exists()
        assert "requests_s hints / a" in capsys.readouterr().out
        with pytest.raises(SystemExit) as ended:
            main(["warm", url, "--prompt", str(prompt), "--keep-s", "30"])
        assert ended.value.code == 0 and "4 tokens, of which 0 were cached" in capsys.readouterr().out
        small.fault = dict.fromkeys(range(len(small.bodies), 1000), "status")
        with pytest.raises(SystemExit) as ended:
            main(["bench", "chat", url, "--out", str(tmp_path / "chat"), "--context-tokens", "200"])
        assert ended.value.code == 2 and "does not serve: HTTP 503: the pool is full" in capsys.readouterr().err


def test_a_figure_that_is_0_in_one_round_has_no_ratio() -> None:
    """The other rounds alone would say that the second arm has twice the goodput."""
    figures = {"ttft_s": {"mean": 1.0}, "e2e_per_token_s": {"mean": 0.5}}
    runs = [
        figures | {"cell": {"rate": 2.0}, "arm": arm, "round": number, "goodput_req_s": goodput}
        for arm, all_rounds in (("first", (1.0, 1.0, 1.0)), ("second", (2.0, 0.0, 2.0)))
        for number, goodput in enumerate(all_rounds)
    ]
    arms = [{"name": "first"}, {"name": "second"}]
    report = LoadReport({"kind": "rate", "arms": arms, "runs": runs}, "bench.json")
    assert [name for name, _ in report.ratios({"rate": 2.0})] == [
        "e2e_per_token_s.mean second / first",
        "ttft_s.mean second / first",
    ]


def test_requests_of_all_rounds_are_in_bins_by_prompt_length_that_all_arms_share() -> None:
    """Ten prompts of 1 to 10 tokens in two rounds; the second arm does not answer the longest one of the first."""

    def row(tokens: int, factor: float, error: str = "") -> dict[str, object]:
        seconds = {"ttft_s": None if error else factor * tokens, "e2e_s": 10 * factor * tokens}
        return {"prompt_tokens": tokens, "error": error, **seconds}

    runs = [
        {"cell": {"rate": 2.0}, "arm": arm, "round": number, "errors": {}, "rows": [
            row(tokens, factor, "HTTP 503" if (tokens, arm) == (9, "second") else "")
            for tokens in range(1 + number, 11, 2)
        ]}
        for arm, factor in (("first", 1.0), ("second", 2.0)) for number in (0, 1)
    ]  # fmt: skip
    report = LoadReport({"kind": "rate", "arms": [{"name": "first"}, {"name": "second"}], "runs": runs}, "bench.json")
    first, second = report.by_prompt_length({"rate": 2.0}).values()
    edges = [(one.min_tokens, one.max_tokens) for one in first]
    assert edges == [(one.min_tokens, one.max_tokens) for one in second]
    assert edges[0][0] == 1 and edges[-1][1] == 10 and len(edges) == 4
    assert (sum(one.requests for one in first), sum(one.requests for one in second)) == (10, 9)
    assert second[0].ttft_s.mean == 2 * first[0].ttft_s.mean and first[0].e2e_s.p50 == 10 * first[0].ttft_s.p50


@pytest.mark.parametrize(("gap", "ok"), [(None, False), (0.3, False), (1e-5, True)])
def test_tokens_that_differ_by_more_than_a_tie_are_the_first_thing_said_and_a_failure(
    gap: float | None, ok: bool
) -> None:
    arms = [{"name": "first"}, {"name": "second"}]
    different = [{"conversation": "a", "turn": 0, "token": 3, "gap": gap}]
    comparison = {"cell": {"rate": 2.0}, "round": 0, "tokens": {"second": {"tokens": 40, "different": different}}}
    results = {"kind": "analytics", "model": "m", "arms": arms, "runs": [], "comparisons": [comparison]}
    report = LoadReport(results, "bench.json")
    assert report.ok is ok and report.to_dict()["tokens"]["wrong"] == (not ok)
    said = report.text().startswith("TOKENS DIFFER: 1 conversations are not those of first")
    assert said is not ok


def test_an_address_that_no_server_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "rate", "ftp://x", "--out", str(tmp_path / "out")])
    assert ended.value.code == 2 and not (tmp_path / "out").exists()
    said = capsys.readouterr().err
    assert "error: URL|LLM is ftp://x: ftp:// is no server's, should be http:// or https://" in said


@pytest.mark.parametrize("kind", ["chat", "analytics", "rate"])
@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("localhost:9", "a server's address: did you mean http://localhost:9?"),
        ("127.0.0.1", "a server's address: did you mean http://127.0.0.1?"),
        ("gpu-3.local:8000/v1", "a server's address: did you mean http://gpu-3.local:8000/v1?"),
        ("/nowhere/model", "/nowhere/model: no such folder; should be a model's folder, or its id at a hub"),
    ],
)
def test_no_server_is_started_for_what_is_no_model(
    kind: str, target: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", kind, target, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and problem in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_names_of_models_are_no_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for llm in ("gpt2", "org/model", "org/model-GGUF:Q4_K_M", "org/model:4", "v1.5"):
        assert not BenchTarget(llm).is_url
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model:8").mkdir()
    assert not BenchTarget("model:8").is_url, "a folder that is there"


def test_a_wrong_value_in_a_list_is_shown_as_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rates, shown in (("-1",), "-1.0"), (("2", "-1"), "2.0, -1.0"):
        with pytest.raises(SystemExit):
            main(["bench", "rate", "http://x", "--out", str(tmp_path / "out"), *(f"--rate={rate}" for rate in rates)])
        assert f"--rate is {shown}, should be above 0 each" in capsys.readouterr().err


def test_a_bench_without_a_run_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless it was there before, or the output of a server is in it."""
    command = ["bench", "rate", "http://127.0.0.1:9", "--rate", "1"]
    (tmp_path / "before").mkdir()
    for name in ("made", "before"):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--out", str(tmp_path / name)])
        assert ended.value.code == 2 and "does not answer as an OpenAI server" in capsys.readouterr().err
    assert not (tmp_path / "made").exists() and (tmp_path / "before").is_dir()


@pytest.mark.parametrize("file", ["runs/round-000-arm-first.json", "logs/0-vllm.log"])
def test_a_bench_with_a_run_or_a_log_keeps_its_folder(file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def begin_and_fail() -> None:
        with run_bench.taken_up(out, {"kind": "rate"}):
            (out / file).parent.mkdir(exist_ok=True)
            (out / file).write_text("{}")
            raise InputError("the server ended")

    with pytest.raises(InputError, match="ended"):
        begin_and_fail()
    assert (out / file).exists() and (out / "plan.json").exists()


# ---- servers that are started anew ----


class Started:
    """In place of a server's process: a small server in a thread, with the port that the one before it for the same arm
    had."""

    said: ClassVar[list[str]] = []
    """What was started and ended, in order."""
    alive: ClassVar[list[Started]] = []
    alone: ClassVar[list[str]] = []
    """Servers that were asked for something while there was no other one."""
    ports: ClassVar[dict[str, int]] = {}
    bound: ClassVar[Mapping[str, list[str]]] = {}
    """Cores of threads, by a server's name, where they are not those of the machine."""
    busy: ClassVar[str] = ""
    """The server that always computes, by name."""
    gap: ClassVar[float] = 0.0
    """Where it is not 0, servers with the plugin give another last token, so far behind the best one."""

    def __init__(self, command: Sequence[str], log: Path, say: Callable[[str], None]) -> None:
        assert not log.exists(), "the output of an earlier server of this call is kept"
        self._log, self._name, self._stack = log, log.stem.partition("-")[2], ExitStack()
        self.small = Small(wrong=bool(self.gap) and self._name != "vllm", gap=self.gap)

    def __enter__(self) -> Started:
        self._log.parent.mkdir(exist_ok=True)
        self._log.touch()
        self.url = self._stack.enter_context(serving(self.small, self.ports.get(self._name, 0)))
        self.ports[self._name] = int(self.url.rpartition(":")[2])
        self.said.append(self._name)
        self.alive.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.said.append(f"end {self._name}")
        self.alive.remove(self)
        warmed = [body for body in self.small.bodies if body.get("cache_salt") == "warm-up"]
        assert len(warmed) == (WARM_UP if self.small.bodies else 0), "each process by itself"

    @property
    def cpu_s(self) -> float:
        return time.monotonic() if self._name == self.busy else 1.0

    @property
    def cores(self) -> list[str]:
        return self.bound.get(self._name, ["0-1"])

    def refuse_ended(self) -> None:
        assert self in self.alive
        if self.small.bodies and len(self.alive) < 2:
            self.alone.append(self._name)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> BenchTarget:
    """A model, for which servers are started anew after every two rounds; three arms have two of them."""
    monkeypatch.setattr(live_arms, "LiveServer", Started)
    monkeypatch.setattr(idle_servers, "INTERVAL_S", 0.001)
    monkeypatch.setattr(launch, "require", lambda name: None)
    for seen in (Started.said, Started.alive, Started.alone, Started.ports):
        seen.clear()
    settings = ServerSettings("always-swap", cache="lru")
    return BenchTarget("some/llm", ("vllm", "kvpolicy", "hints"), settings, rounds_per_start=2)


FIVE = replace(ANALYTICS, prefix_tokens=(40, 80), rounds=5, price_ratio=False)
ENDED = ["end kvpolicy", "end vllm"]


def test_all_servers_are_ended_and_started_anew_in_the_other_order(ours: BenchTarget, tmp_path: Path) -> None:
    found = run_bench.bench(tmp_path, FIVE, ours)
    every_other = ["kvpolicy", "vllm", *reversed(ENDED)]
    assert Started.said == ["vllm", "kvpolicy", *ENDED, *every_other, "vllm", "kvpolicy", *ENDED]
    assert not Started.alone, "no run is made while a server is not there"
    assert {(run["round"], run["start"]) for run in found.results["runs"]} == {(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)}
    assert found.ok and found.results["rounds_per_start"] == 2 and found.to_dict()["starts"] == 3
    text = " ".join(found.text().split())
    assert "analytics, small, 3 starts of the servers" in text and "intervals of ratios over 3 starts" in text
    report([tmp_path], tmp_path / "page.html")
    assert "brackets 95% intervals over 3 starts of the servers" in " ".join(
        (tmp_path / "page.html").read_text().split()
    )


def test_a_run_waits_for_what_the_last_one_left_to_any_server(
    ours: BenchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And begins all the same where one never stands still, which is said."""
    load = replace(FIVE, prefix_tokens=(40,), rounds=1)
    still = run_bench.bench(tmp_path / "still", load, ours)
    assert {run["busy_cores_before"] for run in still.results["runs"]} == {0.0}
    assert "begins while" not in capsys.readouterr().err
    monkeypatch.setattr(idle_servers, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(Started, "busy", "kvpolicy")
    found = run_bench.bench(tmp_path / "busy", load, ours)
    assert all(run["busy_cores_before"] > idle_servers.STILL_CORES for run in found.results["runs"]), "of all arms"
    assert "prefix tokens 40, round 1, vllm: begins while a server takes" in capsys.readouterr().err
    with serving(Small()) as url:
        there = run_bench.bench(tmp_path / "there", load, BenchTarget(url))
    assert [run["busy_cores_before"] for run in there.results["runs"]] == [None], "nobody knows of one that ran already"


def test_servers_on_other_cores_are_the_first_thing_that_is_said(
    ours: BenchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what the flags ask for, and is no error."""
    load = replace(FIVE, prefix_tokens=(40,), rounds=2)
    same = run_bench.bench(tmp_path / "same", load, ours)
    assert all(run["cores"] == ["0-1"] for run in same.results["runs"])
    assert "CORES" not in same.text() and same.to_dict()["unequal_cores"] == {}
    monkeypatch.setattr(Started, "bound", {"vllm": ["0", "0-1"]})
    found = run_bench.bench(tmp_path / "other", load, ours)
    assert found.text().startswith("UNEQUAL CORES: ratios compare these as well.")
    for arm, cores in (("vllm", ["0", "0-1"]), ("kvpolicy", ["0-1"]), ("hints", ["0-1"])):
        assert f"{arm}: {', '.join(cores)}" in found.text() and found.to_dict()["unequal_cores"][arm] == cores
    assert found.ok


def test_a_tie_is_one_by_what_servers_compute_in(
    ours: BenchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two best log-probabilities are 0.125 apart here, one step between logits of some twenty in bfloat16."""
    monkeypatch.setattr(Started, "gap", 0.125)
    load = replace(FIVE, prefix_tokens=(40,), rounds=1)
    for dtype, wrong in (("bfloat16", 0), ("half", 20), ("auto", 20)):
        found = run_bench.bench(tmp_path / dtype, load, replace(ours, vllm_flags=("--dtype", dtype)))
        assert found.compared()[1:] == (20, 0.125) and (found.wrong(), found.ok) == (wrong, not wrong)
        assert ("taken to be float32" in found.text()) == (dtype == "auto"), "of a model at a hub nobody knows it"


def test_one_start_serves_all_rounds_where_nobody_said_otherwise(ours: BenchTarget, tmp_path: Path) -> None:
    found = run_bench.bench(tmp_path, FIVE, replace(ours, rounds_per_start=None))
    assert Started.said == ["vllm", "kvpolicy", *ENDED]
    assert {run["start"] for run in found.results["runs"]} == {0} and found.starts == 1
    assert "intervals of ratios over rounds of one process each" in found.text()


def test_a_resumed_start_keeps_its_number_and_starts_nothing_for_those_that_are_done(
    ours: BenchTarget, tmp_path: Path
) -> None:
    expected = run_bench.bench(tmp_path, FIVE, ours)
    Started.said.clear()
    assert run_bench.bench(tmp_path, FIVE, ours).results == expected.results and not Started.said
    (tmp_path / "runs" / "round-003-prefix_tokens-80-arm-vllm.json").unlink()
    shutil.rmtree(tmp_path / "logs")
    found = run_bench.bench(tmp_path, FIVE, ours)
    assert Started.said == ["kvpolicy", "vllm", *reversed(ENDED)]
    (again,) = [run for run in found.results["runs"] if run not in expected.results["runs"]]
    assert (again["arm"], again["round"], again["start"]) == ("vllm", 3, 1)


@pytest.mark.parametrize("other", [None, 1, 3])
def test_a_bench_is_not_resumed_with_another_number_of_rounds_per_start(
    other: int | None, ours: BenchTarget, tmp_path: Path
) -> None:
    load = replace(FIVE, prefix_tokens=(40,), rounds=2)
    run_bench.bench(tmp_path, load, ours)
    with pytest.raises(InputError, match=r"has a bench with other settings \(rounds_per_start\): give --out another"):
        run_bench.bench(tmp_path, load, replace(ours, rounds_per_start=other))


def test_a_bench_of_before_servers_were_started_anew_is_resumed_as_one_start(ours: BenchTarget, tmp_path: Path) -> None:
    at = replace(ours, rounds_per_start=None)
    expected = run_bench.bench(tmp_path, FIVE, at)
    for path in (tmp_path / "plan.json", *(tmp_path / "runs").glob("*-arm-*.json")):
        earlier = {
            name: value for name, value in read_sealed(path).items() if name not in ("start", "rounds_per_start")
        }
        path.write_text(json.dumps(sealed(earlier)))
    shutil.rmtree(tmp_path / "logs")
    (tmp_path / "runs" / "round-004-prefix_tokens-80-arm-vllm.json").unlink()
    found = run_bench.bench(tmp_path, FIVE, at)
    assert found.starts == 1 and len(found.results["runs"]) == len(expected.results["runs"])
    assert "over rounds of one process each" in found.text()


def test_a_start_counts_once_however_many_rounds_it_has() -> None:
    """Over four starts of two rounds the ratio is 1.5 or 1 / 1.5: by rounds, these would be eight and not four."""
    factors = [1.5, 1.5, 1 / 1.5, 1 / 1.5] * 2
    runs = [
        {"cell": {"prefix_tokens": 40}, "arm": arm, "round": number, "start": number // 2, "cpu_s": 10 * seconds,
         "requests_s": 1 / seconds, "e2e_s": {"mean": seconds}}
        for number, factor in enumerate(factors)
        for arm, seconds in (("one", 1.0 + number), ("two", (1.0 + number) * factor))
    ]  # fmt: skip
    results = {"kind": "analytics", "arms": [{"name": "one"}, {"name": "two"}], "runs": runs}
    found = LoadReport(results, "bench.json")
    ratios = dict(found.ratios({"prefix_tokens": 40}))
    expected = student_ratio([1.5, 1 / 1.5] * 2, [1.0] * 4)
    assert found.starts == 4
    for figure in ("cpu_s", "e2e_s.mean"):
        assert ratios[f"{figure} two / one"].to_dict() == pytest.approx(expected.to_dict())
    by_round = LoadReport(results | {"runs": [run | {"start": 0} for run in runs]}, "bench.json")
    narrow = dict(by_round.ratios({"prefix_tokens": 40}))["cpu_s two / one"]
    assert narrow.pairs == 8 and narrow.to_dict() == pytest.approx(student_ratio(factors, [1.0] * 8).to_dict())


def test_servers_that_run_already_have_no_start(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    found = run_bench.bench(tmp_path, replace(ANALYTICS, prefix_tokens=(40,)), two[-1])
    assert not any("start" in run for run in found.results["runs"]) and found.starts == 1
    assert "over rounds of one process each" in found.text()


@pytest.mark.parametrize("kind", ["chat", "analytics", "rate"])
@pytest.mark.parametrize(
    ("target", "given", "problem"),
    [
        ("some/llm", "0", "--rounds-per-start is 0, should be 1 or more"),
        ("some/llm", "-2", "--rounds-per-start is -2, should be 1 or more"),
        ("http://x", "2", "--rounds-per-start is of servers to be started; http://x runs already, and is not ended"),
    ],
)
def test_rounds_per_start_that_cannot_be_are_refused_by_the_flag(
    kind: str, target: str, given: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", kind, target, "--out", str(tmp_path / "out"), "--rounds-per-start", given])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and problem in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_rounds_per_start_are_a_whole_number() -> None:
    with pytest.raises(WrongValue, match=r"rounds_per_start is 1\.5, should be a whole number"):
        BenchTarget("some/llm", rounds_per_start=1.5)  # type: ignore[arg-type]
