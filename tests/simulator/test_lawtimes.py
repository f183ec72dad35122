"""Step and copy times out of cost models, worked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from math import hypot
from pathlib import Path

import numpy as np
import pytest

from kvpolicy import cost
from kvpolicy.cost import FittedModel, ModelError
from kvpolicy.cost.laws import RecomputeRoofline
from kvpolicy.simulator import StepLoad
from kvpolicy.simulator.lawtimes import LawTimes
from tests.synthetic import fitted_model

DENSE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
LOADS = (
    StepLoad(1, 1, 500, 0, 0, 0),
    StepLoad(64, 64, 64_000, 0, 0, 0),
    StepLoad(2048, 0, 0, 2048 * 2049 // 2, 1, 0),
    StepLoad(2048, 48, 9_000, 2_500_000, 2, 4000),
    StepLoad(0, 0, 0, 0, 0, 0),
)


@pytest.fixture
def sheet(tmp_path: Path) -> FittedModel:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    return cost.load(f"analytic:A100-SXM-80GB:{tmp_path}")


def test_a_roofline_step_by_hand(sheet: FittedModel) -> None:
    law = sheet.laws["recompute"]
    assert isinstance(law, RecomputeRoofline)
    tokens, read, pairs = 2048, 9_000, 2_500_000
    attention_s = max(law.s_per_pair * (pairs + read), law.s_per_kv_token * (read + 4000))
    wanted = law.alone_s + hypot(law.s_per_token * tokens, law.weight_s) + attention_s
    assert LawTimes(sheet).step_s(LOADS[3]) == pytest.approx(wanted, rel=1e-12)


def test_a_trained_models_steps_are_its_d0(tmp_path: Path) -> None:
    model = cost.load("cpu-llama-native")
    d0 = model.step_time
    assert d0 is not None
    calm = LOADS[1]
    assert LawTimes(model).step_s(calm) == pytest.approx(float(d0.predict(np.array([calm[:4]], float))[0]))
    chunk = LOADS[2]
    alone = float(d0.predict(np.array([chunk[:4]], float))[0])
    assert LawTimes(model).step_s(chunk) == pytest.approx(alone + sum(d0.per_part_s[4:])), "what it leaves to the next"


def test_rows_and_single_steps_agree_to_the_last_bit(sheet: FittedModel) -> None:
    for model in (sheet, cost.load("cpu-llama-native")):
        times = LawTimes(model)
        assert times.steps_s(np.array(LOADS, float)).tolist() == [times.step_s(load) for load in LOADS]
        assert times.step_s(LOADS[4]) == 0.0


def test_copies_are_those_of_the_models_link(sheet: FittedModel) -> None:
    swap = sheet.laws["swap"].to_dict()["save"]
    wanted = swap["latency_s"] + swap["s_per_byte"] * 10**9 + swap["s_per_segment"] * 50
    assert LawTimes(sheet).copy_s("save", 10**9, 50, 2 * 10**7) == pytest.approx(wanted)


def test_what_knows_no_steps_or_no_link_is_refused() -> None:
    linear = fitted_model("linear")
    with pytest.raises(ModelError, match="its law of swaps knows no link"):
        LawTimes(linear)
    assert fitted_model("analytic").provenance.trace_digests
    with pytest.raises(ModelError, match="it knows no step times"):
        LawTimes(replace(fitted_model("analytic"), step_time=None))
