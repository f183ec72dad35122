"""The same forests in other libraries: LightGBM's Booster, ONNX Runtime, scikit-learn."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from kvpolicy.arrays import Floats
from kvpolicy.cost import FittedModel
from kvpolicy.cost.forest import Forest, Nodes
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES
from kvpolicy.training.model_fit import INPUTS

Rows = Sequence[Sequence[Sequence[float]]]
"""Features, by situation and option."""
Rivals = Mapping[str, Callable[[Rows], Callable[[int], object]]]

TREES, LEAVES, SAMPLES = 100, 31, 4000


def rivals_of(model: FittedModel, largest: bool, seed: int) -> tuple[FittedModel, Rivals, list[str]]:
    """The model to measure, its forests in other libraries, and what is missing, with the reason.

    ``largest``: in place of the model's own forests the largest there may be, fitted to made-up residuals.
    """
    samples = {kind: _samples(model, kind, seed) for kind in KINDS}
    if largest:
        texts = {kind: _fitted(samples[kind], seed) for kind in KINDS}
        forests = {kind: Forest.from_text(text, _positions(kind)) for kind, text in texts.items()}
        model = replace(model, residuals=forests)
    else:
        texts = {kind: _stored(model, kind) for kind in model.residuals}
    missing = [] if texts else [f"Booster, ONNX Runtime, scikit-learn: {model.name} has no learned residual"]
    rivals: dict[str, Callable[[Rows], Callable[[int], object]]] = {}
    if texts:
        rivals["LightGBM Booster.predict"] = _booster(texts)
        try:
            rivals["ONNX Runtime"] = _onnx({kind: model.residuals[kind].nodes for kind in texts})
        except ImportError as error:
            missing.append(f"ONNX Runtime: {error}; pip install 'kvpolicy[bench]'")
        trees = {kind: len(model.residuals[kind].nodes.roots) for kind in texts}
        rivals["scikit-learn HistGradientBoosting"] = _histogram(samples, trees, seed)
    return model, rivals, missing


def _positions(kind: Kind) -> list[int]:
    return [FEATURES.index(name) for name in INPUTS[kind]]


def _samples(model: FittedModel, kind: Kind, seed: int) -> tuple[Floats, Floats]:
    """Rows over the trained ranges, and residuals that take all trees and leaves to follow."""
    rng = np.random.default_rng(seed)
    spans = np.array([model.ranges[kind][name] for name in INPUTS[kind]])
    spread = spans[:, 0] + rng.random((SAMPLES, len(spans))) * np.maximum(spans[:, 1] - spans[:, 0], 1.0)
    along = (spread - spans[:, 0]) / np.maximum(spans[:, 1] - spans[:, 0], 1.0)
    bumps = np.sin(along @ rng.normal(0, 6, (len(spans), 8))).sum(axis=1)
    return spread, 0.1 * bumps + 0.02 * rng.standard_normal(SAMPLES)


def _fitted(samples: tuple[Floats, Floats], seed: int) -> str:
    settings = {
        "objective": "huber", "num_leaves": LEAVES, "min_data_in_leaf": 5, "learning_rate": 0.1, "num_threads": 1,
        "seed": seed, "deterministic": True, "verbosity": -1,
    }  # fmt: skip
    return lightgbm.train(settings, lightgbm.Dataset(*samples), num_boost_round=TREES).model_to_string()


def _stored(model: FittedModel, kind: Kind) -> str:
    """The text of a model's own forest, which lies beside its card."""
    for folder in (Path(model.name), Path(__file__).resolve().parent.parent / "models" / model.name):
        if (folder / f"{kind}.txt").is_file():
            return (folder / f"{kind}.txt").read_text()
    raise ValueError(f"--cost-model {model.name}: {kind}.txt is not found")


def _arrays(rows: Rows, kinds: Sequence[Kind], columns: Callable[[Kind], Sequence[int]], dtype: Any) -> list[Any]:
    """By situation, a row of one for each kind."""
    where = {kind: list(columns(kind)) for kind in kinds}
    return [
        [np.array([[row[KINDS.index(kind)][at] for at in where[kind]]], dtype) for kind in kinds] for row in rows
    ]  # fmt: skip


def _booster(texts: Mapping[Kind, str]) -> Callable[[Rows], Callable[[int], object]]:
    boosters = [lightgbm.Booster(model_str=text) for text in texts.values()]

    def make(rows: Rows) -> Callable[[int], object]:
        inputs = _arrays(rows, list(texts), _positions, np.float64)
        return lambda i: [booster.predict(row, num_threads=1) for booster, row in zip(boosters, inputs[i], strict=True)]

    return make


def _histogram(
    samples: Mapping[Kind, tuple[Floats, Floats]], trees: Mapping[Kind, int], seed: int
) -> Callable[[Rows], Callable[[int], object]]:
    """Of the same size, not the same trees: it reads no others."""
    fitted = [
        HistGradientBoostingRegressor(
            max_iter=count, max_leaf_nodes=LEAVES, min_samples_leaf=5, early_stopping=False, random_state=seed
        ).fit(*samples[kind])
        for kind, count in trees.items()
    ]

    def make(rows: Rows) -> Callable[[int], object]:
        inputs = _arrays(rows, list(trees), _positions, np.float64)
        return lambda i: [regressor.predict(row) for regressor, row in zip(fitted, inputs[i], strict=True)]

    return make


# ---- ONNX ----


def _onnx(forests: Mapping[Kind, Nodes]) -> Callable[[Rows], Callable[[int], object]]:
    onnx, runtime = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = [
        runtime.InferenceSession(_graph(onnx, nodes), options, providers=["CPUExecutionProvider"])
        for nodes in forests.values()
    ]

    def make(rows: Rows) -> Callable[[int], object]:
        inputs = _arrays(rows, list(forests), lambda _: range(len(FEATURES)), np.float32)
        _refuse_other_forest(sessions, list(forests.values()), inputs, rows)
        return lambda i: [session.run(None, {"x": row})[0] for session, row in zip(sessions, inputs[i], strict=True)]

    return make


def _refuse_other_forest(sessions: Sequence[Any], forests: Sequence[Nodes], inputs: Sequence[Any], rows: Rows) -> None:
    """ONNX Runtime computes in single precision: a row near a threshold may fall to its other side."""
    far = 0
    for arrays in inputs:
        for session, nodes, row in zip(sessions, forests, arrays, strict=True):
            expected = Forest(nodes).predict([float(value) for value in row[0]])
            far += abs(float(session.run(None, {"x": row})[0].ravel()[0]) - expected) > 1e-3
    if far > 0.02 * 2 * len(rows):
        raise ValueError(f"ONNX Runtime: {far} of {2 * len(rows)} values are not those of the same forest")


def _graph(onnx: Any, nodes: Nodes) -> bytes:
    """The forest as one TreeEnsembleRegressor."""
    table: dict[str, list[Any]] = {
        name: []
        for name in (
            "nodes_treeids", "nodes_nodeids", "nodes_featureids", "nodes_values", "nodes_modes",
            "nodes_truenodeids", "nodes_falsenodeids", "target_treeids", "target_nodeids", "target_ids",
            "target_weights",
        )
    }  # fmt: skip
    for tree, root in enumerate(nodes.roots):
        _add_tree(table, nodes, tree, root)
    node = onnx.helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1, aggregate_function="SUM",
        post_transform="NONE", **table,
    )  # fmt: skip
    real = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [node], "forest", [onnx.helper.make_tensor_value_info("x", real, [None, len(FEATURES)])],
        [onnx.helper.make_tensor_value_info("y", real, [None, 1])],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("ai.onnx.ml", 3), onnx.helper.make_opsetid("", 17)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def _add_tree(table: dict[str, list[Any]], nodes: Nodes, tree: int, root: int) -> None:
    """Depth first; a node's number in its tree is the order in which it is met."""
    waiting, met = [root], {root: 0}
    while waiting:
        at = waiting.pop()
        leaf = at < 0
        children = [0, 0]
        if not leaf:
            children = []
            for child in (nodes.left[at], nodes.right[at]):
                met[child] = len(met)
                children.append(met[child])
                waiting.append(child)
        table["nodes_treeids"].append(tree)
        table["nodes_nodeids"].append(met[at])
        table["nodes_featureids"].append(0 if leaf else nodes.feature[at])
        table["nodes_values"].append(0.0 if leaf else nodes.threshold[at])
        table["nodes_modes"].append("LEAF" if leaf else "BRANCH_LEQ")
        table["nodes_truenodeids"].append(children[0])
        table["nodes_falsenodeids"].append(children[1])
        if leaf:
            table["target_treeids"].append(tree)
            table["target_nodeids"].append(met[at])
            table["target_ids"].append(0)
            table["target_weights"].append(nodes.leaf[~at])
