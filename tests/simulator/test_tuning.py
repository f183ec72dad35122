"""Tuning a threshold by simulation, with a simulator that knows its answer."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field

import pytest

from kvpolicy.policy import Policy
from kvpolicy.simulator.base import Run, Server, Sink, Summary, Tail, Times
from kvpolicy.simulator.tuning import tune_threshold
from kvpolicy.workload import Request, Source, Workload

SERVER = Server(block_size=16, block_bytes=1 << 16, device_blocks=100, host_blocks=100)
GRID = (0, 128, 256, 512, 1024, 2048, 1 << 20)
NO_TIMES: Times = None  # type: ignore[assignment]  # the stub asks for none


@dataclass
class Bowl:
    """End-to-end time is least at ``best`` tokens; a workload moves all candidates alike, and each a little."""

    best: int = 512
    depth: float = 1.0
    shared: float = 50.0
    own: float = 0.0
    name: str = "stub"
    asked: list[tuple[int, str, int]] = field(default_factory=list)

    def run(
        self, requests: Source, policy: Policy, server: Server, times: Times, seed: int = 0, sink: Sink | None = None
    ) -> Run:
        self.asked.append((requests.seed, policy.name, seed))
        tokens = int(policy.name.removeprefix("threshold:"))
        away = math.log2((tokens + 1) / (self.best + 1))
        luck = random.Random(requests.seed).random() * self.shared
        mine = random.Random(f"{requests.seed} {tokens}").gauss(0.0, self.own) if self.own else 0.0
        e2e = Tail(100.0 + self.depth * away**2 + luck + mine, 0.0, 0.0)
        return Run(Summary(1, 1.0, e2e, e2e, e2e, {}, 0, 0, 1.0, 1, 0.0), None)


def workload(seed: int) -> Workload:
    return Workload("w", (Request(0.0, 5, 5),), seed)


def test_the_least_is_found_through_noise_that_all_share() -> None:
    found = tune_threshold(Bowl(), workload, SERVER, NO_TIMES, GRID, range(6))
    assert (found.tokens, found.policy, found.ties) == (512, "threshold:512", ())
    beside = {one.tokens: one for one in found.candidates}
    assert beside[1024].beyond_best == pytest.approx(math.log2(1025 / 513) ** 2)
    assert beside[1024].high - beside[1024].low < 1e-9
    assert (beside[512].beyond_best, beside[512].low, beside[512].high) == (0.0, 0.0, 0.0)
    assert [one.tokens for one in found.candidates] == sorted(GRID)


def test_every_candidate_meets_the_same_workloads_and_seeds() -> None:
    bowl = Bowl()
    tune_threshold(bowl, workload, SERVER, NO_TIMES, (0, 512), (3, 5, 7, 9))
    assert sorted(bowl.asked) == sorted((s, f"threshold:{t}", s) for s in (3, 5, 7, 9) for t in (0, 512))


def test_what_cannot_be_told_apart_is_a_tie() -> None:
    found = tune_threshold(Bowl(depth=0.001, own=1.0), workload, SERVER, NO_TIMES, (256, 512, 1024), range(8))
    assert set(found.ties) == {256, 512, 1024} - {found.tokens}
    assert found.text().count("tied") == 2
    assert tune_threshold(Bowl(depth=0.0), workload, SERVER, NO_TIMES, (512, 256), range(4)).tokens == 256


def test_the_winner_is_judged_on_workloads_it_was_not_chosen_by() -> None:
    """Where all are alike, the winner's mean advantage would always seem real on its own workloads."""
    advantages = []
    for start in range(0, 4000, 40):
        bowl = Bowl(depth=0.0, shared=0.0, own=1.0)
        found = tune_threshold(bowl, workload, SERVER, NO_TIMES, GRID, range(start, start + 8))
        others = [one.beyond_best for one in found.candidates if one.tokens != found.tokens]
        advantages.append(sum(others) / len(others))
    assert abs(sum(advantages) / len(advantages)) < 0.2


def test_another_measure_is_what_is_minimised() -> None:
    found = tune_threshold(
        Bowl(), workload, SERVER, NO_TIMES, (0, 512, 1 << 20), range(4), measure=lambda one: -one.e2e_s.mean
    )
    assert found.tokens in (0, 1 << 20)


def test_the_report_goes_to_json() -> None:
    read = json.loads(json.dumps(tune_threshold(Bowl(), workload, SERVER, NO_TIMES, GRID, range(5)).to_dict()))
    assert read["policy"] == "threshold:512" and len(read["candidates"]) == len(GRID)
    assert (read["seeds_to_choose"], read["seeds_to_judge"]) == (3, 2)


@pytest.mark.parametrize(
    ("candidates", "seeds", "message"),
    [
        ((512,), range(4), "candidates are"),
        ((512, 512), range(4), "candidates are"),
        ((512, -1), range(4), "candidates are"),
        ((0, 512), range(3), "seeds are"),
        ((0, 512), (1, 1, 2, 3), "seeds are"),
    ],
)
def test_too_little_to_choose_from_is_refused(candidates: tuple[int, ...], seeds: range, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune_threshold(Bowl(), workload, SERVER, NO_TIMES, candidates, seeds)
