"""The plot of choices: the same at every run, and missed by name without matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cli, explanation
from tests.explanation.models import explain

WITH_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def test_without_matplotlib_the_text_is_there_and_the_plot_is_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(explanation, "import_module", missing)
    file = tmp_path / "boundary.svg"
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", "--cost-model", "boosted", "--tokens", "500", "--plot", str(file)])
    output = capsys.readouterr()
    assert end.value.code == 2
    assert "pip install 'kvpolicy[plots]'" in output.err
    assert "choice over tokens and running requests" in output.out
    assert not file.exists()


@pytest.mark.skipif(not WITH_MATPLOTLIB, reason="matplotlib is not installed")
@pytest.mark.parametrize(("ending", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_the_boundary_is_drawn_the_same_every_time(tmp_path: Path, ending: str, begins: bytes) -> None:
    files = [tmp_path / f"{number}{ending}" for number in range(2)]
    for file in files:
        assert explain(plot=file).not_drawn == ""
    assert files[0].read_bytes().startswith(begins)
    assert files[0].read_bytes() == files[1].read_bytes()
