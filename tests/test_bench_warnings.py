"""What is said first of a bench: conversations that differ by more than a tie, servers on other cores, and chats
without conversations left."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.bench_warnings import TIE_GAPS, ran_out, tie_gap, unequal_cores, warnings, wrong_conversations
from kvpolicy_vllm.bench.exactness import TIE_GAP


def bench(dtype: str, *gaps: float | None, **cores: list[str]) -> dict[str, Any]:
    different = [{"conversation": "a", "turn": 0, "token": 3, "gap": gap} for gap in gaps]
    return {
        "dtype": dtype, "arms": [{"name": "first"}, {"name": "second"}],
        "runs": [run(name, 0, some) for name, some in cores.items()],
        "comparisons": [{"tokens": {"second": {"tokens": 40, "different": different}}}],
    }  # fmt: skip


def run(arm: str, round_: int, cores: list[str], prefix_tokens: int = 40) -> dict[str, Any]:
    return {"arm": arm, "round": round_, "cell": {"prefix_tokens": prefix_tokens}, "cores": cores}


@pytest.mark.parametrize(
    ("dtype", "ties", "wrong"), [("float32", 5e-5, 2e-4), ("float16", 2**-6, 2**-5), ("bfloat16", 2**-3, 2**-2)]
)
def test_a_tie_is_as_wide_as_the_rounding_of_the_servers_dtype(dtype: str, ties: float, wrong: float) -> None:
    """Two logits of some twenty that are one step of their dtype apart are a tie, two steps are none."""
    assert wrong_conversations(bench(dtype, ties)) == 0 and warnings(bench(dtype, ties)) == []
    assert wrong_conversations(bench(dtype, ties, wrong, None)) == 2
    (said,) = warnings(bench(dtype, wrong))
    assert said.startswith("TOKENS DIFFER: 1 conversations are not those of first") and "taken" not in said


@pytest.mark.parametrize("dtype", ["", "float8"])
def test_where_nobody_knows_the_dtype_it_is_said_what_is_taken_for_it(dtype: str) -> None:
    assert tie_gap(bench(dtype)) == TIE_GAPS["float32"] == TIE_GAP
    (said,) = warnings(bench(dtype, 0.05))
    assert said.endswith("Nobody knows what the servers compute in: it is taken to be float32.")
    earlier = {name: value for name, value in bench("", 0.05).items() if name != "dtype"}
    assert warnings(earlier) == [said], "nor does a bench of an earlier version"


def test_cores_that_differ_are_named_by_arm() -> None:
    assert warnings(bench("float32", first=["0-1"], second=["0-1"])) == []
    found = bench("float32", first=["0", "0-1"], second=["0-1"])
    assert unequal_cores(found) == {"first": ["0", "0-1"], "second": ["0-1"]}
    (said,) = warnings(found)
    assert said.startswith("UNEQUAL CORES: ") and said.endswith("first: 0, 0-1; second: 0-1")
    assert unequal_cores(bench("float32", first=["0"], second=[])) == {}, "nobody knows the second one's"


def test_cores_are_compared_round_by_round() -> None:
    """Two arms that change places have the same cores over all rounds, and others in each; two that both get others
    have the same in each. So with the settings of one round, which a resumed bench may serve by two starts."""
    swapped = bench("float32") | {"runs": [
        run("first", 0, ["0-1"]), run("second", 0, ["0-1"]),
        run("first", 1, ["0"]), run("second", 1, ["1"]),
        run("first", 2, ["1"]), run("second", 2, ["0"]),
    ]}  # fmt: skip
    assert unequal_cores(swapped) == {"first": ["0"], "second": ["1"]}
    (said,) = warnings(swapped)
    assert "Rounds: 2, 3." in said and said.endswith("first: 0; second: 1")
    moved = bench("float32") | {"runs": [
        run("first", 0, ["0"]), run("second", 0, ["0"]), run("first", 1, ["1"]), run("second", 1, ["1"]),
        run("first", 2, ["1"], 80), run("second", 2, ["1"], 80), run("second", 2, ["0"]),
    ]}  # fmt: skip
    assert unequal_cores(moved) == {} and warnings(moved) == []


def test_runs_that_had_no_conversations_left_are_named() -> None:
    runs = [
        run("second", 1, ["0"]) | {"ran_out_s": 395.44}, run("first", 1, ["0"]) | {"ran_out_s": 384.35},
        run("first", 0, ["0"]) | {"ran_out_s": None}, run("second", 0, ["0"]),
    ]  # fmt: skip
    found = bench("float32") | {"runs": runs}
    assert ran_out(found) == [(1, "first", 384.35), (1, "second", 395.44)]
    (said,) = warnings(found)
    assert said.startswith("OUT OF CONVERSATIONS: ") and "more --conversations" in said
    assert said.endswith("After round 2, first: 384 s; round 2, second: 395 s")
    assert ran_out(bench("float32")) == [] == warnings(bench("float32", first=["0"]))
