"""The integration of vLLM, found by entry point: measures, simulates with vLLM's scheduler, writes its flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.errors import InputError
from kvpolicy.settings import DEMO_ORDER
from kvpolicy_vllm import launch

if TYPE_CHECKING:
    from kvpolicy.bench_settings import BenchTarget, Load
    from kvpolicy.integrations import Checked, Launcher, Report
    from kvpolicy.settings import Measurement, ServerSettings
    from kvpolicy.simulator.base import Simulator


class VllmIntegration:
    """Implements :class:`kvpolicy.integrations.Integration`. Late imports, so that writing flags loads no engine."""

    @property
    def launcher(self) -> Launcher:
        return launch

    def simulator(self) -> Simulator:
        from kvpolicy_vllm.simulator.engine import VllmScheduler

        return VllmScheduler()

    def check(self, llm: str, settings: ServerSettings, vllm_flags: Sequence[str]) -> Checked:
        from kvpolicy_vllm.check import check

        return check(llm, settings, vllm_flags)

    def profile(self, out: Path, how: Measurement) -> Report:
        from kvpolicy_vllm.bench.run_profile import profile

        return profile(out, how)

    def demo(self, out: Path, quick: bool, seed: int, order: str = DEMO_ORDER) -> Report:
        from kvpolicy_vllm.bench.run_demo import demo

        return demo(out, quick=quick, seed=seed, order=order)

    def characterize(self, out: Path, figures: Sequence[str], how: Measurement) -> Report:
        from kvpolicy_vllm.bench.run_characterize import characterize

        return characterize(out, figures, how)

    def bench(self, out: Path, load: Load, at: BenchTarget) -> Report:
        try:
            from kvpolicy_vllm.bench.run_bench import bench
        except ModuleNotFoundError as error:
            if error.name != "aiohttp":
                raise
            raise InputError("a bench over HTTP needs aiohttp: pip install 'kvpolicy[load]'") from error
        return bench(out, load, at)
