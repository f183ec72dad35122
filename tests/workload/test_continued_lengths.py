"""Conversations of a table of lengths whose prompts hold the whole history."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.workload import Even, Starting, Think, WorkloadError, open_workload
from kvpolicy.workload.continued_lengths import ContinuedLengths
from tests.workload import published_files

TABLE = "prompt_tokens,output_tokens\n10,5\n20,4\n24,3\n9,9\n18,1\n19,2\n"
"""The third row has a prompt no longer than the second row's prompt and answer, the fourth and fifth likewise."""


def test_a_row_continues_the_one_above_where_its_prompt_is_longer_than_that_and_its_answer(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "lengths.csv.gz", TABLE)
    source = ContinuedLengths(path, Think(3.0, 0.0), Starting(Even(0.01)), block_tokens=8)
    result = list(source)
    assert [(r.session, r.arrival_s, r.think_s, r.prompt_tokens, r.output_tokens) for r in result] == [
        ("conversation-0", 100.0, None, 10, 5),
        ("conversation-0", 103.0, 3.0, 20, 4),
        ("conversation-1", 200.0, None, 24, 3),
        ("conversation-2", 300.0, None, 9, 9),
        ("conversation-3", 400.0, None, 18, 1),
        ("conversation-4", 500.0, None, 19, 2),
    ]
    assert result[1].prefix[:2] == result[0].prefix and len(result[1].prefix) == 3
    assert not set(result[1].prefix) & set(result[2].prefix)
    assert (source.counts.rows, source.counts.requests) == (6, 6)


def test_turns_are_chosen_by_their_windows(tmp_path: Path) -> None:
    """A window has its prompt, and with its answer 24 tokens or fewer; a session without such a turn is left out."""
    path = published_files.put(tmp_path, "lengths.csv", TABLE)

    def chosen(options: str) -> list[tuple[str, int]]:
        rows = open_workload(f"lengths:{path}?think=2&{options}")
        return [(row.session, row.prompt_tokens) for row in rows]

    assert chosen("min_window=18&max_window=24") == [
        ("conversation-0", 20), ("conversation-3", 18), ("conversation-4", 19),
    ]  # fmt: skip
    assert chosen("max_window=18") == [("conversation-0", 10), ("conversation-2", 9)]
    assert chosen("min_turns=2") == [("conversation-0", 10), ("conversation-0", 20)]
    assert chosen("min_window=20&sessions=2") == [("conversation-0", 20), ("conversation-1", 24)]
    (alone,) = open_workload(f"lengths:{path}?think=2&min_window=20&sessions=1")
    assert alone.think_s is None, "the first turn that is left begins its session"
    with pytest.raises(WorkloadError, match="max_window=17: should be at least min_window, 18"):
        chosen("min_window=18&max_window=17")
    with pytest.raises(WorkloadError, match="min_turns=0: should be 1 or more"):
        chosen("min_turns=0")


def test_it_is_named_by_the_pause(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "lengths.csv", TABLE)
    text = f"lengths:{path}?think=2&rate=1&block=4&sessions=2&seed=3"
    assert [request.session for request in open_workload(text)].count("conversation-0") == 2
    assert len(list(open_workload(text))) == 3 and list(open_workload(text)) == list(open_workload(text))
    with pytest.raises(WorkloadError, match="block is 0, should be 1 or more"):
        open_workload(f"lengths:{path}?think=2&block=0")
    with pytest.raises(WorkloadError, match="draw"):
        open_workload(f"lengths:{path}?think=2&draw=5")
