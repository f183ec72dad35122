"""A real server with the plugin on: concurrent clients under memory pressure, metrics over HTTP, an unkind end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from benchmarks.gpu.alternating import ALTERNATING
from kvpolicy import trace
from kvpolicy.cli.screen import DECISIONS
from kvpolicy.settings import ServerSettings
from kvpolicy.simulator.trace_workload import RecordedRequests
from tests.policy.ten_line_policy import Longer
from tests.snippets import posted
from tests.vllm import harness
from tests.vllm.test_own_policy import OWN

PATIENCE_S = 600.0
"""Whatever is waited for comes much sooner, except on a machine that is busy with something else."""
ROUNDS = 8
"""Of clients. The first presses an engine for memory; where the machine is too busy to bring them all at once, a later
one does."""
BEFORE_EPHEMERAL = range(20000, 32000)
"""Ports that no connection is given by chance."""
DISPLACES = {("chat", "batch"), ("chat", "default"), ("batch", "default")}
"""Under the order classes:chat+batch: whose request displaces whose."""
BATCH = 12
"""Batch requests that are served beside urgent ones, half of them by each engine core."""
WORDS = ("block", "page", "cache", "step", "batch", "queue", "token", "prompt", "decode", "evict", "swap", "host")


def free_port() -> int:
    for port in random.SystemRandom().sample(BEFORE_EPHEMERAL, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@contextmanager
def server(
    model: str, folder: Path, *arguments: str, workers: int = 1, checked: bool = False
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`kvpolicy serve`, up and answering; ended by its own process id. ``checked``: whether it checks its flags
    before."""
    port = free_port()
    before = () if checked else ("--no-check",)
    command = [sys.executable, "-m", "kvpolicy.cli", "serve", model, *before, *arguments, *vllm_flags(port)]
    with started(command, port, folder, harness.environment(workers, multiprocess=True)) as running:
        yield running


@contextmanager
def started(
    command: list[str], port: int, folder: Path, environment: dict[str, str], working: Path = harness.ROOT
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server's command, run in the folder ``working``: as :func:`server`. Its log is in ``folder``."""
    log = folder / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment | {"VLLM_LOGGING_LEVEL": "INFO"}, cwd=working, stdout=sink, stderr=sink,
            start_new_session=True,
        )  # fmt: skip
    try:
        base = f"http://127.0.0.1:{port}"
        wait_for(base, process, log)
        yield base, process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):  # whoever of its processes outlived it
            os.killpg(process.pid, signal.SIGKILL)


def vllm_flags(port: int, dtype: str = "float32") -> list[str]:
    """Of a small server on this machine."""
    return [
        "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enforce-eager", "--block-size", "32",
        "--max-model-len", "1024", "--served-model-name", "small", "--num-gpu-blocks-override", "48",
    ]  # fmt: skip


def wait_for(base: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=30):
                return True
        except (urllib.error.URLError, OSError):
            return False

    wait_until(answers, lambda: f"the server does not answer:\n{log.read_text()[-4000:]}")


def wait_until(true: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    patience = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < patience, otherwise()
        time.sleep(0.2)


def complete(
    base: str, seed: int, tokens: tuple[int, int] = (60, 120), rank: int | None = None, **more: object
) -> dict[str, Any]:
    """Ask for so many tokens, of the data-parallel engine core ``rank`` where that is given. ``more``: of the body."""
    rng = random.Random(seed)
    body = {
        "model": "small",
        "prompt": " ".join(rng.choice(WORDS) for _ in range(rng.randint(20, 60))),
        "max_tokens": rng.randint(*tokens),
        "temperature": 0.0,
        "ignore_eos": True,
        **more,
    }
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    return post(f"{base}/v1/completions", body, **headers) | {"wanted": body["max_tokens"]}


def post(url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    sent = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"} | headers)
    with urllib.request.urlopen(sent, timeout=PATIENCE_S) as answer:
        return dict(json.loads(answer.read()))


def all_answered(base: str, clients: int, number: int, cores: int = 1) -> list[str]:
    """Round ``number`` of so many clients at once, spread evenly over engine cores; returns what each was told."""
    ranks = [None if cores == 1 else client % cores for client in range(clients)]
    return texts_of(base, range(number * clients, (number + 1) * clients), ranks, clients)


def texts_of(base: str, seeds: Sequence[int], ranks: Sequence[int | None], at_once: int) -> list[str]:
    """The texts of answers that are as long as they should be, ``at_once`` at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda seed, rank: complete(base, seed, rank=rank), seeds, ranks))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [answer["wanted"] for answer in answers]
    return [str(answer["choices"][0]["text"]) for answer in answers]


def pressed(base: str) -> set[str]:
    """Engine cores that have preempted somebody."""
    return {core for core, count in by_core(base, "preemptions_total").items() if count}


def by_core(base: str, name: str, label: str = "") -> dict[str, float]:
    """One of our metrics by engine core, summed over its other labels, or with one of them, as ``name="value"``."""
    result: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"{base}/metrics", timeout=PATIENCE_S) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"vllm:kvpolicy_{name}{{") and label in line:
                result[line.split('engine="')[1].split('"')[0]] += float(line.rsplit(" ", 1)[1])
    return result


def loading(base: str) -> set[str]:
    """Engine cores that have loaded somebody's tokens."""
    return {core for core, count in by_core(base, "loaded_tokens_total").items() if count}


def by_label(base: str, name: str) -> dict[str, float]:
    """One of our metrics by each of its own labels, as ``name="value"``."""
    result: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"{base}/metrics", timeout=PATIENCE_S) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"vllm:kvpolicy_{name}{{"):
                labels, value = line.split("{")[1].rsplit("} ", 1)
                for label in labels.split(","):
                    result[label] += float(value)
    return result


def metrics(base: str) -> dict[str, float]:
    """Our metrics, summed over labels; 0 for one that is not there yet."""
    result: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"{base}/metrics", timeout=PATIENCE_S) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("vllm:kvpolicy_"):
                name = line.split("{")[0].split(" ")[0].removeprefix("vllm:kvpolicy_")
                result[name] += float(line.rsplit(" ", 1)[1])
    return result


def test_thirty_two_clients_then_killed(model: str, tmp_path: Path) -> None:
    """Everybody gets all tokens, /metrics tells what happened, and after SIGKILL the trace can be read."""
    folder = tmp_path / "trace"
    options = ("--policy", ALTERNATING, "--allow-python-policies", "--host-gib", "0.25", "--trace", str(folder))
    with server(model, tmp_path, *options) as (base, process):
        for number in range(ROUNDS):
            all_answered(base, 32, number)
            wait_until(lambda: settled(metrics(base)), lambda: f"what is told does not settle: {metrics(base)}")
            if metrics(base)["loaded_tokens_total"] and metrics(base)["recomputed_tokens_total"]:
                break
        result = metrics(base)
        assert result["resumed_total"] == result["preemptions_total"] >= 2
        assert result["copy_bytes_total"] > 0 and result["copy_microseconds_total"] > 0
        assert result["loaded_tokens_total"] > 0 and result["recomputed_tokens_total"] > 0
        assert result["host_slots_used"] == 0 and result["host_slots_total"] > 0
        assert result["open_preemptions"] == 0
        assert result["cost_model"] == 1
        wait_until(lambda: is_recorded(folder, result), lambda: "what came about is not written while the server runs")
        assert_watched(base, folder, result)
        with ThreadPoolExecutor(32) as pool:
            cut_off = [pool.submit(complete, base, 1000 + client, (500, 600)) for client in range(32)]
            again = "nobody is preempted again"
            wait_until(lambda: metrics(base)["preemptions_total"] > result["preemptions_total"], lambda: again)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=PATIENCE_S)
        assert any(future.exception() is not None for future in cut_off)
    assert is_recorded(folder, result)


def assert_watched(base: str, folder: Path, told: dict[str, float]) -> None:
    """`kvpolicy watch` shows what this server said and recorded."""
    command = [sys.executable, "-m", "kvpolicy.cli", "watch", base, "--trace", str(folder), "--once"]
    environment = {**os.environ, "COLUMNS": "400"}  # no line is broken
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, cwd=harness.ROOT
    ).stdout
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
    named = {row[0]: row[1:] for row in rows if len(row) == 2}
    assert named["host blocks in use"] == [f"0 of {told['host_slots_total']:g}"] and "%" in named["KV memory in use"][0]
    assert named["preemptions, as vLLM counts"] == [f"{told['preemptions_total']:g}"]
    assert named["in force"][0].startswith("policy alternating") and named["requests waiting"] == ["0"]
    choices = [row for row in rows if len(row) == 4 and row[3].endswith("with prices")]
    assert sum(float(row[2]) for row in choices) == told["preemptions_total"]
    needs = "cannot tell: .* of the decoded tokens were computed again; .* the bound needs a cost model with step times"
    assert re.search(f"^A better choice between recompute and swap: {needs}", shown, re.MULTILINE)
    decided = [row for row in rows if len(row) == 7 and row[2] in ("recompute", "swap")]
    assert len(decided) == min(DECISIONS, told["preemptions_total"])


def test_requests_say_what_they_are(model: str, tmp_path: Path) -> None:
    """Over HTTP, well-meant or not: everybody is served, by what was granted, and the trace has that and no more."""
    folder = tmp_path / "trace"
    options = (
        "--policy", "always-swap", "--host-gib", "0.25", "--trace", str(folder), "--order", "deadline:ttft=5,tpot=1",
        "--classes", "chat:ttft=0.5,priority=-1+batch:priority=3",
    )  # fmt: skip
    said: list[object] = [{"class": "chat"}, {"class": "batch", "ttft_s": 0.001}, {"class": "Jane Doe"}, {}]
    unreadable = [{"class": {"class": []}}, {"ttft_s": True}, "x" * 10**6, {"class": "chat", "more": 1}]
    with server(model, tmp_path, *options) as (base, process):

        def ask(number: int) -> dict[str, object]:
            sent = {"kvpolicy": [*said, *unreadable][number]}
            return complete(base, number, (20, 40), kv_transfer_params=sent, priority=-1000 if number == 2 else 0)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
        assert all(answer["kv_transfer_params"] is None for answer in answers), "nothing is sent back"
        wait_until(lambda: metrics(base)["invalid_marks_total"] >= 4, lambda: f"not counted: {metrics(base)}")
        assert metrics(base)["invalid_marks_total"] == 4 and metrics(base)["order_failed_total"] == 0
        assert metrics(base)["clamped_marks_total"] == 3, "a deadline, a class and a priority"
        process.terminate()
        process.wait(timeout=PATIENCE_S)
    columns = ("class", "priority", "ttft_deadline_s", "tpot_deadline_s")
    rows = sorted(tuple(str(row[name]) for name in columns) for row in trace.read(folder).rows("requests"))
    default = ("default", "0", "None", "None")
    assert rows == sorted([("chat", "-1", "0.5", "None"), ("batch", "3", "None", "None"), *[default] * 6])
    again = {(request.class_name, request.priority, request.ttft_s) for request in RecordedRequests(folder)}
    assert again == {("chat", -1, 0.5), ("batch", 3, None), ("default", 0, None)}


def settled(told: dict[str, float]) -> bool:
    """Whether the engine core's last report has reached the API process."""
    return told["resumed_total"] == told["preemptions_total"] and not told["host_slots_used"] + told["open_preemptions"]


def is_recorded(folder: Path, told: dict[str, float]) -> bool:
    """Whether the trace has all that happened up to when ``told`` was told."""
    recorded = trace.read(folder)
    decisions, requests = (recorded.table(name).num_rows for name in ("decisions", "requests"))
    return decisions >= told["preemptions_total"] and requests >= 32


def test_terminated_right_after_the_last_answer(model: str, tmp_path: Path) -> None:
    """Every request that was answered is in the trace: vLLM by itself would kill the engine before it is written."""
    folder = tmp_path / "trace"
    options = ("--policy", ALTERNATING, "--allow-python-policies", "--host-gib", "0.25", "--trace", str(folder))
    with server(model, tmp_path, *options) as (base, process):
        with ThreadPoolExecutor(16) as pool:  # long answers: however slowly they come, some are served together
            answers = list(pool.map(lambda seed: complete(base, seed, (200, 300)), range(16)))
        process.terminate()
        process.wait(timeout=PATIENCE_S)
    recorded = trace.read(folder)
    rows = recorded.rows("requests")
    assert sorted(row["output_tokens"] for row in rows) == sorted(answer["wanted"] for answer in answers)
    assert sum(row["preemptions"] for row in rows) == recorded.table("decisions").num_rows > 0
    assert recorded.table("outcomes").num_rows == recorded.table("decisions").num_rows


@pytest.mark.filterwarnings("ignore:never tested with an engine")  # where an older vLLM is installed
def test_started_from_python(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvpolicy.serve` with a policy of one's own: it is checked and answers, also what the documents send it, decides
    by that policy, and ends when it is told to."""
    port, log = free_port(), tmp_path / "none"
    for name, value in harness.environment(1, multiprocess=True).items():
        monkeypatch.setenv(name, value)
    log.write_text("its output is that of the tests")
    settings = ServerSettings(OWN, host_gib=0.25, trace=tmp_path / "trace", allow_python_policies=True, cache="lru")
    process = kvpolicy.serve(model, settings, vllm_flags(port))
    try:
        base = f"http://127.0.0.1:{port}"
        wait_for(base, process, log)
        assert complete(base, 0, (5, 5))["wanted"] == 5
        answers = [post(base + path, body | {"model": "small"}) for path, body in posted("docs/requests.md")]
        assert len(answers) == 4 and all(answer["usage"]["completion_tokens"] > 0 for answer in answers)
        assert not metrics(base)["invalid_marks_total"] + metrics(base)["hints_failed_total"]
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)
    (header,) = trace.read(tmp_path / "trace").headers.values()
    assert header.policy == Longer().label


@pytest.mark.feature("data parallelism")
def test_two_data_parallel_cores(model: str, tmp_path: Path) -> None:
    """Each engine core has its own host pool, decides for itself, saves and loads for itself, and records into a
    sub-folder of its own; everybody is told what one core says with memory enough. The check before does not wait for
    the cores."""
    folder = tmp_path / "trace"
    options = ("--policy", "always-swap", "--host-gib", "0.25", "--trace", str(folder), "--data-parallel-size", "2")
    with server(model, tmp_path, *options, workers=2, checked=True) as (base, _):
        assert "could not be looked at beforehand" not in (tmp_path / "server.log").read_text()
        alone = texts_of(base, range(64), [0] * 64, at_once=2)
        assert not pressed(base)
        for _ in range(ROUNDS):
            assert all_answered(base, 64, 0, cores=2) == alone
            wait_until(lambda: settled(metrics(base)), lambda: f"what is told does not settle: {metrics(base)}")
            if len(loading(base)) == 2:
                break
        assert metrics(base)["cost_model"] == 2
        for direction in ("save", "load"):
            copied = by_core(base, "copy_bytes_total", f'direction="{direction}"')
            assert len(copied) == 2 and min(copied.values()) > 0, copied
        swaps = by_core(base, "preemptions_total", 'executed="swap"')
        assert len(swaps) == 2 and min(swaps.values()) > 0 and len(loading(base)) == 2, swaps
    recorded = trace.read(folder)
    assert len(recorded.headers) == 2
    assert set(recorded.table("decisions")["core"].to_pylist()) == set(recorded.headers)


@pytest.mark.feature("data parallelism")
@pytest.mark.feature("orders of service")
def test_marks_and_an_order_reach_both_cores(model: str, tmp_path: Path) -> None:
    """Each core ranks its own requests by what was granted, displaces among them alone, and counts for itself."""
    folder, order = tmp_path / "trace", "classes:chat+batch"
    options = (
        "--policy", "always-swap", "--host-gib", "0.25", "--trace", str(folder), "--data-parallel-size", "2",
        "--order", order, "--classes", "chat:ttft=0.5+batch",
    )  # fmt: skip
    with server(model, tmp_path, *options, workers=2) as (base, process):

        def ask(seed: int, class_name: str, tokens: tuple[int, int]) -> dict[str, object]:
            marks = {"kvpolicy": {"class": class_name}}
            return complete(base, seed, tokens, rank=seed % 2, kv_transfer_params=marks)

        seen_on_both = threading.Event()

        def keep_asking(first: int) -> None:
            """One batch request after the other, so that there is a batch to displace however late a chat comes."""
            for seed in range(first, first + 100 * BATCH, BATCH):
                ask(seed, "batch", (600, 700))
                if seen_on_both.is_set():
                    break

        with ThreadPoolExecutor(24) as pool:
            batch = [pool.submit(keep_asking, first) for first in range(BATCH)]
            batch += [pool.submit(ask, seed, "nobody's", (600, 700)) for seed in (12, 13)]
            try:
                for number in range(4 * ROUNDS):  # at once, so that together they take the blocks of somebody
                    seeds = range(5000 + 8 * number, 5008 + 8 * number)
                    list(pool.map(lambda seed: ask(seed, "chat", (60, 80)), seeds))
                    if len([core for core, count in by_core(base, "displaced_total").items() if count]) == 2:
                        break
            finally:
                seen_on_both.set()
            for one in batch:
                one.result()
        wait_until(lambda: settled(metrics(base)), lambda: f"the metrics do not settle: {metrics(base)}")
        displaced, clamped = by_core(base, "displaced_total"), by_core(base, "clamped_marks_total")
        process.terminate()
        process.wait(timeout=PATIENCE_S)
    recorded = trace.read(folder)
    assert len(displaced) == 2 and min(displaced.values()) > 0, displaced
    assert clamped == {"0": 1, "1": 1}, "a class that nobody listed, of each core"
    assert [header.order for header in recorded.headers.values()] == [order, order]
    class_of = {(row["core"], row["request"]): row["class"] for row in recorded.rows("requests")}
    taken = Counter[str]()
    for row in recorded.rows("displacements"):
        for victim in row["candidates"][: row["taken"]]:
            taken[row["core"]] += 1
            assert (class_of[row["core"], row["request"]], class_of[row["core"], victim["request"]]) in DISPLACES
    assert sorted(taken.values()) == sorted(displaced.values())
    for core in recorded.headers:
        assert Counter(name for at, name in class_of.items() if at[0] == core)["batch"] >= BATCH / 2
        assert {"chat", "default"} <= {name for at, name in class_of.items() if at[0] == core}
