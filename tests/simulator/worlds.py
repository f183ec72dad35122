"""Small servers and workloads, by hand and by chance."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from kvpolicy import policy
from kvpolicy.simulator import Builtin, ConstantTimes, Link, MemorySink, Run, Server
from kvpolicy.trace import Trace
from kvpolicy.workload import ClosedLoop, Request, Workload

SECONDS = ConstantTimes(fixed_s=1.0, per_part_s=(0.01, 0.0, 0.0, 0.0, 0.0, 0.0), copy_latency_s=0.5)
"""A second per step, a hundredth per token, half a second per copy."""
LINEAR = ConstantTimes(fixed_s=4e-3, per_part_s=(2e-5, 1e-5, 1e-7, 3e-8, 0.0, 0.0), copy_latency_s=2e-3)
SMALL = Server(block_size=4, block_bytes=1, device_blocks=5, host_blocks=8, prefix_caching=False)


def workload(*requests: Request) -> Workload:
    return Workload("by hand", tuple(requests), 0)


def run(
    source: Workload, server: Server, name: str = "always-recompute", times: ConstantTimes = LINEAR, **how: Any
) -> tuple[Run, Trace]:
    outcome = Builtin(wall=lambda: 0.0, **how).run(
        source, policy.load(name, allow_python=True), server, times, seed=1, sink=MemorySink()
    )
    assert outcome.trace is not None
    return outcome, outcome.trace


def random_workload(seed: int, count: int, rate_per_s: float) -> Workload:
    """Every third seed has requests in a closed loop."""
    rng, marks = random.Random(seed), random.Random(f"marks {seed}")
    loop = ClosedLoop(marks.randint(1, 5)) if seed % 3 == 0 else None
    at_s, made = 0.0, []
    for number in range(count):
        at_s += rng.expovariate(rate_per_s)
        shared = rng.choice(((), (1,), (1, 2), (1, 3, 5), (4, 2)))
        session = rng.choice(("", "", "a", "b"))
        made.append(
            Request(
                at_s,
                rng.randint(1, 160),
                rng.randint(1, 70),
                prefix=shared,
                prefix_block_tokens=10 if shared else 0,
                session=session,
                think_s=0.1 if session and number % 2 else None,
                priority=rng.randrange(3),
                class_name=marks.choice(("default", "urgent")),
                loop=marks.choice((loop, loop, None)),
            )
        )
    return Workload(f"random {seed}", tuple(made), seed)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Workload, Server, str]:
    """A workload, a server with little memory, a policy."""
    size = draw(st.sampled_from((1, 4, 16)))
    server = Server(
        block_size=size,
        block_bytes=1 << 20,
        device_blocks=-(-230 // size) + draw(st.integers(0, 12)),
        host_blocks=draw(st.sampled_from((0, 40, 2000))),
        token_budget=draw(st.sampled_from((7, 64, 256))),
        max_running=draw(st.sampled_from((3, 40))),
        prefix_caching=draw(st.booleans()),
        scheduling=draw(st.sampled_from(("fcfs", "priority"))),
        asynchronous=draw(st.booleans()),
        link=Link(draw(st.booleans()), draw(st.sampled_from((0.0, 0.2))), draw(st.booleans())),
    )
    source = random_workload(draw(st.integers(0, 10**6)), draw(st.integers(1, 25)), draw(st.sampled_from((5.0, 500.0))))
    return source, server, draw(st.sampled_from(("always-recompute", "always-swap", "random:0.5", "threshold:90")))
