"""The scheduler's machine is noted in vLLM's configuration where Ray may place ranks on others."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.plugin import boot_ids as machine
from kvpolicy_vllm.plugin.boot_ids import boot_id, note_machine, noted_machine


def configured(use_ray: bool, cores_by: str = "mp") -> Any:
    parallel = SimpleNamespace(use_ray=use_ray, data_parallel_backend=cores_by)
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace())


@pytest.mark.parametrize(
    ("use_ray", "cores_by", "noted"),
    [(True, "mp", "this one"), (False, "mp", ""), (True, "ray", ""), (False, "ray", "")],
)
def test_the_machine_is_noted_where_ray_places_ranks_alone(
    monkeypatch: pytest.MonkeyPatch, use_ray: bool, cores_by: str, noted: str
) -> None:
    """And travels to other processes."""
    monkeypatch.setattr(machine, "boot_id", lambda: "this one")
    config = configured(use_ray, cores_by)
    assert noted_machine(config) == ""
    note_machine(config)
    assert noted_machine(pickle.loads(pickle.dumps(config))) == noted


def test_a_machine_is_known_by_its_last_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "boot_id"
    monkeypatch.setattr(machine, "BOOT", file)
    assert boot_id() == "", "not on Linux"
    file.write_text("3f0c\n")
    assert boot_id() == "3f0c"
