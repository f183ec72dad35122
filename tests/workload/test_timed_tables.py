"""Readers of timed traces give what the file says, refuse what it cannot mean, and read no further than asked."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.request_marks import ALL_TOKENS, Hints
from kvpolicy.workload import ARRIVALS, AZURE, BURSTGPT, MOONCAKE, Care, Layout, Request, TimedFile, WorkloadError
from kvpolicy.workload import files as files_module
from tests.workload import published_files

SKIP = Care(skip_damaged=True)


def test_azure_2023_has_seven_decimals(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "conv.csv", published_files.AZURE_2023)
    assert list(TimedFile(path, AZURE)) == [
        Request(0.0, 374, 44),
        Request(4.314579, 396, 109),
        Request(4.541945, 879, 55),
    ]


def test_azure_2024_has_a_time_zone_and_crosses_midnight(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "week.csv.gz", published_files.AZURE_2024)
    assert [request.arrival_s for request in TimedFile(path, AZURE)] == [0.0, 0.001, 0.01093]


def test_time_zones_are_counted_in(tmp_path: Path) -> None:
    rows = "2024-05-12 10:00:00+00:00,1,1\n2024-05-12 12:00:01+02:00,1,1\n2024-05-12T10:00:02Z,1,1\n"
    path = published_files.put(tmp_path, "zones.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert [request.arrival_s for request in TimedFile(path, AZURE)] == [0.0, 1.0, 2.0]


def test_times_with_and_without_zone_do_not_mix(tmp_path: Path) -> None:
    rows = "2024-05-12 10:00:00+00:00,1,1\n2024-05-12 12:00:01,1,1\n"
    path = published_files.put(tmp_path, "zones.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    with pytest.raises(WorkloadError, match=r"zones\.csv, line 3: TIMESTAMP .* should carry a time zone like others"):
        list(TimedFile(path, AZURE))


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
def test_azure_ticks_come_out_exactly(tmp_path_factory: pytest.TempPathFactory, ticks: list[int]) -> None:
    """100 ns ticks over more than a day: every arrival is the nearest double to the true difference."""
    ticks.sort()
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for tick in ticks:
        seconds, fraction = divmod(tick, 10**7)
        day, seconds = divmod(seconds, 86400)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        lines.append(f"2023-11-{16 + day:02} {clock}.{fraction:07},1,1")
    path = published_files.put(tmp_path_factory.mktemp("ticks"), "t.csv", "\n".join(lines))
    assert [request.arrival_s for request in TimedFile(path, AZURE)] == [(tick - ticks[0]) / 1e7 for tick in ticks]


def test_burstgpt_leaves_failures_out_and_counts_them(tmp_path: Path) -> None:
    source = TimedFile(published_files.put(tmp_path, "burst.csv", published_files.BURSTGPT_1), BURSTGPT)
    assert list(source) == [Request(0.0, 472, 18), Request(40.0, 1087, 230), Request(113.0, 417, 276)]
    assert (source.counts.rows, source.counts.requests, source.counts.empty, source.counts.damaged) == (4, 3, 1, 0)


def test_burstgpt_with_sessions(tmp_path: Path) -> None:
    source = TimedFile(published_files.put(tmp_path, "burst.csv", published_files.BURSTGPT_3), BURSTGPT)
    assert list(source) == [Request(0.0, 906, 446, session="1722ac82"), Request(51.5, 36, 29)]


def test_plain_arrivals(tmp_path: Path) -> None:
    source = TimedFile(published_files.put(tmp_path, "plain.csv.gz", published_files.ARRIVALS), ARRIVALS, seed=7)
    assert list(source) == [Request(0.0, 4808, 10), Request(0.052, 3180, 8), Request(0.052, 110, 27)]
    assert (source.name, source.seed) == ("plain.csv", 7)
    assert source.source.startswith("plain.csv.gz: ")


def test_columns_may_come_in_any_order_among_others(tmp_path: Path) -> None:
    path = published_files.put(
        tmp_path, "o.csv", '\ufeffnote,output_tokens,arrival_s,prompt_tokens\r\n"a,b",3,1.5,20\r\n\r\n'
    )
    assert list(TimedFile(path, ARRIVALS)) == [Request(1.5, 20, 3)]


def test_mooncake_shares_blocks_of_512(tmp_path: Path) -> None:
    source = TimedFile(published_files.put(tmp_path, "moon.jsonl.gz", published_files.MOONCAKE), MOONCAKE)
    assert list(source) == [
        Request(0.0, 1100, 500, (0, 1, 2), 512),
        Request(3.052, 1024, 794, (0, 1), 512),
        Request(3.052, 513, 3, (0, 9), 512),
    ]


ROWS = {
    "1.0,5": "2 fields, the header has 3",
    "1.0,5,6,7": "4 fields, the header has 3",
    "1.0,x,6": "prompt_tokens is 'x', should be a number",
    "1.0,5.5,6": "prompt_tokens is '5.5', should be a whole number, 0 or more",
    "1.0,-5,6": "prompt_tokens is '-5', should be a whole number",
    "1.0,5,0": "output_tokens is 0, should be 1 or more",
    "1.0,nan,6": "prompt_tokens is 'nan', should be a number",
    "nan,5,6": "arrival_s is 'nan', should be a number",
    "inf,5,6": "arrival_s is 'inf', should be a number",
    "1_0,5,6": "arrival_s is '1_0', should be a number",
    "-1,5,6": "arrives 3 s before the row above it",
    "1.0,1e300,6": "prompt_tokens is '1e300', should be a whole number",
    "1.0,\udcff5,6": "prompt_tokens is .*, should be a number",
    '1.0,"5,6': "not a CSV row",
}


@pytest.mark.parametrize(("row", "reason"), ROWS.items(), ids=repr)
def test_a_damaged_row_is_refused_by_line_or_skipped_and_counted(tmp_path: Path, row: str, reason: str) -> None:
    text = f"arrival_s,prompt_tokens,output_tokens\n2,1,1\n{row}\n2,5,6\n"
    path = published_files.put(tmp_path, "bad.csv", text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(WorkloadError, match=rf"bad\.csv, line 3: {reason}"):
        list(TimedFile(path, ARRIVALS))
    source = TimedFile(path, ARRIVALS, SKIP)
    assert list(source) == [Request(2.0, 1, 1), Request(2.0, 5, 6)]
    assert (source.counts.rows, source.counts.requests, source.counts.damaged) == (3, 2, 1)
    assert "bad.csv, line 3: " in source.counts.first_damage


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "should be a JSON object"),
        ('{"timestamp":1,"input_length":5,"output_length":1}', "hash_ids is missing; it has timestamp"),
        ('{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[1,2]}', "holds 2 ids, 5 tokens are 1 blocks"),
        ('{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[-1]}', "should be a list of whole numbers"),
        ('{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[true]}', "should be a list of whole numbers"),
        (
            '{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[1' + 45 * "0" + "]}",
            "hash_ids holds 10+, should be under 18446744073709551616",
        ),
        ('{"timestamp":NaN,"input_length":5,"output_length":1,"hash_ids":[]}', "timestamp is nan, should be a number"),
        (
            '{"timestamp":true,"input_length":5,"output_length":1,"hash_ids":[]}',
            "timestamp is True, should be a number",
        ),
        ('{"timestamp":1,"input_length":null,"output_length":1,"hash_ids":[]}', "input_length is None"),
        ('{"timestamp":1,"input_length":5,"output_le', "not JSON"),
    ],
)
def test_a_damaged_json_line_is_refused_or_skipped(tmp_path: Path, row: str, reason: str) -> None:
    good = '{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[3]}\n'
    path = published_files.put(tmp_path, "bad.jsonl", good + row)
    with pytest.raises(WorkloadError, match=rf"bad\.jsonl, line 2: .*{reason}"):
        list(TimedFile(path, MOONCAKE))
    source = TimedFile(path, MOONCAKE, SKIP)
    assert len(list(source)) == source.counts.requests == source.counts.damaged == 1


@pytest.mark.parametrize("stamp", ["2023-13-16 18:15:46", "16.11.2023 18:15", "2023-11-16 25:15:46", "", "0.5"])
def test_a_wrong_time_stamp_is_refused(tmp_path: Path, stamp: str) -> None:
    path = published_files.put(tmp_path, "a.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n{stamp},1,1\n")
    with pytest.raises(WorkloadError, match=r"a\.csv, line 2: TIMESTAMP is "):
        list(TimedFile(path, AZURE))


def test_backward_rows_are_refused_or_sorted(tmp_path: Path) -> None:
    text = "Timestamp,Request tokens,Response tokens\n100,1,1\n98,2,1\n100,3,1\n98,4,1\n"
    path = published_files.put(tmp_path, "back.csv", text)
    with pytest.raises(WorkloadError, match=r"back\.csv, line 3: arrives 2 s before the row above it"):
        list(TimedFile(path, BURSTGPT))
    source = TimedFile(path, BURSTGPT, SKIP)
    assert [request.prompt_tokens for request in source] == [1, 3]
    assert source.counts.damaged == 2
    ordered = list(TimedFile(path, BURSTGPT, Care(sort=True)))
    assert [(request.arrival_s, request.prompt_tokens) for request in ordered] == [(0, 2), (0, 4), (2, 1), (2, 3)]


def test_a_time_before_the_start_is_refused(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "early.csv", "arrival_s,prompt_tokens,output_tokens\n-0.5,1,1\n")
    with pytest.raises(WorkloadError, match=r"line 2: arrives 0\.5 s before the workload's start"):
        list(TimedFile(path, ARRIVALS, Care(sort=True)))


def test_every_iteration_reads_anew(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "a.csv", published_files.ARRIVALS)
    source = TimedFile(path, ARRIVALS)
    assert list(source) == list(source)
    assert source.counts.rows == 3
    assert list(pickle.loads(pickle.dumps(source))) == list(source)


@pytest.mark.parametrize(
    ("layout", "first_line", "row"),
    [
        (ARRIVALS, "arrival_s,prompt_tokens,output_tokens\n", "1,5,6\n"),
        (MOONCAKE, "", '{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[3]}\n'),
    ],
    ids=["csv", "jsonl"],
)
def test_a_trace_larger_than_memory_streams(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, first_line: str, row: str
) -> None:
    """An endless file: what was read is never more than a row ahead of what was given."""
    read = 0

    class Endless:
        """A file in bytes of which lines are read."""

        head = first_line

        def readline(self, size: int = -1) -> bytes:
            nonlocal read
            first, self.head = self.head, ""
            read += not first
            return (first or row).encode()

        def __iter__(self) -> Iterator[bytes]:
            return iter(self.readline, b"")

    @contextmanager
    def open_bytes(path: Path) -> Iterator[Endless]:
        yield Endless()

    monkeypatch.setattr(files_module, "open_bytes", open_bytes)
    for given_so_far, _ in enumerate(TimedFile("endless", layout), 1):
        assert read <= given_so_far + 1
        if given_so_far == 5000:
            break
    assert read >= 5000


HINTED = "arrival_s,prompt_tokens,output_tokens,keep_s,once,pin,session,ended\n"


def test_requests_of_a_table_say_what_of_their_kv_will_be_of_use(tmp_path: Path) -> None:
    rows = "0,5,6,60,,,u-7,\n1,5,6,,true,4,,\n2,5,6,,,,u-7,true\n3,5,6,,,true,,\n4,5,6,,,,,\n"
    path = published_files.put(tmp_path, "a.csv", HINTED + rows)
    assert [request.hints for request in TimedFile(path, ARRIVALS)] == [
        Hints(keep_s=60.0, session="u-7"), Hints(once=True, pin_tokens=4), Hints(session="u-7", ended=True),
        Hints(pin_tokens=ALL_TOKENS), Hints(),
    ]  # fmt: skip


@pytest.mark.parametrize("row", ["0,5,6,-1,,,,", "0,5,6,,maybe,,,", "0,5,6,,,0,,", "0,5,6,,,,a b,", "0,5,6,60,true,,,"])
def test_an_impossible_hint_is_refused_by_line_and_column(tmp_path: Path, row: str) -> None:
    with pytest.raises(WorkloadError, match=r"line 2: .*has an? (keep_s|once|pin|session) that"):
        list(TimedFile(published_files.put(tmp_path, "a.csv", f"{HINTED}{row}\n"), ARRIVALS))


MARKED = "arrival_s,class,prompt_tokens,output_tokens,priority,tpot_deadline_s,ttft_deadline_s\n"


def test_requests_of_a_table_say_what_they_are(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "a.csv", f"{MARKED}0,urgent,5,6,-1,0.05,2\n1,,7,8,,,\n")
    urgent = Request(0.0, 5, 6, class_name="urgent", priority=-1, ttft_s=2.0, tpot_s=0.05)
    assert list(TimedFile(path, ARRIVALS)) == [urgent, Request(1.0, 7, 8)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("0,a,5,6,1.5,,", "line 2: priority is '1.5', should be a whole number"),
        ("0,a,5,6,high,,", "line 2: priority is 'high', should be a number"),
        ("0,a,5,6,1,0,", "line 2: tpot_deadline_s is '0', should be above 0, or empty"),
        ("0,a,5,6,1,,nan", "line 2: ttft_deadline_s is 'nan', should be a number"),
    ],
)
def test_an_impossible_mark_is_refused_by_line_and_column(tmp_path: Path, row: str, reason: str) -> None:
    with pytest.raises(WorkloadError, match=reason):
        list(TimedFile(published_files.put(tmp_path, "a.csv", f"{MARKED}{row}\n"), ARRIVALS))
