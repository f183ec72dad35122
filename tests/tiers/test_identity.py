"""Digests that tell apart whatever decides the bytes of KV."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpolicy.errors import InputError
from kvpolicy.tiers.identity import SAMPLE_BYTES, namespace_digest, weights_digest, weights_stamp


def test_a_namespace_is_its_values_in_any_order() -> None:
    one = {"dtype": "float16", "ranks": [2, 0], "sizes": {"block": 16, "layers": 4}}
    assert namespace_digest(one) == namespace_digest(dict(reversed(one.items())))
    others: list[dict[str, object]] = [
        {**one, "dtype": "bfloat16"}, {**one, "ranks": [2, 1]}, {**one, "sizes": {"block": 32, "layers": 4}},
        {**one, "adapter": ""}, {"dtype": "float16"},
    ]  # fmt: skip
    assert len({namespace_digest(other) for other in (one, *others)}) == len(others) + 1


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"bytes", object()])
def test_a_value_without_a_form_of_its_own_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="namespace"):
        namespace_digest({"value": value})


def model(folder: Path, weights: bytes = bytes(10 * SAMPLE_BYTES), config: str = "{}") -> Path:
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(weights)
        os.utime(folder / name, (1, 1))
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text("")
    return folder


def test_weights_are_told_apart_by_name_size_time_and_content(tmp_path: Path) -> None:
    digest = weights_digest(model(tmp_path / "one"))
    assert weights_digest(model(tmp_path / "same")) == digest
    (tmp_path / "same" / "README.md").write_text("other words")
    assert weights_digest(tmp_path / "same") == digest
    zeros = bytearray(10 * SAMPLE_BYTES)
    zeros[-1] = 1
    assert weights_digest(model(tmp_path / "content", bytes(zeros))) != digest
    assert weights_digest(model(tmp_path / "size", bytes(10 * SAMPLE_BYTES + 1))) != digest
    assert weights_digest(model(tmp_path / "config", config='{"rope_theta": 1}')) != digest
    os.utime(tmp_path / "one" / "b.safetensors", (1, 2))
    assert weights_digest(tmp_path / "one") != digest
    (tmp_path / "same" / "b.safetensors").rename(tmp_path / "same" / "c.safetensors")
    assert weights_digest(tmp_path / "same") != digest


def test_one_file_of_weights_is_a_model_too(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    assert weights_digest(path) == weights_digest(path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no file of weights"):
        weights_digest(tmp_path)


def test_a_stamp_sees_what_the_digest_covers(tmp_path: Path) -> None:
    folder = model(tmp_path / "one")
    stamp = weights_stamp(folder)
    (folder / "README.md").write_text("another")
    assert weights_stamp(folder) == stamp and {*stamp} == {"a.safetensors", "b.safetensors", "config.json"}
    digest = weights_digest(folder)
    (folder / "removed.json").symlink_to("nothing")
    assert weights_stamp(folder) == stamp and weights_digest(folder) == digest
    (folder / "config.json").write_text("{ }")
    assert weights_stamp(folder) != stamp
    assert {*weights_stamp(folder / "a.safetensors")} == {"a.safetensors"}
