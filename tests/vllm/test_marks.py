"""Marks of requests in vLLM's scheduler: what vLLM's own request carries reaches the order of service, clamped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.request import Request

from kvpolicy.errors import InputError
from kvpolicy.order import Order, Progress, Rank, View
from kvpolicy.request_marks import KEY
from kvpolicy_vllm.plugin.marks import MarkReader
from kvpolicy_vllm.plugin.metrics import COUNTERS
from kvpolicy_vllm.plugin.one_flag import own_refusal
from tests.vllm import alone, fuzz, harness
from tests.vllm.models import write_llama
from tests.vllm.setups import Setup
from tests.vllm.test_ordering import ORDERED

pytestmark = pytest.mark.scheduler


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def schedule(model: Path, seed: int = 1, **fixed: Any) -> fuzz.Schedule:
    return fuzz.Schedule(Setup.draw(seed, **ORDERED | fixed), model)


def sent(number: int, said: Any, priority: int = 0, **more: Any) -> Request:
    """vLLM's request, as of a client that sent this."""
    parameters = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": {KEY: said}})
    return alone.made_request(number, [1, 2, 3], parameters, priority=priority, **more)


def ranked(made: fuzz.Schedule, *requests: Request) -> list[Progress]:
    for request in requests:
        made.scheduler.add_request(request)
    return [made.scheduler.ordering.ranks.progress(request) for request in requests]


def test_an_order_sees_what_was_granted(model: Path) -> None:
    made = schedule(model, order="deadline:ttft=9,tpot=9")
    chat, nobody = ranked(
        made, sent(0, {"class": "chat", "ttft_s": 0.1, "tpot_s": 0.2}, -7), sent(1, {"class": "root"}, -1000)
    )
    assert (chat.class_name, chat.priority, chat.ttft_s, chat.tpot_s) == ("chat", -1, 0.5, 0.2)
    assert (nobody.class_name, nobody.priority, nobody.ttft_s, nobody.tpot_s) == ("default", 0, None, None)
    assert chat.rank < nobody.rank, "its own deadline is nearer than the order's"
    stats = made.scheduler.connector.stats()
    assert harness.total(stats, "clamped_marks", mark="class") == 1
    assert harness.total(stats, "clamped_marks", mark="ttft_s") == 1
    assert harness.total(stats, "clamped_marks", mark="priority") == 2


def test_no_client_ranks_itself_before_those_that_an_operator_puts_first(model: Path) -> None:
    made = schedule(model, order="urgent")
    greedy, chat = ranked(made, sent(0, None, -1000), sent(1, {"class": "chat"}))
    assert chat.rank < greedy.rank


def test_a_hint_of_the_process_goes_before_the_client(model: Path) -> None:
    hints = pytest.importorskip("vllm.v1.kv_hints")
    envelope = hints.KvHintsEnvelope("1", "m", [hints.KvHintAction("a", KEY, "1", {"class": "chat"})])
    made = schedule(model, order="urgent")
    (chat,) = ranked(made, sent(0, {"class": "batch"}, kv_hints=envelope))
    assert chat.class_name == "chat"


@pytest.mark.parametrize("order", ["deadline:ttft=.5,tpot=.05", "urgent", "fcfs"])
def test_whatever_is_sent_everybody_is_served(order: str, model: Path) -> None:
    made = schedule(model, order=order, requests=60, cache="off")
    made.run()
    assert made.outcome().problems == ()
    invalid = harness.total(made.scheduler.connector.stats(), "invalid_marks")
    assert (invalid > 10) == (order != "fcfs"), "without an order, a cache or a trace nothing is read"


def test_marks_that_are_kept_are_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MarkReader, "forget", lambda self, request: None)
    made = schedule(model, order="urgent", requests=12)
    made.run()
    assert "12 marks of requests left" in made.outcome().problems


class FailsOnClasses(Order):
    """Fails for every request of a listed class."""

    name = "fails-on-classes"
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank(({"default": 0}[request.class_name],))


def test_an_order_that_fails_on_a_class_stops_nobody(model: Path) -> None:
    made = schedule(model, order="fcfs", requests=30)
    made.scheduler.kvpolicy.serve_by(FailsOnClasses())
    made.scheduler.serve_by(made.scheduler.kvpolicy.order)
    made.run()
    assert all(request.is_finished() for request in made.requests)
    assert harness.total(made.scheduler.connector.stats(), "order_failed", method="rank") > 5


def test_priorities_that_vllm_itself_ranks_by_cannot_be_bounded(model: Path) -> None:
    setup = Setup.draw(1, **ORDERED | {"scheduling": "priority", "order": "fcfs"})
    job = fuzz._job(setup, model)
    job["plugin"]["kv_transfer_config"]["kv_connector_extra_config"]["classes"] = "chat:priority=-1"
    with pytest.raises(ValidationError, match=r"bounds priorities.*leave that flag out") as refused:
        alone.scheduler_for(job)
    assert isinstance(own_refusal(refused.value), InputError), "while vLLM makes its configuration"


def test_what_is_counted_is_declared() -> None:
    assert COUNTERS["invalid_marks"][1] == ("reason",) and COUNTERS["clamped_marks"][1] == ("mark",)
