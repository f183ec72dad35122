"""Families of cost models: how laws are found in measured costs, and whether trees correct them.

A family of one's own extends :class:`Family` and writes one method. What it finds is stored, compiled and served as
every other model is: the family itself is needed for training alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kvpolicy import extensions
from kvpolicy.code_digest import digest_of, label_of
from kvpolicy.cost.laws import Law, law_from_dict
from kvpolicy.cost.store import LAWS
from kvpolicy.datasets.examples import Examples
from kvpolicy.datasets.tables import Move
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.training.law_fits import fit_analytic, fit_linear

GROUP = "kvpolicy.families"
"""Of entry points: families that installed packages offer by name."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a family learns from."""

    examples: Examples
    """By option, features and measured seconds; of a log a record stands as often as it weighs."""
    floor_s: Mapping[Kind, float]
    """Costs below are not told from none."""
    moves: Sequence[Move] = ()
    """Copies and how long they took; none of a log."""
    budget_tokens: float = inf
    """Most tokens of a step; infinite where that is not known."""


class Family(ABC):
    """How a cost model is learned. Deterministic: the same costs give the same laws."""

    name: str
    """As ``--family`` takes it, and as a model's card has it."""
    trees: bool = False
    """Whether boosted trees correct the laws, where that helps on states they have not seen."""

    @abstractmethod
    def fit_laws(self, costs: Costs) -> Mapping[Kind, Law]:
        """A law for each option: a roofline of its own, or a :class:`kvpolicy.cost.laws.LinearLaw`."""

    @property
    def digest(self) -> str:
        """See :attr:`kvpolicy.policy.Policy.digest`."""
        return digest_of(self)

    @property
    def label(self) -> str:
        """In a model's card and in reports; see :attr:`kvpolicy.policy.Policy.label`."""
        return label_of(self)


class Analytic(Family):
    """Rooflines: physics with a handful of constants."""

    name = "analytic"

    def fit_laws(self, costs: Costs) -> Mapping[Kind, Law]:
        return fit_analytic(costs.examples, costs.moves, costs.floor_s, costs.budget_tokens)


class Boosted(Analytic):
    """Rooflines, and trees on what they miss."""

    name = "boosted"
    trees = True


class Linear(Family):
    """A sum of weighted features: what a user without physics would try first."""

    name = "linear"

    def fit_laws(self, costs: Costs) -> Mapping[Kind, Law]:
        return fit_linear(costs.examples, costs.floor_s)


FAMILIES: Mapping[str, Family] = {one.name: one for one in (Boosted(), Linear(), Analytic())}


def family_of(family: str | Family) -> Family:
    """The family itself, or the one of that name: of :data:`FAMILIES`, registered by an installed package, or
    ``python:MODULE:FACTORY[,KEY=VALUE...]``, which runs that module.

    Raises ValueError for a name that is none, :class:`kvpolicy.extensions.ExtensionError` for what leads to none.
    """
    if isinstance(family, Family):
        found: Family | None = family
    elif extensions.is_module_path(family):
        found = extensions.from_module(family, Family, "family", allowed=True)
    else:
        found = FAMILIES.get(family) or extensions.from_entry_point(family, GROUP, Family, "family")
    if found is None:
        raise InputError(f"family is {family!r}, should be one of {', '.join(FAMILIES)} or {extensions.FORM}")
    extensions.refuse_unnamed(found, "family")
    return found


def laws_of(family: Family, costs: Costs) -> dict[Kind, Law]:
    """The family's laws, as they can be stored. Raises ExtensionError, naming the option, for laws that cannot be."""
    found = family.fit_laws(costs)
    laws: dict[Kind, Law] = {}
    for kind in KINDS:
        law = found.get(kind) if isinstance(found, Mapping) else None
        if not isinstance(law, LAWS[kind]):
            wanted = " or ".join(one.__name__ for one in LAWS[kind])
            raise extensions.ExtensionError(f"family {family.name}: the law of {kind} is {law!r}, should be a {wanted}")
        try:
            laws[kind] = law_from_dict(law.to_dict())
        except ValueError as error:
            raise extensions.ExtensionError(f"family {family.name}: the law of {kind}: {error}") from error
    return laws
