"""The scheduler side put together: a policy that fits the engine, seeds, state files, complaints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvpolicy.cost import ModelError
from kvpolicy.hardware import EngineSpec
from kvpolicy_vllm.plugin import assembly
from kvpolicy_vllm.plugin.assembly import draw_seed, load_fitting, of_rank
from kvpolicy_vllm.plugin.settings import Settings
from tests.synthetic import GEOMETRY, HARDWARE, fitted_model

pytestmark = pytest.mark.scheduler


def test_a_model_of_another_machine_is_refused_when_the_policy_is_loaded() -> None:
    settings = Settings("cheapest:linear")
    here = EngineSpec(32, 2048, block_bytes=32 * 4096, geometry=GEOMETRY.to_dict(), hardware=HARDWARE)
    assert load_fitting("", settings, fitted_model, here).cost_model is not None
    with pytest.raises(ModelError, match="another GPU"):
        load_fitting("", settings, fitted_model, replace(here, hardware=HARDWARE | {"device": "another GPU"}))
    assert load_fitting("always-swap", settings, fitted_model, here).name == "always-swap"


def test_cores_and_starts_draw_from_seeds_of_their_own() -> None:
    seeds = {draw_seed(seed, rank, core) for seed in (0, 1) for rank in (0, 1) for core in ("core-a", "core-b")}
    assert len(seeds) == 8
    assert draw_seed(0, 1, "core-a") == draw_seed(0, 1, "core-a")


def test_ranks_learn_into_files_of_their_own() -> None:
    assert [of_rank(Path("a/state.json"), rank).name for rank in (0, 2)] == ["state.json", "state-2.json"]


def test_a_complaint_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, ...]] = []
    monkeypatch.setattr(assembly.logger, "exception", lambda *arguments: logged.append(arguments))
    complain = assembly.Complaints()
    for what in ("first", "first", "second"):
        complain(what)
    assert [arguments[1] for arguments in logged] == ["first", "second"]
