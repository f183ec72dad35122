"""Files line by line: fields of a row, damaged rows, streams that break off."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kvpolicy.workload import ARRIVALS, AZURE, Care, Request, TimedFile, WorkloadError
from kvpolicy.workload.files import DamagedRow, block_ids, cells, lines, tokens, whole
from tests.workload import published_files

SKIP = Care(skip_damaged=True)


def test_missing_files_columns_and_headers_are_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no\.csv: cannot be read: No such file"):
        list(TimedFile(tmp_path / "no.csv", AZURE))
    path = published_files.put(tmp_path, "some.csv", "TIMESTAMP,ContextTokens\n")
    with pytest.raises(WorkloadError, match=r"line 1: column GeneratedTokens is missing; the columns are TIMESTAMP, "):
        list(TimedFile(path, AZURE, SKIP))
    path = published_files.put(tmp_path, "twice.csv", "arrival_s,prompt_tokens,prompt_tokens,output_tokens\n")
    with pytest.raises(WorkloadError, match="column prompt_tokens is there twice"):
        list(TimedFile(path, ARRIVALS))
    with pytest.raises(WorkloadError, match=r"empty\.csv: is empty, should begin with columns arrival_s"):
        list(TimedFile(published_files.put(tmp_path, "empty.csv", ""), ARRIVALS))


def test_a_broken_gzip_stream_gives_what_came_before_only_when_asked(tmp_path: Path) -> None:
    rows = [f"{number},{number % 7 + 1},1\n" for number in range(5000)]
    whole = gzip.compress("".join(["arrival_s,prompt_tokens,output_tokens\n", *rows]).encode())
    for name, damaged in (("cut", whole[: len(whole) // 2]), ("sum", whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])):
        path = published_files.put(tmp_path, name, damaged)
        with pytest.raises(WorkloadError, match=rf"{name}, line \d+: cannot be read on"):
            list(TimedFile(path, ARRIVALS))
        source = TimedFile(path, ARRIVALS, SKIP)
        result = list(source)
        assert 1000 < len(result) == source.counts.requests <= 5000
        assert result == [Request(float(number), number % 7 + 1, 1) for number in range(len(result))]
        # Cut off, it may end inside a row, which is damaged too.
        assert source.counts.damaged in (1, 2)
        assert "cannot be read on" in source.counts.first_damage or source.counts.damaged == 2


@pytest.mark.parametrize(("value", "number"), [(7, 7), ("7", 7), ("7.0", 7), (7.0, 7), ("0", 0)])
def test_whole_numbers(value: object, number: int) -> None:
    assert whole(value, "tokens") == number


@pytest.mark.parametrize("value", [-1, "-1", 1.5, True, "1_0", "", None, float("inf"), 2**53, [1]])
def test_a_wrong_whole_number_is_a_damaged_row(value: object) -> None:
    with pytest.raises(DamagedRow, match=r"^tokens is .*, should be a (whole )?number"):
        whole(value, "tokens")


def test_a_number_of_tokens_is_one_or_more() -> None:
    assert tokens("1", "prompt") == 1
    with pytest.raises(DamagedRow, match="prompt is 0, should be 1 or more"):
        tokens("0", "prompt")


def test_lines_are_numbered_as_in_the_file_without_mark_and_blanks(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "marked.csv", b"\xef\xbb\xbfa,b\n\n1,2\r\n\xff,3\n")
    assert list(lines(path)) == [(1, "a,b"), (3, "1,2"), (4, "\ufffd,3")]


def test_quoted_cells_hold_commas() -> None:
    assert cells('1,"a,b",2') == ["1", "a,b", "2"]
    with pytest.raises(DamagedRow, match="not a CSV row"):
        cells('1,"a')


@pytest.mark.parametrize("value", ["1", [1, -1], [True], [1.0]])
def test_ids_of_blocks_are_whole_numbers(value: object) -> None:
    assert block_ids([3, 0], "hash_ids") == (3, 0)
    with pytest.raises(DamagedRow, match=r"hash_ids is .*, should be a list of whole numbers"):
        block_ids(value, "hash_ids")


def test_ids_of_blocks_fit_in_64_bits() -> None:
    with pytest.raises(DamagedRow, match=f"should be under {2**64}"):
        block_ids([2**64], "hash_ids")
