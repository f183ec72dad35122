"""When latency has exploded, and which rates a sweep tries."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kvpolicy_vllm.bench.rate_sweep import MAX_RATES, MAX_STEP, next_rate, sustained, why_exploded


def run(
    p50: float | None, finished: float | None = 1.0, offered: float | None = 1.0, failed: int = 0
) -> dict[str, Any]:
    errors = {"HTTP 503: full": failed} if failed else {}
    return {"ttft_s": {"p50": p50}, "finished_s": finished, "offered_s": offered, "errors": errors, "rows": [{}] * 20}


def served_by(capacity: float, rate: float) -> list[dict[str, Any]]:
    """A server that serves up to its capacity at once."""
    return [run(0.1 if rate <= capacity else 5.0, min(rate, capacity), rate)]


def swept(first: float, *capacities: float) -> list[float]:
    served: dict[float, dict[str, list[dict[str, Any]]]] = {}
    while (rate := next_rate(first, 10.0, served)) is not None:
        assert rate not in served
        served[rate] = {str(capacity): served_by(capacity, rate) for capacity in capacities}
    return list(served)


def test_what_counts_as_exploded() -> None:
    low = [run(0.1)]
    assert not why_exploded([run(0.9)], low, 10.0)
    assert "1.1e+01 times" not in why_exploded([run(1.1)], low, 10.0)
    assert why_exploded([run(1.1)], low, 10.0) == "the median time to first token is 11 times that at the lowest rate"
    assert why_exploded([run(0.1, 0.7)], low, 10.0) == "requests are finished at 70% of the rate at which they arrive"
    assert not why_exploded([run(0.1, 0.7), run(0.1, 1.0)], low, 10.0), "by the mean over rounds"
    assert why_exploded([run(None)], low, 10.0) == "nothing was answered"
    assert not why_exploded([run(0.1, None)], low, 10.0), "a short run does not say how fast it finished"
    assert not why_exploded([run(0.1, 0.9, failed=4)], low, 10.0)
    assert why_exploded([run(0.1, None, failed=15)], low, 10.0) == "25% of the requests are answered"


def test_a_sweep_doubles_until_all_have_exploded_and_then_fills_in() -> None:
    rates = swept(0.5, 3.0)
    assert rates == [0.5, 1.0, 2.0, 4.0, 2.83]
    assert swept(0.5, 3.0, 9.0)[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0], "until the last arm has"
    filled = sorted(swept(0.5, 3.0, 9.0))
    assert all(high / low <= MAX_STEP for low, high in pairwise(filled) if 2.0 <= low < 9.0)


def test_a_sweep_that_begins_too_high_goes_down() -> None:
    rates = swept(16.0, 3.0)
    assert rates[:4] == [16.0, 8.0, 4.0, 2.0] and rates[4:] == [2.83]
    assert len(swept(16.0, 0.0)) == MAX_RATES, "it ends where nothing is served at all"


def test_the_highest_rate_before_the_first_explosion() -> None:
    rates = (1.0, 2.0, 4.0, 8.0)
    runs = {rate: served_by(3.0, rate) for rate in rates}
    assert sustained(runs, 10.0) == (2.0, 4.0, "requests are finished at 75% of the rate at which they arrive")
    assert sustained({1.0: served_by(3.0, 1.0)}, 10.0) == (1.0, None, "")
    assert sustained({4.0: [run(None)]}, 10.0)[0] is None
