"""Tokens compared with those of the unmodified engine: ties and faults."""

from __future__ import annotations

from kvpolicy_vllm.bench.exactness import Comparison, compare


def test_comparison_counts_ties_and_faults() -> None:
    reference, gaps = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1.0, 1.0, 1.0], [1.0, 5e-5, 1.0], [1.0, 1.0, 5e-5]]
    assert compare(reference, gaps, reference, "same") == Comparison(9)
    tied = compare(reference, gaps, [[1, 2, 3], [4, 0, 0], [7, 8, 9]], "tied")
    assert (tied.ties, tied.wrong, tied.exact) == (1, (), True)
    wrong = compare(reference, gaps, [[1, 0, 3], [4, 5, 6], [7, 8, 9]], "wrong")
    assert wrong.wrong == ("wrong, request 0: token 1 is 0, should be 2",)
    assert not wrong.exact
    short = compare(reference, gaps, [[1, 2], [4, 5, 6], [7, 8, 9]], "short")
    assert "3 tokens expected, 2 generated" in short.wrong[0]


def test_ties_are_allowed_one_in_fifty_thousand() -> None:
    assert Comparison(200_000, 4).exact
    assert not Comparison(200_000, 5).exact
    assert Comparison(10, 1).exact
    assert (Comparison(60_000, 1) + Comparison(60_000, 2)).ties == 3
