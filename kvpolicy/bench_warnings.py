"""What is to be said first of a bench over HTTP: tokens of its arms that differ, servers that had other cores, and
chats that had no conversations left.

``results`` are what ``bench.json`` holds. The report and the page of a bench have the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLOAT32 = "float32"
TIE_GAPS: Mapping[str, float] = {FLOAT32: 1e-4, "float16": 0.02, "bfloat16": 0.15}
"""A first difference is a tie where the two best log-probabilities are closer than this, by the dtype that a model
computes in. Sums depend on the batch. In float32, log-probabilities do by up to 2e-5. In the other two each logit is
rounded itself, and one between 16 and 32 to a multiple of 2**-6 or 2**-3: two that are one step apart are as good as
equal."""
Results = Mapping[str, Any]


def tie_gap(results: Results) -> float:
    """That of the dtype in which the servers compute; float32's where nobody knows it."""
    return TIE_GAPS.get(results.get("dtype", ""), TIE_GAPS[FLOAT32])


def wrong_conversations(results: Results) -> int:
    """Conversations whose tokens differ from the first arm's where the two best log-probabilities are not close, or
    nobody knows how close they are."""
    compared = [one for comparison in results["comparisons"] for one in comparison["tokens"].values()]
    gaps = [at.get("gap") for one in compared for at in one["different"]]
    return sum(gap is None or gap >= tie_gap(results) for gap in gaps)


def unequal_cores(results: Results) -> dict[str, list[str]]:
    """By arm, the cores that threads of its server may run on, in the first round in which these are not the same for
    all arms at one setting; empty where they always are, or nobody knows."""
    return next(iter(_unequal_rounds(results).values()), {})


def _unequal_rounds(results: Results) -> dict[int, dict[str, list[str]]]:
    """The rounds in which arms had other cores than each other at one setting, and which cores each had there."""
    found: dict[tuple[int, str], dict[str, list[str]]] = {}
    for run in results["runs"]:
        if run.get("cores"):
            found.setdefault((run["round"], str(run["cell"])), {})[run["arm"]] = sorted(run["cores"])
    unequal: dict[int, dict[str, list[str]]] = {}
    for (round_, _), by_arm in sorted(found.items()):
        if len({tuple(cores) for cores in by_arm.values()}) > 1:
            unequal.setdefault(round_, by_arm)
    return unequal


def ran_out(results: Results) -> list[tuple[int, str, float]]:
    """Round, arm and seconds after which somebody had no conversation left, of each run of a chat in which that was
    before its seconds were over; runs of an earlier version do not say."""
    found = [
        (run["round"], run["arm"], run["ran_out_s"]) for run in results["runs"] if run.get("ran_out_s") is not None
    ]
    return sorted(found)


def warnings(results: Results) -> list[str]:
    """A sentence or two for each; none where there is nothing to say."""
    said = []
    if wrong := wrong_conversations(results):
        known = results.get("dtype", "") in TIE_GAPS
        taken = "" if known else f" Nobody knows what the servers compute in: it is taken to be {FLOAT32}."
        said.append(
            f"TOKENS DIFFER: {wrong} conversations are not those of {results['arms'][0]['name']}, and no tie of "
            f"log-probabilities explains it. Times of other answers cannot be compared.{taken}"
        )
    if unequal := _unequal_rounds(results):
        rounds = ", ".join(str(round_ + 1) for round_ in unequal)
        by_arm = "; ".join(f"{name}: {', '.join(cores)}" for name, cores in unequal_cores(results).items())
        said.append(
            f"UNEQUAL CORES: ratios compare these as well. Rounds: {rounds}. What threads of each arm's server may run "
            f"on in the first of these: {by_arm}"
        )
    if ended := ran_out(results):
        runs = "; ".join(f"round {round_ + 1}, {arm}: {after_s:.0f} s" for round_, arm, after_s in ended)
        said.append(
            "OUT OF CONVERSATIONS: somebody had none left before the run's seconds were over, and its rates are those "
            f"until then. Give more --conversations, or a workload with more sessions. After {runs}"
        )
    return said
