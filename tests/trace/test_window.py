"""A window of time reads what was recorded then, and nothing else, whatever cuts the trace into files."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kvpolicy
from kvpolicy import trace as traces
from kvpolicy.cli import main
from kvpolicy.errors import KVPolicyError
from kvpolicy.fields import WrongValue
from kvpolicy.trace import Header, Trace, TraceError, TraceWarning, row_groups, upkeep, write_part
from kvpolicy.trace.window import Window, read_window
from tests.synthetic import make_trace
from tests.synthetic_logs import make_log

HOUR_S = 3600.0
CLOCK_S = 5_000.0
DAY = datetime(2026, 3, 1, tzinfo=UTC)
"""The time of day at which the clock of :func:`write_log` stood at :data:`CLOCK_S`."""
HOURS = 48


def write_log(folder: Path, name: str = "log", clock_s: float | None = CLOCK_S, source: str = "production") -> Trace:
    """A log of two days, four decisions an hour and a part file for each hour; the first is half a minute after
    :data:`DAY`."""
    log = make_log(3, decisions=4 * HOURS, name=name, source=source)
    (core,) = log.headers
    header = replace(log.headers[core], created="2026-03-01T00:00:00Z", clock_s=clock_s)
    times = pa.array([CLOCK_S + 30.0 + 900.0 * number for number in range(4 * HOURS)])
    decisions = log.table("decisions")
    decisions = decisions.set_column(decisions.column_names.index("time_s"), "time_s", times)
    outcomes = log.table("outcomes")
    outcomes = outcomes.set_column(outcomes.column_names.index("closed_s"), "closed_s", pc.add(times, 10.0))
    header.write(folder / core)
    for hour in range(HOURS):
        for table_name, table in (("decisions", decisions), ("outcomes", outcomes)):
            rows = table.slice(4 * hour, 4).drop_columns(["core"])
            path = write_part(folder / core, table_name, hour, rows)
            written_s = DAY.timestamp() + (hour + 1) * HOUR_S
            os.utime(path, (written_s, written_s))
    return traces.read(folder)


def hours_of(trace: Trace) -> list[int]:
    """The hours of its decisions, without repetitions."""
    return sorted({int((at_s - CLOCK_S) // HOUR_S) for at_s in trace.table("decisions")["time_s"].to_pylist()})


@pytest.mark.parametrize(
    ("between", "hours"),
    [
        (("2026-03-01T02:00:00Z", "2026-03-01T05:00"), [2, 3, 4]),
        (("2026-03-01T03:00+01:00", "2026-03-01T06:00+01:00"), [2, 3, 4]),
        (("2026-03-02", "2026-03-02T00:59:59"), [24]),
        (("begin", "2026-03-01T01:00"), [0]),
        (("-2h", "end"), [46, 47]),
        (("-90m", "-1800s"), [46, 47]),
        (("-1.5d", "2026-03-01T14:00Z"), [12, 13]),
        (("begin", "end"), list(range(HOURS))),
    ],
)
@pytest.mark.parametrize("compacted", [False, True])
def test_a_window_has_the_rows_of_its_time(
    tmp_path: Path, between: tuple[str, str], hours: list[int], compacted: bool
) -> None:
    whole = write_log(tmp_path)
    if compacted:
        upkeep.compact(tmp_path)
    found = traces.read_between([tmp_path], between)[str(tmp_path)]
    assert hours_of(found) == hours
    decisions, outcomes = found.table("decisions"), found.table("outcomes")
    assert 0 <= decisions.num_rows - outcomes.num_rows <= 1, "at the end one may not have ended"
    assert set(decisions["preemption_id"].to_pylist()) >= set(outcomes["preemption_id"].to_pylist())
    rows = pc.is_in(whole.table("decisions")["preemption_id"], decisions["preemption_id"].combine_chunks())
    assert whole.table("decisions").filter(rows).equals(decisions), "rows are as they were"
    if between == ("begin", "end"):
        assert found.digest() == whole.digest()


@pytest.mark.parametrize(
    ("between", "begin", "end"),
    [
        (("2026-03-01T03:00+01:00", "2026-03-01T05:00"), "2026-03-01T02:00:00Z", "2026-03-01T05:00:00Z"),
        (("-2h", "end"), "2026-03-02T21:45:40Z", "2026-03-02T23:45:40Z"),
        (("begin", "2027-01-01"), "2026-03-01T00:00:30Z", "2026-03-02T23:45:40Z"),
    ],
)
def test_a_window_is_said_in_times_of_day(tmp_path: Path, between: tuple[str, str], begin: str, end: str) -> None:
    """No wider than what was recorded, whose last row is 10 s after the last decision."""
    write_log(tmp_path)
    found, window = read_window([tmp_path], between)
    assert found[str(tmp_path)].digest() == traces.read_between([tmp_path], between)[str(tmp_path)].digest()
    assert window == Window(between, begin, end)
    assert window.text() == f"only what was recorded from {begin} to {end} (--between {' '.join(between)})"


def test_an_outcome_is_of_a_decision_in_the_window(tmp_path: Path) -> None:
    """The window begins between a decision and its outcome."""
    write_log(tmp_path)
    between = ("2026-03-01T05:00:35", "2026-03-01T07:00:35")
    found = traces.read_between([tmp_path], between)[str(tmp_path)]
    decided, ended = (set(found.table(name)["preemption_id"].to_pylist()) for name in ("decisions", "outcomes"))
    assert len(decided) == 8 and len(ended) == 7 and ended < decided
    assert kvpolicy.evaluate([tmp_path], ["always-swap"], between=between).n == 8


def test_files_of_other_times_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path)
    read: list[str] = []
    original = row_groups.read_rows
    monkeypatch.setattr(
        row_groups,
        "read_rows",
        lambda path, *more: read.append(f"{path.parent.name} {path.stem}") or original(path, *more),
    )
    traces.read_between([tmp_path], ("2026-03-01T02:00", "2026-03-01T04:00"))
    assert read == [f"{name} part-{hour:06d}" for name in ("decisions", "outcomes") for hour in (2, 3)]


def test_without_the_clocks_time_of_day_files_tell_it_and_that_is_said(tmp_path: Path) -> None:
    write_log(tmp_path, clock_s=None)
    with pytest.warns(TraceWarning, match="the last row is taken to be of the time of its file"):
        found = traces.read_between([tmp_path], ("2026-03-01T02:30", "2026-03-01T05:30"))
    # The last part is of the last hour, and was written at its end: 14 minutes and 20 seconds after its last row.
    assert hours_of(found[str(tmp_path)]) == [2, 3, 4, 5]
    with pytest.warns(TraceWarning):
        assert hours_of(traces.read_between([tmp_path], ("-2h", "end"))[str(tmp_path)]) == [46, 47]


def test_a_core_of_another_time_is_left_out(tmp_path: Path) -> None:
    """Two starts of one server: the clocks differ, the window is one."""
    write_log(tmp_path, "one")
    write_log(tmp_path, "two", clock_s=CLOCK_S - 72 * HOUR_S)  # three days later
    assert set(traces.read(tmp_path).headers) == {"core-one", "core-two"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = traces.read_between([tmp_path], ("2026-03-04", "2026-03-05"))[str(tmp_path)]
        assert set(found.headers) == {"core-two"} and hours_of(found) == list(range(24))
        assert set(traces.read_between([tmp_path], ("-1h", "end"))[str(tmp_path)].headers) == {"core-two"}


def test_a_trace_of_another_time_is_left_out(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    write_log(folders[0], "one")
    write_log(folders[1], "two", clock_s=CLOCK_S - 72 * HOUR_S)
    assert list(traces.read_between(folders, ("-1h", "end"))) == [str(folders[1])]
    report = kvpolicy.evaluate(folders, ["always-swap"], between=("-1d", "end"))
    assert report.n == 96


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (("yesterday", "end"), "has 'yesterday', should be an ISO time such as 2026-11-24T09:00"),
        (("-2", "end"), "has '-2', should be"),
        (("-2w", "end"), "has '-2w'"),
        (("2h", "end"), "has '2h'"),
        (("2026-13-01", "end"), "has '2026-13-01'"),
        (("end", "begin"), "is from end to begin: the second time should be after the first"),
        (("-1h", "-2h"), "is from -1h to -2h"),
        ("-2h", "is '-2h', should be two times"),
        (("-2h",), "should be two times"),
        ((1, 2), "has 1, should be"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path: Path, between: tuple[str, str], words: str) -> None:
    write_log(tmp_path)
    with pytest.raises(WrongValue, match=words) as refused:
        traces.read_between([tmp_path], between)
    assert refused.value.field == "between"


def test_an_empty_window_names_the_times_that_there_are(tmp_path: Path) -> None:
    write_log(tmp_path)
    there = "there is what was recorded from 2026-03-01T00:00:30Z to 2026-03-02T23:45:40Z"
    for between in (("2026-04-01", "2026-05-01"), ("begin", "2026-02-28"), ("2026-03-01T00:01", "2026-03-01T00:02")):
        with pytest.raises(TraceError, match=f"nothing was recorded between {between[0]} and {between[1]}; {there}"):
            traces.read_between([tmp_path], between)
    with pytest.raises(TraceError, match=f"table decisions holds nothing between -8s and end; {there}"):
        traces.read_between([tmp_path], ("-8s", "end"), "decisions")


def test_a_simulation_has_no_time_of_day(tmp_path: Path) -> None:
    write_log(tmp_path, clock_s=None, source="simulation")
    assert hours_of(traces.read_between([tmp_path], ("-1h", "end"))[str(tmp_path)]) == [47]
    with pytest.raises(WrongValue, match="a simulation has none: give times back, such as -2h"):
        traces.read_between([tmp_path], ("2026-03-01", "end"))
    with pytest.raises(TraceError, match="the simulation is of 171,910 s"):
        traces.read_between([tmp_path], ("-9s", "-1s"), "decisions")


def test_what_has_no_common_time_is_refused(tmp_path: Path) -> None:
    make_trace(states=2, repeats=1).write(tmp_path / "profile")
    write_log(tmp_path / "simulated", "one", source="simulation")
    write_log(tmp_path / "served", "two")
    with pytest.raises(TraceError, match="is of a profile, which is judged as a whole"):
        traces.read_between([tmp_path / "profile"], ("-1h", "end"))
    with pytest.raises(WrongValue, match="is given with a profile"):
        kvpolicy.evaluate([tmp_path / "profile"], ["always-swap"], between=("-1h", "end"))
    with pytest.raises(TraceError, match="a simulation and a server have no common time"):
        traces.read_between([tmp_path / "simulated", tmp_path / "served"], ("-1h", "end"))


@pytest.mark.parametrize("value", ["soon", True])
def test_a_wrong_clock_in_a_header_is_refused(tmp_path: Path, value: object) -> None:
    write_log(tmp_path)
    header = tmp_path / "core-log" / "header.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"clock_s": value}))
    with pytest.raises(TraceError, match=r"header.json: field clock_s is .*, should be a number, or null"):
        Header.read(header)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_every_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out, report = str(tmp_path / "log"), tmp_path / "run.json", tmp_path / "report.json"
    write_log(Path(folder))
    window = ["--between", "-1d", "end"]
    assert run("evaluate", folder, "--policy", "always-swap", *window, "--json", str(report)) == 0
    assert json.loads(report.read_text())["n"] == 96
    assert run("export", folder, "--perfetto", str(out), *window) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert sum(event["ph"] == "i" for event in events) == 96
    assert run("shadow", folder, *window) == 2, "swaps were executed"
    assert "executed a swap" in capsys.readouterr().err
    for command in (["evaluate", folder, "--policy", "always-swap"], ["export", folder, "--perfetto", str(out)],
                    ["shadow", folder]):  # fmt: skip
        assert run(*command, "--between", "2027-01-01", "end") == 2
        said = capsys.readouterr().err
        assert "between 2027-01-01 and end; there is what was recorded from 2026-03-01T00:00:30Z" in said
        assert run(*command, "--between", "noon", "end") == 2
        assert capsys.readouterr().err.startswith("kvpolicy: error: --between has 'noon', should be an ISO time")


def test_a_warning_takes_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, clock_s=None)
    assert run("export", str(tmp_path), "--perfetto", str(tmp_path / "x.json"), "--between", "-1h", "end") == 0
    said = capsys.readouterr().err
    assert said.startswith(f"kvpolicy: warning: {tmp_path}") and said.count("\n") == 1


def test_python_refuses_like_the_command_line(tmp_path: Path) -> None:
    write_log(tmp_path)
    for call in (kvpolicy.shadow_savings, lambda folders, **more: kvpolicy.evaluate(folders, ["always-swap"], **more)):
        with pytest.raises(KVPolicyError, match="table decisions holds nothing between -8s and end"):
            call([tmp_path], between=("-8s", "end"))


@pytest.mark.parametrize("clock_s", [CLOCK_S, None])
def test_files_that_are_merged_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_s: float | None
) -> None:
    """A server merges its parts, and removes them, between the opening of the first and what follows."""
    write_log(tmp_path, clock_s=clock_s)
    original, calls = row_groups._bounds, 0

    def merged_meanwhile(*given: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2 * HOURS or (calls == 1 and clock_s is not None):  # the last file of a table is open
            upkeep.compact(tmp_path)
        return original(*given)

    monkeypatch.setattr(row_groups, "_bounds", merged_meanwhile)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        assert hours_of(traces.read_between([tmp_path], ("-2h", "end"))[str(tmp_path)]) == [46, 47]
    assert len(list((tmp_path / "core-log" / "outcomes").iterdir())) < HOURS, "they were merged"


def change_header(folder: Path, **values: object) -> Path:
    header = folder / "core-log" / "header.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | values))
    return header


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf")])
def test_a_clock_that_is_no_number_is_refused_by_every_reader(tmp_path: Path, value: float) -> None:
    write_log(tmp_path)
    change_header(tmp_path, clock_s=value)
    with pytest.raises(TraceError, match=r"header.json: field clock_s is .{1,60}, should be a number, or null$"):
        traces.read(tmp_path)


@pytest.mark.parametrize("value", [None, 5, ["2026"]])
def test_a_creation_that_is_no_text_is_refused(tmp_path: Path, value: object) -> None:
    write_log(tmp_path)
    change_header(tmp_path, created=value)
    with pytest.raises(TraceError, match=r"header.json: field created is .*, should be an ISO time$"):
        traces.read(tmp_path)


@pytest.mark.parametrize("clock_s", [1e300, -1e300, 1e12, -1e12, 1e11])
@pytest.mark.parametrize("between", [("-2h", "end"), ("2030-01-01", "end")])
def test_a_clock_beyond_all_calendars_is_named(tmp_path: Path, clock_s: float, between: tuple[str, str]) -> None:
    write_log(tmp_path)
    change_header(tmp_path, clock_s=clock_s)
    with pytest.raises(
        TraceError, match=r"header.json: by its field clock_s, .*, rows are of a time outside the years"
    ):
        traces.read_between([tmp_path], between)


def test_times_of_files_beyond_all_calendars_are_named(tmp_path: Path) -> None:
    write_log(tmp_path, clock_s=None)
    rows = traces.read(tmp_path).table("decisions").slice(0, 1).drop_columns(["core"])
    early = rows.set_column(rows.column_names.index("time_s"), "time_s", pa.array([-1e15]))
    write_part(tmp_path / "core-log", "decisions", 99, early)
    with pytest.warns(TraceWarning), pytest.raises(TraceError, match="by the times of its files rows are of a time"):
        traces.read_between([tmp_path], ("-2h", "end"))
