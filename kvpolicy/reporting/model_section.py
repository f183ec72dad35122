"""The report's section about a cost model: its decision boundary, calibration and regret on the report's traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from kvpolicy.cost import FittedModel, load
from kvpolicy.datasets.profiles import Dataset, State, read_dataset
from kvpolicy.errors import KVPolicyError
from kvpolicy.evaluation.replay import EvaluationReport, evaluate, of_models
from kvpolicy.events import KINDS, Kind
from kvpolicy.explanation import Explanation, Question, explain
from kvpolicy.stats import proportion_interval
from kvpolicy.training import train

FIXED = ("always-recompute", "always-swap")
OWN = "trained on two thirds of these states"
LEARNED_NAME = "learned"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Measured and predicted cost of one option in a state that the model was not trained on."""

    kind: Kind
    tokens: float
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, slots=True)
class Learned:
    """One cost model judged on one group of traces; parts that are missing are None or empty, see ``lacking``."""

    model: str
    boundary: Explanation | None = None
    calibration: tuple[Predicted, ...] = ()
    scores: EvaluationReport | None = None
    lacking: tuple[str, ...] = ()
    """Why parts are missing."""
    fitted: FittedModel | None = None
    """The model itself; None where none could be trained."""


def learned(traces: Sequence[Path], cost_model: str | None, seed: int) -> Learned:
    """Judge a cost model on traces. ``cost_model``: folder or name; None trains one on two thirds of their states."""
    if cost_model is not None:
        return _judged(traces, cost_model, cost_model, seed)
    with TemporaryDirectory() as scratch:
        model = Path(scratch) / LEARNED_NAME
        try:
            train(traces=list(traces), out=model, seed=seed)
        except KVPolicyError as error:
            return Learned(OWN, lacking=(f"no cost model can be trained on these traces: {error}",))
        return _judged(traces, str(model), OWN, seed)


def of_window(cost_model: str | None) -> Learned:
    """The model of a report on a window of logs: the one that is given. None is trained on a part of a log."""
    if cost_model is None:
        return Learned(OWN, lacking=("no cost model is trained on a window of a log: give one with --cost-model",))
    return Learned(cost_model, lacking=("boundary, calibration and regret: a log does not measure both options",),
                   fitted=load(cost_model))  # fmt: skip


def _judged(traces: Sequence[Path], model: str, name: str, seed: int) -> Learned:
    lacking = []
    try:
        dataset = read_dataset(list(traces))
    except KVPolicyError as error:  # as in a log of production, whose states were not measured under both options
        return Learned(name, lacking=(f"boundary, calibration and regret: {error}",), fitted=load(model))
    calibration = _calibration(dataset, model)
    if not calibration:
        lacking.append("calibration: the model was trained on every state of these traces")
    scores = None
    try:
        scores = evaluate(traces=list(traces), policies=[*FIXED, f"cheapest:{model}"], seed=seed)
    except KVPolicyError as error:
        lacking.append(f"regret: {error}")
    return Learned(name, _boundary(dataset, model), calibration, scores, tuple(lacking), load(model))


def _boundary(dataset: Dataset, model: str) -> Explanation:
    """The decision boundary around the medians of the measured lengths and loads."""
    situations = [
        sample.situation for state in dataset.states for samples in state.samples.values() for sample in samples
    ]
    sizes = sorted({situation.block_size for situation in situations})
    tokens = round(median(situation.computed_tokens for situation in situations))
    running = round(median(situation.running_requests for situation in situations))
    return explain(model, Question(tokens=tokens, running=running, block_size=sizes[0]))


def _calibration(dataset: Dataset, model: str) -> tuple[Predicted, ...]:
    fitted = load(model)
    unseen = [state for state in of_models(dataset, [fitted]).states if not state.ids & fitted.state_ids]
    predictions = []
    for state in unseen:
        for kind in KINDS:
            costs = [fitted.predict(sample.situation, (sample.option,))[0] for sample in state.samples[kind]]
            predictions.append(_predicted(state, kind, [(cost.engine_s, cost.low_s, cost.high_s) for cost in costs]))
    return tuple(predictions)


def _predicted(state: State, kind: Kind, costs: Sequence[tuple[float, float, float]]) -> Predicted:
    engine_s, low_s, high_s = (fmean(column) for column in zip(*costs, strict=True))
    return Predicted(kind, state.computed_tokens, state.typical_s[kind], engine_s, low_s, high_s)


def coverage(predictions: Sequence[Predicted]) -> tuple[float, float, float]:
    """Share of states inside their 90% interval, with Clopper and Pearson's 95% interval of that share."""
    inside = sum(prediction.inside for prediction in predictions)
    return inside / len(predictions), *proportion_interval(inside, len(predictions))
