"""Explanations of models by name, with defaults for what a test does not ask for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import kvpolicy
from kvpolicy.explanation import Explanation, Question


def explain(**more: Any) -> Explanation:
    value = {"tokens": 500, "running": 3} | more
    asked = {field.name: value.pop(field.name) for field in fields(Question) if field.name in value}
    return kvpolicy.explain(**({"cost_model": "boosted", "question": Question(**asked)} | value))
