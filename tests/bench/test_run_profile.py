"""What a profile's folder is resumed with, by its plan and the headers of what was measured; no engine is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy.errors import InputError
from kvpolicy.settings import Measurement
from kvpolicy_vllm.bench.run_profile import PLAN, open_plan, plan_arguments
from tests.synthetic import HARDWARE, make_trace

EARLIER = {"llm": "some/llm", "link": None, "seed": 0, "vllm_flags": None, "extent": "full"}
"""As versions before the data type was one of the arguments wrote them."""


def begun(out: Path, device: str, **asked: object) -> Path:
    """A profile that has measured one part on such a device."""
    header = next(iter(make_trace(states=1, repeats=1).headers.values()))
    replace(header, hardware=HARDWARE | {"device": device}).write(out / "core-1")
    (out / PLAN).write_text(json.dumps({"asked": EARLIER | asked, "done": {"part": "core-1"}}))
    return out


def test_an_earlier_profile_on_an_accelerator_is_resumed(tmp_path: Path) -> None:
    """There a model was computed in its own data type all along; any other argument is compared as ever."""
    out = begun(tmp_path / "gpu", "NVIDIA H100 80GB HBM3")
    assert open_plan(out, EARLIER | {"dtype": "auto"}) == {"part": "core-1"}
    with pytest.raises(InputError, match="was begun with seed 0, now asked for with 1"):
        open_plan(out, EARLIER | {"dtype": "auto", "seed": 1})


def test_an_earlier_profile_on_a_cpu_is_not(tmp_path: Path) -> None:
    out = begun(tmp_path / "cpu", "cpu")
    with pytest.raises(InputError) as refused:
        open_plan(out, EARLIER | {"dtype": "auto"})
    said = str(refused.value)
    assert said.startswith(f"{out}: was computed in float32, as by an earlier kvpolicy; ") and "\n" not in said
    assert "give another --out, and `-- --dtype float32`" in said
    with pytest.raises(InputError, match="was begun with dtype 'auto', now asked for with None"):
        open_plan(begun(tmp_path / "made", "cpu", dtype="auto"), EARLIER | {"dtype": None})


def test_the_data_type_is_an_argument_of_a_models_folder_alone(tmp_path: Path) -> None:
    (model := tmp_path / "llm").mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    assert plan_arguments(Measurement(model))["dtype"] == "auto"
    assert plan_arguments(Measurement(model), is_made=True)["dtype"] is None
    assert plan_arguments(Measurement(model, vllm_flags=("--dtype", "float32")))["dtype"] is None
