"""`kvpolicy report`: files it writes, arguments it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy.order import load
from kvpolicy.reporting.pipeline import _key, report
from kvpolicy.simulator import Server
from kvpolicy.trace import TraceError
from tests.simulator.worlds import LINEAR, random_workload, run
from tests.synthetic import GEOMETRY, HARDWARE, make_trace


def test_figures_are_written_as_svg_and_png(report_folder: Path) -> None:
    names = {path.name for path in (report_folder / "figures").iterdir()}
    assert {"sequence-length-1.svg", "sequence-length-1.png", "sequence-length-2.svg"} <= names


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace was given"):
        report([], tmp_path / "a.html")
    with pytest.raises(ValueError, match=r"^out is .*a.txt, should end in .html"):
        report([tmp_path], tmp_path / "a.txt")
    with pytest.raises(TraceError, match="no such folder"):
        report([tmp_path / "nothing"], tmp_path / "a.html")


def test_bytes_of_a_token_are_named_where_blocks_hold_nothing_but_tokens() -> None:
    """Not where windows or states share the blocks: their bytes depend on the length."""
    header, *_ = make_trace().headers.values()
    assert "B/token" in _key(header)[1]
    assert f"{header.block_bytes + 64} B/block" in _key(replace(header, block_bytes=header.block_bytes + 64))[1]


def test_a_trace_under_an_order_has_its_displacements(tmp_path: Path) -> None:
    """In the text, in the page and in the JSON; nothing about them where nobody was displaced."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    server = Server(16, 1 << 16, 60, 300, token_budget=256, max_running=24, geometry=GEOMETRY.to_dict(),
                    hardware=HARDWARE)  # fmt: skip
    for order in ("mlfq:base=8", "fcfs"):
        ordered = replace(server, order=load(order))
        run(random_workload(1, 60, 200.0), ordered, "random:0.5", LINEAR)[1].write(tmp_path / order)
        found = report([tmp_path / order], tmp_path / "page.html")
        (group,) = found.to_dict().values()
        page = (tmp_path / "page.html").read_text()
        if order == "fcfs":
            assert group["displacements"] is None and "displaced" not in page + found.text()
            continue
        assert group["displacements"]["by_class"]["urgent"]["displaced"] > 0
        for line in (
            f"displaced by the order {order}: {group['displacements']['displaced']} requests",
            "class urgent:",
        ):
            assert line in found.text() and line in page
