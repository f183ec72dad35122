"""The flattened forest: the same numbers as LightGBM; nothing but whole forests is read."""

from __future__ import annotations

import re
from typing import Any

import lightgbm
import numpy as np
import pytest

from kvpolicy.cost.forest import Forest, ForestError

COLUMNS = 6
POSITIONS = [4, 0, 7, 2, 9, 5]
"""Where the forest's features are in a row of ten."""


def booster(trees: int = 40, seed: int = 0, **more: Any) -> lightgbm.Booster:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((600, COLUMNS)) * 10.0 ** np.arange(-2, 4)
    y = np.sin(x[:, 0] * 50) + np.tanh(x[:, 3]) * x[:, 1] + 0.1 * rng.standard_normal(600)
    settings = {"objective": "huber", "num_leaves": 15, "verbosity": -1, "num_threads": 1, "seed": seed}
    return lightgbm.train(settings | more, lightgbm.Dataset(x, y), num_boost_round=trees)


def rows(count: int, one: lightgbm.Booster) -> np.ndarray[Any, Any]:
    """Random rows, and rows exactly on the trees' thresholds."""
    rng = np.random.default_rng(5)
    spread = rng.standard_normal((count, COLUMNS)) * 10.0 ** np.arange(-2, 4) * 2
    text = one.model_to_string()
    thresholds = [float(v) for line in re.findall(r"^threshold=(.*)$", text, re.M) for v in line.split()]
    edges = rng.choice(thresholds, (count, COLUMNS))
    return np.concatenate([spread, edges])


def test_equals_lightgbm() -> None:
    one = booster()
    forest = Forest.from_text(one.model_to_string(), POSITIONS)
    given = rows(2000, one)
    row = np.zeros((len(given), 10))
    row[:, POSITIONS] = given
    results = [forest.predict(tuple(each)) for each in row.tolist()]
    assert np.abs(np.array(results) - one.predict(given)).max() < 1e-9


def test_only_split_features_are_used() -> None:
    forest = Forest.from_text(booster(trees=1, num_leaves=2).model_to_string(), POSITIONS)
    assert len(forest.used) == 1
    assert forest.used <= set(POSITIONS)


def test_trees_of_one_leaf() -> None:
    flat = lightgbm.train(
        {"objective": "huber", "verbosity": -1, "min_data_in_leaf": 1000},
        lightgbm.Dataset(np.random.default_rng(0).random((50, COLUMNS)), np.full(50, 0.25)),
        num_boost_round=3,
    )
    forest = Forest.from_text(flat.model_to_string(), POSITIONS)
    assert forest.predict([0.0] * 10) == pytest.approx(float(flat.predict(np.zeros((1, COLUMNS)))[0]), abs=1e-12)


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        (r"^tree\n", "forest\n", "not a LightGBM model"),
        (r"\nend of trees[\s\S]*", "", "truncated"),
        (r"\nTree=3\n[\s\S]*?(?=\nTree=4\n)", "", "tree_sizes lists 40 trees, the file holds 39"),
        (r"(?m)^tree_sizes=.*$", "", "tree_sizes is missing"),
        (r"(?m)^threshold=\S+", "threshold=", "tree 0: threshold holds"),
        (r"(?m)^leaf_value=\S+", "leaf_value=nan", "tree 0: leaf_value holds"),
        (r"(?m)^leaf_value=\S+", "leaf_value=x", "tree 0"),
        (r"(?m)^decision_type=\d+", "decision_type=1", "tree 0: decision_type"),
        (r"(?m)^split_feature=\d+", "split_feature=77", "tree 0: split_feature 77"),
        (r"(?m)^left_child=\S+", "left_child=0", "tree 0: left_child"),
        (r"(?m)^num_cat=0", "num_cat=1", "categorical"),
    ],
)
def test_anything_but_a_whole_forest_is_refused(pattern: str, replacement: str, message: str) -> None:
    text = re.sub(pattern, replacement, booster().model_to_string(), count=1)
    with pytest.raises(ForestError, match=message):
        Forest.from_text(text, POSITIONS)
