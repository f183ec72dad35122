"""Texts that join workloads: how they are taken apart, what each part gets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.workload import WorkloadError
from kvpolicy.workload.join_text import JoinText, divided, files_of, join_of, with_seed
from kvpolicy.workload.options import Options
from tests.workload import published_files


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("a + b", JoinText(("a", "b"), "")),
        ("a?n=5&class=x + sessions:b?n=6  +  c.csv", JoinText(("a?n=5&class=x", "sessions:b?n=6", "c.csv"), "")),
        ("(a + b)?n=5&rate=2", JoinText(("a", "b"), "n=5&rate=2")),
        ("(a?n=1 + b)", JoinText(("a?n=1", "b"), "")),
        ("a(1).csv + b", JoinText(("a(1).csv", "b"), "")),
        ("a + (b + c)", JoinText(("a", "(b + c)"), "")),
        ("a", None),
        ("a+b", None),
        ("a?rate=1e+5", None),
        ("(a)?n=5", None),
        ("(a).csv", None),
    ],
)
def test_texts_are_taken_apart(text: str, joined: JoinText | None) -> None:
    assert join_of(text) == joined


def test_a_file_whose_name_holds_a_plus_sign_is_a_file(tmp_path: Path) -> None:
    path = published_files.put(tmp_path, "a + b.csv", published_files.ARRIVALS)
    assert join_of(f"{path}?n=2") is None
    assert join_of(f"arrivals:{path}") is None
    assert files_of(f"arrivals:{path}?n=2") == (path,)


def test_files_of_all_parts_are_found(tmp_path: Path) -> None:
    one = published_files.put(tmp_path, "one.csv", published_files.ARRIVALS)
    other = published_files.put(tmp_path, "other.csv", published_files.ARRIVALS)
    assert files_of(f"(arrivals:{one}?n=1 + azure-conversation-2023?n=5 + {other})?seed=3") == (one, other)
    assert files_of(f"{one}?n=1 + {other}?n=1") == (one, other)
    assert files_of("azure-conversation-2023?n=5") == ()


@pytest.mark.parametrize(
    ("text", "seeded"),
    [
        ("a", "a?seed=7"),
        ("a?n=5", "a?n=5&seed=7"),
        ("a?seed=1", "a?seed=1"),
        ("a?n=5 + b?seed=2", "(a?n=5 + b?seed=2)?seed=7"),
        ("(a + b)?n=5", "(a + b)?n=5&seed=7"),
        ("(a + b)?seed=1", "(a + b)?seed=1"),
    ],
)
def test_a_text_is_given_a_seed_unless_it_has_one(text: str, seeded: str) -> None:
    assert with_seed(text, 7) == seeded


def options(tail: str) -> Options:
    return Options(f"x?{tail}", tail)


def test_shares_divide_the_whole() -> None:
    parts = [options("share=0.2"), options("share=0.5"), options("share=0.3")]
    assert divided(options("n=11&rate=4"), parts) == [
        {"n": "2", "rate": "0.8"},
        {"n": "6", "rate": "2.0"},
        {"n": "3", "rate": "1.2"},
    ]
    assert divided(options("n=11"), [options("n=1"), options("n=2")]) == [{}, {}]


@given(st.integers(0, 10**6), st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
def test_shares_of_a_number_add_up_to_it(count: int, weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    given = divided(options(f"n={count}"), [options(f"share={share!r}") for share in shares])
    numbers = [int(values["n"]) for values in given]
    assert sum(numbers) == count
    assert all(abs(number - count * share) <= 1 + 1e-6 for number, share in zip(numbers, shares, strict=True))


@pytest.mark.parametrize(
    ("whole", "parts", "message"),
    [
        ("n=5", ("share=0.5", "n=3"), r"x\?n=3: share: should be given for every part, or for none"),
        (
            "n=5",
            ("share=0.5", "share=0.4"),
            "share=0.4: should be such that all shares add up to 1; they .* 0.9",
        ),
        ("n=5", ("share=0", "share=1"), "share=0: should be above 0 and below 1"),
        ("seed=5", ("share=0.5", "share=0.5"), "n or rate: should be given for the whole"),
    ],
)
def test_impossible_shares_are_refused(whole: str, parts: tuple[str, ...], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        divided(options(whole), list(map(options, parts)))
