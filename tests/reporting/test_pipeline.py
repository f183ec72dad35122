"""`kvpolicy report`: files it writes, arguments it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pytest

from kvpolicy import trace
from kvpolicy.fields import WrongValue
from kvpolicy.order import load
from kvpolicy.reporting.pipeline import StudyReport, _key, report
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


def test_a_report_is_of_a_window_of_the_logs(tmp_path: Path) -> None:
    """Of two logs that end together: what was recorded then, without a model that was trained on the rest."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    server = Server(16, 1 << 16, 60, 300, token_budget=256, max_running=24, geometry=GEOMETRY.to_dict(),
                    hardware=HARDWARE, order=load("mlfq:base=8"))  # fmt: skip
    folders = []
    for seed in (1, 2):
        run(random_workload(seed, 60, 200.0), server, "random:0.5", LINEAR)[1].write(tmp_path / str(seed))
        folders.append(f"{tmp_path / str(seed)}/")
    whole = report(folders, tmp_path / "page.html")
    first_s, last_s = (edge(trace.read(*folders).table("steps")["start_s"]).as_py() for edge in (pc.min, pc.max))
    half = (f"-{(last_s - first_s) / 2:.3f}s", "end")
    windowed = report(folders, tmp_path / "window.html", between=half)
    assert isinstance(windowed, StudyReport) and isinstance(whole, StudyReport)
    (group,), (all_of_it,) = windowed.groups, whole.groups
    assert group.displacements is not None and all_of_it.displacements is not None
    assert 0 < group.displacements.displaced < all_of_it.displacements.displaced
    assert [str(folder) for folder in group.folders] == [str(Path(folder)) for folder in folders]
    begin_s, end_s = last_s - float(half[0][1:-1]), last_s
    window = windowed.to_dict()[group.name]["window"]
    assert window["between"] == half and whole.to_dict()[group.name]["window"] is None
    assert float(window["begin"].removesuffix(" s")) == pytest.approx(begin_s, rel=0.2)
    assert float(window["end"].removesuffix(" s")) == pytest.approx(end_s, rel=0.2)
    said = f"only what was recorded from {window['begin']} to {window['end']} (--between {half[0]} end)"
    assert windowed.text().splitlines()[0] == said
    assert f"This page shows {said}." in (tmp_path / "window.html").read_text()
    assert "only what was recorded" not in whole.text() + (tmp_path / "page.html").read_text()
    assert "no cost model is trained on a window of a log: give one with --cost-model" in windowed.text()
    priced = report(folders, tmp_path / "window.html", cost_model="cpu-llama-native", between=half)
    assert "a log does not measure both options" in priced.text()
    everything = report(folders, tmp_path / "window.html", between=("begin", "end"))
    assert everything.to_dict()[group.name]["displacements"] == whole.to_dict()[group.name]["displacements"]


def test_a_window_of_what_has_none_is_refused(tmp_path: Path) -> None:
    make_trace(states=3, repeats=2).write(tmp_path / "profile")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "bench.json").write_text("{}")
    with pytest.raises(TraceError, match="is of a profile, which is judged as a whole"):
        report([tmp_path / "profile"], tmp_path / "page.html", between=("-2h", "end"))
    with pytest.raises(WrongValue, match=r"^between is given with .*bench.json, which is shown as a whole"):
        report([tmp_path / "bench"], tmp_path / "page.html", between=("-2h", "end"))
