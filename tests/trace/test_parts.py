"""Which part files hold a table's rows, and what is known of a part before it is read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvpolicy import stored_tables
from kvpolicy.trace import (
    TraceError,
    core_folders,
    from_rows,
    iter_parts,
    read,
    read_part,
    row_groups,
    scan,
    write_part,
)
from kvpolicy.trace.parts import all_parts, covered, opened, parts_of
from kvpolicy.trace.upkeep import compact
from tests.trace.test_rows import ROWS
from tests.trace.test_table import HEADER


def rows(first: int, count: int) -> pa.Table:
    return from_rows("outcomes", [ROWS["outcomes"] | {"preemption_id": f"p{first + i}"} for i in range(count)])


def ids(core: Path) -> list[str]:
    return [name for some in iter_parts(core, "outcomes") for name in some["preemption_id"].to_pylist()]


def names(folder: Path, *numbers: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        (folder / f"part-{number}.parquet").touch()
    return folder


def test_a_part_that_another_covers_is_not_read(tmp_path: Path) -> None:
    folder = names(tmp_path, "000000-000031", "000003", "000031", "000032", "1000000", "000033-000040")
    (folder / ".part-000041.77").touch()
    (folder / "part-x.parquet").touch()
    assert [(part.first, part.last) for part in parts_of(folder)] == [
        (0, 31), (32, 32), (33, 40), (1000000, 1000000),
    ]  # fmt: skip
    assert [part.first for part in covered(all_parts(folder))] == [3, 31]


def test_parts_that_overlap_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"part-000020-000040\.parquet: shares parts with part-000000-000031\.parquet"):
        parts_of(names(tmp_path / "a", "000000-000031", "000020-000040"))
    with pytest.raises(TraceError, match="should ascend"):
        parts_of(names(tmp_path / "b", "000005-000002"))


def test_a_merge_beside_a_reader_loses_no_row_and_doubles_none(tmp_path: Path) -> None:
    core = tmp_path / "core"
    for number in range(6):
        write_part(core, "outcomes", number, rows(number * 10, 10))
    found: list[str] = []
    for at, some in enumerate(iter_parts(core, "outcomes")):
        found += some["preemption_id"].to_pylist()
        if at == 1:  # parts 1 to 4 become one, while the reader has given the rows of 0 and 1
            pq.write_table(rows(10, 40), core / "outcomes" / "part-000001-000004.parquet")
            for number in range(1, 5):
                (core / "outcomes" / f"part-{number:06d}.parquet").unlink()
    assert found == [f"p{i}" for i in range(60)]


def test_links_inside_a_trace_are_refused_and_never_followed(tmp_path: Path) -> None:
    core = tmp_path / "trace" / "core"
    other = tmp_path / "elsewhere"
    write_part(other, "outcomes", 0, rows(0, 3))
    write_part(core, "outcomes", 0, rows(10, 2))
    (core / "header.json").write_text("{}")
    (core / "outcomes" / "part-000001.parquet").symlink_to(other / "outcomes" / "part-000000.parquet")
    assert ids(core) == ["p10", "p11"]
    (core / "steps").symlink_to(other / "outcomes")
    with pytest.raises(TraceError, match="core/steps: is a link"):
        core_folders(tmp_path / "trace")
    (core / "steps").unlink()
    (tmp_path / "trace" / "second").symlink_to(core)
    with pytest.raises(TraceError, match="second: is a link"):
        read(tmp_path / "trace")


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = write_part(tmp_path / "trace" / "core", "outcomes", 0, rows(0, 3))
    assert path.stat().st_mode & 0o777 == 0o600
    assert {folder.stat().st_mode & 0o777 for folder in (path.parent, path.parent.parent, tmp_path / "trace")} == {
        0o700
    }


def test_a_part_is_encoded_without_loss(tmp_path: Path) -> None:
    for name, row in ROWS.items():
        rows_of = from_rows(name, [row] * 7)
        assert read_part(write_part(tmp_path, name, 0, rows_of), name).equals(rows_of), name


class TestBombs:
    """Files of a few kilobytes whose rows would fill the memory: refused by their footers, before they are read."""

    def test_many_equal_numbers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stored_tables, "MAX_TABLE_BYTES", 1 << 24)
        path = tmp_path / "part-000000.parquet"
        pq.write_table(pa.table({"step": pa.array([7] * 4_000_000, pa.int64())}), path, compression="zstd")
        assert path.stat().st_size < 20_000
        with pytest.raises(TraceError, match=r"its 4,000,000 rows would take .* GiB of memory or more"):
            read_part(path, "steps")

    @pytest.mark.parametrize("nested", [False, True])
    def test_a_long_text_many_times(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool) -> None:
        monkeypatch.setattr(stored_tables, "MAX_TABLE_BYTES", 1 << 26)
        path = tmp_path / "part-000000.parquet"
        texts = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), ["x" * 50_000])  # 5 GB
        with pq.ParquetWriter(
            path, pa.schema([("policy", pa.list_(pa.string()) if nested else pa.string())])
        ) as writer:
            for _ in range(100):
                some = texts[:1000].cast(pa.string())
                if nested:
                    some = pa.ListArray.from_arrays(pa.array(range(1001), pa.int32()), some)
                writer.write_table(pa.table({"policy": some}), row_group_size=1000)
        before = pa.total_allocated_bytes()
        with pytest.raises(TraceError, match=r"its 100,000 rows would take"):
            opened(path)
        assert pa.total_allocated_bytes() - before < 1 << 26

    def test_columns_that_are_not_read_do_not_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stored_tables, "MAX_TABLE_BYTES", 1 << 20)
        path = tmp_path / "part-000000.parquet"
        pq.write_table(pa.table({"step": [1] * 200_000, "mine": [[1] * 3] * 200_000}), path)
        with pytest.raises(TraceError, match="would take"):
            opened(path)
        monkeypatch.setattr(stored_tables, "MAX_TABLE_BYTES", 1 << 22)
        assert opened(path, ["step"]).metadata.num_rows == 200_000

    @pytest.mark.parametrize("value", [1, "x" * 50, [1], {"n": 1}])
    def test_a_dot_may_be_in_a_columns_name(
        self, tmp_path: Path, value: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stored_tables, "MAX_TABLE_BYTES", 1 << 20)
        path = tmp_path / "part-000000.parquet"
        pq.write_table(pa.table({"a.b": [value] * 200_000, "a": [1] * 200_000, "a.bc": [1] * 200_000}), path)
        with pytest.raises(TraceError, match="would take"):
            opened(path, ["a.b"])
        monkeypatch.setattr(stored_tables, "MAX_TABLE_BYTES", 1 << 24)
        assert opened(path, ["a.b"]).read(["a.b"]).num_rows == 200_000

    def test_what_is_ours_is_never_taken_for_one(self, tmp_path: Path) -> None:
        """Long tables with many distinct ids: the bound of their texts is far too high, and they are counted."""
        many = pa.concat_tables([rows(i * 1000, 1000) for i in range(30)])
        path = write_part(tmp_path, "outcomes", 0, many)
        assert read_part(path, "outcomes").num_rows == 30_000


class TestScan:
    """A part of a long trace, with no more in memory than it takes."""

    def trace_of(self, folder: Path) -> Path:
        for core in ("a", "b"):
            HEADER.write(folder / core)
            for number in range(4):
                many = [
                    ROWS["outcomes"] | {"preemption_id": f"{core}-{i}", "closed_s": float(i)}
                    for i in range(number * 100, number * 100 + 100)
                ]
                write_part(folder / core, "outcomes", number, from_rows("outcomes", many))
        return folder

    def test_rows_by_time_and_by_preemption(self, tmp_path: Path) -> None:
        folder = self.trace_of(tmp_path / "trace")
        whole = read(folder).table("outcomes")
        assert pa.concat_tables(scan(folder, "outcomes")).equals(whole)
        found = pa.concat_tables(scan(folder, "outcomes", ["preemption_id"], between_s=(98.5, 101.0)))
        assert found.to_pydict() == {
            "preemption_id": ["a-99", "a-100", "a-101", "b-99", "b-100", "b-101"], "core": [*"aaabbb"],
        }  # fmt: skip
        (one,) = scan(folder, "outcomes", ["closed_s"], preemptions={"b-250", "c-1"})
        assert one.to_pydict() == {"closed_s": [250.0], "core": ["b"]}
        assert list(scan(folder, "steps")) == list(scan(folder, "outcomes", preemptions=())) == []
        with pytest.raises(KeyError, match="preemption_id"):
            list(scan(folder, "steps", preemptions={"a"}))

    def test_what_cannot_hold_a_wanted_row_is_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = self.trace_of(tmp_path / "trace")
        compact(folder)
        groups: list[int] = []
        plain = row_groups.read_rows
        monkeypatch.setattr(
            row_groups, "read_rows", lambda *arguments: (groups.append(arguments[-1]), plain(*arguments))[1]
        )
        list(scan(folder, "outcomes", between_s=(1e6, 2e6)))
        assert groups == []
        list(scan(folder, "outcomes", between_s=(5.0, 6.0)))
        assert groups == [0, 0]
