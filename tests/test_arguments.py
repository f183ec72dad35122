"""What a verb cannot take is refused by the argument's name, with what would be right, before anything runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import KVPolicyError, cost
from kvpolicy.cost import CostModel, ModelError
from kvpolicy.evaluation import EvaluationReport
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.explanation import Question
from kvpolicy.fields import WrongValue
from kvpolicy.order import Fcfs
from kvpolicy.overflow import FIGURES
from kvpolicy.policy import NoState, PolicyError, decide, load_policies, load_policy, probabilities_of
from kvpolicy.policy.cheapest import Cheapest, MinWaste
from kvpolicy.reporting.findings import missing
from kvpolicy.simulator import Server
from kvpolicy.study.config import Criterion, Run, Serving
from kvpolicy.training.family import family_of
from tests.policy.ten_line_policy import Longer
from tests.synthetic import make_trace, options_for, situation
from tests.training.own_family import PerToken

MODEL = "cpu-llama-native"
TRACE = Path(__file__).resolve().parent.parent / "traces" / MODEL
NAN = float("nan")
WORKLOAD = "azure-conversation-2023?n=5"


class Doubling(CostModel):
    """A cost model of one's own: seconds by length, and a swap takes ``share`` of them."""

    name = "doubling"

    def __init__(self, share: float = 0.5, count: int | None = None) -> None:
        self.share, self.count = share, count

    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        costs = []
        for option in options:
            seconds = situation.computed_tokens * 1e-4 * (self.share if option.kind == "swap" else 1.0)
            parts = (seconds, 0.0, 0.0) if option.kind == "swap" else (0.0, 0.0, seconds)
            costs.append(Cost(seconds, *parts, 0.0, seconds / 2, seconds * 2, -1.0, 1.0, False))
        return tuple(costs[: self.count])


def simulate(*policies: Any, kv_blocks: Any = (200,), **more: Any) -> Any:
    return kvpolicy.simulate([WORKLOAD], list(policies), list(kv_blocks), MODEL, **more)


def recommend(*policies: Any, kv_blocks: Any = 200, **more: Any) -> Any:
    return kvpolicy.recommend(WORKLOAD, MODEL, kv_blocks, list(policies), **more)


def explain(**more: Any) -> Any:
    return kvpolicy.explain(**({"cost_model": MODEL, "question": Question(500)} | more))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments") / "trace"
    make_trace(seed=1, states=40).write(folder)
    return folder


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: kvpolicy.evaluate([TRACE], ["always-swap", Longer]), "policies[1] is Longer, a class: give Longer()"),
        (lambda: simulate(Longer), "policies[0] is Longer, a class: give Longer()"),
        (lambda: recommend(Longer), "policies[0] is Longer, a class: give Longer()"),
        (lambda: explain(policy=Longer), "policy is Longer, a class: give Longer()"),
        (lambda: load_policy(Longer), "policy is Longer, a class: give Longer()"),  # type: ignore[arg-type]
        (lambda: kvpolicy.train(["x"], family=PerToken), "family is PerToken, a class: give PerToken()"),  # type: ignore[arg-type]
        (lambda: explain(cost_model=Doubling), "cost_model is Doubling, a class: give Doubling()"),
        (lambda: kvpolicy.calibrate(Doubling, ["x"]), "cost_model is Doubling, a class"),  # type: ignore[arg-type]
        (lambda: load_policy(Cheapest("mine", Doubling)), "policy mine: cost_model is Doubling, a class"),  # type: ignore[arg-type]
        (lambda: load_policies([MinWaste("mine", MODEL)]), "policy mine: cost_model is 'cpu-llama-native' (str), sho"),  # type: ignore[arg-type]
        (lambda: simulate("always-swap", None), "policies[1] is None (NoneType), should be a name or a Policy"),
        (lambda: family_of(7), "family is 7 (int), should be a name or a Family"),  # type: ignore[arg-type]
        (lambda: explain(question=500), "question is 500 (int), should be a Question"),
        (lambda: explain(question=Question), "question is Question, a class: give Question()"),
        (lambda: simulate("always-swap", kv_blocks=[200, 200.5]), "kv_blocks[1] is 200.5, should be a whole number"),
        (lambda: simulate("always-swap", kv_blocks=["200"]), "kv_blocks[0] is '200', should be a whole number"),
        (lambda: simulate("always-swap", kv_blocks=[True]), "kv_blocks[0] is True, should be a whole number"),
        (lambda: recommend(kv_blocks=[200]), "kv_blocks is [200], should be a whole number"),
        (lambda: simulate("always-swap", serving={"block_size": 32}), "serving is {'block_size': 32} (dict), sh"),
        (lambda: simulate("always-swap", run=Run), "run is Run, a class: give Run()"),
        (lambda: recommend(serving=Serving), "serving is Serving, a class: give Serving()"),
        (lambda: recommend(run=4), "run is 4 (int), should be a Run"),
        (lambda: recommend(criterion="ttft"), "criterion is 'ttft' (str), should be a Criterion"),
        (lambda: kvpolicy.recommend(WORKLOAD, MODEL, 9, "always-swap"), "policies is 'always-swap', should be a list"),
        (lambda: kvpolicy.evaluate(["x"], ["always-swap"], seed="0"), "seed is '0', should be a whole number"),  # type: ignore[arg-type]
        (lambda: kvpolicy.evaluate(["x"], ["always-swap"], how="dr"), "how is 'dr' (str), should be an Estimation"),  # type: ignore[arg-type]
        (lambda: kvpolicy.train(["x"], seed=0.5), "seed is 0.5, should be a whole number"),  # type: ignore[arg-type]
        (lambda: kvpolicy.calibrate(MODEL, ["x"], seed=-1), "seed is -1, should be 0 or above"),
        (lambda: kvpolicy.calibrate(MODEL, "x"), "traces is 'x', should be a list"),
        (lambda: missing(None, "third"), f"figure is 'third', should be one of {', '.join(FIGURES)}"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(call: Any, told: str) -> None:
    with pytest.raises(WrongValue) as error:
        call()
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("block_size", 16.5, "block_size is 16.5, should be a whole number"),
        ("device_blocks", "24", "device_blocks is '24', should be a whole number"),
        ("host_blocks", 1e3, "host_blocks is 1000.0, should be a whole number"),
        ("host_blocks", -1, "host_blocks is -1, should be 0 or above"),
        ("device_blocks", 0, "device_blocks is 0, should be 1 or more"),
        ("segment_bytes", 0, "segment_bytes is 0, should be 1 or more"),
        ("max_running", True, "max_running is True, should be a whole number"),
    ],
)
def test_a_count_of_a_server_is_a_whole_number(field: str, value: Any, told: str) -> None:
    with pytest.raises(WrongValue) as error:
        Server(**({"block_size": 16, "block_bytes": 1, "device_blocks": 24, "host_blocks": 9} | {field: value}))
    assert str(error.value) == told


def test_a_criterion_and_a_run_of_ones_own_are_taken() -> None:
    with pytest.raises(KVPolicyError, match="no-such-workload"):
        kvpolicy.recommend("no-such-workload", MODEL, 200, (), "native", Serving(32), Run(parts=2), Criterion("ttft"))


class TestACostModelOfOnesOwn:
    def test_a_policy_decides_by_it(self, profile: Path) -> None:
        swaps, recomputes = Cheapest("swaps", Doubling()), Cheapest("recomputes", Doubling(2.0))
        report = kvpolicy.evaluate([profile], [swaps, recomputes, "always-swap", "always-recompute"])
        assert isinstance(report, EvaluationReport)
        regrets = [policy.mean_regret_s.value for policy in report.policies]
        assert regrets[:2] == regrets[2:]

    def test_it_is_refused_where_laws_are_needed(self) -> None:
        """And takes part in an explanation as the model of a policy."""
        with pytest.raises(ModelError, match="doubling is a Doubling, which has no laws that could be explained"):
            explain(cost_model=Doubling())
        told = explain(cost_model=cost.load(MODEL), policy=Cheapest("swaps", Doubling()))
        assert told.choice.probabilities == (0.0, 1.0)

    def test_one_that_leaves_an_option_out_is_named(self) -> None:
        one = situation(500)
        policy = Cheapest[NoState]("mine", Doubling(count=1))
        with pytest.raises(PolicyError, match="policy mine: cost model doubling predicts 1 costs for 2 options"):
            probabilities_of(policy, one, options_for(one), NoState())

    def test_one_that_predicts_no_list_is_named(self) -> None:
        class Forgetful(Doubling):
            def predict(self, situation: Preemption, options: Sequence[Option]) -> Any:
                return None

        one = situation(500)
        with pytest.raises(PolicyError, match="policy mine: cost model doubling predicts None, should predict a Cost"):
            probabilities_of(Cheapest[NoState]("mine", Forgetful()), one, options_for(one), NoState())

    def test_one_that_predicts_numbers_is_named(self) -> None:
        class Numbers(Doubling):
            def predict(self, situation: Preemption, options: Sequence[Option]) -> Any:
                return [1.0 for _ in options]

        one = situation(500)
        with pytest.raises(PolicyError, match=r"doubling predicts \[1\.0, 1\.0\], should predict a Cost for"):
            probabilities_of(Cheapest[NoState]("mine", Numbers()), one, options_for(one), NoState())

    def test_one_without_a_name_is_refused(self) -> None:
        class Nameless(Doubling):
            name = None  # type: ignore[assignment]  # what is wrong

        with pytest.raises(KVPolicyError, match="policy mine: cost model Nameless: its name is None"):
            kvpolicy.load_policy(Cheapest("mine", Nameless()))

    def test_a_policy_that_takes_other_arguments_is_refused(self) -> None:
        class Short(kvpolicy.Policy[NoState]):
            name = "short"

            def probabilities(self, situation: Preemption) -> Any:  # type: ignore[override]
                return [1.0]

        with pytest.raises(KVPolicyError, match=r"policy short: probabilities\(situation.*\).* cannot be called"):
            kvpolicy.load_policy(Short())

    def test_a_policy_whose_probabilities_are_no_method_is_refused(self) -> None:
        class Table(kvpolicy.Policy[NoState]):
            name = "table"
            probabilities = (0.5, 0.5)  # type: ignore[assignment]  # what is wrong

        with pytest.raises(KVPolicyError, match=r"policy table: probabilities is \(0\.5, 0\.5\), should be a method"):
            kvpolicy.load_policy(Table())

    def test_a_priced_policy_without_one_is_named(self) -> None:
        one = situation(500)
        with pytest.raises(PolicyError, match="policy mine: has no cost model: set cost_model, or write costs"):
            probabilities_of(Cheapest[NoState]("mine", None), one, options_for(one), NoState())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kvpolicy.evaluate([3], ["always-swap"]), "traces[0] is 3 (int), should be a path"),
        (lambda: kvpolicy.train([TRACE, None]), "traces[1] is None (NoneType), should be a path"),
        (lambda: kvpolicy.train([TRACE], out=3), "out is 3 (int), should be a path"),
        (lambda: kvpolicy.calibrate(MODEL, [3]), "traces[0] is 3 (int), should be a path"),
        (lambda: kvpolicy.calibrate(None, [TRACE]), "cost_model is None (NoneType), should be a CostModel, a folder"),
        (lambda: kvpolicy.report([3]), "traces[0] is 3 (int), should be a path"),
        (lambda: kvpolicy.report("trace"), "traces is 'trace', should be a list"),
        (lambda: kvpolicy.read_trace(None), "folders[0] is None (NoneType), should be a path"),
        (lambda: kvpolicy.load_cost_model(CostModel), "cost_model is CostModel, a class: give CostModel()"),
        (lambda: kvpolicy.open_workload(Path("a.csv")), "workload is PosixPath('a.csv') (PosixPath), should be a text"),
        (lambda: kvpolicy.calibrate(MODEL, [TRACE], states="5"), "states is '5', should be a whole number"),
        (lambda: kvpolicy.report([TRACE], seed="1"), "seed is '1', should be a whole number"),
        (lambda: kvpolicy.demo(seed="1"), "seed is '1', should be a whole number"),
        (lambda: kvpolicy.demo(order="lifo"), "order 'lifo' is no order; the orders are fcfs, priority"),
        (lambda: kvpolicy.demo(order=Fcfs()), "order is fcfs (Fcfs), should be a name: engines are other processes"),
        (lambda: kvpolicy.profile(None), "out is None (NoneType), should be a path"),
        (lambda: kvpolicy.characterize(3), "out is 3 (int), should be a path"),
        (lambda: kvpolicy.serve(3, "always-swap"), "llm is 3 (int), should be a model's name"),
        (lambda: kvpolicy.Objective(-1.0), "objective has the weight engine=-1.0, should be a number, 0 or above"),
        (lambda: kvpolicy.Objective(victim="x"), "objective has the weight victim='x', should be a number"),
        (lambda: kvpolicy.Objective(0.0), "objective has no weight above 0"),
        (lambda: kvpolicy.report([TRACE], cost_model=Doubling()), "cost_model is <tests.test_a"),
        (lambda: Run(progress=3), "progress is 3, should be a function"),
        (lambda: explain(plot=3), "plot is 3 (int), should be a path"),
        (lambda: simulate(), "policies are none, should be at least one"),
        (lambda: simulate("always-swap", links=[]), "links are none, should be at least one"),
        (lambda: simulate("always-swap", links=[None]), "links[0] is None (NoneType), should be a text"),
        (lambda: recommend(link=["native"]), "link is ['native'] (list), should be a text"),
        (
            lambda: kvpolicy.simulate([kvpolicy.Workload], ["always-swap"], [200], MODEL),
            "workloads is Workload, a class: give Workload()",
        ),
        (
            lambda: kvpolicy.simulate([WORKLOAD], ["always-swap"], [200], kvpolicy.HardwareModel),
            "hardware is HardwareModel, a class: give HardwareModel()",
        ),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(WrongValue) as error:
        call()
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("policies", [None, {"always-swap"}, iter(["always-swap"])])
def test_the_list_that_is_shown_holds_no_list(policies: Any) -> None:
    with pytest.raises(WrongValue, match=r"^policies is .*, should be a list$"):
        kvpolicy.evaluate([TRACE], policies)


def test_a_module_path_is_no_model_with_laws() -> None:
    message = "cost model 'python:tests.own:Model': names a module, should be a model with laws"
    for call in (
        lambda: explain(cost_model="python:tests.own:Model"),
        lambda: kvpolicy.calibrate("python:tests.own:Model", [TRACE]),
    ):
        with pytest.raises(ModelError, match=message):
            call()


@pytest.mark.parametrize("objective", [None, 3])
def test_what_is_no_objective_is_refused(objective: Any) -> None:
    for call in (
        lambda: kvpolicy.evaluate([TRACE], ["always-swap"], objective=objective),
        lambda: explain(objective=objective),
    ):
        with pytest.raises(WrongValue, match=f"^objective is {objective} .*should be an Objective or engine, victim"):
            call()


class Stating(kvpolicy.Policy[NoState]):
    name = "stating"

    def __init__(self, stated: Any) -> None:
        self.stated = stated

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: NoState) -> Any:
        return self.stated


@pytest.mark.parametrize(
    "stated",
    [(1.0,), (0.2, 0.2, 0.6), (), (0.5, NAN), (NAN, 0.5), (0.7, 0.7), (-0.5, 1.5), None, "ab", (None,)],
)
def test_wrong_probabilities_are_the_policys_fault_by_name(stated: Any) -> None:
    one = situation(500)
    for call in (probabilities_of, lambda *given: decide(*given, rng=random.Random(0))):
        with pytest.raises(PolicyError, match=r"^policy stating: probabilities "):
            call(Stating(stated), one, options_for(one), NoState())
