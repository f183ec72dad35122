"""What a cost model makes of the same traces: where its choice turns, how well it is calibrated, what it regrets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from kvpolicy.cost import load
from kvpolicy.datasets.profiles import Dataset, State, measured
from kvpolicy.errors import KVPolicyError
from kvpolicy.evaluation.replay import EvaluationReport, evaluate
from kvpolicy.events import KINDS, Kind
from kvpolicy.explanation import Explanation, Question, explain
from kvpolicy.stats import proportion_interval
from kvpolicy.training import train

FIXED = ("always-recompute", "always-swap")
OWN = "trained on two thirds of these states"
LEARNED_NAME = "learned"


@dataclass(frozen=True, slots=True)
class Predicted:
    """One unseen state under one option, seconds."""

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
    """One cost model on one material; parts that could not be had are None, and ``lacking`` says why."""

    model: str
    boundary: Explanation | None = None
    calibration: tuple[Predicted, ...] = ()
    scores: EvaluationReport | None = None
    lacking: tuple[str, ...] = ()


def learned(traces: Sequence[Path], cost_model: str | None, seed: int) -> Learned:
    """``cost_model``: folder or name; None trains one here, on two thirds of the traces' states."""
    if cost_model is not None:
        return _judged(traces, cost_model, cost_model, seed)
    with TemporaryDirectory() as scratch:
        model = Path(scratch) / LEARNED_NAME
        try:
            train(traces=list(traces), out=model, seed=seed)
        except KVPolicyError as error:
            return Learned(OWN, lacking=(f"no cost model can be trained on these traces: {error}",))
        return _judged(traces, str(model), OWN, seed)


def _judged(traces: Sequence[Path], model: str, name: str, seed: int) -> Learned:
    dataset, lacking = measured(list(traces)), []
    calibration = _calibration(dataset, model)
    if not calibration:
        lacking.append("calibration: the model was trained on every state of these traces")
    scores = None
    try:
        scores = evaluate(traces=list(traces), policies=[*FIXED, f"cheapest:{model}"], seed=seed)
    except KVPolicyError as error:
        lacking.append(f"regret: {error}")
    return Learned(name, _boundary(dataset, model), calibration, scores, tuple(lacking))


def _boundary(dataset: Dataset, model: str) -> Explanation:
    """Around the middle of what was measured."""
    situations = [one.situation for state in dataset.states for some in state.samples.values() for one in some]
    sizes = sorted({one.block_size for one in situations})
    tokens = round(median(one.computed_tokens for one in situations))
    running = round(median(one.running_requests for one in situations))
    return explain(model, Question(tokens=tokens, running=running, block_size=sizes[0]))


def _calibration(dataset: Dataset, model: str) -> tuple[Predicted, ...]:
    fitted = load(model)
    unseen = [state for state in dataset.states if not state.ids & fitted.state_ids]
    found = []
    for state in unseen:
        for kind in KINDS:
            costs = [fitted.predict(one.situation, (one.option,))[0] for one in state.samples[kind]]
            found.append(_predicted(state, kind, [(one.engine_s, one.low_s, one.high_s) for one in costs]))
    return tuple(found)


def _predicted(state: State, kind: Kind, costs: Sequence[tuple[float, float, float]]) -> Predicted:
    engine_s, low_s, high_s = (fmean(column) for column in zip(*costs, strict=True))
    return Predicted(kind, state.computed_tokens, state.typical_s[kind], engine_s, low_s, high_s)


def coverage(some: Sequence[Predicted]) -> tuple[float, float, float]:
    """Share of states inside their 90% interval, with Clopper and Pearson's 95% interval of that share."""
    held = sum(one.inside for one in some)
    return held / len(some), *proportion_interval(held, len(some))
