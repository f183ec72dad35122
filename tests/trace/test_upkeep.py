"""A trace that is written for weeks: few files, none of them lost, and nobody else's files touched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy.cli import main
from kvpolicy.trace import SCHEMAS, Header, TraceError, from_rows, iter_parts, read, write_part
from kvpolicy.trace import upkeep as upkeeping
from kvpolicy.trace.parts import parts_of
from kvpolicy.trace.upkeep import MERGED_PARTS, Retention, Upkeep, compact, hold_header, locked, merge, size
from tests.trace.test_parts import ids, rows
from tests.trace.test_rows import ROWS
from tests.trace.test_table import HEADER

SERVED = replace(HEADER, source="production")


def trace_of(folder: Path, parts: int, core: str = "core-a", header: Header = SERVED, each: int = 3) -> Path:
    header.write(folder / core)
    for number in range(parts):
        path = write_part(folder / core, "outcomes", number, rows(number * each, each))
        os.utime(path, (1000.0 + number, 1000.0 + number))
    return folder / core


def files(core: Path, table: str = "outcomes") -> list[str]:
    return sorted(path.name for path in (core / table).iterdir())


def test_compaction_changes_files_and_no_row(tmp_path: Path) -> None:
    core = trace_of(tmp_path / "trace", 70)
    trace_of(tmp_path / "trace", 5, "core-b", replace(HEADER, source="profile"))
    for name in SCHEMAS:
        if name != "outcomes":
            for number in range(3):
                write_part(core, name, number, from_rows(name, [ROWS[name]] * 2))
    before = read(tmp_path / "trace").digest()
    small, merged = compact(tmp_path / "trace")
    assert read(tmp_path / "trace").digest() == before
    assert files(core) == ["part-000000-000069.parquet"]
    assert small.files == 70 + 5 + 3 * (len(SCHEMAS) - 1) + 2 and merged.files == 2 + len(SCHEMAS) + 1
    assert merged.bytes < small.bytes / 3
    assert (core / "outcomes" / files(core)[0]).stat().st_mode & 0o777 == 0o600
    assert compact(tmp_path / "trace")[0] == merged, "once more does nothing"


def test_the_command_says_what_it_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace_of(tmp_path / "trace", 10)
    with pytest.raises(SystemExit) as end:
        main(["compact", str(tmp_path / "trace")])
    assert not end.value.code
    assert "11 files, 0.0 MB -> 2 files, 0.0 MB" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as end:
        main(["compact", str(tmp_path / "nowhere")])
    assert end.value.code == 2 and "no such folder" in capsys.readouterr().err


def test_columns_that_only_some_parts_have_stay(tmp_path: Path) -> None:
    core = trace_of(tmp_path / "trace", 0)
    plain = {name: value for name, value in ROWS["steps"].items() if name not in ("weight", "left_out")}
    write_part(core, "steps", 0, from_rows("steps", [plain]))
    write_part(core, "steps", 1, from_rows("steps", [plain | {"step": 9, "weight": 4.0, "left_out": 3}]))
    compact(tmp_path / "trace")
    (table,) = iter_parts(core, "steps")
    assert (table["weight"].to_pylist(), table["left_out"].to_pylist()) == ([None, 4.0], [None, 3])


def test_an_interrupted_merge_loses_nothing_and_is_cleared_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = trace_of(tmp_path / "trace", 8)
    expected = ids(core)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for where in ("_grouped", "_remove"):  # while it writes; and after it is in place
        with monkeypatch.context() as patched:
            patched.setattr(upkeeping, where, killed)
            with pytest.raises(KeyboardInterrupt):
                merge(core, "outcomes", parts_of(core / "outcomes"))
        assert ids(core) == expected
    assert len(files(core)) == 9
    compact(tmp_path / "trace")
    assert files(core) == ["part-000000-000007.parquet"] and ids(core) == expected


def test_a_server_merges_by_levels(tmp_path: Path) -> None:
    core = trace_of(tmp_path / "trace", 2 * MERGED_PARTS + 5, each=1)
    expected = ids(core)
    Upkeep(core, Retention()).merge()
    assert files(core)[:2] == ["part-000000-000031.parquet", "part-000032-000063.parquet"]
    assert len(files(core)) == 7 and ids(core) == expected
    for number in range(69, MERGED_PARTS**2 + 3):
        write_part(core, "outcomes", number, rows(number, 1))
    Upkeep(core, Retention()).merge()
    assert files(core)[0] == "part-000000-001023.parquet"
    assert len(files(core)) == 4 and ids(core) == [f"p{i}" for i in range(MERGED_PARTS**2 + 3)]


def test_a_damaged_part_is_left_alone_and_the_others_are_merged(tmp_path: Path) -> None:
    core = trace_of(tmp_path / "trace", 3 * MERGED_PARTS)
    (core / "outcomes" / "part-000040.parquet").write_bytes(b"PAR1 no")
    keeper = Upkeep(core, Retention())
    with pytest.raises(TraceError, match="part-000040"):
        keeper.merge()
    keeper.merge()
    assert "part-000000-000031.parquet" in files(core) and "part-000064-000095.parquet" in files(core)
    assert "part-000040.parquet" in files(core)
    with pytest.raises(TraceError, match="part-000040"):
        compact(tmp_path / "trace")


def test_while_another_process_merges_the_server_does_not_wait(tmp_path: Path) -> None:
    core = trace_of(tmp_path / "trace", MERGED_PARTS)
    with locked(core):
        Upkeep(core, Retention()).merge()
    assert len(files(core)) == MERGED_PARTS


BESIDE = "import sys; from kvpolicy.trace.upkeep import compact\nfor _ in range(25): compact(sys.argv[1])"


def test_compaction_beside_a_writer_and_a_reader(tmp_path: Path) -> None:
    """A process that compacts all the time, while parts are written, merged and read here."""
    core = trace_of(tmp_path / "trace", 1, each=1)
    keeper = Upkeep(core, Retention())
    with subprocess.Popen([sys.executable, "-c", BESIDE, str(tmp_path / "trace")]) as beside:
        number = 1
        while beside.poll() is None or number < 100:
            write_part(core, "outcomes", number, rows(number, 1))
            number += 1
            if number % 8 == 0:
                keeper.merge()
                assert ids(core) == [f"p{i}" for i in range(number)]
    assert beside.returncode == 0
    compact(tmp_path / "trace")
    assert ids(core) == [f"p{i}" for i in range(number)] and len(files(core)) == 1


class TestRetention:
    def test_the_oldest_parts_go_until_the_trace_fits(self, tmp_path: Path) -> None:
        core = trace_of(tmp_path / "trace", 10)
        other = trace_of(tmp_path / "trace", 4, "core-b")  # of the same ages: an earlier start of the server
        present = size(tmp_path / "trace")
        part = (core / "outcomes" / files(core)[0]).stat().st_size
        left = Upkeep(core, Retention(max_bytes=present.bytes - 5 * part)).retain()
        assert left == size(tmp_path / "trace")
        assert left.bytes <= present.bytes - 5 * part and left.files == present.files - 5
        assert files(core)[0] == "part-000003.parquet" and files(other)[0] == "part-000002.parquet"

    def test_days(self, tmp_path: Path) -> None:
        core = trace_of(tmp_path / "trace", 10)
        Upkeep(core, Retention(max_age_s=5.0), clock=lambda: 1012.0).retain()
        assert files(core) == [f"part-{number:06d}.parquet" for number in (7, 8, 9)]

    def test_a_merged_part_is_as_old_as_its_newest_row(self, tmp_path: Path) -> None:
        core = trace_of(tmp_path / "trace", MERGED_PARTS)
        keeper = Upkeep(core, Retention(max_age_s=100.0), clock=lambda: 1100.0)
        keeper.merge()
        keeper.retain()
        assert len(files(core)) == 1
        Upkeep(core, Retention(max_age_s=100.0), clock=lambda: 1132.0).retain()
        assert files(core) == []

    def test_nothing_that_is_not_a_servers_is_touched(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        core = trace_of(trace, 2)
        profile = trace_of(trace, 3, "core-p", replace(HEADER, source="profile"))
        (tmp_path / "outside").mkdir()
        outside = write_part(tmp_path / "outside" / "core-x", "outcomes", 0, rows(0, 1))
        SERVED.write(tmp_path / "outside" / "core-x")
        (trace / "core-link").symlink_to(tmp_path / "outside" / "core-x")
        (core / "steps").symlink_to(outside.parent)
        strange = [
            core / "outcomes" / "notes.txt", core / "outcomes" / ".part-000009.1", core / "mine.parquet",
            trace / "part-000000.parquet", trace / "no-core" / "outcomes" / "part-000000.parquet",
        ]  # fmt: skip
        for path in strange:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("not the trace's")
        Upkeep(core, Retention(max_bytes=1.0, max_age_s=1.0), clock=lambda: 1e10).retain()
        assert files(core) == [".part-000009.1", "notes.txt"]
        assert len(files(profile)) == 3 and outside.exists() and all(path.exists() for path in strange)

    def test_the_folder_of_an_earlier_start_goes_when_it_is_empty_and_nobody_writes_it(self, tmp_path: Path) -> None:
        core, ended = trace_of(tmp_path / "trace", 1), trace_of(tmp_path / "trace", 1, "core-b")
        living = trace_of(tmp_path / "trace", 1, "core-c")
        handle = hold_header(living)
        keeper = Upkeep(core, Retention(max_age_s=1.0), clock=time.time)
        keeper.retain()
        assert not ended.exists() and (living / "header.json").exists() and (core / "header.json").exists()
        os.close(handle)
        keeper.retain()
        assert not living.exists()
