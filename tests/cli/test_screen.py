"""`kvpolicy watch`: what a frame shows, and that it outlives the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvpolicy.cli import main
from kvpolicy.cli.screen import Watcher
from kvpolicy.errors import InputError
from kvpolicy.server_metrics import Metrics, fetch, last_decisions
from tests.synthetic import make_trace
from tests.test_server_metrics import TEXT


def shown(watcher: Watcher) -> str:
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=160, record=True, file=nowhere)
        console.print(watcher.frame())
        return console.export_text()


def watcher_of(*texts: str | OSError, trace: Path | None = None) -> Watcher:
    answers: Iterator[Any] = iter(texts)

    def ask(url: str) -> Metrics:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return Metrics.of(answer)

    return Watcher("http://here", trace, ask)


def test_a_frame_has_pressure_choices_costs_and_queues() -> None:
    watcher = watcher_of(TEXT)
    watcher.look(0.0)
    rows = {line.split("│")[0].strip(): [cell.strip() for cell in line.split("│")[1:]]
            for line in shown(watcher).splitlines() if "│" in line}  # fmt: skip
    assert rows["KV memory in use"] == ["97%"] and rows["requests waiting"] == ["11"]
    assert rows["host blocks in use"] == ["7 of 128"] and rows["preempted, not yet back"] == ["4"]
    assert rows["in force"] == ["policy cheapest:mine (0123456789ab); order urgent"]
    assert rows["swap"] == ["2.5", "2.6", "100"], "30 ms over 12 priced, 26 over 10 measured, 1.2 s over 12"
    assert rows["recompute"] == ["none", "none", "none"], "the last table's: nothing was priced, measured or resumed"
    text = shown(watcher)
    assert "of these recomputed, not by choice: host full 5\n" in text and "error" not in text and "former" not in text
    choices = text.split("Choices")[1].split("Cost, ms")[0].splitlines()
    counts = [line.split("│")[2].strip() for line in choices if line.count("│") == 3]
    assert counts == ["5", "15"], "each preemption is in one row"
    assert "A better choice between recompute and swap: cannot tell: no token was decoded." in text


CACHE = """\
vllm:kvpolicy_cached_slots{engine="0",tier="host"} 90.0
vllm:kvpolicy_cache_loaded_tokens_total{engine="0",tier="host"} 640.0
vllm:kvpolicy_cache_blocks_total{engine="0",event="stored",tier="host"} 200.0
"""
FILES = """\
vllm:kvpolicy_cache_blocks_total{engine="0",event="found",tier="files"} 400.0
vllm:kvpolicy_cache_blocks_total{engine="0",event="stored",tier="files"} 120.0
vllm:kvpolicy_cache_blocks_total{engine="0",event="loaded",tier="files"} 30.0
vllm:kvpolicy_cache_blocks_total{engine="0",event="load_failed",tier="files"} 2.0
vllm:kvpolicy_cache_blocks_total{engine="0",event="late",tier="files"} 1.0
vllm:kvpolicy_hinted_blocks_total{engine="0",event="held",tier="host"} 17.0
vllm:kvpolicy_hinted_blocks_total{engine="0",event="held",tier="files"} 23.0
vllm:kvpolicy_hinted_blocks_total{engine="0",event="released",tier="host"} 5.0
"""


def test_cached_prompts_and_hints_and_files_have_rows_where_there_are_any() -> None:
    rows = []
    for text in (TEXT, TEXT + CACHE, TEXT + CACHE + FILES):
        watcher = watcher_of(text)
        watcher.look(0.0)
        lines = [line for line in shown(watcher).splitlines() if line.strip().startswith("prompts ")]
        rows.append([line.split("│")[1].strip() for line in lines])
    in_host = "90 blocks in host memory; 640 tokens loaded"
    in_files = "400 blocks found at the start, 120 written, 30 read, 3 failed or late"
    assert rows == [[], [in_host], [f"{in_host}; 17 held back for hints so far", in_files]]


def test_of_a_policy_without_prices_nothing_is_predicted_and_nothing_is_cheaper() -> None:
    unpriced = [line for line in TEXT.splitlines() if "priced" not in line and "cheaper" not in line]
    watcher = watcher_of("\n".join(unpriced))
    watcher.look(0.0)
    rows = [[cell.strip() for cell in line.split("│")] for line in shown(watcher).splitlines()]
    assert ["swap", "swap", "15", "none with prices"] in rows and ["swap", "none", "2.6", "100"] in rows
    watcher = watcher_of(TEXT)
    watcher.look(0.0)
    assert "0 of the 12 executed with prices" in shown(watcher)


def test_what_a_server_says_is_no_markup() -> None:
    watcher = watcher_of(TEXT.replace("host_full", "[/red]").replace("cheapest:mine", "[bold]mine"))
    watcher.look(0.0)
    assert "not by choice: [/red] 5" in shown(watcher) and "policy [bold]mine" in shown(watcher)


def test_rates_are_of_the_time_between_two_frames() -> None:
    watcher = watcher_of(TEXT, TEXT.replace('swap",model_name="m"} 15.0', 'swap",model_name="m"} 25.0'))
    watcher.look(10.0)
    watcher.look(14.0)
    assert "25, 2.5 a second" in shown(watcher)


def test_a_restart_is_said_and_gives_no_negative_rate() -> None:
    fallen = TEXT.replace('_preemptions_total{cause="memory",engine="0",executed="swap"', '_gone{x="1"')
    watcher = watcher_of(TEXT, ConnectionRefusedError("refused"), fallen, fallen)
    watcher.look(0.0)
    watcher.look(1.0)
    assert "does not answer (refused)" in shown(watcher) and "97%" in shown(watcher)
    watcher.look(2.0)
    text = shown(watcher)
    assert "restarted 1 times" in text and "does not answer" not in text and "a second" not in text
    watcher.look(3.0)
    assert "restarted 1 times" in shown(watcher) and "0 a second" in shown(watcher)


def test_a_server_without_the_plugin_is_shown_by_vllms_own() -> None:
    watcher = watcher_of("\n".join(line for line in TEXT.splitlines() if "kvpolicy" not in line))
    watcher.look(0.0)
    assert "kvpolicy is not switched on" in shown(watcher) and "97%" in shown(watcher)


@contextmanager
def serving(text: Callable[[], str]) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text().encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_one_frame_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda: TEXT) as url:
        with pytest.raises(SystemExit) as left:
            main(["watch", url, "--once"])
        assert left.value.code == 0 and "cheapest:mine" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["watch", url, "--once"])
    assert left.value.code == 2 and "does not answer" in capsys.readouterr().err
    with serving(lambda: "<html>") as url, pytest.raises(InputError, match="has no metrics of vLLM"):
        fetch(url)


def test_it_leaves_by_control_c_without_a_trace_of_it() -> None:
    asked = threading.Event()
    with serving(lambda: asked.set() or TEXT) as url:
        command = [sys.executable, "-m", "kvpolicy.cli", "watch", url, "--every", "0.2"]
        # Where the tests themselves run in a shell's background, what they start ignores the signal.
        heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
        assert asked.wait(60)
        asked.clear()
        assert asked.wait(60), "it asks again"
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == "" and "97%" in said


def test_the_last_decisions_are_shown(tmp_path: Path) -> None:
    make_trace(states=3, repeats=2).write(tmp_path / "trace")
    rows = last_decisions(tmp_path / "trace", 4)
    watcher = watcher_of(TEXT, trace=tmp_path / "trace")
    watcher.look(0.0)
    assert "Last decisions" in shown(watcher) and rows[0]["request"][:16] in shown(watcher)
    watcher = watcher_of(TEXT, trace=tmp_path / "none")
    watcher.look(0.0)
    assert "no such folder" in shown(watcher)
