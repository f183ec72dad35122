"""The environment of an engine that is measured. Runs that finish are in tests/vllm/test_run_profile.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.errors import EngineFailed
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench.engine_process import FLAGS
from kvpolicy_vllm.bench.engine_run import run_engine


@pytest.mark.parametrize(
    ("engine", "version", "cores"),
    [
        ({FLAGS: ["some/llm", "--max-num-seqs", "4", "-tp", "2"]}, "0.32.0+cpu", "2"),
        ({FLAGS: ["some/llm", "-tp", "2"]}, "0.32.0", "as many as it will"),
        ({"model": "some/llm"}, "0.32.0+cpu", "as many as it will"),
    ],
)
def test_an_engine_measured_as_a_servers_has_the_cores_of_its_server(
    engine: dict[str, Any], version: str, cores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "version", lambda name: version)
    for name in (launch.RESERVED_CORES, "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EngineFailed, match=rf"its last output:\n{cores}$"):
        run_engine(
            "tests.bench.ending_process", {"engine": engine}, tmp_path, tmp_path / "part", "part",
            report_progress=lambda done, windows: None, extra_noise=lambda result: {},
        )  # fmt: skip
