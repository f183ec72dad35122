"""What preemptions cost where requests have several block tables: attributed live and from the trace alike."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median

import pytest

pytest.importorskip("vllm")

from kvpolicy import policy
from kvpolicy.attribution.offline import attribute, common_step_time
from kvpolicy.simulator import Link
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.sinks import MemorySink
from kvpolicy.trace import Trace, from_rows, with_core
from kvpolicy_vllm.plugin.versions import OLDEST_WITH_TABLES, engine_version
from kvpolicy_vllm.simulator.engine import VllmScheduler
from kvpolicy_vllm.simulator.model_layers import ModelLayers
from tests.attribution.test_streaming import live_costs
from tests.vllm.test_model_layers import HYBRID, STATEFUL, WORK, server_of

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.skipif(engine_version() < OLDEST_WITH_TABLES, reason="several block tables are served from 0.32 on"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # vLLM's own
]

TIMES = ConstantTimes(2e-3, (5e-5, 1e-5, 1e-7, 1e-8, 2e-4, 0.0), 1e-3, 1e8)


@pytest.fixture(scope="module", params=[HYBRID, STATEFUL], ids=["windows", "states"])
def trace(request: pytest.FixtureRequest) -> Trace:
    """Recorded on a virtual clock. Both options are drawn; costs are left to be attributed."""
    layers: ModelLayers = request.param
    server = server_of(layers, prefix_caching=True, link=Link(overlapped=True, slowdown=0.3))
    work = replace(WORK, requests=tuple(replace(WORK.requests[i % 24], arrival_s=0.01 * i) for i in range(96)))
    done = VllmScheduler(layers=layers).run(work, policy.load("random:0.5"), server, TIMES, 0, MemorySink()).trace
    assert done is not None
    return done


def test_live_costs_are_those_of_the_trace(trace: Trace) -> None:
    model = common_step_time([trace])
    assert model is not None
    live = live_costs(trace, model)
    offline = {row["preemption_id"]: row["engine_s"] for row in attribute(trace).rows("outcomes")}
    known = {key for key, engine_s in offline.items() if engine_s is not None}
    assert len(known) > 40 and live.keys() >= known
    pairs = [(live[key].engine_s, offline[key]) for key in known]
    mean_s = fmean(there for _, there in pairs)
    assert mean_s > 0
    assert abs(fmean(here - there for here, there in pairs)) < 0.1 * mean_s
    assert median(abs(here - there) for here, there in pairs) < 0.1 * mean_s


def test_every_swap_that_lacks_its_save_has_no_cost(trace: Trace) -> None:
    """All blocks of several tables are saved at once, whether or not they are hashed."""
    swaps = {row["preemption_id"] for row in trace.rows("decisions") if row["executed"] == "swap"}
    (core,) = trace.headers
    rows = [
        {k: v for k, v in row.items() if k != "core"} for row in trace.rows("transfers") if row["direction"] == "load"
    ]
    without = Trace(trace.headers, dict(trace.tables) | {"transfers": with_core(from_rows("transfers", rows), core)})
    cost = {row["preemption_id"]: row["engine_s"] for row in attribute(without).rows("outcomes")}
    assert len(swaps) > 20 and all(cost.get(name) is None for name in swaps)
