"""First and last tokens, as if every request were looked at after every step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.plugin.token_times import TokenTimes
from tests.plugin.engine import Engine, Request

Times = tuple[float | None, float | None]


class OneByOne:
    """What is to come out: looks at everybody."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.times: dict[str, Times] = {}

    def look_at(self, request: Request, now: float) -> None:
        if request.num_output_tokens > self.tokens.get(request.request_id, 0):
            self.tokens[request.request_id] = request.num_output_tokens
            first, _ = self.times.get(request.request_id, (None, None))
            self.times[request.request_id] = (now if first is None else first, now)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_times_equal_those_of_a_scan_over_all_requests(seed: int, depth: int) -> None:
    plain, tokens, result = OneByOne(), TokenTimes(), dict[str, Times]()

    def ended(request: Request, now: float) -> None:
        plain.look_at(request, now)
        life = tokens.ended(request, now)
        assert life is not None and life.output_tokens == request.num_output_tokens
        result[request.request_id] = life.first_token_s, life.last_token_s

    def done(output: Any, requests: dict[str, Request], now: float) -> None:
        tokens.step(output, requests, now)
        for name in output.num_scheduled_tokens:
            if name in requests:
                plain.look_at(requests[name], now)

    engine = Engine(
        random.Random(seed),
        depth,
        arrived=lambda request, now: tokens.arrived(request.request_id, now),
        ended=ended,
        preempted=lambda request: tokens.preempted.append(request.request_id),
        done=done,
    )
    engine.run(150)
    assert len(result) > 20 and any(plain.times.values())
    assert result == {name: plain.times.get(name, (None, None)) for name in result}


def test_an_unknown_request_is_ignored() -> None:
    tokens = TokenTimes()
    assert tokens.ended(Request("stranger", 1, 1), 1.0) is None
    assert tokens.of("stranger") is None


def test_a_request_whose_arrival_was_missed_hides_no_pause_of_another() -> None:
    tokens = TokenTimes()
    tokens.arrived("r", 0.0)
    request, stranger = Request("r", 4, 10), Request("stranger", 4, 10)
    requests = {"r": request, "stranger": stranger}

    def step(now: float, scheduled: Request, new: bool) -> None:
        scheduled.num_output_tokens += 1
        output: Any = SimpleNamespace(
            num_scheduled_tokens={scheduled.request_id: 1},
            scheduled_new_reqs=[SimpleNamespace(req_id=scheduled.request_id)] if new else [],
        )
        tokens.step(output, requests, now)

    step(1.0, request, True)
    step(2.0, stranger, True)
    step(3.0, stranger, False)
    life = tokens.ended(request, 4.0)
    assert life is not None and (life.first_token_s, life.last_token_s, life.output_tokens) == (1.0, 1.0, 1)


def test_requests_that_decode_are_not_looked_at() -> None:
    """Their number of tokens is not even asked for until they end."""

    class Silent:
        request_id = "r"

        @property
        def num_output_tokens(self) -> int:
            raise AssertionError("looked at")

    tokens = TokenTimes()
    engine = Engine(random.Random(0), 1)
    request = Request("r", 4, 10)
    engine.requests["r"] = request
    engine.running.append(request)
    tokens.arrived("r", 0.0)
    while not request.num_output_tokens:
        flight = engine.schedule()
        request.num_output_tokens += len(flight.sampled)
        request.placeholders = 0
        tokens.step(flight.output, engine.requests, 1.0)
    flight = engine.schedule()
    while "r" not in flight.output.num_scheduled_tokens:
        flight = engine.schedule()
    silent: Any = Silent()
    tokens.step(flight.output, {"r": silent}, 2.0)
    request.num_output_tokens = 2
    life = tokens.ended(request, 3.0)
    assert life is not None and (life.first_token_s, life.last_token_s, life.output_tokens) == (1.0, 2.0, 2)
