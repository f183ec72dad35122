"""The connector's count of engine cores on one machine, a scheduler and ranks on several, and which loads it reports
to vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin import connector
from kvpolicy_vllm.plugin.boot_ids import NOTED
from kvpolicy_vllm.plugin.connector import KVPolicyConnector, cores_here, pools, refuse_several_machines
from kvpolicy_vllm.plugin.copiers.base import Finished
from kvpolicy_vllm.plugin.forward_timer import ForwardTimer
from kvpolicy_vllm.plugin.messages import NO_REQUEST, Job, StepJobs
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.versions import UnsupportedEngine


def specification(kind: str) -> Any:
    return type(kind, (), {})()


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (["MLAAttentionSpec"], 1),
        (["MLAAttentionSpec", "MambaSpec"], 2),
        (["FullAttentionSpec"], 2),
    ],
)
def test_ranks_share_a_pool_only_where_they_have_the_same_in_all_layers(kinds: list[str], count: int) -> None:
    """Beside latent KV, which is the same on all ranks, each keeps the states of its own heads."""
    groups = [SimpleNamespace(kv_cache_spec=specification(kind)) for kind in kinds]
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(use_mla="MLAAttentionSpec" in kinds),
        parallel_config=SimpleNamespace(world_size=2),
    )
    kv_cache: Any = SimpleNamespace(kv_cache_groups=groups)
    settings = Settings.read({"policy": "always-swap", "share_replicated_kv": True})
    assert pools(config, kv_cache, settings) == count


@pytest.mark.parametrize(("size_local", "rank_local", "cores"), [(1, None, 1), (4, 0, 4), (1, 3, 4), (0, None, 1)])
def test_cores_are_counted_though_each_is_configured_as_the_only_one(
    size_local: int, rank_local: int | None, cores: int
) -> None:
    """Of a dense model vLLM tells every core that it is the only one, but leaves it its rank."""
    parallel = SimpleNamespace(data_parallel_size_local=size_local, data_parallel_rank_local=rank_local)
    config: Any = SimpleNamespace(parallel_config=parallel)
    assert cores_here(config) == cores


def ranks_on(monkeypatch: pytest.MonkeyPatch, machines: Sequence[str], rank: int = 0) -> None:
    """Be that rank of an engine whose ranks are on these machines."""

    def gather(found: list[str], own: str, group: str) -> None:
        assert len(machines) > 1, "there is nobody to hear of"
        assert (own, group) == (machines[rank], "of CPUs")
        found[:] = machines

    group = SimpleNamespace(world_size=len(machines), cpu_group="of CPUs")
    monkeypatch.setattr(connector, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(connector, "get_tp_group", lambda: group)
    monkeypatch.setattr(connector, "all_gather_object", gather)
    monkeypatch.setattr(connector, "boot_id", lambda: machines[rank])


def scheduled_on(scheduler: str | None) -> Any:
    """A configuration in which that machine is noted; None: none is."""
    return SimpleNamespace(model_config=SimpleNamespace(**({} if scheduler is None else {NOTED: scheduler})))


SEVERAL = "several nodes, .* the scheduler and all ranks of --tensor-parallel-size .* --distributed-executor-backend"


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("scheduler", [None, "", "one"], ids=["not noted", "not known", "noted"])
@pytest.mark.parametrize("machines", [("one", "one", "one"), ("one", "other", "one")])
def test_ranks_on_several_machines_are_refused_by_all_of_them(
    machines: tuple[str, ...], scheduler: str | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_on(monkeypatch, machines, rank)
    if len(set(machines)) == 1:
        refuse_several_machines(scheduled_on(scheduler))
        return
    with pytest.raises(UnsupportedEngine, match=SEVERAL):
        refuse_several_machines(scheduled_on(scheduler))


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_are_all_on_another_machine_than_the_scheduler_are_refused(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray may place them, a single one, too."""
    ranks_on(monkeypatch, ["other"] * ranks)
    for accepted in (None, "", "other"):
        refuse_several_machines(scheduled_on(accepted))
    with pytest.raises(UnsupportedEngine, match=SEVERAL):
        refuse_several_machines(scheduled_on("one"))


@pytest.mark.parametrize("by_request", [True, False])
def test_a_load_of_no_request_is_not_reported_whether_it_fails_or_not(by_request: bool) -> None:
    """vLLM would look for its request."""
    done = [
        Finished(Job(1, NO_REQUEST, (3,), (0,)), True),
        Finished(Job(2, NO_REQUEST, (4,), (1,)), False),
        Finished(Job(3, "r", (5,), (2,)), False),
    ]
    connector: Any = object.__new__(KVPolicyConnector)
    connector.copier = SimpleNamespace(poll=lambda idle: done)
    connector._connector_metadata = connector.files = None
    connector.forward_timer = ForwardTimer()
    connector._reports_requests = by_request
    connector._failed_requests, connector._failed_blocks = set(), set()
    assert connector.get_finished(set()) == (None, {"r"})
    assert (connector._failed_requests, connector._failed_blocks) == (({"r"}, set()) if by_request else (set(), {5}))


@pytest.mark.parametrize("on_cpu", [True, False], ids=["CPU", "GPU"])
@pytest.mark.parametrize("at_once", [False, True])
def test_blocks_that_another_connector_may_write_to_are_off_the_device_before_the_worker_goes_on(
    at_once: bool, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU files are read while the step computes; on a GPU they are anyway."""
    monkeypatch.setattr("kvpolicy_vllm.plugin.connector.platform", lambda: SimpleNamespace(is_cpu=lambda: on_cpu))
    called: list[str] = []
    copier = SimpleNamespace(
        finish=lambda blocks: called.append("finish"), save=lambda job, blocks: called.append("save"),
        drain=lambda: called.append("drain"),
    )  # fmt: skip
    connector: Any = object.__new__(KVPolicyConnector)
    connector.copier, connector._saved_step = copier, -1
    connector.files = SimpleNamespace(begin=lambda jobs: called.append("files"))
    jobs = StepJobs(1, (Job(1, "r", (3,), (0,)),), overwritten=frozenset({3}), at_once=at_once)
    connector.handle_preemptions(jobs)
    connector.handle_preemptions(jobs)  # vLLM may call twice in a step
    saved = ["finish", "save", *(["drain"] if at_once else [])]
    assert called == [*saved, *(["files"] * 2 if on_cpu else [])]


def test_a_second_end_does_nothing() -> None:
    """The numbers of files that the first one has closed are others' by then."""
    called: list[str] = []
    connector: Any = object.__new__(KVPolicyConnector)
    connector.controller = None
    connector.files = SimpleNamespace(close=lambda: called.append("files"))
    connector.shutdown()
    connector.shutdown()
    assert called == ["files"]
