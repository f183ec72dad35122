"""A server started by `KVPOLICY=...` alone, switched under load by the control file: no request is lost, no token is
wrong, and the metrics show every change."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from kvpolicy.policy import Policy, load
from kvpolicy.policy.cheapest import Always
from tests.order.made import ByLevel
from tests.plugin.test_control_file import write
from tests.synthetic import fitted_model
from tests.vllm import alone, harness
from tests.vllm.test_same_schedule import BASE
from tests.vllm.test_server import (
    PATIENCE_S,
    by_label,
    complete,
    free_port,
    metrics,
    vllm_flags,
    wait_for,
    wait_until,
)  # fmt: skip

CLIENTS = 24
STEPS = (
    ("threshold:100,order=urgent", "threshold:100", "urgent", 0),
    ("always-swap,shadow=on", "always-swap", "fcfs", 1),
    ("off", "always-recompute", "fcfs", 0),
    ("always-swap,order=urgent", "always-swap", "urgent", 0),
    ("", "always-swap", "fcfs", 0),
)
"""What is written, and the policy, order and shadow mode that come of it."""


def text_of(answer: dict[str, Any]) -> tuple[str, int]:
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


@pytest.mark.feature("orders of service")
@pytest.mark.feature("switching while it serves")
def test_switched_under_load(model: str, tmp_path: Path) -> None:
    control, log, port = tmp_path / "control", tmp_path / "server.log", free_port()
    line = f"always-swap,host_gib=0.25,control={control}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *vllm_flags(port)]
    environment = harness.environment(1, multiprocess=True) | {"VLLM_LOGGING_LEVEL": "DEBUG", "KVPOLICY": line}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
    base = f"http://127.0.0.1:{port}"
    try:
        wait_for(base, process, log)
        alone = [text_of(complete(base, seed)) for seed in range(CLIENTS)]  # one at a time: nobody is preempted
        assert not metrics(base)["preemptions_total"]
        with ThreadPoolExecutor(CLIENTS) as pool:
            for text, policy, order, shadow in STEPS:
                wanted = {f'policy="{policy}"': 1.0, f'order="{order}"': 1.0}
                changes = metrics(base)["control_changes_total"]
                asked: list[Any] = []
                then: list[float] = []

                def seen(changes: float = changes, asked: list[Any] = asked, then: list[float] = then) -> bool:
                    """Whether a preemption came after the change; until then more is asked for, so that steps go on.
                    ``then``: how many there were when the change was first seen."""
                    if all(one.done() for one in asked):
                        asked += [pool.submit(complete, base, seed) for seed in range(CLIENTS)]
                    told = metrics(base)
                    if not then and told["control_changes_total"] > changes:
                        then.append(told["preemptions_total"])
                    return bool(then) and told["preemptions_total"] > then[0]

                asked += [pool.submit(complete, base, seed) for seed in range(CLIENTS)]
                write(control, text)
                wait_until(seen, lambda text=text: f"{text!r} changes nothing: {log.read_text()[-3000:]}")
                answers = [text_of(one.result()) for one in asked]
                assert answers == alone * (len(asked) // CLIENTS), f"another text under {text!r}"
                told = by_label(base, "cost_model") | by_label(base, "order")
                assert {name: told[name] for name in wanted} == wanted and metrics(base)["shadow"] == shadow
        write(control, "always-swop")
        wait_until(lambda: "always-swop" in log.read_text(), lambda: "what is wrong is not said")
        assert text_of(complete(base, 0)) == alone[0]
        refused = 'result="refused"'
        wait_until(lambda: by_label(base, "control_changes_total").get(refused) == 1, lambda: "it is not counted")
        assert metrics(base)["order_failed_total"] == 0
        assert by_label(base, "control_changes_total")['result="applied"'] == len(STEPS)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text()
    assert "kvpolicy: policy always-swap; order fcfs; 0.25 GiB of host memory" in said and "pageable" in said
    assert "preempted (memory) at" in said, "no line of a preemption"
    assert "not swap (shadow) by always-swap" in said, "no line of a preemption in shadow mode"
    assert said.count("by the control file from now on") == len(STEPS)


# ---- on the scheduler alone ----


class Unready(Always):
    """A policy of a user's that has no state to begin with."""

    def initial_state(self) -> None:
        raise RuntimeError("no state to begin with")


def controlled(model: str, control: Path, policies: Mapping[str, Policy]) -> Any:
    """A scheduler that serves a request; ``policies``: what the control file loads, by name."""
    plugin = harness.plugin("always-swap", control=str(control))
    scheduler = alone.scheduler_for(BASE | {"model": model, "plugin": plugin})
    scheduler.control._load_policy = policies.__getitem__
    return scheduler


def switched(scheduler: Any, control: Path, text: str) -> str:
    """Switch by the control file and serve a request; returns the name of the policy then."""
    write(control, text)
    scheduler.control.look()
    request = alone.made_request(len(text), [*range(40)], SamplingParams(temperature=0.0, max_tokens=4))
    for _ in alone.drive(scheduler, deque([request]), alone.Worker(0).execute, False):
        pass
    assert request.num_output_tokens == 4
    return str(scheduler.kvpolicy.decider.policy.name)


@pytest.mark.feature("switching while it serves")
@pytest.mark.scheduler
def test_a_model_that_was_made_anew_is_taken(model: str, tmp_path: Path) -> None:
    """Under its old name. A policy that is the same goes on, with what it has learned."""
    policies = {"": load("cheapest:linear", fitted_model)}
    scheduler = controlled(model, tmp_path / "control", policies)
    decider = scheduler.kvpolicy.decider
    switched(scheduler, tmp_path / "control", "")
    first = decider.policy
    assert first is policies[""]
    policies[""] = load("cheapest:linear", fitted_model)
    switched(scheduler, tmp_path / "control", "shadow=on")
    assert decider.policy is first and decider.shadow
    policies[""] = anew = load("cheapest:linear", lambda family: replace(fitted_model(family), digest="another"))
    switched(scheduler, tmp_path / "control", "shadow=off")
    assert decider.policy is anew and not decider.shadow


@pytest.mark.feature("switching while it serves")
@pytest.mark.scheduler
def test_a_policy_that_cannot_begin_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the engine does not die of it."""
    scheduler = controlled(model, tmp_path / "control", {"unready": Unready("unready", "swap")})
    assert switched(scheduler, tmp_path / "control", "unready,shadow=on,order=urgent") == "always-swap"
    stats = scheduler.kvpolicy.stats()
    assert harness.total(stats, "control_changes", result="refused") == 1
    assert stats["order|order=fcfs"] == 1 and stats["shadow"] == 0
    assert {name: value for name, value in stats.items() if "cost_model" in name} == {
        "cost_model|policy=always-swap|digest=": 1
    }


@pytest.mark.feature("switching while it serves")
@pytest.mark.scheduler
def test_an_order_that_was_given_itself_serves_until_another_is_named(model: str, tmp_path: Path) -> None:
    """And again where none is named."""
    control, order = tmp_path / "control", ByLevel()
    plugin = harness.plugin("always-swap", order=order, control=str(control))
    scheduler = alone.scheduler_for(BASE | {"model": model, "plugin": plugin})
    assert scheduler.kvpolicy.order.label == order.label
    for text, label in (("order=urgent", "urgent"), ("shadow=on", order.label), ("off", "fcfs"), ("", order.label)):
        switched(scheduler, control, text)
        assert scheduler.kvpolicy.order.label == label


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("always-swop", "KVPOLICY: policy 'always-swop' is no policy"),
        ("always-swap,order=fastest", "KVPOLICY: order 'fastest' is no order"),
        ("cheapest:no/such/model", "KVPOLICY: policy is 'cheapest:no/such/model', which cannot be loaded"),
    ],
)
def test_a_wrong_variable_ends_the_start_in_one_line(model: str, value: str, words: str) -> None:
    """In the process that reads vLLM's flags: no engine is made, no page of calls printed."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *vllm_flags(free_port())]
    environment = harness.environment(1, multiprocess=True) | {"KVPOLICY": value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    said = done.stderr + done.stdout
    assert done.returncode == 2 and f"kvpolicy: error: {words}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in said and "EngineCore" not in said
