"""A real server with the plugin on: concurrent clients under memory pressure, metrics over HTTP, an unkind end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kvpolicy import trace
from tests.vllm import harness

WORDS = ("block", "page", "cache", "step", "batch", "queue", "token", "prompt", "decode", "evict", "swap", "host")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(
    model: str, folder: Path, *arguments: str, workers: int = 1
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`kvpolicy serve`, up and answering; ended by its own process id."""
    port, log = free_port(), folder / "server.log"
    command = [
        sys.executable, "-m", "kvpolicy.cli", "serve", model, *arguments,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--block-size", "32",
        "--max-model-len", "1024", "--served-model-name", "small", "--num-gpu-blocks-override", "48",
    ]  # fmt: skip
    environment = harness.environment(workers, multiprocess=True) | {"VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment, cwd=harness.ROOT, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        base = f"http://127.0.0.1:{port}"
        wait_for(base, process, log)
        yield base, process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):  # whoever of its processes outlived it
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(base: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server does not answer:\n{log.read_text()[-4000:]}")


def complete(base: str, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    body = {
        "model": "small",
        "prompt": " ".join(rng.choice(WORDS) for _ in range(rng.randint(20, 60))),
        "max_tokens": rng.randint(60, 120),
        "temperature": 0.0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return dict(json.loads(answer.read())) | {"wanted": body["max_tokens"]}


def pressed(base: str) -> set[str]:
    """Engine cores that have preempted somebody."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("vllm:kvpolicy_preemptions_total{") and float(line.split()[-1])]
    return {line.split('engine="')[1].split('"')[0] for line in counts}


def metrics(base: str) -> dict[str, float]:
    """Our metrics, summed over labels."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"{base}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("vllm:kvpolicy_"):
                name = line.split("{")[0].split(" ")[0].removeprefix("vllm:kvpolicy_")
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def test_thirty_two_clients_then_killed(model: str, tmp_path: Path) -> None:
    """Everybody gets all tokens, /metrics tells what happened, and after SIGKILL the trace can be read."""
    folder = tmp_path / "trace"
    options = ("--policy", "random:0.5", "--host-gib", "0.25", "--trace", str(folder))
    with server(model, tmp_path, *options) as (base, process):
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda seed: complete(base, seed), range(32)))
        for answer in answers:
            assert answer["usage"]["completion_tokens"] == answer["wanted"]
        time.sleep(1.0)  # the engine core's last report is on its way to the API process
        told = metrics(base)
        assert told["preemptions_total"] >= 4
        assert told["resumed_total"] == told["preemptions_total"]
        assert told["copy_bytes_total"] > 0 and told["copy_microseconds_total"] > 0
        assert told["loaded_tokens_total"] > 0 and told["recomputed_tokens_total"] > 0
        assert told["host_slots_used"] == 0 and told["host_slots_total"] > 0
        assert told["open_preemptions"] == 0
        assert told["cost_model"] == 1
        time.sleep(3.0)  # longer than a part is kept open: these rows must be there afterwards
        with ThreadPoolExecutor(32) as pool:
            cut_off = [pool.submit(complete, base, seed) for seed in range(100, 132)]
            time.sleep(1.0)  # serving and recording again
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
        assert any(future.exception() is not None for future in cut_off)
    recorded = trace.read(folder)
    assert recorded.table("decisions").num_rows >= told["preemptions_total"]
    assert recorded.table("requests").num_rows >= 32


def test_terminated_right_after_the_last_answer(model: str, tmp_path: Path) -> None:
    """Every request that was answered is in the trace: vLLM by itself would kill the engine before it is written."""
    folder = tmp_path / "trace"
    options = ("--policy", "random:0.5", "--host-gib", "0.25", "--trace", str(folder))
    with server(model, tmp_path, *options) as (base, process):
        with ThreadPoolExecutor(36) as pool:
            answers = list(pool.map(lambda seed: complete(base, seed), range(36)))
        process.terminate()
        process.wait(timeout=60)
    recorded = trace.read(folder)
    rows = recorded.rows("requests")
    assert sorted(row["output_tokens"] for row in rows) == sorted(answer["wanted"] for answer in answers)
    assert sum(row["preemptions"] for row in rows) == recorded.table("decisions").num_rows > 0
    assert recorded.table("outcomes").num_rows == recorded.table("decisions").num_rows


def test_two_data_parallel_cores(model: str, tmp_path: Path) -> None:
    """Each engine core has its own host pool, decides for itself, and records into a sub-folder of its own."""
    folder = tmp_path / "trace"
    options = ("--policy", "always-swap", "--host-gib", "0.25", "--trace", str(folder), "--data-parallel-size", "2")
    with server(model, tmp_path, *options, workers=2) as (base, _):
        for first in range(0, 8 * 64, 64):  # a busy machine may bring requests too slowly to press both at once
            with ThreadPoolExecutor(64) as pool:
                answers = list(pool.map(lambda seed: complete(base, seed), range(first, first + 64)))
            for answer in answers:
                assert answer["usage"]["completion_tokens"] == answer["wanted"]
            if len(pressed(base)) == 2:
                break
        time.sleep(4.0)
        told = metrics(base)
        assert told["host_slots_used"] == 0
        assert told["cost_model"] == 2
    recorded = trace.read(folder)
    assert len(recorded.headers) == 2
    assert set(recorded.table("decisions")["core"].to_pylist()) == set(recorded.headers)
