"""Policies by name, the same in every command and every configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path

from kvpolicy import cost, extensions
from kvpolicy.code_digest import labelled
from kvpolicy.cost import CostModel
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.policy.base import Policy
from kvpolicy.policy.cheapest import Always, Cheapest, CheapestOnline, Coin, MinWaste, Threshold
from kvpolicy.policy.explore import Budget, Explore, ExploreOnline
from kvpolicy.policy.objective import ENGINE, Objective

FORMS: Mapping[str, str] = {
    "always-recompute": "what vLLM does by itself",
    "always-swap": "swaps wherever that is feasible",
    "threshold:TOKENS": "swaps from that many computed tokens on",
    "random:P_SWAP": "swaps with that probability",
    "cheapest:COST_MODEL": "whatever the cost model predicts to be cheaper",
    "explore:COST_MODEL": "the same as cheapest, but draws where the model cannot tell the two apart, so that the "
    "trace can judge other policies",
    "minwaste:COST_MODEL": "InferCept's rule: whatever leaves less device memory idle by the cost model's times",
    extensions.FORM: "what FACTORY of the module MODULE makes: one of your own",
}
"""Policies by name, and what each does: for errors, for help, and for the README."""
GROUP = "kvpolicy.policies"
"""Of entry points: policies that installed packages offer by name."""
COST_MODELS = (
    "a folder, the name of one that ships, analytic (untrained, of the running engine), "
    "analytic:DEVICE[@LINK]:CONFIG (untrained, of a data sheet and a config.json) "
    f"or {extensions.FORM}"
)
AFTERWARDS = (
    "; after COST_MODEL may follow ,online=on and ,objective=OBJECTIVE (not after minwaste), and of explore "
    ",budget=SECONDS or ,budget=SHARE%; after FACTORY, a class or function of that module, ,KEY=VALUE..."
)
HELP = (
    f"{'; '.join(f'{form}: {what}' for form, what in FORMS.items())}. COST_MODEL is {COST_MODELS}{AFTERWARDS}. "
    "online=on: measured outcomes correct the model; budget: of predicted regret"
)

PRICED = ("cheapest", "explore")
MODELLED = (*PRICED, "minwaste")
"""Kinds that name a cost model."""
OPTIONS = ("online", "objective", "budget")
MAX_DIGITS = 18
"""Of a threshold: more are no length, and Python itself refuses thousands."""


def load_policy(policy: str | Policy, cost_model_loader: Callable[[str], CostModel] = cost.load) -> Policy:
    """The policy itself, or the one of that name; see :func:`load`.

    A name may be a module path, ``python:MODULE:FACTORY``, which runs that module: give none that came out of a file.
    """
    return checked(policy) if isinstance(policy, Policy) else load(policy, cost_model_loader, allow_python=True)


def load_policies(policies: Sequence[str | Policy]) -> list[Policy]:
    """The policies themselves, or those of these names. Raises ValueError for none, for one that is there twice, and as
    :func:`load_policy`."""
    if not policies:
        raise InputError("no policy was given")
    loaded: list[Policy] = []
    for given in policies:
        policy = load_policy(given)
        if any(one.label == policy.label for one in loaded):
            raise InputError(f"policy {policy.label}: given twice")
        loaded.append(policy)
    return loaded


def load(spec: str, cost_model_loader: Callable[[str], CostModel] = cost.load, allow_python: bool = False) -> Policy:
    """The policy of that name. COST_MODEL is :data:`COST_MODELS`; OBJECTIVE as in
    :meth:`kvpolicy.policy.Objective.parse`, engine without it. An installed package may offer others by name.

    ``cost_model_loader``: in a server that of :func:`kvpolicy.cost.engine_loader`, which knows the engine.
    ``allow_python``: whether a module path may be named, which runs code.
    Raises ValueError, listing the forms, for a wrong name; ModelError for a model that cannot be loaded;
    :class:`kvpolicy.extensions.ExtensionError` for a module path that is refused or leads to no policy.
    """
    kind, _, value = spec.partition(":")
    if extensions.is_module_path(spec):
        found: Policy = extensions.from_module(spec, Policy, "policy", allow_python)
        return checked(found)

    if spec == "always-recompute":
        return Always(spec, "recompute")
    if spec == "always-swap":
        return Always(spec, "swap")
    if kind == "threshold":
        return Threshold(spec, _tokens(spec, value))
    if kind == "random":
        return Coin(spec, _share(spec, value))
    if kind == "minwaste" and value:
        return MinWaste(*_priced(spec, _bare_model(spec, value), cost_model_loader, allow_python))
    if kind in PRICED and value:
        model, options = _options(spec, value)
        objective, online = _objective(spec, options), _switch(spec, options, "online")
        name, cost_model = _priced(spec, model, cost_model_loader, allow_python)
        if objective.victim and not cost_model.predicts_victim_delay:
            raise _knows_no_delay(spec, model)
        if online and cost_model.step_time is None:
            raise _knows_no_steps(spec, model)
        if kind == "explore":
            return (ExploreOnline if online else Explore)(name, cost_model, objective, _budget(spec, options))
        return (CheapestOnline if online else Cheapest)(name, cost_model, objective)
    offered: Policy | None = extensions.from_entry_point(spec, GROUP, Policy, "policy")
    if offered is None:
        raise _wrong(spec, "is no policy")
    return checked(offered)


def _priced(spec: str, model: str, loader: Callable[[str], CostModel], allow_python: bool) -> tuple[str, CostModel]:
    """A policy's name and its cost model. In a name that is recorded stands no module path, but what it led to."""
    if not extensions.is_module_path(model):
        return spec, loader(model)
    found = cost.load_cost_model(model, allow_python)
    extensions.refuse_unnamed(found, "cost model")
    return spec.replace(model, labelled(found), 1), found


def checked(policy: Policy) -> Policy:
    """A policy of somebody's own, with what every policy has. Raises ExtensionError naming what it lacks."""
    extensions.refuse_unnamed(policy, "policy")
    state: object = policy.initial_state()
    if not callable(getattr(state, "to_json", None)):
        raise extensions.ExtensionError(
            f"policy {policy.name}: initial_state() gives {state!r}, should give a value with to_json()"
        )
    return policy


def anchored(spec: str) -> str:
    """The name with the folder of its cost model, where it names one, made absolute: a server may start elsewhere."""
    kind, colon, value = spec.partition(":")
    if kind not in MODELLED or not value:
        return spec
    model, _ = _options(spec, value)
    place = model
    if model.startswith(f"{cost.ANALYTIC}:"):  # analytic:DEVICE:CONFIG
        place = model.split(":", 2)[-1]
    elif not cost.holds_model(Path(model)):
        return spec
    if not place or not Path(place).exists():
        return spec
    head = model[: len(model) - len(place)]
    return f"{kind}{colon}{head}{Path(place).absolute()}{value[len(model) :]}"


def needs_engine(spec: str) -> bool:
    """Whether the policy can only be loaded inside a server: its cost model is the running engine's own.

    Raises ValueError for options that no such model can serve, so that nobody has to start a server to hear of it.
    """
    kind, _, value = spec.partition(":")
    if kind not in MODELLED or value.partition(",")[0] != cost.ANALYTIC:
        return False
    if kind == "minwaste":
        return bool(_bare_model(spec, value))
    model, options = _options(spec, value)
    if _switch(spec, options, "online"):
        raise _knows_no_steps(spec, model)
    if _objective(spec, options).victim:
        raise _knows_no_delay(spec, model)
    return True


def _options(spec: str, value: str) -> tuple[str, dict[str, str]]:
    """Cost model and options; what has no ``=`` belongs to the model's name."""
    parts = value.split(",")
    options: dict[str, str] = {}
    while len(parts) > 1 and "=" in parts[-1]:
        key, _, given = parts.pop().partition("=")
        if key not in OPTIONS or key in options:
            raise _wrong(spec, f"has the option {key!r}; the options are {', '.join(OPTIONS)}, each at most once")
        options[key] = given
    if not parts[0] or not parts[-1]:
        raise _wrong(spec, "names no cost model")
    if "budget" in options and not spec.startswith("explore:"):
        raise _wrong(spec, "has a budget, and nothing to spend it on: it explores nothing")
    _budget(spec, options)
    return ",".join(parts), options


def _bare_model(spec: str, value: str) -> str:
    model, options = _options(spec, value)
    if options:
        raise _wrong(spec, f"has the option {next(iter(options))!r}; minwaste takes none")
    return model


def _objective(spec: str, options: Mapping[str, str]) -> Objective:
    if "objective" not in options:
        return ENGINE
    try:
        return Objective.parse(options["objective"])
    except ValueError as error:
        raise _wrong(spec, f"cannot be: {error}") from None


def _budget(spec: str, options: Mapping[str, str]) -> Budget:
    """Seconds of predicted regret in all, or a share of the predicted cost; without a bound where none is given."""
    if "budget" not in options:
        return Budget()
    given = options["budget"]
    try:
        number = float(given.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0.0 <= number < inf:
        raise _wrong(spec, f"has budget={given}, should be seconds, or a share as in 1%, 0 or above")
    return Budget(share=number / 100) if given.endswith("%") else Budget(seconds=number)


def _switch(spec: str, options: Mapping[str, str], key: str) -> bool:
    given = options.get(key, "off")
    if given not in ("on", "off"):
        raise _wrong(spec, f"has {key}={given}, should be on or off")
    return given == "on"


def _tokens(spec: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise _wrong(spec, "should name a whole number of tokens, 0 or above")
    if len(value.lstrip("0")) > MAX_DIGITS:
        raise _wrong(f"{spec[:40]}...", f"should name at most {'9' * MAX_DIGITS} tokens")
    return int(value.lstrip("0") or "0")


def _share(spec: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise _wrong(spec, "should name a probability from 0 to 1")
    return share


def _knows_no_delay(spec: str, model: str) -> WrongValue:
    return _wrong(spec, f"minimises the victim's delay, which cost model {model} was not taught; train it again")


def _knows_no_steps(spec: str, model: str) -> WrongValue:
    return _wrong(spec, f"learns by step times, of which cost model {model} knows none; profile and train one")


def _wrong(spec: str, what: str) -> WrongValue:
    return WrongValue("policy", f"{spec!r} {what}; the policies are {', '.join(FORMS)}{AFTERWARDS}")
