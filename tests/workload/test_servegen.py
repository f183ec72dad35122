"""ServeGen's tables: as many requests as the windows say, as bursty as they say, of the lengths that they give."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from kvpolicy.workload import WorkloadError, open_workload

HEADER = "client,window_start_s,rate_per_s,cv,pattern,arg1,arg2"


def windows(folder: Path, *rows: str) -> Path:
    file = folder / "windows.csv"
    file.write_text("\n".join((HEADER, *rows)) + "\n")
    return file


def lengths(folder: Path, **changed: Any) -> Path:
    """Client 0: prompts of 10 and 30 tokens, three of four of them 30, then of 50; client 1: of 7. Outputs: 5."""
    rows = [
        (0, 0, "input_tokens", 10.0, 0.25), (0, 0, "input_tokens", 30.0, 0.75), (0, 0, "output_tokens", 5.0, 1.0),
        (0, 21600, "input_tokens", 50.0, 1.0), (0, 21600, "output_tokens", 5.0, 1.0),
        (1, 0, "input_tokens", 7.0, 1.0), (1, 0, "output_tokens", 5.0, 1.0), (1, 0, "reason_ratio", 0.5, 1.0),
    ]  # fmt: skip
    names = ("client", "window_start_s", "field", "value", "prob")
    table = [dict(zip(names, row, strict=True)) for row in rows]
    table[0] |= changed
    file = folder / "lengths.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(table), file)
    return file


def opened(windows: Path, lengths: Path, more: str = "") -> Any:
    return open_workload(f"servegen:{windows}?lengths={lengths}{more}")


def test_each_client_sends_what_its_windows_say(tmp_path: Path) -> None:
    table = windows(tmp_path, "1,600,1,1,Gamma,1,1", "0,0,2,1,Gamma,1,0.5", "0,21600,0.5,1,Weibull,1,2")
    requests = list(opened(table, lengths(tmp_path)))
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    of_windows = {start: [r for r in requests if start <= r.arrival_s < start + 600] for start in (0, 600, 21600)}
    assert {start: len(found) for start, found in of_windows.items()} == {0: 1200, 600: 600, 21600: 300}
    assert sum(map(len, of_windows.values())) == len(requests)
    prompts = [request.prompt_tokens for request in of_windows[0]]
    assert set(prompts) == {10, 30} and prompts.count(30) / 1200 == pytest.approx(0.75, abs=0.04)
    assert {r.prompt_tokens for r in of_windows[600]} == {7} and {r.prompt_tokens for r in of_windows[21600]} == {50}
    assert {request.output_tokens for request in requests} == {5}
    assert list(opened(table, lengths(tmp_path))) == requests
    assert list(opened(table, lengths(tmp_path), "&seed=1")) != requests


@pytest.mark.parametrize(("pattern", "shape", "variation"), [("Gamma", 0.25, 2.0), ("Gamma", 4, 0.5),
                                                            ("Weibull", 0.5, 5**0.5), ("Weibull", 1, 1.0)])  # fmt: skip
def test_gaps_are_as_uneven_as_the_pattern_says(tmp_path: Path, pattern: str, shape: float, variation: float) -> None:
    requests = list(opened(windows(tmp_path, f"0,0,20,1,{pattern},{shape},1"), lengths(tmp_path)))
    gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(requests)]
    assert len(requests) == 12_000
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.1)


def test_a_fraction_of_a_request_comes_by_chance_and_a_tiny_shape_is_served(tmp_path: Path) -> None:
    table = windows(tmp_path, *(f"0,{600 * n},0.0005,1,Gamma,1,1" for n in range(36)), "1,0,0.1,9,Gamma,0.01,1")
    counts = [sum(r.prompt_tokens != 7 for r in opened(table, lengths(tmp_path), f"&seed={n}")) for n in range(30)]
    assert statistics.fmean(counts) == pytest.approx(36 * 0.3, rel=0.15)
    assert sum(request.prompt_tokens == 7 for request in opened(table, lengths(tmp_path))) == 60


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0,0,2,1,Pareto,1,1", r"line 2: pattern is 'Pareto', should be Gamma or Weibull"),
        ("0,0,2,1,Gamma,0,1", r"line 2: arg1 is 0\.0, should be a shape"),
        ("0,0,-2,1,Gamma,1,1", r"line 2: rate_per_s is -2\.0, should be from 0"),
        ("0,0,2,1,Gamma,1", r"line 2: 6 fields, the header has 7"),
        ("2,0,2,1,Gamma,1,1", r"line 2: .*lengths\.parquet holds no input_tokens of client 2 from second 0"),
        ("1,43200,2,1,Gamma,1,1", r"holds no input_tokens of client 1 from second 43200"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        list(opened(windows(tmp_path, row), lengths(tmp_path)))


def test_damaged_rows_are_skipped_where_asked_for(tmp_path: Path) -> None:
    rows = ("0,0,1,1,Gamma,1,1", "0,0,1,1,Gamma,1,1", "0,600,nan,1,Gamma,1,1")
    source = opened(windows(tmp_path, *rows), lengths(tmp_path), "&skip_damaged=true")
    assert len(list(source)) == 600
    assert (source.counts.rows, source.counts.damaged, source.counts.requests) == (3, 2, 600)
    assert "line 3: client 0 is there twice from second 0" in source.counts.first_damage


def test_wrong_lengths_are_named(tmp_path: Path) -> None:
    table = windows(tmp_path, "0,0,1,1,Gamma,1,1")
    with pytest.raises(WorkloadError, match="lengths: should be given"):
        open_workload(f"servegen:{table}")
    with pytest.raises(WorkloadError, match="lengths: should be given"):
        open_workload(str(table))
    with pytest.raises(WorkloadError, match=r"windows\.csv: damaged or not a Parquet file"):
        list(opened(table, table))
    for changed in ({"value": 0.0}, {"value": 1.5}, {"prob": -1.0}):
        with pytest.raises(WorkloadError, match=r"lengths\.parquet, row 0: value|lengths\.parquet, row 0: .*prob"):
            list(opened(table, lengths(tmp_path, **changed)))
    pyarrow.parquet.write_table(pa.table({"client": [0]}), tmp_path / "other.parquet")
    with pytest.raises(WorkloadError, match=r"other\.parquet: column window_start_s is missing"):
        list(opened(table, tmp_path / "other.parquet"))


def test_a_small_table_of_many_rows_is_refused(tmp_path: Path) -> None:
    """All of its rows are equal: 20 million of them take some 100 kB on disk, and would take gigabytes in memory."""
    table, file = windows(tmp_path, "0,0,1,1,Gamma,1,1"), tmp_path / "lengths.parquet"
    row = pa.table({"client": [0], "window_start_s": [0], "field": ["input_tokens"], "value": [1.0], "prob": [1.0]})
    many = row.take(pa.array([0] * 1_000_000))
    with pyarrow.parquet.ParquetWriter(file, row.schema, compression="zstd") as writer:
        for _ in range(20):
            writer.write_table(many)
    assert file.stat().st_size < 500_000
    before = pa.total_allocated_bytes()
    with pytest.raises(WorkloadError, match=r"lengths\.parquet: its 20,000,000 rows would take .* at most 0\.5"):
        list(opened(table, file))
    assert pa.total_allocated_bytes() - before < 1 << 26


def test_lengths_that_are_there_twice_add_up(tmp_path: Path) -> None:
    file = lengths(tmp_path)
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(pa.concat_tables([table, table]), file)
    requests = list(opened(windows(tmp_path, "0,0,20,1,Gamma,1,1"), file))
    pyarrow.parquet.write_table(table, file)
    assert requests == list(opened(windows(tmp_path, "0,0,20,1,Gamma,1,1"), file))
