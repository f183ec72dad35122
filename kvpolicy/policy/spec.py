"""Policies by name: the names (specs) are the same in all commands and configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from math import inf
from pathlib import Path

from kvpolicy import cost, extensions
from kvpolicy.code_digest import call_of, digest_label
from kvpolicy.cost import CostModel
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue, like, refuse_other
from kvpolicy.policy.base import Policy
from kvpolicy.policy.cheapest import Always, Cheapest, CheapestOnline, Coin, MinWaste, Threshold
from kvpolicy.policy.decision import initial_state_of
from kvpolicy.policy.explore import Budget, Explore, ExploreOnline
from kvpolicy.policy.objective import ENGINE, Objective

FORMS: Mapping[str, str] = {
    "always-recompute": "what vLLM does without kvpolicy",
    "always-swap": "swaps wherever feasible",
    "threshold:TOKENS": "swaps requests of at least that many computed tokens",
    "random:P_SWAP": "swaps with that probability, at random",
    "cheapest:COST_MODEL": "the option that the cost model predicts to be cheaper",
    "explore:COST_MODEL": "as cheapest, but chooses at random where the predicted difference is not significant, so "
    "that the trace can be used to judge other policies",
    "minwaste:COST_MODEL": "InferCept's rule: the option that leaves less device memory idle by the cost model's times",
    extensions.FORM: "a policy of your own, which FACTORY of the module MODULE makes",
}
"""Forms of policy names, with what each policy does: for error messages, for help, and for docs/serving.md."""
GROUP = "kvpolicy.policies"
"""Entry point group of the policies that installed packages offer by name."""
COST_MODELS = (
    "a folder, the name of a shipped one, analytic (untrained, of the running engine), "
    "analytic:DEVICE[@LINK]:CONFIG (untrained, of a data sheet and a config.json) "
    f"or {extensions.FORM}"
)
OPTIONS_HELP = (
    "; options after COST_MODEL: ,online=on and ,objective=OBJECTIVE (not for minwaste), for explore also "
    ",budget=SECONDS or ,budget=SHARE%; after FACTORY, a class or function of that module: ,KEY=VALUE..."
)
HELP = (
    f"{'; '.join(f'{form}: {what}' for form, what in FORMS.items())}. COST_MODEL is {COST_MODELS}{OPTIONS_HELP}. "
    "online=on: measured outcomes correct the model; budget: maximum predicted regret spent on random choices"
)

PRICED = ("cheapest", "explore")
WITH_COST_MODEL = (*PRICED, "minwaste")
"""Kinds of policies whose name holds a cost model."""
OPTIONS = ("online", "objective", "budget")
MAX_DIGITS = 18
"""Maximum number of digits of a threshold: no length is longer, and Python does not parse thousands of digits."""


def load_policy(
    policy: str | Policy, cost_model_loader: Callable[[str], CostModel] = cost.load, argument: str = "policy"
) -> Policy:
    """Return the policy itself, or load the policy of that name; see :func:`load`.

    A name may be a module path, ``python:MODULE:FACTORY``, which runs that module: do not pass names read from a file.
    ``argument``: name of the caller's argument, for errors. Raises WrongValue for anything but a text and a policy, and
    the errors of :func:`load`.
    """
    refuse_other(argument, policy, (str, Policy), "a name or a Policy")
    return checked(policy) if isinstance(policy, Policy) else load(policy, cost_model_loader, allow_python=True)


def load_policies(policies: Sequence[str | Policy]) -> list[Policy]:
    """Load several policies, given by name or as objects.

    Raises InputError for an empty list and for duplicates, and the errors of :func:`load_policy`.
    """
    if not policies:
        raise InputError("no policy was given")
    loaded: list[Policy] = []
    for number, policy in enumerate(policies):
        loaded_policy = load_policy(policy, argument=f"policies[{number}]")
        if any(other.label == loaded_policy.label for other in loaded):
            raise InputError(f"policy {loaded_policy.label}: given twice")
        loaded.append(loaded_policy)
    return loaded


def specs_by_label(policies: Sequence[str | Policy], labels: Sequence[str]) -> dict[str, str]:
    """What stands behind labels with a digest, for reports: the text as it was given, or the call that makes an object.

    ``labels``: one per policy. Left out are policies whose label is that text, and objects that are no dataclasses.
    """
    texts: dict[str, str] = {}
    for policy, label in zip(policies, labels, strict=True):
        text = policy if isinstance(policy, str) else call_of(policy) if label != policy.name else ""
        if text and text != label:
            texts[label] = text
    return texts


def spec_lines(specs: Mapping[str, str]) -> list[str]:
    """A line for each of :func:`specs_by_label`, to stand below a report's table."""
    return [f"{label} is {spec}" for label, spec in specs.items()]


def load(spec: str, cost_model_loader: Callable[[str], CostModel] = cost.load, allow_python: bool = False) -> Policy:
    """Load the policy of that name. COST_MODEL is :data:`COST_MODELS`; OBJECTIVE as in
    :meth:`kvpolicy.policy.Objective.parse`, by default engine. Installed packages may offer further policies by name.

    ``cost_model_loader``: in a server that of :func:`kvpolicy.cost.engine_loader`, which knows the engine.
    ``allow_python``: whether the name may be a module path, which runs code.
    Raises WrongValue, listing the forms, for an unknown name; ModelError for a model that cannot be loaded;
    :class:`kvpolicy.extensions.ExtensionError` for a module path that is refused or gives no policy.
    """
    kind, _, value = spec.partition(":")
    if extensions.is_module_path(spec):
        user_policy: Policy = extensions.from_module(spec, Policy, "policy", allow_python)
        return checked(user_policy)

    if spec == "always-recompute":
        return Always(spec, "recompute")
    if spec == "always-swap":
        return Always(spec, "swap")
    if kind == "threshold":
        return Threshold(spec, _token_count(spec, value))
    if kind == "random":
        return Coin(spec, _swap_probability(spec, value))
    if kind == "minwaste" and value:
        return MinWaste(*_priced(spec, _model_without_options(spec, value), cost_model_loader, allow_python))
    if kind in PRICED and value:
        model, options = _options(spec, value)
        objective, online = _objective(spec, options), _is_on(spec, options, "online")
        name, cost_model = _priced(spec, model, cost_model_loader, allow_python)
        if objective.victim and not cost_model.predicts_victim_delay:
            raise _no_victim_delay(spec, model)
        if online and cost_model.step_time is None:
            raise _no_step_time(spec, model)
        if kind == "explore":
            return (ExploreOnline if online else Explore)(name, cost_model, objective, _budget(spec, options))
        return (CheapestOnline if online else Cheapest)(name, cost_model, objective)
    plugin_policy: Policy | None = extensions.from_entry_point(spec, GROUP, Policy, "policy")
    if plugin_policy is None:
        raise _refusal(spec, f"is no policy{like(spec, FORMS)}")
    return checked(plugin_policy)


def _priced(spec: str, model: str, loader: Callable[[str], CostModel], allow_python: bool) -> tuple[str, CostModel]:
    """Name and cost model of a policy. A module path in the name is replaced by the label of the model it gave."""
    if not extensions.is_module_path(model):
        return spec, loader(model)
    cost_model = cost.load_cost_model(model, allow_python)
    extensions.refuse_unnamed(cost_model, "cost model")
    return spec.replace(model, digest_label(cost_model), 1), cost_model


def checked(policy: Policy) -> Policy:
    """Check a user's policy.

    Raises ExtensionError, naming what the policy lacks, PolicyError for an initial state that cannot be recorded, and
    WrongValue for a cost model that is none.
    """
    extensions.refuse_unnamed(policy, "policy")
    if policy.cost_model is not None:
        refuse_other(f"policy {policy.name}: cost_model", policy.cost_model, CostModel, "a CostModel")
        extensions.refuse_unnamed(policy.cost_model, f"policy {policy.name}: cost model")
    probabilities: object = policy.probabilities
    if not callable(probabilities):
        raise extensions.ExtensionError(
            f"policy {policy.name}: probabilities is {probabilities!r}, should be a method of a situation, options "
            "and a state"
        )
    shape = signature(probabilities)
    try:
        shape.bind("situation", "options", "state")
    except TypeError as error:
        raise extensions.ExtensionError(
            f"policy {policy.name}: probabilities{shape} cannot be called with a situation, options and a state: "
            f"{error}"
        ) from error
    initial_state_of(policy)
    return policy


def anchored(spec: str) -> str:
    """The name, with the folder of its cost model, if any, made absolute: a server may start in another folder."""
    kind, colon, value = spec.partition(":")
    if kind not in WITH_COST_MODEL or not value:
        return spec
    model, _ = _options(spec, value)
    path = model
    if model.startswith(f"{cost.ANALYTIC}:"):  # analytic:DEVICE:CONFIG
        path = model.split(":", 2)[-1]
    elif not cost.holds_model(Path(model)):
        return spec
    if not path or not Path(path).exists():
        return spec
    prefix = model[: len(model) - len(path)]
    return f"{kind}{colon}{prefix}{Path(path).absolute()}{value[len(model) :]}"


def model_in(spec: str) -> str:
    """Name or folder of the trained cost model in a policy's name or label; empty where it holds none, an untrained one
    or a module's. Raises WrongValue for options that no policy has."""
    kind, _, value = spec.partition(":")
    if kind not in WITH_COST_MODEL or not value or extensions.names_module(spec):
        return ""
    model, _ = _options(spec, value)
    return "" if model.partition(":")[0] == cost.ANALYTIC else model


def needs_engine(spec: str) -> bool:
    """Whether the policy can be loaded inside a server only, because its cost model is that of the running engine.

    Raises WrongValue for options that such a model does not support, so that the error comes before a server starts.
    """
    kind, _, value = spec.partition(":")
    if kind not in WITH_COST_MODEL or value.partition(",")[0] != cost.ANALYTIC:
        return False
    if kind == "minwaste":
        return bool(_model_without_options(spec, value))
    model, options = _options(spec, value)
    if _is_on(spec, options, "online"):
        raise _no_step_time(spec, model)
    if _objective(spec, options).victim:
        raise _no_victim_delay(spec, model)
    return True


def _options(spec: str, value: str) -> tuple[str, dict[str, str]]:
    """Split into cost model and options; a part without ``=`` belongs to the model's name."""
    parts = value.split(",")
    options: dict[str, str] = {}
    while len(parts) > 1 and "=" in parts[-1]:
        key, _, setting = parts.pop().partition("=")
        if key not in OPTIONS or key in options:
            raise _refusal(spec, f"has the option {key!r}; the options are {', '.join(OPTIONS)}, each at most once")
        options[key] = setting
    if not parts[0] or not parts[-1]:
        raise _refusal(spec, "names no cost model")
    if "budget" in options and not spec.startswith("explore:"):
        raise _refusal(spec, "has a budget, and nothing to spend it on: it explores nothing")
    _budget(spec, options)
    return ",".join(parts), options


def _model_without_options(spec: str, value: str) -> str:
    model, options = _options(spec, value)
    if options:
        raise _refusal(spec, f"has the option {next(iter(options))!r}; minwaste takes none")
    return model


def _objective(spec: str, options: Mapping[str, str]) -> Objective:
    if "objective" not in options:
        return ENGINE
    try:
        return Objective.parse(options["objective"])
    except ValueError as error:
        raise _refusal(spec, f"cannot be: {error}") from None


def _budget(spec: str, options: Mapping[str, str]) -> Budget:
    """Maximum predicted regret, in seconds or as a share of the predicted cost; no bound if none is given."""
    if "budget" not in options:
        return Budget()
    text = options["budget"]
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0.0 <= number < inf:
        raise _refusal(spec, f"has budget={text}, should be seconds, or a share as in 1%, 0 or above")
    return Budget(share=number / 100) if text.endswith("%") else Budget(seconds=number)


def _is_on(spec: str, options: Mapping[str, str], key: str) -> bool:
    setting = options.get(key, "off")
    if setting not in ("on", "off"):
        raise _refusal(spec, f"has {key}={setting}, should be on or off")
    return setting == "on"


def _token_count(spec: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise _refusal(spec, "should name a whole number of tokens, 0 or above")
    if len(value.lstrip("0")) > MAX_DIGITS:
        raise _refusal(f"{spec[:40]}...", f"should name at most {'9' * MAX_DIGITS} tokens")
    return int(value.lstrip("0") or "0")


def _swap_probability(spec: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise _refusal(spec, "should name a probability from 0 to 1")
    return share


def _no_victim_delay(spec: str, model: str) -> WrongValue:
    return _refusal(spec, f"minimises the victim's delay, which cost model {model} does not predict; train it again")


def _no_step_time(spec: str, model: str) -> WrongValue:
    return _refusal(spec, f"learns by step times, of which cost model {model} knows none; profile and train one")


def _refusal(spec: str, problem: str) -> WrongValue:
    return WrongValue("policy", f"{spec!r} {problem}; the policies are {', '.join(FORMS)}{OPTIONS_HELP}")
