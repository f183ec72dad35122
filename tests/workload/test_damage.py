"""Whatever bytes a file holds: it is read or refused by name; where damage is skipped, every row is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvpolicy.workload import (
    ARRIVALS,
    AZURE,
    BURSTGPT,
    FORMATS,
    MOONCAKE,
    AgentSessions,
    Care,
    LengthTable,
    Request,
    ServeGen,
    ShareGPT,
    Source,
    Think,
    TimedFile,
    WorkloadError,
)
from kvpolicy.workload.continued_lengths import ContinuedLengths
from tests.examples import examples
from tests.snippets import shown
from tests.workload import published_files

SKIP = Care(skip_damaged=True)
JSON_LINES = "".join(json.dumps(row) + "\n" for row in published_files.MOONCAKE)
ANSWERS = '{"prompt": 5, "answer": 6}\n{"prompt": 7, "answer": 8}\n'
AGENT_LINES = "".join(json.dumps(row) + "\n" for row in published_files.AGENTIC)

READERS = {
    "azure": (published_files.AZURE_2023, lambda path, care: TimedFile(path, AZURE, care)),
    "burstgpt": (published_files.BURSTGPT_3, lambda path, care: TimedFile(path, BURSTGPT, care)),
    "arrivals": (published_files.ARRIVALS, lambda path, care: TimedFile(path, ARRIVALS, care)),
    "servegen": (published_files.SERVEGEN, lambda path, care: ServeGen(path, published_files.servegen(path), care)),
    "mooncake": (JSON_LINES, lambda path, care: TimedFile(path, MOONCAKE, care)),
    "lengths": ("prompt_tokens,output_tokens\n5,6\n7,8\n", lambda path, care: LengthTable(path, care=care)),
    "continued lengths": (
        "prompt_tokens,output_tokens\n5,6\n17,8\n",
        lambda path, care: ContinuedLengths(path, Think(1.0), care=care),
    ),
    "agentic": (AGENT_LINES, lambda path, care: AgentSessions(path, care=care)),
    "sharegpt": (json.dumps(published_files.SHAREGPT), lambda path, care: ShareGPT(path, Think(1.0), care=care)),
}

SHOWN = {"answers": (ANSWERS, lambda path, care: shown("Answers")(path, care, 0))}
"""Readers that are shown to contributors."""

EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from(
            (
                *(b"", b"\x00", b"\xff", b'"', b",", b"\n", b"-", b"nan", b"Infinity", b"1e999", b"[", b"}", b"\\"),
                *(b"null", b"9" * 400, b"[" * 3000, b"-1", b"0", b"true", b'{"a":'),
            )
        ),
        st.integers(0, 3),
    ),
    max_size=4,
)


def test_every_format_is_damaged() -> None:
    assert set(READERS) == {*FORMATS, "continued lengths"}


def outcome(source: Source) -> list[Request] | str:
    """The requests, or why there are none."""
    try:
        return list(source)
    except WorkloadError as error:
        return str(error)


@pytest.mark.parametrize("kind", [*READERS, *SHOWN])
@given(edits=EDITS, packed=st.booleans())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(
    tmp_path: Path, kind: str, edits: list[tuple[float, bytes, int]], packed: bool
) -> None:
    text, reader = (READERS | SHOWN)[kind]
    content = text.encode()
    for where, put, instead_of in edits:
        place = int(where * len(content))
        content = content[:place] + put + content[place + instead_of :]
    path = published_files.put(tmp_path, "packed.gz" if packed else "file", content)
    source = reader(path, SKIP)
    strict, lenient = outcome(reader(path, Care())), outcome(source)
    if isinstance(strict, str):
        assert str(path) in strict
    if isinstance(lenient, str):
        # Not a damaged row: nothing in the file says what its rows are.
        assert str(path) in lenient
        assert strict == lenient
        return
    assert isinstance(strict, str) or strict == lenient
    assert isinstance(strict, str) == (source.counts.damaged > 0)
    assert not isinstance(strict, str) or strict == source.counts.first_damage
    assert [request.arrival_s for request in lenient] == sorted(request.arrival_s for request in lenient)
    assert all(request.prompt_tokens >= 1 and request.output_tokens >= 1 for request in lenient)
    if kind not in ("sharegpt", "agentic", "servegen"):
        assert source.counts.rows == source.counts.requests + source.counts.damaged + source.counts.empty
