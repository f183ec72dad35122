"""One text names a workload: what it means, what is recognised, and what is refused with what would be right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvpolicy.workload import (
    AZURE,
    FORMATS,
    SHIPPED,
    ClosedLoop,
    Request,
    Source,
    TimedFile,
    WorkloadError,
    all_at_once,
    counts_of,
    open_workload,
)
from tests.workload import published_files

FILES = {
    "azure": ("conv.csv", published_files.AZURE_2023, "", 3),
    "burstgpt": ("burst.csv.gz", published_files.BURSTGPT_3, "", 2),
    "arrivals": ("plain.csv", published_files.ARRIVALS, "", 3),
    "lengths": ("lengths.csv", "prompt_tokens,output_tokens\n5,6\n7,8\n", "?rate=2", 2),
    "servegen": ("windows.csv", published_files.SERVEGEN, "", 9),
    "mooncake": ("moon.jsonl.gz", published_files.MOONCAKE, "", 3),
    "agentic": ("agents.jsonl", published_files.AGENTIC, "?users=2", 5),
    "sharegpt": (
        "sg.json",
        '[{"conversations":[{"from":"user","value":"a"},{"from":"gpt","value":"b"}]}]',
        "?think=1",
        1,
    ),
}


def test_every_format_is_tried_here() -> None:
    assert set(FILES) == set(FORMATS)


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_known_by_its_name_or_by_its_columns(tmp_path: Path, kind: str) -> None:
    name, content, options, rows = FILES[kind]
    path = published_files.put(tmp_path, name, content)
    if kind == "servegen":
        options = f"?lengths={published_files.servegen(path)}"
    named, known = open_workload(f"{kind}:{path}{options}"), open_workload(f"{path}{options}")
    assert type(named) is type(known)
    assert list(named) == list(known)
    assert len(list(named)) == rows
    counts = counts_of(named)
    assert counts is not None and counts.requests == rows


def test_options_are_applied_in_their_order(tmp_path: Path) -> None:
    """Of three arrivals at 0, 4 and 5 s, those of the window are 0 and 1 s apart; then 2/s makes that half a second."""
    rows = "arrival_s,prompt_tokens,output_tokens\n0,10,10\n4,20,20\n5,30,30\n9,40,40\n"
    path = published_files.put(tmp_path, "a.csv", rows)
    source = open_workload(f"{path}?window=4-&n=2&rate=2&prompt=0.5&output=2&context=60&seed=5")
    assert list(source) == [Request(0.0, 10, 40), Request(0.5, 1, 59)]
    assert source.seed == 5
    assert source.name == "a.csv,window=4-inf,n=2,speed=2,prompt=0.5,output=2,context=60"
    assert list(open_workload(f"{path}?speed=2&scale=0.1"))[1] == Request(2.0, 2, 2)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_lengths_at_once_are_those_of_all_at_once(name: str) -> None:
    source = open_workload(f"{name}?n=40&context=1024&scale=fit&seed=3")
    assert tuple(source) == all_at_once(SHIPPED[name], 40, 3, 1024).requests
    assert source.source == SHIPPED[name].source


def test_another_arrival_process_leaves_the_lengths() -> None:
    texts = [
        "rate=4",
        "arrivals=even&rate=4",
        "arrivals=gamma&rate=4&variation=2",
        "arrivals=weibull&rate=4&shape=0.7",
        "arrivals=bursts&rate=4&on=2&off=6",
        "arrivals=groups&rate=4&size=12",
        "arrivals=at-once",
    ]
    drawn = [list(open_workload(f"azure-conversation-2023?n=50&seed=1&{text}")) for text in texts]
    for requests in drawn:
        assert [replace(request, arrival_s=0.0) for request in requests] == [
            replace(request, arrival_s=0.0) for request in drawn[0]
        ]
        assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(requests))
    arrivals = {tuple(request.arrival_s for request in requests) for requests in drawn}
    assert len(arrivals) == len(texts)


def test_sessions_are_made_from_lengths() -> None:
    result = list(open_workload("sessions:azure-conversation-2023?n=20&turns=3&think=5&users=4&context=4096&system=64"))
    assert {request.session for request in result} == {f"user-{user}" for user in range(4)}
    assert max(request.total_tokens for request in result) <= 4096
    assert {request.prefix[:4] for request in result} == {(0, 1, 2, 3)}
    first = next(iter(open_workload("sessions:azure-conversation-2023?n=20&turns=3&think=5&rate=0.1")))
    assert (first.session, first.think_s) == ("conversation-0", None)
    assert first.arrival_s > 0


@pytest.mark.parametrize("text", ["turns=1&think=5", "turns=4&think=0"])
def test_users_have_equal_numbers_of_sessions(text: str) -> None:
    """Sessions of one request, and of several without pauses: every user takes an equal share of both."""
    source = open_workload(f"sessions:azure-conversation-2023?n=208&{text}&users=16")
    firsts = {request.prefix[0]: request.session for request in reversed(list(source))}
    assert Counter(firsts.values()) == {f"user-{user}": 13 for user in range(16)}


def test_requests_say_what_they_are() -> None:
    plain = list(open_workload("azure-conversation-2023?n=20&rate=4"))
    text = "azure-conversation-2023?n=20&rate=4&class=urgent&priority=-2&ttft=0.5&tpot=0.05&concurrency=3"
    marked = list(open_workload(text))
    marks = {"class_name": "urgent", "priority": -2, "ttft_s": 0.5, "tpot_s": 0.05, "loop": ClosedLoop(3)}
    assert marked == [replace(request, **marks) for request in plain]


def test_classes_are_joined() -> None:
    urgent = "azure-conversation-2023?n=30&rate=4&class=urgent&priority=-1&ttft=1&seed=3"
    batch = "deepseek-r1?n=20&arrivals=at-once&class=batch&concurrency=4"
    requests = list(open_workload(f"{urgent} + {batch}&seed=4"))
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    by_class = [[request for request in requests if request.class_name == name] for name in ("urgent", "batch")]
    assert by_class[0] == list(open_workload(urgent))
    assert [replace(request, loop=None) for request in by_class[1]] == [
        replace(request, loop=None) for request in open_workload(f"{batch}&seed=4")
    ]
    assert {request.loop for request in requests} == {None, ClosedLoop(4, "1/")}


def test_parts_share_the_whole() -> None:
    parts = "azure-conversation-2023?share=0.25&class=a + deepseek-r1?share=0.75&class=b&arrivals=groups&size=6"
    source = open_workload(f"({parts})?n=4000&rate=8&context=4096&seed=5")
    requests = list(source)
    assert Counter(request.class_name for request in requests) == {"a": 1000, "b": 3000}
    assert max(request.total_tokens for request in requests) <= 4096
    assert len(requests) / requests[-1].arrival_s == pytest.approx(8, rel=0.1)
    alone = list(open_workload("azure-conversation-2023?n=1000&rate=2&context=4096&seed=5&class=a"))
    assert [request for request in requests if request.class_name == "a"] == alone


def test_joined_parts_do_not_draw_the_same() -> None:
    """Equal texts: without seeds of their own each part has another one, which follows from that of the whole."""
    part = "azure-conversation-2023?n=50&rate=4"
    drawn = {}
    for seed in (0, 1):
        requests = list(open_workload(f"({part}&class=a + {part}&class=b)?seed={seed}"))
        drawn |= {(seed, name): {one.arrival_s for one in requests if one.class_name == name} for name in "ab"}
    assert drawn[0, "a"] == {request.arrival_s for request in open_workload(part)}
    assert len(set().union(*drawn.values())) == 200
    assert list(open_workload(f"{part} + {part}")) == list(open_workload(f"({part} + {part})?seed=0"))


def test_options_of_the_whole_are_applied_to_the_whole() -> None:
    part = "azure-conversation-2023?n=50&arrivals=even&rate=4"
    source = open_workload(f"({part} + {part})?n=30&speed=2&class=all&concurrency=5")
    requests = list(source)
    assert len(requests) == 30 and requests[-1].arrival_s == 15 / 8
    assert {(request.class_name, request.loop) for request in requests} == {("all", ClosedLoop(5))}


def test_damaged_rows_are_skipped_when_asked(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "lengths.csv", "prompt_tokens,output_tokens\n5,6\n7\n,8\n0,1\n9,9\n")
    with pytest.raises(WorkloadError, match=r"lengths\.csv, line 3: 1 fields, the header has 2"):
        list(open_workload(f"lengths:{path}"))
    source = open_workload(f"{path}?skip_damaged=true&n=10&scale=2")
    assert [one.prompt_tokens for one in source] == [10, 18]
    counts = counts_of(source)
    assert counts is not None
    assert (counts.rows, counts.requests, counts.damaged) == (5, 2, 3)
    backward = published_files.put(tmp_path, "back.csv", "arrival_s,prompt_tokens,output_tokens\n1,1,1\n0,2,2\n")
    assert [one.prompt_tokens for one in open_workload(f"{backward}?sort=true")] == [2, 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("azure-conversation-202?n=3", r"no workload of that name \(did you mean azure-conversation-2023\?\); known"),
        ("burstgp:a.csv", r"burstgp:a\.csv: no such file, and .* \(did you mean burstgpt:FILE\?\); known are"),
        ("azure/a.csv", r"azure/a\.csv: no such file, and no workload of that name; known are"),
        ("sessions:sharegpt?n=3", r"sessions:sharegpt \(did you mean sharegpt-8k\?\): known lengths"),
        ("nowhere.csv", r"nowhere\.csv: no such file, and no workload of that name; known are azure:FILE \(CSV: TIME"),
        ("azure:nowhere.csv?n=5&speed=x", r"speed=x: should be a number"),
        ("azure-conversation-2023", r"azure-conversation-2023: n: should be given: how many"),
        ("azure-conversation-2023?n=5&n=6", "n is given twice"),
        ("azure-conversation-2023?n", "'n': options are written NAME=VALUE"),
        ("azure-conversation-2023?n=-5", "n=-5: should be a whole number, 0 or more"),
        ("azure-conversation-2023?n=5&scale=fit", "context: should be given for scale=fit"),
        ("azure-conversation-2023?n=5&scale=half", "scale=half: should be a number"),
        ("azure-conversation-2023?n=5&rate=0", "Poisson: rate_per_s is 0.0, should be above 0"),
        ("azure-conversation-2023?n=5&rate=1e-320", "Poisson: rate_per_s is 1e-320, should be above 0, from 1e-09 to"),
        ("azure-conversation-2023?n=5&scale=1e300", "scale is 1e.300, should be above 0, from 1e-09 to 1e.09"),
        ("azure-conversation-2023?n=5&rate=1&speed=1e-320", "speed is 1e-320, should be above 0, from 1e-09"),
        (
            "azure-conversation-2023?n=5&rate=1&arrivals=weibull&shape=0.001",
            "Weibull: shape is 0.001, should be from 0.01",
        ),
        ("azure-conversation-2023?n=5&arrivals=gamma&rate=2", "variation: should be given"),
        ("azure-conversation-2023?n=5&arrivals=poisson", "rate: should be given, above 0, for arrivals=poisson"),
        ("azure-conversation-2023?n=5&arrivals=tides&rate=1", "arrivals=tides: should be at-once, poisson, even"),
        ("azure-conversation-2023?n=5&arrivals=at-once&rate=1", "rate=1: should be left out where everything"),
        ("azure-conversation-2023?n=5&users=3", "users is no option of this workload; those are .*context.*window"),
        ("azure-conversation-2023?n=5&window=5-3", "window=5-3: should be START-END in seconds"),
        ("azure-conversation-2023?n=5&window=5", "window=5: should be START-END in seconds"),
        ("sessions:nobody?n=5", "sessions:nobody: known lengths of messages are azure-conversation-2023"),
        ("sessions:deepseek-r1?n=5&turns=2", "think: should be given"),
        (
            "sessions:deepseek-r1?n=5&turns=2&think=1&users=2&rate=3",
            "users=2: should be or rate and arrivals, not both",
        ),
        ("sessions:deepseek-r1?turns=2&think=1", "n: should be given: how many conversations"),
        ("mooncake:nowhere?skip_damaged=maybe", "skip_damaged=maybe: should be true or false"),
        ("deepseek-r1?n=5&speed=2&rate=nan", "rate=nan: should be a number"),
        ("deepseek-r1?n=5&arrivals=groups&rate=2", "size: should be given: how many requests arrive together"),
        ("deepseek-r1?n=5&arrivals=groups&rate=2&size=0", "Groups: size is 0, should be 1 or more"),
        ("deepseek-r1?n=5&class=a b", "class is 'a b', should be 1 to 64 letters"),
        ("deepseek-r1?n=5&priority=1.5", "priority=1.5: should be a whole number"),
        ("deepseek-r1?n=5&ttft=-1", r"ttft is -1\.0, should be above 0"),
        ("deepseek-r1?n=5&concurrency=0", "concurrency is 0, should be 1 or more"),
        ("deepseek-r1?n=5&share=0.5", "share is no option of this workload"),
        ("deepseek-r1?n=5 + deepseek-r2?n=5", r"part 2 of 2: deepseek-r2: no such file, and no workload of that name"),
        ("deepseek-r1?n=5&x=1 + deepseek-r1?n=5", r"part 1 of 2: deepseek-r1\?n=5&x=1: x is no option"),
        ("deepseek-r1?n=5 + ", "part 2 of 2: it is empty"),
        ("deepseek-r1?n=5 + (sharegpt-8k?n=5 + deepseek-r1?n=5)", "part 2 of 2: .* joins workloads itself"),
        ("(deepseek-r1?n=5 + deepseek-r1?n=5)?turns=3", "turns is no option of this workload"),
        (
            "(deepseek-r1?n=5&share=0.5 + deepseek-r1?share=0.5)?n=9",
            "part 1 of 2: .*n=5: should be left out of a part with a share: it is set for the whole",
        ),
    ],
)
def test_impossible_texts_are_refused(text: str, reason: str) -> None:
    with pytest.raises(WorkloadError, match=reason):
        open_workload(text)


def test_a_file_of_no_known_format_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("a.csv", "n_words,label\n13,1\n"),
        ("b.jsonl", '{"x": 1}\n'),
        ("c", ""),
        ("d", b"\x00\xff\n"),
    ):
        with pytest.raises(WorkloadError, match=r"is of no known format; known are azure:FILE"):
            open_workload(str(published_files.put(tmp_path, name, content)))
    with pytest.raises(WorkloadError, match="is of no known format"):
        open_workload(str(tmp_path))


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "late.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nbroken\n")
    source: Source = open_workload(f"azure:{path}?n=3&speed=2&scale=2")
    with pytest.raises(WorkloadError, match="line 2"):
        list(source)
    assert list(TimedFile(published_files.put(tmp_path, "late.csv", published_files.AZURE_2023), AZURE))
    assert len(list(source)) == 3
