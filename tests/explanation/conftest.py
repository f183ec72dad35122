"""Models by name, without files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy import explanation
from tests.synthetic import fitted_model


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    """``boosted``, ``linear`` and ``analytic`` are models by name."""
    monkeypatch.setattr(explanation, "load", lambda name: replace(fitted_model(str(name)), name=str(name)))
