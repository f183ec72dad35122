"""What ships is found by its bare name, unless a folder of that name is there."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvpolicy
from kvpolicy import shelf
from kvpolicy.trace import TraceError

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("kind", ["models", "traces"])
def test_the_names_are_those_of_the_folders(kind: str) -> None:
    assert shelf.names(kind) == tuple(sorted(path.name for path in (ROOT / kind).iterdir() if path.is_dir()))


def test_a_trace_is_read_by_its_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = shelf.names("traces")[0]
    by_name, by_path = kvpolicy.read_trace(name), kvpolicy.read_trace(ROOT / "traces" / name)
    assert by_name.headers == by_path.headers and by_name.tables["steps"].equals(by_path.tables["steps"])


def test_a_folder_of_that_name_and_a_path_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = shelf.names("traces")[0]
    (tmp_path / name).mkdir()
    assert shelf.trace_folder(name) == Path(name)
    assert shelf.trace_folder(f"else/{name}") == Path("else") / name


def test_a_name_that_is_none_says_which_there_are() -> None:
    with pytest.raises(TraceError, match="one that ships: cpu-llama-native, cpu-llama-simulated-link"):
        kvpolicy.read_trace("cpu-llama")
