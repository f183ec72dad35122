import json
from dataclasses import asdict, dataclass, replace

from kvpolicy import LearningPolicy


@dataclass(frozen=True)
class Means:
    recompute: float | None = None  # measured engine seconds per token; None before the first outcome
    swap: float | None = None

    def to_json(self):
        return json.dumps(asdict(self))


class Measured(LearningPolicy):
    name = "measured"
    explored = 0.05  # share of the decisions for the option that has cost more so far

    def initial_state(self):
        return Means()

    def probabilities(self, situation, options, state):
        if len(options) == 1:
            return [1.0]
        if state.recompute is None or state.swap is None:
            return [0.5, 0.5]
        swap = 1.0 - self.explored if state.swap < state.recompute else self.explored
        return [1.0 - swap, swap]

    def observe(self, state, feedback):
        tokens = feedback.situation.computed_tokens
        if feedback.engine_s is None or not tokens:
            return state
        kind, seconds = feedback.option.kind, feedback.engine_s / tokens
        before = getattr(state, kind)
        return replace(state, **{kind: seconds if before is None else 0.9 * before + 0.1 * seconds})
