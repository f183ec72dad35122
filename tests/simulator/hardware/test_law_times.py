"""Step times by the laws of a cost model and by constants."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvpolicy import cost
from kvpolicy.simulator import LOAD, StepLoad, law_times
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from tests.shape.configs import LLAMA_31_8B
from tests.simulator.worlds import SECONDS


@pytest.mark.parametrize("name", ["cpu-llama-native", "analytic:H100-SXM"])
def test_step_times_of_a_cost_model(name: str, tmp_path: Path) -> None:
    """Numbers and arrays come out alike; more of anything never takes less."""
    if name.startswith("analytic"):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
        name = f"{name}:{tmp_path}"
    times = law_times(cost.load(name))
    base = StepLoad(100, 100, 50_000, 0, 0, 0)
    loads = [base, StepLoad(612, 100, 50_000, 512 * 513 // 2, 1, 0), base._replace(kv_read_tokens=90_000)]
    seconds = times.steps_s(np.array(loads, dtype=np.float64))
    assert seconds.tolist() == [times.step_s(load) for load in loads]
    assert seconds[1] > seconds[0] and seconds[2] > seconds[0] and "save" in times.source
    assert times.copy_s("save", 2 << 20, 10, 1 << 19) > times.copy_s("save", 1 << 20, 10, 1 << 19) > 0


def test_constant_times_want_a_number_for_each_part() -> None:
    with pytest.raises(ValueError, match=f"should hold {len(LOAD)} numbers"):
        ConstantTimes(per_part_s=(1.0,))
    assert SECONDS.step_s(StepLoad(8, 0, 0, 36, 1, 0)) == pytest.approx(1.08)
