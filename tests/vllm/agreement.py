"""Both simulators over the same workload, and where their accounts of it differ first."""

from __future__ import annotations

import random
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvpolicy import order, policy
from kvpolicy.events import CACHE_COPY, SITUATION_FIELDS
from kvpolicy.request_marks import NO_HINTS, HintLimits, Hints
from kvpolicy.simulator import ClassSummary, Link, Run, Server, Simulator, Slo, Summary
from kvpolicy.simulator.base import LowerTiers, Scheduling
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.builtin.engine import Engine as BuiltinEngine
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.sinks import MemorySink
from kvpolicy.trace import Trace
from kvpolicy.workload import ClosedLoop, Request, Workload
from kvpolicy_vllm.simulator.controller import number_of
from kvpolicy_vllm.simulator.engine import Engine as VllmEngine
from kvpolicy_vllm.simulator.engine import VllmScheduler

BLOCK, BLOCK_BYTES = 16, 65536
TIMES = ConstantTimes(2e-3, (1e-5, 2e-6, 1e-7, 1e-9, 1e-4, 1e-8), 1e-4, 2e9, 1e-6)
FICKLE = "python:tests.fickle:Fickle"
ORDERS = (
    "mlfq:base=8", "mlfq:base=4,promote=0.2", "las:quantum=8", "srpt:limit", "srpt:lengths", "gittins:quantum=8",
    "urgent", "urgent:quantum=4", "urgent/mlfq:base=8", "reserve:.2", "deadline:ttft=.2,tpot=.01",
    "mlfq:base=8,victims=least-computed", "mlfq:base=4,victims=cheapest", "deadline:ttft=.2,tpot=.01,step=.02,ahead=.1",
)  # fmt: skip
BY_CLASS = (
    "deadline:ttft=.2,tpot=.01", "classes:chat+batch", "classes:chat+default,promote=.2/mlfq:base=8", "srpt:lengths",
    "classes:chat/deadline:ttft=.5,tpot=.02,quantum=4", "deadline:ttft=.2,tpot=.01,ahead=.02",
)  # fmt: skip
"""Orders that heed classes or deadlines."""
SLO = Slo(tpot_s=0.02)
"""For requests that bring no deadline of this kind."""
SAME_S = 1e-9
"""Times are sums of the same numbers in another order."""

Scheduled = list[dict[int, int]]
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Account:
    """What an engine said it did."""

    run: Run
    scheduled: Scheduled
    """By step that computes: tokens by request."""

    def rows(self, table: str) -> Rows:
        assert isinstance(self.run.trace, Trace)
        return [_plain(row) for row in self.run.trace.rows(table)]


def drawn_workload(seed: int, count: int = 60) -> Workload:
    """Prompts that share prefixes or not, sessions that think, priorities, classes, arrivals alone and together."""
    rng, marks = random.Random(f"agreement {seed}"), random.Random(f"marks {seed}")
    size = rng.choice((7, 16, 32))
    now_s, made = 0.0, []
    for number in range(count):
        now_s += rng.choice((0.0, 0.0, rng.expovariate(100.0)))
        head = (
            tuple(rng.choice((1, 2)) * 10 + depth for depth in range(rng.randint(0, 6))) if rng.random() < 0.6 else ()
        )
        session = f"s{number % 5}" if rng.random() < 0.3 else ""
        made.append(
            Request(
                arrival_s=now_s,
                prompt_tokens=rng.randint(1, 300),
                output_tokens=rng.randint(1, 120),
                prefix=head,
                prefix_block_tokens=size if head else 0,
                session=session,
                think_s=rng.choice((None, 0.0, 0.05)) if session else None,
                priority=rng.randrange(3),
                class_name=marks.choice(("default", "urgent")),
                ttft_s=marks.choice((None, 0.5)),
            )
        )
    return Workload(f"drawn {seed}", tuple(made), seed)


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, a server and a policy, drawn from a seed; :func:`drawn` draws evenly over what is asked about."""

    seed: int
    work: Workload
    server: Server
    policy: str
    times: ConstantTimes


def drawn(seed: int, count: int = 60) -> Case:
    """Memory for the longest request and a few more; the host pool large, tiny or none; the link fast or slow."""
    rng = random.Random(f"case {seed}")
    scheduling: Scheduling = "priority" if seed % 2 else "fcfs"
    server = Server(
        block_size=BLOCK,
        block_bytes=BLOCK_BYTES,
        device_blocks=rng.randint(30, 110),
        host_blocks=(1000, 1000, 25, 0)[rng.randrange(4)],
        token_budget=rng.choice((48, 64, 256, 2048)),
        max_running=rng.choice((4, 16, 48)),
        max_model_len=1024,
        prefix_caching=seed // 2 % 2 == 1,
        scheduling=scheduling,
        asynchronous=seed // 4 % 2 == 1,
        watermark=0.05 if seed % 3 == 1 else 0.0,
        segment_bytes=rng.choice((None, 8192)),
        link=rng.choice((Link(), Link(slowdown=0.2), Link(overlapped=False), Link(slowdown=0.1, saves_wait=False))),
    )
    spec = rng.choice(("always-recompute", "always-swap", "always-swap", "threshold:100", "random:0.5", FICKLE))
    times = replace(TIMES, copy_bytes_per_s=rng.choice((2e9, 2e8, 2e7)))
    return Case(seed, drawn_workload(seed, count), server, spec, times)


def looped(seed: int, count: int = 60) -> Case:
    """The case of :func:`drawn`, most of whose requests are in one of two closed loops. In half of
    the cases all wait from the start."""
    rng, case = random.Random(f"loops {seed}"), drawn(seed, count)
    loops = (ClosedLoop(rng.randint(1, 6), "a"), ClosedLoop(rng.randint(1, 6), "b"), None)
    at_once = rng.random() < 0.5
    made = tuple(
        replace(request, arrival_s=0.0 if at_once else request.arrival_s, loop=rng.choice(loops))
        for request in case.work
    )
    return replace(case, work=replace(case.work, requests=made))


def crowded(seed: int, count: int = 40) -> Case:
    """Requests that come one by one, always swapped, over a link so slow that others come while one is away."""
    rng = random.Random(f"crowded {seed}")
    server = Server(
        block_size=BLOCK,
        block_bytes=BLOCK_BYTES,
        device_blocks=rng.randint(40, 60),
        host_blocks=1000,
        token_budget=rng.choice((64, 256, 2048)),
        max_running=rng.choice((16, 48)),
        max_model_len=1024,
        prefix_caching=seed % 2 == 1,
        asynchronous=seed // 2 % 2 == 1,
        link=rng.choice((Link(), Link(slowdown=0.2), Link(saves_wait=False))),
    )
    now_s, made = 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(40.0)
        made.append(Request(now_s, rng.randint(20, 200), rng.randint(40, 200)))
    times = replace(TIMES, copy_bytes_per_s=rng.choice((2e7, 5e6)))
    return Case(seed, Workload(f"crowded {seed}", tuple(made), seed), server, "always-swap", times)


def ordered(seed: int, count: int = 60, spec: str = "") -> Case:
    """A case of :func:`crowded`, :func:`drawn` or :func:`looped` in turn, served by that order, or another in turn."""
    case = (crowded, drawn, looped)[seed % 3](seed, count)
    named = order.load(spec or ORDERS[seed % len(ORDERS)], allow_python=True)
    served = replace(case.server, scheduling="fcfs", order=named)
    return replace(case, server=served)


def prompted(seed: int, count: int = 24) -> Case:
    """Long prompts that a small budget cuts into many chunks, in memory that is ample or short in turn, by an order
    under which who comes goes first."""
    case, rng = crowded(seed // 2, count), random.Random(f"prompted {seed}")
    served = replace(
        case.server,
        device_blocks=900 if seed % 2 else rng.randint(60, 90),
        token_budget=rng.choice((24, 48)),
        max_running=16,
        order=order.load(rng.choice(("mlfq:base=4", "las:quantum=8", "gittins:quantum=8", "urgent"))),
    )
    made = tuple(
        replace(request, prompt_tokens=rng.choice((20, 200, 400)), priority=rng.randrange(3)) for request in case.work
    )
    return replace(case, work=replace(case.work, requests=made), server=served)


def classed(seed: int, count: int = 60) -> Case:
    """A case of :func:`ordered` whose requests have drawn classes and deadlines, served by an order that heeds them."""
    case, rng = ordered(seed, count), random.Random(f"classes {seed}")
    made = tuple(
        replace(
            request,
            class_name=rng.choice(("default", "chat", "batch")),
            ttft_s=rng.choice((None, 0.02, 0.2, 2.0)),
            tpot_s=rng.choice((None, 0.002, 0.01, 0.1)),
        )
        for request in case.work
    )
    served = replace(case.server, order=order.load(BY_CLASS[seed % len(BY_CLASS)]))
    return replace(case, work=replace(case.work, requests=made), server=served)


def hinted(seed: int, count: int = 60) -> Case:
    """A case of :func:`cached` whose requests say what of their KV will be of use, served by an order that heeds that
    in every other case."""
    case, rng = cached(seed, count), random.Random(f"hinted {seed}")
    said = (
        NO_HINTS, Hints(keep_s=0.3), Hints(keep_s=2.0, session="a"), Hints(once=True), Hints(once=True, pin_tokens=48),
        Hints(pin_tokens=64, keep_s=0.5), Hints(session="a"), Hints(session="a", ended=True), Hints(session="b"),
    )  # fmt: skip
    made = tuple(replace(request, hints=rng.choice(said)) for request in case.work)
    assert case.server.cache is not None
    limits = rng.choice((HintLimits(), HintLimits(0.5, 0.3, 0.2, 0.1)))
    server = replace(case.server, cache=replace(case.server.cache, hints=limits))
    if seed % 2:
        server = replace(server, scheduling="fcfs", order=order.load("hints"))
    return replace(case, work=replace(case.work, requests=made), server=server)


CACHES = ("lru", "cost", "s3fifo", "arc", "lfu")


def cached(seed: int, count: int = 60) -> Case:
    """A case of :func:`drawn` with prefix caching, whose prompts come back, and a cache in host memory of a few of
    them, by another caching policy in turn."""
    rng, case = random.Random(f"cached {seed}"), drawn(seed, count)
    size = rng.choice((7, 16, 32))
    made = []
    for request in case.work:
        head, depth = rng.randint(1, 8), rng.randint(0, 300 // size)
        made.append(
            replace(
                request,
                prefix=tuple(head * 100 + at for at in range(depth)),
                prefix_block_tokens=size if depth else 0,
            )
        )
    server = replace(
        case.server,
        prefix_caching=True,
        host_blocks=rng.choice((25, 60, 200)),
        cache=LowerTiers(CACHES[seed % len(CACHES)]),
    )
    policy = rng.choice(("always-swap", "always-swap", "threshold:100", "always-recompute", PRICED))
    return replace(case, work=replace(case.work, requests=tuple(made)), server=server, policy=policy)


PRICED = "python:tests.priced:Priced"


def priced(spec: str, seed: int, count: int = 60) -> Case:
    """A case of :func:`crowded` or :func:`drawn` in turn, with an order that asks what displacing somebody costs, and
    a policy that can tell."""
    case = (crowded, drawn)[seed % 2](seed, count)
    served = replace(case.server, scheduling="fcfs", order=order.load(spec))
    return replace(case, server=served, policy=PRICED)


def short_of_slots(seed: int, count: int = 60) -> Case:
    """A case of :func:`crowded`, or one of three of :func:`drawn`, with host memory for a few requests and a policy for
    which the copies of short requests are worth the most."""
    case = (crowded, drawn)[seed % 2](seed, count)
    return replace(case, server=replace(case.server, host_blocks=12), policy="python:tests.priced:short_first")


def returned_before_newcomers(told: Account) -> set[int]:
    """Requests that ran before others again that were admitted while they were away."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    away: dict[int, range] = {}
    found = set()
    for number, step in enumerate(told.scheduled):
        order = list(step)
        away |= {name: range(last[name] + 1, number) for name in order if last.get(name, number) < number - 1}
        for name in order:
            first.setdefault(name, number)
            last[name] = number
        found |= {
            name
            for index, name in enumerate(order)
            if name in away and any(first[other] in away[name] for other in order[index + 1 :])
        }
    return found


def displaced(told: Account) -> int:
    """Preemptions by which the order of service made room."""
    return sum(row["cause"] == "displaced" for row in told.rows("decisions"))


def account(engine: str, case: Case) -> Account:
    """vLLM's scheduler goes by the rules of the version that is installed, whatever the case says."""
    simulator: Simulator = Builtin(leap=False)
    server = case.server
    if engine != "builtin":
        simulator = VllmScheduler()
        server = replace(server, rules=simulator.rules)
    with _watched() as scheduled:
        run = simulator.run(
            case.work, policy.load(case.policy, allow_python=True), server, case.times, case.seed, MemorySink(), slo=SLO
        )
    return Account(run, scheduled)


@contextmanager
def _watched() -> Iterator[Scheduled]:
    """What either engine schedules, step by step."""
    seen: Scheduled = []
    begin_step, schedule = BuiltinEngine.begin_step, VllmEngine._schedule

    def builtin(self: BuiltinEngine) -> Any:
        step = begin_step(self)
        assert not step.batch_requests, "the plain mode lists everybody"
        if step.scheduled:
            seen.append({live.number: tokens for live, tokens in step.scheduled.items()})
        return step

    def vllm(self: VllmEngine) -> Any:
        flight = schedule(self)
        if flight.computes:
            seen.append({number_of(name): n for name, n in flight.output.num_scheduled_tokens.items()})
        return flight

    BuiltinEngine.begin_step, VllmEngine._schedule = builtin, vllm  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        BuiltinEngine.begin_step, VllmEngine._schedule = begin_step, schedule  # type: ignore[method-assign]


def differences(one: Account, other: Account) -> list[str]:
    """The first difference of each kind; empty where the engines agree."""
    events = [
        _first_difference("scheduled tokens, step", _in_order(one.scheduled), _in_order(other.scheduled)),
        _rows_differ("steps", _steps(one), _steps(other)),
        _rows_differ("decisions", _decisions(one), _decisions(other)),
        _rows_differ("outcomes", _outcomes(one), _outcomes(other)),
        _rows_differ("displacements", _displacements(one), _displacements(other)),
        _rows_differ("requests", _sorted(one.rows("requests"), "request"), _sorted(other.rows("requests"), "request")),
        _rows_differ("transfers", _transfers(one), _transfers(other)),
        _rows_differ("summary", [_summary(one)], [_summary(other)]),
    ]
    return [difference for difference in events if difference]


def _in_order(scheduled: Scheduled) -> list[list[tuple[int, int]]]:
    return [list(step.items()) for step in scheduled]


def differences_in_crowds(seeds: list[int]) -> list[str]:
    """Of each :func:`crowded` case; the built-in simulator has the rules of one version whatever runs beside it."""
    cases = [crowded(seed) for seed in seeds]
    return [
        f"seed {case.seed}: {difference}"
        for case in cases
        for difference in differences(account("builtin", case), account("vllm", case))
    ]


def _steps(told: Account) -> Rows:
    """Steps that compute. Engines that wait look around a different number of times."""
    rows = [row for row in told.rows("steps") if row["scheduled_tokens"]]
    for row in rows:
        row["repeated"] = sorted((_plain(part) for part in row["repeated"]), key=lambda part: sorted(part.items()))
        del row["step"]
    return rows


def _decisions(told: Account) -> Rows:
    expected = (
        *SITUATION_FIELDS,
        "preemption_id",
        "request",
        "generation",
        "probabilities",
        "chosen",
        "executed",
        "reason",
    )
    return _sorted([{name: row[name] for name in expected} for row in told.rows("decisions")], "preemption_id")


def _displacements(told: Account) -> Rows:
    """With one column for each value of a candidate, and without numbers of steps."""
    rows = []
    for row in told.rows("displacements"):
        candidates = row.pop("candidates")
        del row["step"], row["displacement_id"]
        values = {
            f"candidate {at}, {name}": value
            for at, candidate in enumerate(candidates)
            for name, value in candidate.items()
        }
        rows.append(row | values)
    return rows


def _outcomes(told: Account) -> Rows:
    """Without ``engine_s``, which the built-in engine knows and a server's trace leaves to
    :mod:`kvpolicy.attribution.offline`, and without numbers of steps."""
    left_out = ("engine_s", "others_delay_s", "first_step", "last_step")
    rows = [{name: value for name, value in row.items() if name not in left_out} for row in told.rows("outcomes")]
    return _sorted(rows, "preemption_id")


def _transfers(told: Account) -> Rows:
    rows = told.rows("transfers")
    for row in rows:
        del row["step"]
    return sorted(rows, key=lambda row: (row["preemption_id"], row["direction"], row["start_s"]))


def _summary(told: Account) -> dict[str, Any]:
    summary = told.run.summary
    names = ("recomputed_tokens", "moved_bytes")
    assert summary.headroom is not None
    to_win = {f"headroom {name}": value for name, value in summary.headroom.to_dict().items()}
    by_class = [_service(told, f"class {name} ") for name, told in summary.classes.items()]
    found = {f"hits {name}": value for name, value in asdict(summary.prefix_hits).items()}
    return dict(ChainMap(_service(summary), *by_class, to_win, found, dict(summary.preemptions))) | {
        name: getattr(summary, name) for name in names
    }


def _service(told: Summary | ClassSummary, prefix: str = "") -> dict[str, Any]:
    """The service that requests got, by the name of the figure."""
    tails = {
        f"{prefix}{name} {part}": getattr(getattr(told, name), part)
        for name in ("e2e_s", "ttft_s", "itl_s", "longest_gap_s", "e2e_per_token_s")
        for part in ("mean", "p50", "p99")
    }
    names = (
        "requests", "throughput_tok_s", "makespan_s", "fairness", "deadline_requests", "slo_share", "goodput_req_s",
        "steady_tok_s", "longest_pause_s",
    )  # fmt: skip
    return tails | {f"{prefix}{name}": getattr(told, name) for name in names}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Without the name of the engine core, which is in every preemption's id too."""
    by_name = {name: value for name, value in row.items() if name != "core"}
    if "preemption_id" in by_name:
        of = str(by_name["preemption_id"])
        by_name["preemption_id"] = 0 if of == CACHE_COPY else int(of.rsplit("-", 1)[1])
    return by_name


def _sorted(rows: Rows, by: str) -> Rows:
    return sorted(rows, key=lambda row: int(row[by]))


def _first_difference(what: str, one: list[Any], other: list[Any]) -> str:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"{what} {at}: {a} and {b}"
    return "" if len(one) == len(other) else f"{what}: {len(one)} and {len(other)}"


def _rows_differ(what: str, one: Rows, other: Rows) -> str:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        for name in a.keys() | b.keys():
            if not _same(a.get(name), b.get(name)):
                return f"{what} {at}, {name}: {a.get(name)} and {b.get(name)}; in {a} and {b}"
    return "" if len(one) == len(other) else f"{what}: {len(one)} and {len(other)} rows"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= SAME_S * max(1.0, abs(a)) or (a != a and b != b)
    return bool(a == b)
