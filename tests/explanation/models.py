"""Explanations of models by name, with defaults for what a test does not ask for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import kvpolicy
from kvpolicy.explanation import Explanation, Question


def explain(**more: Any) -> Explanation:
    given = {"tokens": 500, "running": 3} | more
    asked = {one.name: given.pop(one.name) for one in fields(Question) if one.name in given}
    return kvpolicy.explain(**({"cost_model": "boosted", "question": Question(**asked)} | given))
