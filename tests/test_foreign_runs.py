"""Whatever a live server answers, and whatever is in the folder of an interrupted run: it is taken or refused.

As in tests/test_foreign_files.py, which has the readers of most other files.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvpolicy.cli.screen import Watcher
from kvpolicy.client import counters_in
from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.hardware import Geometry
from kvpolicy.prefix_store import read_messages, read_prompt, warm
from kvpolicy.server_metrics import Metrics
from kvpolicy.simulator.hardware.communication import with_all_reduces
from kvpolicy.simulator.hardware.operators import SourcedCurve, curve_of
from kvpolicy.study.cache import ResultCache
from kvpolicy.workload import open_workload
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench import run_bench
from kvpolicy_vllm.bench.demo_rounds import STATE, Measured
from kvpolicy_vllm.bench.exactness import Comparison
from kvpolicy_vllm.bench.openai_api import Api
from kvpolicy_vllm.config_file import merge
from tests.bench.test_demo_rounds import RUN, WORK
from tests.examples import examples
from tests.simulator.hardware.step_loads import SHAPE
from tests.test_config_file import ADDITION
from tests.test_foreign_files import DEEP, VALUES, changed, damaged, scratch, taken_or_refused
from tests.test_server_metrics import TEXT


def contents(value: Any) -> st.SearchStrategy[bytes]:
    """The JSON of a value with something else in it, damaged, or of another value."""
    text = json.dumps(value).encode()
    other = VALUES.map(lambda drawn: json.dumps(drawn).encode())
    return st.one_of(changed(value).map(str.encode), damaged(text), other, st.just(b"[" * DEEP + b"]" * DEEP))


# ---- kvpolicy warm ----

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]


@given(ids=contents([1, 2, 3]), messages=contents(MESSAGES))
@examples(100)
def test_prompts_and_messages(ids: bytes, messages: bytes) -> None:
    with scratch() as folder:
        for name, content, read in (("a.json", ids, read_prompt), ("a.txt", ids, read_prompt),
                                    ("b.json", messages, read_messages)):  # fmt: skip
            (folder / name).write_bytes(content)
            taken_or_refused(lambda path=folder / name, read=read: read(path))


# ---- /metrics ----


@given(data=st.data())
@examples(100)
def test_metrics_of_a_server_and_what_is_shown_of_them(data: st.DataObject) -> None:
    named = TEXT.replace("host_full", data.draw(st.sampled_from(["host_full", "[/red]", "[bold", "\\[a]"]) | st.text()))
    metrics = [Metrics.of(data.draw(damaged(named.encode())).decode(errors="replace")) for _ in range(2)]
    watcher = Watcher("http://here", None, lambda url: metrics.pop())
    for at_s in (0.0, 2.0):
        watcher.look(at_s)
        Console(file=io.StringIO()).print(watcher.frame())


@given(data=st.data())
@examples(100)
def test_counters_of_a_server(data: st.DataObject) -> None:
    for value in counters_in(data.draw(damaged(TEXT.encode())).decode(errors="replace")).values():
        assert abs(value) < float("inf"), "a file of results could not hold it"


# ---- YAML ----


ODD_YAML = (
    b"- a", b"[" * 5000, b"a: 2001-99-99", b"!!set {a}", b"? [a]\n: b", b"<<: {a: 1}", b"!!omap [a: 1]", b"!!int x",
    b"&a [*a]", b"a: !!binary x",
)  # fmt: skip


@given(
    content=st.one_of(
        damaged(ADDITION.encode()),
        VALUES.map(lambda value: yaml.safe_dump(value).encode()),
        st.sampled_from(ODD_YAML),
    )
)
@examples(150)
def test_configurations_of_a_server(content: bytes) -> None:
    with scratch() as folder:
        file = folder / "mine.yaml"
        file.write_bytes(content)
        taken_or_refused(lambda: launch.refuse_measured(["--config", str(file)], has_model=True))
        assert file.read_bytes() == content
        try:
            merge(file, ADDITION)
        except KVPolicyError:
            assert file.read_bytes() == content


# ---- tables ----

ALL_REDUCES = b"num_workers,devices_per_node,size_bytes,median_ms\n2,2,1024,0.5\n2,2,2048,0.75\n4,4,1024,1\n"


@given(content=damaged(ALL_REDUCES))
@examples(100)
def test_tables_of_all_reduces(content: bytes) -> None:
    at = pa.array([1.0, 64.0, 4096.0]).to_numpy()
    tokens = SourcedCurve(curve_of(at, 1e-6 * at), ())
    with scratch() as folder:
        (folder / "all_reduce.csv").write_bytes(content)
        taken_or_refused(lambda: with_all_reduces(tokens, folder / "all_reduce.csv", Geometry.of_shape(SHAPE, 2), 2))


ODD_PAIRS = ([None, 1], ["a", "b"], [[1], []], [1e300, -1.0], [b"\xff", b""], [2**62, 0], [True, False])


def lengths(**columns: Any) -> bytes:
    names = {"client": [0, 0], "window_start_s": [0, 0], "field": ["input_tokens", "output_tokens"],
             "value": [7.0, 5.0], "prob": [1.0, 1.0]}  # fmt: skip
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(names | columns), buffer)
    return buffer.getvalue()


@given(
    content=st.one_of(
        damaged(lengths()),
        st.dictionaries(
            st.sampled_from(["client", "window_start_s", "field", "value", "prob"]),
            st.sampled_from(ODD_PAIRS),
            max_size=2,
        ).map(lambda drawn: lengths(**drawn)),
    )
)
@examples(150)
def test_lengths_of_servegen(content: bytes) -> None:
    with scratch() as folder:
        (folder / "windows.csv").write_text("client,window_start_s,rate_per_s,pattern,arg1\n0,0,0.01,Gamma,1\n")
        (folder / "lengths.parquet").write_bytes(content)
        source = open_workload(f"servegen:{folder / 'windows.csv'}?lengths={folder / 'lengths.parquet'}")
        taken_or_refused(lambda: list(source))


# ---- what an interrupted run goes on from ----


@given(data=st.data())
@examples(100)
def test_results_of_simulations(data: st.DataObject) -> None:
    """One is found as it was stored, or it is simulated again."""
    with scratch() as folder:
        cache, digest = ResultCache(folder), "ab" * 32
        result = {"digest": digest, "inputs": {"seed": 0}, "e2e_s": {"mean": 1.5, "p99": None}, "warnings": []}
        cache.store(digest, result)
        (file,) = folder.glob("*/*.json")
        file.write_bytes(data.draw(contents(json.loads(file.read_text()))))
        assert cache.find(digest) in (None, result)


@given(data=st.data())
@examples(100)
def test_states_of_an_interrupted_demo(data: st.DataObject) -> None:
    asked = {"seed": 0, "order": "mlfq:base=32"}
    with scratch() as folder:
        measured = Measured.opened(folder, asked)
        measured.keep("capacity_per_s", 4.0)
        measured.keep_round("one", 0, {"vllm": RUN}, Comparison(3, 1, ("token 1",)))
        for file in (folder / STATE, *folder.glob("rounds/*.json")):
            if data.draw(st.booleans()):
                file.write_bytes(data.draw(contents(json.loads(file.read_text()))))
        with suppress(InputError):
            measured = Measured.opened(folder, asked)
            assert measured.values == {"capacity_per_s": 4.0}
            assert measured.round("one", 0, WORK) == {"vllm": RUN}
            assert measured.comparison("one", 0) == Comparison(3, 1, ("token 1",))


PLAN = {"format": 1, "kind": "chat", "target": "http://here", "load": {"rounds": 2}, "arms": [{"name": "a"}]}


@given(data=st.data())
@examples(100)
def test_plans_and_runs_of_an_interrupted_bench(data: st.DataObject) -> None:
    with scratch() as folder:
        run_bench.take_up(folder, PLAN)
        run = {"arm": "a", "round": 0, "rows": [{"token_ids": [1, 2], "error": ""}]}
        run_bench.write(folder / "runs" / "one.json", run_bench.sealed(run))
        for file in (folder / "plan.json", folder / "runs" / "one.json"):
            if data.draw(st.booleans()):
                file.write_bytes(data.draw(contents(json.loads(file.read_text()))))
        with suppress(InputError):
            run_bench.take_up(folder, PLAN)
            assert run_bench.read_back(folder, folder / "runs" / "one.json") == run


def test_a_bench_without_its_plan_is_not_resumed(tmp_path: Path) -> None:
    run_bench.take_up(tmp_path, PLAN)
    (tmp_path / "runs" / "one.json").write_text("{}")
    for content, why in (
        (None, "cannot be read: no such file"),
        ("[]", "was damaged or changed"),
        ("{", "is no JSON"),
        (json.dumps(PLAN), "has no sha256: was written by an earlier kvpolicy"),
    ):
        (tmp_path / "plan.json").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "plan.json").write_text(content)
        with pytest.raises(InputError, match=rf"plan\.json: .*{why}.* cannot be resumed: give --out another folder"):
            run_bench.take_up(tmp_path, PLAN)


def test_a_demo_whose_state_is_damaged_is_not_resumed(tmp_path: Path) -> None:
    Measured.opened(tmp_path, {"seed": 0})
    for content in ("{", "[]", '{"asked": [], "values": 3}'):
        (tmp_path / STATE).write_text(content)
        with pytest.raises(InputError, match=r"state\.json: .*cannot be resumed: give a new folder, or delete it"):
            Measured.opened(tmp_path, {"seed": 0})


# ---- the API of a server ----


class Any200:
    """A server that answers every request alike."""

    content = b""

    @contextmanager
    def serving(self) -> Iterator[str]:
        us = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                self.send_header("Content-Length", str(len(us.content)))
                self.end_headers()
                self.wfile.write(us.content)

            do_POST = do_GET  # noqa: N815

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


@pytest.fixture(scope="module")
def foreign() -> Iterator[tuple[Any200, str]]:
    server = Any200()
    with server.serving() as url:
        yield server, url


ANSWER = {
    "data": [{"id": "m", "max_model_len": 512}], "tokens": [1, 2], "usage": {"prompt_tokens": 3},
    "choices": [{"token_ids": [1, 2], "logprobs": {"top_logprobs": [{"a": -0.5, "b": -0.75}]}}],
}  # fmt: skip
STREAM = b'data: {"choices": [{"token_ids": [1]}]}\n\ndata: {"choices": [{"token_ids": [2, 3]}]}\n\ndata: [DONE]\n\n'
CACHE = b'\nvllm:cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0\nvllm:prefix_cache_queries_total{} 3\n'
EVENTS = changed(ANSWER).map(lambda text: b"data: " + text.encode() + b"\n\ndata: [DONE]\n\n")


@given(content=st.one_of(contents(ANSWER), damaged(STREAM), EVENTS, damaged(TEXT.encode() + CACHE)))
@examples(100)
def test_answers_of_a_server(foreign: tuple[Any200, str], content: bytes) -> None:
    server, url = foreign
    server.content = content

    async def ask() -> None:
        async def refused(question: Awaitable[Any]) -> None:
            with suppress(KVPolicyError):
                await question

        async with aiohttp.ClientSession() as session:
            api = Api(url, session, "m")
            for question in (api.describe(), api.tokenize("a"), api.counters(), api.kv_tokens()):
                await refused(question)
            gap = await api.gap([1])
            assert gap is None or abs(gap) < float("inf")
            answer = await api.complete([1], 3)
            assert answer.error or len(answer.token_ids) == 3
            json.dumps([*answer.token_ids], allow_nan=False)

    asyncio.run(ask())
    taken_or_refused(lambda: warm(url, [1, 2]))
