"""Measured runs are read as workloads, and refused by file, row and column."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kvpolicy.simulator.requests_csv import RequestsError, measured_requests, measured_run
from kvpolicy.workload import Request

HEAD = "request_id,input_toks,output_toks,queued_ts,scheduled_ts,first_token_ts,last_token_ts,client_arrival_s"
ROWS = ("b,20,3,1.5,1.6,1.7,2.0,1.5", "a,10,2,0.0,0.1,0.2,0.3,0.0")


def csv_file(folder: Path, *rows: str, head: str = HEAD) -> Path:
    file = folder / "run_requests.csv.gz"
    file.write_bytes(gzip.compress("\n".join((head, *rows, "")).encode()))
    return file


def test_requests_come_in_the_order_of_arrival_whatever_the_files(tmp_path: Path) -> None:
    file = csv_file(tmp_path, *ROWS)
    workload = measured_requests(file)
    assert workload.requests == (Request(0.0, 10, 2), Request(1.5, 20, 3))
    assert (workload.name, workload.source) == ("run_requests", "run_requests.csv.gz")
    run = measured_run(file)
    assert run.workload == workload
    assert run.scheduled_s.tolist() == [0.1, 1.6]
    assert run.first_token_s.tolist() == [0.2, 1.7]
    assert run.last_token_s.tolist() == [0.3, 2.0]


def test_requests_alone_need_no_times(tmp_path: Path) -> None:
    file = csv_file(tmp_path, "5,7,0.25", head="input_toks,output_toks,client_arrival_s")
    assert measured_requests(file).requests == (Request(0.25, 5, 7),)
    with pytest.raises(RequestsError, match="no column scheduled_ts"):
        measured_run(file)


MARKED = "client_arrival_s,input_toks,output_toks,class,priority,ttft_deadline_s,tpot_deadline_s"


def test_classes_priorities_and_deadlines_are_read_where_they_are_given(tmp_path: Path) -> None:
    file = csv_file(tmp_path, "1.0,5,6,urgent,-1,0.5,0.05", "0.5,7,8,,,,", head=MARKED)
    urgent = Request(1.0, 5, 6, class_name="urgent", priority=-1, ttft_s=0.5, tpot_s=0.05)
    assert measured_requests(file).requests == (Request(0.5, 7, 8), urgent)
    file = csv_file(tmp_path, "1.0,5,6,7", head="client_arrival_s,input_toks,output_toks,class")
    assert measured_requests(file).requests == (Request(1.0, 5, 6, class_name="7"),)
    file = csv_file(tmp_path, "1.0,5,6,,,,", head=MARKED)
    assert measured_requests(file).requests == (Request(1.0, 5, 6),)


def test_a_class_is_a_name_whatever_it_looks_like(tmp_path: Path) -> None:
    """The same as in a table of arrivals."""
    file = csv_file(tmp_path, "0,1,1,007", "1,1,1,1.50", "2,1,1,", head="client_arrival_s,input_toks,output_toks,class")
    assert [request.class_name for request in measured_requests(file).requests] == ["007", "1.50", "default"]


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = csv_file(tmp_path, "0,1,1,a,b", head="client_arrival_s,input_toks,output_toks,class,class")
    with pytest.raises(RequestsError, match="column class is there twice"):
        measured_requests(file)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("a,1e30,1,1", r"row 0: priority is 1e\+30, should be a whole number"),
        ("a,0.5,1,1", r"row 0: priority is 0\.5, should be a whole number"),
        ("a,high,1,1", "column priority is string, should hold numbers"),
        ("a,1,0,1", r"row 0: ttft_deadline_s is 0\.0, should be a number above 0, or empty"),
        ("a,1,1,-inf", "row 0: tpot_deadline_s is -inf, should be a number, or empty"),
    ],
)
def test_an_impossible_mark_is_refused_by_row_and_column(tmp_path: Path, cells: str, said: str) -> None:
    with pytest.raises(RequestsError, match=said):
        measured_requests(csv_file(tmp_path, f"0,1,1,{cells}", head=MARKED))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("a,0,2,0,0,0,0,0.0", r"row 1: input_toks is 0\.0, should be a whole number"),
        ("a,1.5,2,0,0,0,0,0.0", r"row 1: input_toks is 1\.5"),
        ("a,1,,0,0,0,0,0.0", "row 1: output_toks is nan"),
        ("a,1,2,0,0,0,0,-1", r"row 1: client_arrival_s is -1\.0, should be a number, 0 or above"),
        ("a,1,2,0,0,0,0,inf", "row 1: client_arrival_s is inf"),
        ("a,1,two,0,0,0,0,0.0", "column output_toks is string"),
        ("a,1,2,0,2.0,1.0,3.0,0.0", r"row 1: first_token_ts is 1\.0, should be no earlier than scheduled_ts"),
        ("a,1,2", "cannot be read"),
    ],
)
def test_a_damaged_row_is_refused_by_row_and_column(tmp_path: Path, row: str, said: str) -> None:
    file = csv_file(tmp_path, ROWS[0], row)
    with pytest.raises(RequestsError, match=said) as refused:
        measured_run(file)
    assert str(file) in str(refused.value)
