"""Whatever a file, a text or a request holds: each reader takes it, or refuses it with an error of this package.

Bytes drawn at will and valid content with some of it replaced; small files that would fill the memory; links that lead
elsewhere. Workload files are in tests/workload/test_damage.py, files of a tier with their folders in
tests/tiers/test_file_tier_states.py.
"""

from __future__ import annotations

import copy
import gzip
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import cost, extensions, fields, order, policy
from kvpolicy.caching import spec as caching
from kvpolicy.cost import ModelError, ModelWarning, online
from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.latency import Slo
from kvpolicy.reporting import bench_page, demo_page
from kvpolicy.request_marks import Classes, HintLimits, InvalidMarks, read_marks
from kvpolicy.settings import ServerSettings
from kvpolicy.shape import ModelShape
from kvpolicy.shelf import shelves, trace_folder
from kvpolicy.simulator.hardware.operator_tables import read_table
from kvpolicy.simulator.hardware.table_times import read_hardware
from kvpolicy.simulator.requests_csv import measured_requests
from kvpolicy.stored_values import json_of, read_json
from kvpolicy.tiers.block_format import PAGE, BlockLayout, Damaged, aligned_memory, digest_of_key
from kvpolicy.trace import SCHEMAS, Header, TraceError, from_rows, read_part, write_part
from kvpolicy.workload.files import MAX_LINE_BYTES, DamagedFile, lines
from kvpolicy_vllm.plugin import control_file
from kvpolicy_vllm.plugin.settings_line import read_line
from tests.examples import examples
from tests.reporting.test_bench_page import bench
from tests.reporting.test_demo_page import write as write_demo
from tests.trace.test_rows import ROWS

DEEP = 100_000
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from([-1, 0, 2**63, 10**400, 1e308, "../../etc/passwd", "/etc/passwd", "python:os:system", "\0", ""]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def taken_or_refused(read: Callable[[], Any]) -> None:
    """Anything but an error of this package fails the test."""
    with warnings.catch_warnings(), suppress(KVPolicyError):
        warnings.simplefilter("ignore", ModelWarning)
        read()


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with some of its bytes replaced, cut out or put in; or bytes at will."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(content)))
        end = min(len(content), begin + draw(st.sampled_from([0, 1, 1, 8, 4096, 1 << 30])))
        content = content[:begin] + draw(st.binary(max_size=8)) + content[end:]
    return content


@st.composite
def changed(draw: st.DrawFn, value: Any) -> str:
    """A JSON text of the value in which one or two members are something else, twice there, or missing."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        at, key = value, None
        for _ in range(draw(st.integers(1, 5))):
            inner = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
            if not inner:
                break
            above, key = at, draw(st.sampled_from(inner))
            at = above[key]
        if key is None:
            continue
        if draw(st.integers(0, 3)) == 0:
            del above[key]
        else:
            above[key] = draw(VALUES)
    return json.dumps(value)


# ---- traces ----


def part_bytes(name: str) -> bytes:
    with scratch() as folder:
        return write_part(folder, name, 0, from_rows(name, [ROWS[name]] * 5)).read_bytes()


PARTS = {name: part_bytes(name) for name in SCHEMAS}
CARD = next(Path(str(trace_folder("cpu-llama-native"))).glob("*/header.json"))


@given(data=st.data(), name=st.sampled_from(sorted(PARTS)))
@examples(150)
def test_part_files(data: st.DataObject, name: str) -> None:
    with scratch() as folder:
        path = folder / "part-000000.parquet"
        path.write_bytes(data.draw(damaged(PARTS[name])))
        taken_or_refused(lambda: read_part(path, data.draw(st.sampled_from([name, "steps"]))))


@given(data=st.data())
@examples(100)
def test_headers(data: st.DataObject) -> None:
    with scratch() as folder:
        (folder / "header.json").write_text(data.draw(changed(json.loads(CARD.read_text()))))
        taken_or_refused(lambda: Header.read(folder / "header.json").engine_spec)


# ---- cost models, and what is learned online ----

MODEL = next(
    Path(str(shelf / "cpu-llama-native")) for shelf in shelves("models") if (shelf / "cpu-llama-native").is_dir()
)


@given(data=st.data())
@examples(60)
def test_cost_models(data: st.DataObject) -> None:
    with scratch() as folder:
        shutil.copytree(MODEL, folder / "model")
        file = data.draw(st.sampled_from(sorted(path.name for path in MODEL.iterdir() if path.is_file())))
        path = folder / "model" / file
        if file.endswith(".json"):
            path.write_text(data.draw(changed(json.loads(path.read_text()))))
        else:
            path.write_bytes(data.draw(damaged(path.read_bytes())))
        taken_or_refused(lambda: cost.load(folder / "model"))


@given(data=st.data())
@examples(100)
def test_online_states(data: st.DataObject) -> None:
    with scratch() as folder:
        path = folder / "state.json"
        online.save(online.Online(), "abc", path)
        assert path.stat().st_mode & 0o777 == 0o600
        text = path.read_bytes()
        path.write_bytes(
            data.draw(damaged(text)) if data.draw(st.booleans()) else data.draw(changed(json.loads(text))).encode()
        )
        taken_or_refused(lambda: online.load(path, "abc"))


# ---- texts of an operator ----

LINES = (
    "cheapest:models/mine,order=urgent,host_gib=8",
    '{"policy": "always-swap", "shadow": true}',
    "shadow=on",
    "off",
)


@st.composite
def texts(draw: st.DrawFn, *valid: str) -> str:
    return (
        draw(st.text(max_size=60))
        if draw(st.booleans())
        else draw(damaged(draw(st.sampled_from(valid)).encode())).decode(errors="replace")
    )


@given(text=texts(*LINES))
@examples(300)
def test_settings_lines(text: str) -> None:
    taken_or_refused(lambda: fields.read(ServerSettings, read_line(text, "KVPOLICY"), "KVPOLICY"))


@given(data=st.data())
@examples(60)
def test_control_files(data: st.DataObject) -> None:
    """Whatever it holds, it imports nothing, and the server goes on."""
    with scratch() as folder:
        path = folder / "control"
        path.write_bytes(
            data.draw(texts("threshold:300,order=urgent", "python:os:system", "order=urgent/python:os:system")).encode(
                errors="surrogateescape"
            )
        )
        path.chmod(0o600)
        imported: list[str] = []
        start = control_file.Start("fcfs", False, "threshold:1")
        with patch.object(extensions, "from_module", lambda spec, *others: imported.append(spec)):
            loaders = (partial(one.load, allow_python=True) for one in (policy, order))
            control_file.ControlFile(path, start, *loaders).look()
        assert not imported


@given(
    text=texts(
        "threshold:300", "explore:cpu-llama-native,budget=2%", "cheapest:cpu-llama-native,online=on", "python:x:y"
    )
)
@examples(150)
def test_names_of_policies(text: str) -> None:
    taken_or_refused(lambda: policy.load(text, allow_python=False))


@given(text=texts("mlfq:base=4", "urgent", "by-class:chat=2,batch=1", "priority/python:x:y"))
@examples(150)
def test_names_of_orders_and_caches(text: str) -> None:
    taken_or_refused(lambda: order.load(text, False))
    taken_or_refused(lambda: caching.load(text, 8, allow_python=False))


@given(text=texts("chat:priority=-5..5,batch", "keep=60,share=0.5", "ttft=1.5,tpot=0.1"))
@examples(150)
def test_classes_hints_and_deadlines(text: str) -> None:
    for kind in (Classes, HintLimits, Slo):
        taken_or_refused(lambda kind=kind: kind.parse(text))


# ---- what clients send ----


@given(
    said=VALUES
    | st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("class", "ttft_s", "tpot_s", "keep_s", "evict_first", "session", "pin"), VALUES)
    )
)
@examples(300)
def test_request_marks(said: Any) -> None:
    taken_or_refused(lambda: read_marks(said))


# ---- hardware, models, requests ----


@given(data=st.data())
@examples(100)
def test_model_configurations(data: st.DataObject) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 1000,
        "torch_dtype": "float32", "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    with scratch() as folder:
        (folder / "config.json").write_text(data.draw(changed(config)))
        taken_or_refused(lambda: ModelShape.read(folder))


@given(data=st.data())
@examples(60)
def test_hardware_models_and_tables(data: st.DataObject) -> None:
    with scratch() as folder:
        (folder / "hardware.json").write_bytes(
            data.draw(damaged(b'{"kind": "kvpolicy hardware", "schema_version": 1}'))
        )
        taken_or_refused(lambda: read_hardware(folder / "hardware.json"))
        (folder / "some.csv").write_bytes(data.draw(damaged(b"layer,tokens,time_us\nqkv_proj,4,30.5\nqkv_proj,8,31\n")))
        taken_or_refused(lambda: read_table(folder / "some.csv"))
        (folder / "some.parquet").write_bytes(data.draw(damaged(PARTS["steps"])))
        taken_or_refused(lambda: read_table(folder / "some.parquet"))
        (folder / "requests.csv").write_bytes(data.draw(damaged(b"input_toks,output_toks,client_arrival_s\n5,6,0.5\n")))
        taken_or_refused(lambda: measured_requests(folder / "requests.csv"))


# ---- results that a page is made of ----


@given(data=st.data())
@examples(8)
def test_results_of_a_bench(data: st.DataObject) -> None:
    with scratch() as folder:
        file = bench(folder) / "bench.json"
        file.write_text(data.draw(changed(json.loads(file.read_text()))))
        taken_or_refused(lambda: bench_page.write_page(file, folder / "page.html", None))


@given(data=st.data())
@examples(8)
def test_results_of_a_demo(data: st.DataObject) -> None:
    with scratch() as folder:
        file = write_demo(folder) / "demo.json"
        file.write_text(data.draw(changed(json.loads(file.read_text()))))
        taken_or_refused(lambda: demo_page.write_page(file, folder / "page.html", None))


# ---- blocks of KV in files ----


@given(data=st.data())
@examples(200)
def test_blocks_of_a_tier(data: st.DataObject) -> None:
    layout, key, block = BlockLayout(bytes(20), 64), digest_of_key(b"key"), np.arange(64, dtype=np.uint8)
    header = aligned_memory(PAGE)
    layout.write_header(header, key, [block])
    drawn = data.draw(damaged(header.tobytes()[:160]))[:PAGE]
    found = aligned_memory(PAGE)
    found[:] = header
    found[: len(drawn)] = np.frombuffer(drawn, np.uint8)
    if found.tobytes()[:160] == header.tobytes()[:160]:
        return
    with suppress(Damaged):
        layout.verify(found, key, [block])


# ---- small files that would fill the memory ----


def test_json_that_is_nested_deeply_or_too_long(tmp_path: Path) -> None:
    deep = "[" * DEEP + "]" * DEEP
    with pytest.raises(InputError, match="nested too deeply"):
        json_of(deep)
    (tmp_path / "header.json").write_text(deep)
    with pytest.raises(TraceError, match=r"header\.json: not a readable trace header: is nested too deeply"):
        Header.read(tmp_path / "header.json")
    shutil.copytree(MODEL, tmp_path / "model")
    card = next((tmp_path / "model").glob("*.json"))
    card.write_text(deep)
    with pytest.raises(ModelError, match="nested too deeply"):
        cost.load(tmp_path / "model")
    with card.open("wb") as file:
        file.truncate(1 << 40)  # a file without content takes no room
    with pytest.raises(ModelError, match=r"is larger than 67,108,864 bytes"):
        cost.load(tmp_path / "model")
    with pytest.raises(InputError, match="is larger than 1,000 bytes"):
        read_json(card, 1000)
    with pytest.raises(InvalidMarks):
        read_marks({"class": ["a"] * 10})


def test_a_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(5):
            file.write(b"x" * (MAX_LINE_BYTES // 4))
    assert path.stat().st_size < MAX_LINE_BYTES / 100
    with pytest.raises(DamagedFile, match="line 1: does not end within"):
        list(lines(path))


# ---- links ----


def test_a_models_files_are_in_its_folder(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    card = next((tmp_path / "model").glob("*.json"))
    card.rename(tmp_path / "elsewhere.json")
    card.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ModelError, match="is a link out of the model's folder"):
        cost.load(tmp_path / "model")
