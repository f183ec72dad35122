"""The plugin's own time in a step of a real engine: whose time is counted, and the benchmark at a tiny scale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.vllm import harness

sys.path.insert(0, str(harness.ROOT / "benchmarks"))

from own_time_engine import OwnTime


class Clock:
    """Of which each code below takes a part that says whose it is."""

    ns = 0

    def __call__(self) -> int:
        return self.ns

    def take(self, ns: int) -> None:
        self.ns += ns


CLOCK = Clock()


class Engine:
    def schedule(self) -> str:
        CLOCK.take(1000)
        self.preempt()  # type: ignore[attr-defined]
        CLOCK.take(1000)
        return "scheduled"


class Plugin(Engine):
    __module__ = "kvpolicy_vllm.plugin.scheduler"

    def schedule(self) -> str:
        CLOCK.take(1)
        self.look()
        result = super().schedule()
        CLOCK.take(2)
        return result

    def look(self) -> None:
        CLOCK.take(4)

    def preempt(self) -> None:
        CLOCK.take(8)

    def fail(self) -> None:
        CLOCK.take(16)
        raise ZeroDivisionError


def test_time_is_the_plugins_by_the_method_that_vllm_called() -> None:
    """What it has vLLM do is vLLM's, what vLLM has it do meanwhile is its own again."""
    own, plugin = OwnTime(CLOCK), Plugin()
    own.put_on(plugin, "scheduler's")
    CLOCK.take(500)
    assert plugin.schedule() == "scheduled"
    assert own.ns == {"scheduler's schedule": 1 + 4 + 2, "scheduler's preempt": 8}
    with pytest.raises(ZeroDivisionError):
        plugin.fail()
    CLOCK.take(500)
    plugin.look()
    assert own.ns["scheduler's fail"] == 16 and own.ns["scheduler's look"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--files-gib", "0.1", "--hints"]], ids=["host", "files and hints"])
def test_the_benchmark_says_the_share_and_whose_it_is(flags: list[str], model: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/own_time.py", "--llm", model, "--rounds", "2", "--texts", "8"]
    done = subprocess.run(
        [*command, *flags, "--prefix-tokens", "64", "96", "--json", str(out)],
        env=harness.environment(), cwd=harness.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-4000:]
    for row in json.loads(out.read_text())["rows"]:
        assert 0 < row["share"] < 1 and row["low"] <= row["share"] <= row["high"] and row["rounds"] == 2
        assert sum(row["by_method"].values()) == pytest.approx(row["share"], rel=1e-4)
        sides = {method.partition(":")[0] for method in row["by_method"]}
        assert {"connector's scheduler side", "connector's worker side", "scheduler's schedule"} <= sides
