"""Policies by name, the same in every command and every configuration."""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy import cost
from kvpolicy.cost import CostModel
from kvpolicy.policy.cheapest import Cheapest
from kvpolicy.policy.explore import Explore
from kvpolicy.policy.fixed import Always, Coin
from kvpolicy.policy.protocol import Policy
from kvpolicy.policy.threshold import Threshold

FORMS = (
    "always-recompute",
    "always-swap",
    "threshold:TOKENS",
    "random:P_SWAP",
    "cheapest:COST_MODEL",
    "explore:COST_MODEL",
)
COST_MODELS = (
    "a folder, the name of one that ships, analytic (untrained, of the running engine) "
    "or analytic:DEVICE[@LINK]:CONFIG (untrained, of a data sheet and a config.json)"
)


def load(spec: str, cost_model_loader: Callable[[str], CostModel] = cost.load) -> Policy:
    """The policy of that name. COST_MODEL is :data:`COST_MODELS`.

    ``cost_model_loader``: in a server that of :func:`kvpolicy.cost.engine_loader`, which knows the engine.
    Raises ValueError, listing the forms, for a wrong name; ModelError for a model that cannot be loaded.
    """
    kind, _, value = spec.partition(":")
    if spec == "always-recompute":
        return Always(spec, "recompute")
    if spec == "always-swap":
        return Always(spec, "swap")
    if kind == "threshold":
        return Threshold(spec, _tokens(spec, value))
    if kind == "random":
        return Coin(spec, _share(spec, value))
    if kind == "cheapest" and value:
        return Cheapest(spec, cost_model_loader(value))
    if kind == "explore" and value:
        return Explore(spec, cost_model_loader(value))
    raise _wrong(spec, "is no policy")


def needs_engine(spec: str) -> bool:
    """Whether the policy can only be loaded inside a server: its cost model is the running engine's own."""
    kind, _, value = spec.partition(":")
    return kind in ("cheapest", "explore") and value.partition(",")[0] == cost.ANALYTIC


def _tokens(spec: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise _wrong(spec, "should name a whole number of tokens, 0 or above")
    return int(value)


def _share(spec: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise _wrong(spec, "should name a probability from 0 to 1")
    return share


def _wrong(spec: str, what: str) -> ValueError:
    return ValueError(f"policy {spec!r} {what}; the policies are {', '.join(FORMS)}")
