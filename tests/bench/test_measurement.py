"""Measuring ends in time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from kvpolicy_vllm.bench.job import Job as MeasuringJob
from kvpolicy_vllm.bench.measurement import Measurement, Window
from kvpolicy_vllm.bench.states import Span, State, check_states, grid


class TimedDriver:
    """Windows take ten seconds each, by its own clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.windows: list[tuple[str, str]] = []

    def record(self, row: dict[str, Any]) -> None:
        """Nobody reads it."""

    def measure(self, state: State, arm: str, repeat: int, attempt: int = 0, pause: int = 1) -> Window:
        self.now_s += 10.0
        if repeat >= 0:
            self.windows.append((state.state_id, arm))
        return Window(state.state_id, arm, repeat, state.cause, 0, 1, 10.0, None, "")

    def undisturbed(self, state: State, repeat: int, steps: int) -> Window:
        self.now_s += 1.0 + 0.001 * repeat
        return Window(state.state_id, "undisturbed", repeat, state.cause, 0, 1, 1.0 + 0.001 * repeat, None, "noise")


def test_measuring_ends_in_time_and_leaves_no_state_half_measured() -> None:
    span = Span(64, 256, 3, 1000, 1024)
    states = grid(32, 8, span, random.Random(0))
    job = MeasuringJob({}, states, check_states(32, span), 2, 1, 0, 0, max_s=160.0)
    timed: Any = TimedDriver()
    Measurement(timed, job, lambda values: None, lambda: timed.now_s).run()
    assert 130 < timed.now_s < 200
    measured = {state for state, _ in timed.windows}
    assert 2 <= len(measured) < 8 and len(timed.windows) == 3 * len(measured)
    everything: Any = TimedDriver()
    Measurement(everything, replace(job, max_s=None), lambda values: None, lambda: everything.now_s).run()
    assert len(everything.windows) == 3 * 8 + 2 * 2 * 2


def test_what_time_was_too_short_for_is_said() -> None:
    """By state. Those that come first are measured first, in their order."""
    span = Span(64, 256, 3, 1000, 1024)
    states, checks = grid(32, 8, span, random.Random(0)), check_states(32, span)
    job = MeasuringJob({}, states, checks, 2, 1, 0, 0, end_s=160.0, in_order=True)
    timed: Any = TimedDriver()
    measurement = Measurement(timed, job, lambda values: None, lambda: timed.now_s)
    measurement.run()
    measured = list(dict.fromkeys(state for state, _ in timed.windows))
    assert measured == [state.state_id for state in states[: len(measured)]] and 2 <= len(measured) < 8
    assert measurement.left_out == {
        **{state.state_id: 1 for state in states[len(measured) :]},
        **{check.state_id: 2 for check in checks},
    }
    assert 30 * len(measured) <= measurement.measured_s <= 30 * len(measured) + 1


def test_only_what_is_wanted_is_measured() -> None:
    span = Span(64, 256, 3, 1000, 1024)
    states, checks = grid(32, 8, span, random.Random(0)), check_states(32, span)
    wanted = {states[1].state_id: 2, states[6].state_id: 1, checks[1].state_id: 3}
    timed: Any = TimedDriver()
    job = MeasuringJob({}, states, checks, 2, 1, 0, 0, wanted=wanted)
    measurement = Measurement(timed, job, lambda values: None, lambda: timed.now_s)
    measurement.run()
    assert Counter(state for state, _ in timed.windows) == {
        states[1].state_id: 6,
        states[6].state_id: 3,
        checks[1].state_id: 6,
    }
    assert not measurement.left_out
