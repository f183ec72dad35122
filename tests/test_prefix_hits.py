"""What is found of prompts, by tier."""

from __future__ import annotations

from kvpolicy import policy
from kvpolicy.prefix_hits import PrefixHits, PrefixHitTally, hit_rates
from kvpolicy.simulator import Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.workload import Request, Workload


def test_admissions_add_up_tier_by_tier() -> None:
    tally = PrefixHitTally()
    tally.admitted(100, 32)
    tally.admitted(50, 0, host_tokens=16, file_tokens=8, loaded_tokens=16)
    assert tally.hits() == PrefixHits(150, 32, 16, 8, 16) and tally.hits().found_tokens == 56
    assert PrefixHits.total([tally.hits(), PrefixHits(10, 1)]) == PrefixHits(160, 33, 16, 8, 16)
    assert PrefixHits.total([]) == PrefixHits()


def test_a_run_counts_the_prompts_found_on_the_device_by_class() -> None:
    """The second request shares three blocks of the first one's four, the third none; nobody is preempted."""
    shared = {"prefix_block_tokens": 16}
    requests = (
        Request(0.0, 64, 4, (1, 2, 3, 4), **shared),
        Request(10.0, 60, 4, (1, 2, 3, 9), **shared, class_name="chat"),
        Request(20.0, 40, 4, (7, 8, 9), **shared, class_name="chat"),
    )
    server, times = Server(16, 1, 100, 0), ConstantTimes(0.01, (0.0,) * 6, 0.0, 1.0)
    summary = Builtin().run(Workload("some", requests, 0), policy.load("always-recompute"), server, times).summary
    assert summary.prefix_hits == PrefixHits(164, 48)
    assert summary.classes["chat"].prefix_hits == PrefixHits(100, 48)
    assert summary.classes["default"].prefix_hits == PrefixHits(64, 0)


def test_only_the_first_admission_counts() -> None:
    """Two requests grow beyond the memory of one and a half: one is preempted and finds its own blocks again."""
    requests = tuple(Request(0.0, 64, 100) for _ in range(2))
    server, times = Server(16, 1, 14, 0), ConstantTimes(0.01, (0.0,) * 6, 0.0, 1.0)
    summary = Builtin().run(Workload("some", requests, 0), policy.load("always-recompute"), server, times).summary
    assert summary.preemptions["recompute"] and summary.prefix_hits == PrefixHits(128)


def test_a_hit_rate_over_the_run_is_that_of_each_part_of_its_time() -> None:
    run = [(0.0, 0.0, 0.0), (5.0, 100.0, 10.0), (10.0, 200.0, 90.0)]
    assert hit_rates([run, run], 5) == [None, None, 0.1, None, 0.8]
    assert hit_rates([run, [(0.0, 0.0, 0.0), (1.0, 300.0, 0.0)]], 2) == [None, 90 / 500]
    assert hit_rates([[(0.0, 0.0, 0.0)]], 1) == [None]
