"""The user's own server, as far as a profile depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.settings import GIB, Measurement
from kvpolicy_vllm.bench.engine_process import FLAGS
from kvpolicy_vllm.bench.own_server import OwnServer, named_model
from kvpolicy_vllm.bench.profile_parts import QUICK, Part, Rig, parts_of, tables_of
from tests.shape.configs import GPT_OSS_20B, GRANITE_4_SMALL

SERVER = OwnServer("org/name", ("--tensor-parallel-size", "2"), 16, 4096, 64, 32768, False, 4096)


def rig(server: OwnServer, device: bool = False) -> Rig:
    return Rig(Path(server.llm), QUICK.of_server(server), None, 0, device, server)


def test_the_servers_block_size_is_measured_alone() -> None:
    assert [part.block_size for part in parts_of(QUICK.of_server(SERVER), device=False)] == [16, 16]


def test_the_engine_has_the_servers_flags_and_what_vllm_makes_of_them(tmp_path: Path) -> None:
    part = Part.of(0, 16, True)
    engine = rig(SERVER).job(part, tmp_path).engine
    assert engine[FLAGS] == ["org/name", "--tensor-parallel-size", "2"]
    assert {"block_size": 16, "max_num_batched_tokens": 4096, "max_num_seqs": 64}.items() <= engine.items()
    assert not {"dtype", "enforce_eager", "model", "skip_tokenizer_init"} & set(engine), "as the server has them"
    assert engine["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in rig(SERVER, device=True).job(part, tmp_path).engine


def test_a_length_that_is_given_is_covered() -> None:
    """And one that is the model's own only as far as the amount of measurements reaches."""
    assert rig(SERVER).extent.span(SERVER.model_tokens).max_tokens == QUICK.max_tokens
    given = replace(SERVER, gives_length=True)
    span = rig(given).extent.span(given.model_tokens)
    assert (span.model_tokens, span.max_tokens, span.max_batch_tokens) == (32768, 16384, 32768)
    short = replace(SERVER, gives_length=True, model_tokens=512)
    assert rig(short).extent.span(512).max_tokens == 256


def test_vllm_finds_room_for_a_request_of_full_length(tmp_path: Path) -> None:
    given = replace(SERVER, gives_length=True)
    engine = rig(given).job(Part.of(0, 16, True), tmp_path).engine
    assert engine["max_model_len"] == 32768 and (engine["num_gpu_blocks_override"] - 1) * 16 >= 32768


def test_every_block_table_of_a_request_has_room(tmp_path: Path) -> None:
    """Also of a model at a hub, whose configuration is not here."""
    blocks = [
        rig(server).job(Part.of(0, 16, True), tmp_path).engine["num_gpu_blocks_override"]
        for server in (SERVER, replace(SERVER, block_tables=3))
    ]
    assert blocks[1] == 3 * blocks[0]


def test_windows_that_are_stored_whole_have_no_table_of_their_own() -> None:
    """States have one always."""
    assert (tables_of(GPT_OSS_20B), tables_of(GPT_OSS_20B, windows_whole=True)) == (2, 1)
    assert tables_of(GRANITE_4_SMALL) == tables_of(GRANITE_4_SMALL, windows_whole=True) == 10
    assert tables_of({}) == 1


def test_host_memory_holds_what_is_measured(tmp_path: Path) -> None:
    assert SERVER.host_gib(1000, 4.0) == 4.0
    assert replace(SERVER, kv_token_bytes=1 << 20).host_gib(8192, 4.0) == 12.0
    assert 8 * GIB == 8192 << 20


def test_no_more_requests_run_than_the_server_lets(tmp_path: Path) -> None:
    few = replace(SERVER, max_requests=3)
    states = rig(few).job(Part.of(0, 16, True), tmp_path).states
    assert max(len(state.other_prompts) for state in states) == 2
    with pytest.raises(WrongValue, match=r"let 1 request run at a time \(--max-num-seqs\), should be 2 or more"):
        replace(SERVER, max_requests=1)


def test_a_model_is_a_folder_or_an_id_at_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert named_model(Measurement()) is None
    assert named_model(Measurement(Path("mine"))) == named_model(Measurement("./mine")) == str(tmp_path / "mine")
    for name in ("name", "org/name"):
        assert named_model(Measurement(name)) == named_model(Measurement(Path(name))) == name
    for missing in ("/no/such", "../other", "./other", "./org/name"):
        with pytest.raises(InputError, match=f"^{missing}: no such folder; should be a model's folder, or its id at a"):
            named_model(Measurement(missing))
    for missing in ("a/b/c", "s3://bucket/model"):
        with pytest.raises(WrongValue, match="which is not there; should be a model's folder, or its id at a hub"):
            named_model(Measurement(missing))
