"""The bench over HTTP: arms in alternation, results that are resumed, tokens that are compared, errors that count."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.errors import EngineFailed, InputError
from kvpolicy.fields import WrongValue
from kvpolicy.reporting.pipeline import report
from kvpolicy.settings import AnalyticsLoad, BenchTarget, ChatLoad, ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench import live_server, run_bench
from kvpolicy_vllm.bench.live_arms import arms_of
from kvpolicy_vllm.bench.live_server import LiveServer
from kvpolicy_vllm.bench.load_results import differences
from tests.bench.live_http import Small, serving

CHAT = ChatLoad(
    chatters=(2,), prefixed=(0.0, 0.5), prefix_tokens=32, conversations=6, turns=2.0, think_s=0.0, rounds=2, context=300
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
        assert plain["arms"][name]["hit_rate"] < shared["arms"][name]["hit_rate"] < 1
    assert "messages_s second / first" in shared["ratios"]
    tokens, different, _ = found.compared()
    assert tokens > 100 and different == 0
    said = [body for body in other.bodies if "kv_transfer_params" in body]
    assert 2 * len(said) == len([body for body in other.bodies if body["cache_salt"] != "warm-up"])
    assert not [body for body in one.bodies if "kv_transfer_params" in body]
    assert "hit rate" in found.text() and "0 conversations differ" in found.text()


def test_no_two_runs_share_a_cached_prefix(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    _, other, at = two
    run_bench.bench(tmp_path, ANALYTICS, at)
    salts = {body["cache_salt"] for body in other.bodies} - {"warm-up"}
    assert len(salts) == 2 * 2 * 2, "by arm, cell and round"


def test_an_analysis_finds_its_prefix(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    found = run_bench.bench(tmp_path, ANALYTICS, two[-1])
    assert [dict(cell) for cell in found.cells()] == [{"prefix_tokens": 40}, {"prefix_tokens": 80}]
    short, long = (cell["arms"]["first"] for cell in found.to_dict()["cells"])
    assert 0.4 < short["hit_rate"] < long["hit_rate"] < 0.9
    for run in found.results["runs"]:
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


def test_a_folder_with_another_bench_is_refused(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    at = two[-1]
    run_bench.take_up(tmp_path, {"kind": "chat", "load": {"rounds": 1}})
    with pytest.raises(InputError, match=r"has a bench with other settings \(.*kind.*load.*\): give --out another"):
        run_bench.bench(tmp_path, ANALYTICS, at)


def test_errors_are_counted_by_name_and_arm(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    one, _, at = two
    one.fault = {WARM_UP + 4: "status", WARM_UP + 6: "no end"}
    found = run_bench.bench(tmp_path, ANALYTICS, at)
    assert found.errors() == {"first: HTTP 503: the pool is full": 1, "first: the stream broke off": 1}
    assert not found.ok and "errors: 1 x first: HTTP 503: the pool is full" in found.text()


def test_tokens_that_differ_are_counted_with_how_close_it_was(
    two: tuple[Small, Small, BenchTarget], tmp_path: Path
) -> None:
    one, other, at = two
    other.wrong = True
    found = run_bench.bench(tmp_path, CHAT, at)
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


def test_of_a_conversation_the_first_difference_counts() -> None:
    def row(turn: int, *tokens: int, error: str = "", name: str = "a") -> dict[str, Any]:
        return {"conversation": name, "turn": turn, "token_ids": tokens, "error": error}

    one = [row(1, 4, 5), row(0, 1, 2), row(2, 6), row(0, 7, name="b"), row(1, 8, name="b")]
    other = [row(0, 1, 2), row(1, 4, 9), row(2, 7), row(0, 7, name="b", error="HTTP 500"), row(1, 9, name="b")]
    assert differences(one, other) == {"tokens": 4, "different": [{"conversation": "a", "turn": 1, "token": 1}]}


def test_a_page_shows_the_bench(two: tuple[Small, Small, BenchTarget], tmp_path: Path) -> None:
    run_bench.bench(tmp_path, CHAT, two[-1])
    report([tmp_path], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<svg") == 5 and "hit rate over the run, 2 people" in text and "http://127.0.0.1" in text
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(InputError, match=r"bench.json: is not what `kvpolicy bench` writes"):
        report([tmp_path], tmp_path / "page.html")
    with pytest.raises(InputError, match="a page shows one bench"):
        report([tmp_path, tmp_path], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("arms", "flags", "problem"),
    [
        (("a=1",), (), "should be NAME or NAME=JSON"),
        (("a={",), (), "should be NAME or NAME=JSON"),
        (("a/b",), (), "a name of letters, digits"),
        (("a", "a"), (), "twice by the same name"),
        (('a={"hints": 1}',), (), '"hints" should be true or false'),
        (('vllm={"order": "mlfq"}',), (), "takes no settings"),
        (('a={"ordre": "mlfq"}',), (), "unknown key 'ordre'"),
        ((), ("--port", "1"), "--port cannot be given"),
    ],
)
def test_an_arm_that_cannot_be_read_is_named(
    arms: tuple[str, ...], flags: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "require", lambda name: None)
    with pytest.raises(InputError, match=problem):
        arms_of(BenchTarget("some/llm", arms, vllm_flags=flags))


def test_arms_of_a_model_are_commands_and_of_a_url_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "require", lambda name: None)
    settings = ServerSettings("always-swap", host_gib=2.0, order="mlfq")
    arms = arms_of(BenchTarget("llm", ("vllm", "kvpolicy", 'las={"order": "las"}', "hints"), settings, ("--seed", "3")))
    stock, plugin, las, hints = arms
    assert "--kv-transfer-config" not in stock.command and stock.command[-2:] == ("--seed", "3")
    assert '"order": "mlfq"' in plugin.command[-3] and '"host_gib": 2.0' in plugin.command[-3]
    assert '"order": "las"' in las.command[-3] and '"host_gib": 2.0' in las.command[-3]
    assert hints.command == plugin.command and hints.hints and not plugin.hints
    assert [arm.name for arm in arms_of(BenchTarget("llm"))] == ["vllm", "kvpolicy"]
    (alone,) = arms_of(BenchTarget("http://there:8000"))
    assert alone.url == "http://there:8000" and not alone.command
    with pytest.raises(WrongValue, match='JSON has "url" and "hints" alone'):
        arms_of(BenchTarget("http://there:8000", ('a={"order": "mlfq"}',)))
    with pytest.raises(InputError, match="runs already"):
        arms_of(BenchTarget("http://there:8000", vllm_flags=("--seed", "3")))


def test_a_server_that_ends_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/bin/sh", "-c", "echo no such model; exit 3", "--"]
    with (
        pytest.raises(EngineFailed, match=r"(?s)ended with 3 before it answered.*no such model"),
        LiveServer(command, tmp_path / "log"),
    ):
        pass


def test_a_server_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "_answers", lambda url: (tmp_path / "up").exists())
    command = ["/bin/sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; touch {tmp_path}/up; wait", "--"]
    with LiveServer(command, tmp_path / "log") as server:
        pid = int((tmp_path / "pid").read_text())
        server.refuse_ended()
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(600):  # a killed process takes a moment
        if not stat.exists() or stat.read_text().split(")")[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} outlived the server")


def test_results_are_whole(tmp_path: Path) -> None:
    run_bench.write(tmp_path / "a.json", {"a": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="JSON"):
        run_bench.write(tmp_path / "a.json", {"a": float("nan")})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
