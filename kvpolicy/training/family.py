"""Families of cost models: how laws are fitted to measured costs, and whether boosted trees correct them.

A user's family extends :class:`Family` and implements one method. Its laws are stored, compiled and served like those
of every other model: the family itself is needed for training only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from sklearn.base import BaseEstimator

from kvpolicy import extensions
from kvpolicy.code_digest import digest_of, label_of
from kvpolicy.cost.card import LAWS
from kvpolicy.cost.laws import Law, law_from_dict
from kvpolicy.datasets.examples import Examples
from kvpolicy.datasets.tables import TransferRecord
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.fields import refuse_other
from kvpolicy.hardware import Geometry
from kvpolicy.training.law_fits import fit_analytic, fit_linear

GROUP = "kvpolicy.families"
"""Entry point group of the families that installed packages offer by name."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The data that a family's laws are fitted to."""

    examples: Examples
    """By option, features and measured seconds; a record of a log counts by its weight."""
    floor_s: Mapping[Kind, float]
    """Noise floor: costs below it cannot be distinguished from none."""
    transfers: Sequence[TransferRecord] = ()
    """Transfers (saves and loads) with their durations; empty for a log."""
    budget_tokens: float = inf
    """Maximum number of tokens per step; infinite if unknown."""
    geometry: Geometry | None = None
    """Shape of the LLM, which says which layers attend to a window; None if unknown."""


class Family(BaseEstimator, ABC):
    """A method of learning cost models. Deterministic: the same costs give the same laws.

    By scikit-learn's rules a family is an estimator before its fit: the constructor only stores its arguments, under
    their names, so that ``get_params``, ``set_params`` and ``sklearn.base.clone`` work. A fit does not change it: what
    :func:`kvpolicy.train` learns is the report's ``model``, an immutable :class:`kvpolicy.CostModel` with ``predict``.
    """

    name: str
    """The name on the command line (``--family``) and in the model card."""
    trees: bool = False
    """Whether boosted trees correct the laws, if that helps on held-out states."""

    @abstractmethod
    def fit_laws(self, costs: Costs) -> Mapping[Kind, Law]:
        """Fit one law per option: the option's roofline, or a :class:`kvpolicy.cost.laws.LinearLaw`.

        Leave the family as it is.
        """

    @property
    def digest(self) -> str:
        """See :attr:`kvpolicy.policy.Policy.digest`."""
        return digest_of(self)

    @property
    def label(self) -> str:
        """The name in the model card and in reports; see :attr:`kvpolicy.policy.Policy.label`."""
        return label_of(self)


class Analytic(Family):
    """Rooflines: physics with few constants."""

    name = "analytic"

    def fit_laws(self, costs: Costs) -> Mapping[Kind, Law]:
        return fit_analytic(costs.examples, costs.transfers, costs.floor_s, costs.budget_tokens, costs.geometry)


class Boosted(Analytic):
    """Rooflines, with boosted trees on their residuals."""

    name = "boosted"
    trees = True


class Linear(Family):
    """A weighted sum of features: the baseline without physics."""

    name = "linear"

    def fit_laws(self, costs: Costs) -> Mapping[Kind, Law]:
        return fit_linear(costs.examples, costs.floor_s)


FAMILIES: Mapping[str, Family] = {family.name: family for family in (Boosted(), Linear(), Analytic())}


def family_of(family: str | Family) -> Family:
    """Return the family itself, or the family of that name.

    A name is one of :data:`FAMILIES`, one registered by an installed package, or
    ``python:MODULE:FACTORY[,KEY=VALUE...]``, which runs that module.
    Raises InputError for an unknown name and for a class, :class:`kvpolicy.extensions.ExtensionError` if the module or
    the entry point gives no family.
    """
    refuse_other("family", family, (str, Family), "a name or a Family")
    if isinstance(family, Family):
        resolved: Family | None = family
    elif extensions.is_module_path(family):
        resolved = extensions.from_module(family, Family, "family", allowed=True)
    else:
        resolved = FAMILIES.get(family) or extensions.from_entry_point(family, GROUP, Family, "family")
    if resolved is None:
        raise InputError(f"family is {family!r}, should be one of {', '.join(FAMILIES)} or {extensions.FORM}")
    extensions.refuse_unnamed(resolved, "family")
    return resolved


def laws_of(family: Family, costs: Costs) -> dict[Kind, Law]:
    """Fit the family's laws, in the form they are stored in.

    Raises ExtensionError, naming the option, for a law that cannot be stored.
    """
    fitted = family.fit_laws(costs)
    laws: dict[Kind, Law] = {}
    for kind in KINDS:
        law = fitted.get(kind) if isinstance(fitted, Mapping) else None
        if not isinstance(law, LAWS[kind]):
            wanted = " or ".join(law_type.__name__ for law_type in LAWS[kind])
            raise extensions.ExtensionError(f"family {family.name}: the law of {kind} is {law!r}, should be a {wanted}")
        try:
            laws[kind] = law_from_dict(law.to_dict())
        except InputError as error:
            raise extensions.ExtensionError(f"family {family.name}: the law of {kind}: {error}") from error
    return laws
