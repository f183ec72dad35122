"""How far the cost model that priced a log's decisions is to be trusted. Called by the report on a shadow run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from kvpolicy import cost
from kvpolicy.cost import CostModel, FittedModel, ModelError
from kvpolicy.datasets.threshold import Difference
from kvpolicy.errors import InputError
from kvpolicy.policy.spec import model_in
from kvpolicy.trace import Header


def pricing_warnings(
    policies: Iterable[str], headers: Iterable[Header], cost_model: CostModel | None
) -> tuple[str, ...]:
    """What a reader has to know of the models that priced.

    ``policies``: labels of the policies that decided, whose models are looked at as they are on this machine now.
    ``cost_model``: prices decisions that hold no predicted costs; None where all do, or nothing prices these.
    """
    found: dict[str, None] = {}
    for label in policies:
        found |= dict.fromkeys(_of_label(label))
    if cost_model is not None:
        found |= dict.fromkeys(_misfits(cost_model, headers))
        if isinstance(cost_model, FittedModel):
            found |= dict.fromkeys(_compared(cost_model))
    return tuple(found)


def _of_label(label: str) -> list[str]:
    """What is said of the model that a policy's label names. It is looked up by this name: the server may have had
    another one under it, as before a training."""
    try:
        name = model_in(label)
    except InputError:  # another version's label
        return []
    if not name:
        return []
    try:
        return [*_compared(cost.load(name), ", as it is here now,")]
    except (ModelError, OSError) as error:
        return [_unreadable(name, error)]


def _compared(model: FittedModel, where: str = "") -> Iterator[str]:
    """What training said of it; nothing of an untrained model, or of one that an earlier version trained. ``where``:
    words behind its name."""
    try:
        stored = Difference.from_card(model.provenance.held_out)
    except InputError as error:  # of a card that was edited
        yield _unreadable(model.name, error)
        return
    if stored is not None and stored[1].high_s >= 0.0:
        rule, difference = stored
        yield (
            f"cost model {model.name}{where} did no better than {rule} on the {difference.states} {difference.unit}s "
            f"that training held out, so that {rule}, which needs no prices, may do as well as it: {difference.text()}"
        )


def _unreadable(name: str, error: Exception) -> str:
    return (
        f"cost model {name} cannot be read here: {error}: whether it did better than a threshold on the states that "
        "training held out is not known"
    )


def _misfits(model: CostModel, headers: Iterable[Header]) -> Iterator[str]:
    for header in headers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it can be extrapolated to
            try:
                model.check_fit(header.engine_spec)
            except ModelError as error:
                yield f"prices are of another engine than the one that was recorded: {error}"
