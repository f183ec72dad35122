"""A report of two links, written by the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.cli import main
from tests.synthetic import make_trace


def run(arguments: list[str]) -> None:
    """The command line, which ends by leaving."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0


@pytest.fixture(scope="session")
def report_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("report")
    make_trace(states=12, repeats=2).write(folder / "native")
    link = {"kind": "simulated", "bytes_per_s": 1e8, "latency_s": 0.005}
    make_trace(seed=1, states=12, repeats=2, link=link, name="slow").write(folder / "slow")
    arguments = ["report", str(folder / "native"), str(folder / "slow"), "--out", str(folder / "page.html")]
    run([*arguments, "--figures", str(folder / "figures"), "--json", str(folder / "found.json")])
    return folder
