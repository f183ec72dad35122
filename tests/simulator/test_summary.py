"""The figures of a run: the rate of its output in the steady part, and each class by itself."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy import policy
from kvpolicy.latency import MAX_POINTS, OutputCurve
from kvpolicy.simulator import Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.workload import Request, Workload


def test_the_steady_rate_leaves_out_the_ramp_and_the_tail() -> None:
    """One token a second at first and last, ten a second in between."""
    curve = OutputCurve()
    for second in range(1, 41):
        curve.add(100.0 + second, 1 if second <= 10 or second > 30 else 10)
    assert curve.tokens == 220
    # 55 tokens were out half way through the 15th second, 165 half way through the 26th.
    assert curve.steady_tok_s(100.0) == pytest.approx(110 / 11)


def test_a_step_is_spread_over_its_time() -> None:
    """The quarter and the three quarters lie within single steps."""
    curve = OutputCurve()
    curve.add(2.0, 8)
    curve.add(6.0, 8)
    assert curve.steady_tok_s(0.0) == pytest.approx(8 / (4.0 - 1.0))
    assert np.isnan(OutputCurve().steady_tok_s(0.0))


def test_a_long_run_is_kept_in_bounded_memory() -> None:
    rng = np.random.default_rng(0)
    ends_s, tokens = np.cumsum(rng.exponential(0.02, 100_000)), rng.integers(1, 200, 100_000)
    curve = OutputCurve()
    for end_s, count in zip(ends_s.tolist(), tokens.tolist(), strict=True):
        curve.add(end_s, count)
    assert len(curve._counts) <= MAX_POINTS
    in_bulk = OutputCurve()
    for begin in range(0, 100_000, 700):
        in_bulk.extend(ends_s[begin : begin + 700].tolist(), 30)
    one_by_one = OutputCurve()
    for end_s in ends_s.tolist():
        one_by_one.add(end_s, 30)
    assert vars(in_bulk) == vars(one_by_one) and in_bulk.tokens == 3_000_000
    counts = np.cumsum(tokens)
    low_s, high_s = np.interp((counts[-1] / 4, 3 * counts[-1] / 4), counts, ends_s)
    assert curve.steady_tok_s(0.0) == pytest.approx(counts[-1] / 2 / (high_s - low_s), rel=1e-3)


def test_each_class_has_a_steady_rate_and_a_longest_pause_of_its_own() -> None:
    """A batch request of 400 tokens runs alone for a while, then beside urgent ones of 2 tokens each, 10 a second."""
    batch = Request(0.0, 8, 400, class_name="batch")
    urgent = [Request(1.0 + 0.1 * number, 8, 2, class_name="urgent") for number in range(20)]
    server, times = Server(16, 1, 200, 0), ConstantTimes(0.01, (0.0,) * 6, 0.0, 1.0)
    both, alone = (
        Builtin().run(Workload("some", requests, 0), policy.load("always-recompute"), server, times).summary
        for requests in ((batch, *urgent), (batch,))
    )
    assert both.classes["batch"].steady_tok_s == pytest.approx(100.0, rel=0.02)
    assert both.classes["urgent"].steady_tok_s == pytest.approx(20.0, rel=0.2)
    assert both.steady_tok_s > both.classes["batch"].steady_tok_s
    assert alone.classes["batch"].steady_tok_s == alone.steady_tok_s
    pauses = [one.longest_pause_s for one in both.classes.values()]
    assert both.longest_pause_s == max(pauses) >= both.longest_gap_s.p99
