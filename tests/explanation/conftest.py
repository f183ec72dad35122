"""Models by name, without files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy import explanation
from kvpolicy.cost import FittedModel
from tests.synthetic import fitted_model


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    """``boosted``, ``linear`` and ``analytic`` are models by name."""

    def load(name: object, pinned: bool = True) -> FittedModel:
        return replace(fitted_model(str(name)), name=str(name))

    monkeypatch.setattr(explanation, "load", load)
