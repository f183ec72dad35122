"""Orders of service in the built-in simulator: by hand, and with leaps as step by step."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest

from kvpolicy import policy
from kvpolicy.fields import WrongValue
from kvpolicy.order import Order, OrderError, Progress, Rank, View, load
from kvpolicy.simulator import Builtin, Server
from kvpolicy.simulator.builtin import ordering
from kvpolicy.simulator.builtin.live_request import LiveRequest
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.trace import Trace
from kvpolicy.workload import Request, Workload
from tests.simulator.random_runs import engine_of
from tests.simulator.worlds import LINEAR, SECONDS, random_workload, run, workload
from tests.vllm.setups import RAISING

SLOW = ConstantTimes(2e-2, (1e-5, 2e-6, 1e-7, 1e-9, 1e-4, 1e-8), 1e-4, 2e9, 1e-6)
"""About 25 ms a step."""
TEN = Server(block_size=4, block_bytes=1, device_blocks=10, host_blocks=40, prefix_caching=False, token_budget=64)


def served_by(spec: str, server: Server = TEN) -> Server:
    return replace(server, order=load(spec))


def displaced(trace: Trace) -> list[str]:
    return [row["request"] for row in trace.rows("decisions") if row["cause"] == "displaced"]


def times(trace: Trace, name: str) -> dict[str, float]:
    return {row["request"]: row[name] for row in trace.rows("requests")}


def batch(count: int) -> list[Request]:
    """Each takes five blocks in the end, and runs for some steps."""
    return [Request(0.0, 16, 4, priority=1) for _ in range(count)]


@pytest.mark.parametrize(("prompt", "victims"), [(16, ["1"]), (20, ["1"]), (24, ["1", "0"])])
def test_as_many_are_displaced_as_are_needed_and_who_needs_it_comes_in_at_once(prompt: int, victims: list[str]) -> None:
    """Two hold ten of ten blocks, five each, when the urgent one comes; it gets its first token in the very step before
    which they lose them."""
    source = workload(*batch(2), Request(1.5, prompt, 1, priority=0))
    stock, trace = (
        run(source, server, "always-swap", SECONDS)[1]
        for server in (replace(TEN, scheduling="priority"), served_by("urgent"))
    )
    assert displaced(stock) == [] and displaced(trace) == victims
    at_s = next(row["time_s"] for row in trace.rows("decisions"))
    first_s = times(trace, "first_token_s")["2"]
    step = next(row for row in trace.rows("steps") if row["start_s"] + row["duration_s"] == first_s)
    assert step["start_s"] == at_s and first_s < times(stock, "first_token_s")["2"]


def test_blocks_that_would_be_taken_over_are_no_gain() -> None:
    """The urgent one needs three blocks beside the three of its prefix, which the last one holds alone. That one's five
    are not enough, as the three of the prefix are among them."""
    first, last = batch(2)
    shared = {"prefix": (1, 2, 3), "prefix_block_tokens": 4}
    source = workload(first, replace(last, **shared), Request(1.5, 24, 1, **shared))
    trace = run(source, replace(served_by("urgent"), prefix_caching=True), "always-recompute", SECONDS)[1]
    rows = [row for row in trace.rows("decisions") if row["cause"] == "displaced"]
    assert [row["request"] for row in rows] == ["1", "0"] and len({row["time_s"] for row in rows}) == 1


def test_a_leap_ends_where_room_is_looked_for_again() -> None:
    order = ordering.Ordering(load("urgent"), TEN, lambda live: None)
    runs, waits = (LiveRequest(n, Request(0.0, 16, 4, priority=1 - n), 0.0) for n in range(2))
    order.arrived(runs)
    order.admitted(runs)
    assert order.quiet_steps(3, [runs]) == inf
    order.arrived(waits)
    order.waiting.append(waits)
    assert order.quiet_steps(3, [runs]) <= 0 and order.looks([runs])
    order.lookout.back_off.missed(5)
    assert order.quiet_steps(3, [runs]) == 3 and not order.looks([runs])
    order.lookout.came_in(False, 7)
    assert order.quiet_steps(3, [runs]) == 5


def test_nobody_is_displaced_in_vain() -> None:
    """The urgent one needs more than its victims hold: those of its own priority keep theirs."""
    source = workload(Request(0.0, 16, 4), *batch(1), Request(1.5, 28, 1))
    assert displaced(run(source, served_by("urgent"), "always-swap", SECONDS)[1]) == []


def test_nobody_is_displaced_where_there_is_room() -> None:
    source = workload(*batch(1), Request(1.5, 16, 1))
    assert displaced(run(source, served_by("urgent"), "always-swap", SECONDS)[1]) == []


@pytest.mark.parametrize(("quantum", "waits"), [(0, False), (2, False), (3, True)])
def test_a_quantum_is_served_before_anybody_is_displaced(quantum: int, waits: bool) -> None:
    """Two tokens are out when it comes."""
    source = workload(*(replace(request, output_tokens=8) for request in batch(2)), Request(2.0, 16, 1))
    server = replace(served_by(f"urgent:quantum={quantum}"), device_blocks=12)
    trace = run(source, server, "always-swap", SECONDS)[1]
    assert displaced(trace) == ["1"]
    assert (times(trace, "first_token_s")["2"] > 4.0) == waits


def test_who_waits_for_too_long_goes_first_for_a_quantum() -> None:
    """A long request among short ones that never end to come: without promotion it is through after all of them."""
    short = [Request(0.5 * number, 8, 6) for number in range(60)]
    long = Request(0.0, 8, 24)
    source = Workload("stream", (long, *short), 0)
    ends = {
        spec: times(run(source, served_by(spec), "always-swap", SECONDS)[1], "last_token_s")["0"]
        for spec in ("mlfq:base=4", "mlfq:base=4,promote=10")
    }
    assert ends["mlfq:base=4,promote=10"] < 0.8 * ends["mlfq:base=4"]


def test_a_reserve_stays_free_of_the_less_urgent() -> None:
    """Four of ten blocks: a second one of priority 1 has to wait, one of priority 0 does not."""
    low = run(workload(*batch(2)), served_by("reserve:.4"), times=SECONDS)[1]
    assert times(low, "first_token_s")["1"] > times(low, "last_token_s")["0"]
    high = run(workload(*batch(1), Request(1.5, 16, 4)), served_by("reserve:.4"), times=SECONDS)[1]
    assert times(high, "first_token_s")["1"] < times(high, "last_token_s")["0"]


def test_an_order_is_told_what_displacing_would_cost() -> None:
    prices: list[float | None] = []

    class Asking(type(load("urgent"))):  # type: ignore[misc]
        def victims(self, waiting: Any, running: Any, view: Any) -> Any:
            prices.extend(view.price(one) for one in running)
            return super().victims(waiting, running, view)

    source = workload(*batch(2), Request(1.5, 16, 1))
    run(source, replace(TEN, order=Asking()), "always-swap", SECONDS)
    assert prices == [None, None], "this policy predicts nothing"


@pytest.mark.parametrize(
    "spec",
    ["mlfq:base=8", "mlfq:base=8,promote=1", "las:quantum=16", "gittins:quantum=8", "srpt:limit", "srpt:lengths",
     "urgent", "urgent:quantum=8,promote=2", "urgent/mlfq:base=8", "deadline:ttft=.5,tpot=.02", "reserve:.2",
     "priority", "mlfq:base=8,victims=least-computed", "mlfq:base=8,victims=cheapest,worth=price"],
)  # fmt: skip
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_leaps_change_nothing(spec: str, asynchronous: bool) -> None:
    recomputes = "python:tests.priced:Priced" if "price" in spec else "always-recompute"
    for prefix_caching, name in ((False, "always-swap"), (True, recomputes)):
        server = Server(
            16, 1 << 16, 60, 300, token_budget=256, max_running=24, prefix_caching=prefix_caching,
            asynchronous=asynchronous, order=load(spec),
        )  # fmt: skip
        source = long_outputs(len(spec), 60)
        leaping, stepping = (
            Builtin(leap=leap).run(source, policy.load(name, allow_python=True), server, LINEAR, 1).summary
            for leap in (True, False)
        )
        for field in ("e2e_s", "ttft_s", "preemptions", "recomputed_tokens", "moved_bytes", "steps", "makespan_s"):
            assert getattr(leaping, field) == pytest.approx(getattr(stepping, field)), (field, prefix_caching)
        assert sum(stepping.preemptions.values()) > 0 or spec == "reserve:.2"


@pytest.mark.parametrize("spec", ["mlfq:base=16,promote=1e308", "deadline:ttft=1e308", "deadline:tpot=1e308", "own"])
def test_times_far_in_the_future_are_never(spec: str) -> None:
    """Next to them a step is nothing: the number of steps until then is no number that is counted."""
    order = Later("later") if spec == "own" else load(spec)
    server = Server(16, 1 << 16, 60, 300, token_budget=256, max_running=24, order=order)
    leaping, stepping = (
        run(long_outputs(3, 20), server, "always-swap", LINEAR, leap=leap)[0].summary for leap in (True, False)
    )
    assert leaping.e2e_s == stepping.e2e_s and leaping.preemptions == stepping.preemptions


@dataclass
class Later(Order):
    name: str
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((request.prompt_tokens,), until_s=1e308)


def long_outputs(seed: int, count: int) -> Workload:
    """So long that most steps are leapt over."""
    rng, at_s, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(8.0)
        made.append(Request(at_s, rng.randint(8, 100), rng.randint(4, 400), priority=rng.randrange(3)))
    return Workload(f"long {seed}", tuple(made), seed)


def test_nothing_is_kept_of_who_is_through() -> None:
    server = Server(16, 1 << 16, 40, 300, order=load("mlfq:base=8,promote=1"))
    engine = engine_of(random_workload(4, 200, 100.0), server, "always-swap")
    engine.run()
    kept = engine.ordering
    assert isinstance(kept, ordering.Ordering)
    assert not len(kept.ranks) and not kept.by_number and not kept._number_of
    assert not len(kept.waiting) and not len(kept.holding)
    assert kept.ranks.events < 50


def test_fcfs_ranks_nothing() -> None:
    for spec, scheduling in (("fcfs", "fcfs"), ("fcfs", "priority"), ("priority", "priority")):
        server = replace(TEN, order=load(spec), scheduling=scheduling)  # type: ignore[arg-type]
        assert engine_of(workload(*batch(1)), server, "always-swap").ordering is None
    with pytest.raises(WrongValue, match="ranks requests itself: scheduling should be fcfs"):
        replace(TEN, order=load("urgent"), scheduling="priority")


def test_an_error_in_an_order_is_raised_where_nobody_is_served() -> None:
    """A server goes on without; a simulation would report what nobody asked for."""
    order: Order = load(RAISING, allow_python=True)
    with pytest.raises(OrderError, match=r"^order raising\S*: rank failed with KeyError: 0 \(.*unruly.py, line \d+\)$"):
        run(workload(*batch(3)), replace(TEN, order=order), "always-swap", SECONDS)


@pytest.mark.parametrize("spec", ["mlfq:base=16", "gittins:quantum=16", "srpt:lengths,quantum=16"])
def test_no_stream_pauses_for_much_longer_than_until_promotion(spec: str) -> None:
    """More comes than is served: without promotion long ones pause for longer than that."""
    rng, at_s, made = random.Random(0), 0.0, []
    for _ in range(200):
        at_s += rng.expovariate(4.0)
        made.append(Request(at_s, rng.randint(20, 200), min(1500, round(rng.lognormvariate(5.0, 1.2)) + 1)))
    longest_s = []
    for order in (spec, f"{spec},promote=30"):
        server = Server(16, 1 << 16, 300, 2000, max_running=256, order=load(order))
        served = Builtin().run(Workload("overload", tuple(made), 0), policy.load("always-swap"), server, SLOW, 0)
        longest_s.append(served.summary.longest_pause_s)
    assert longest_s[0] > 35.0 and longest_s[1] <= 1.1 * 30
