"""A serving engine keeps arrivals and rests when it is idle."""

from __future__ import annotations

from pathlib import Path

from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.bench.overload import Arm, Arms, Settings


def cpu_ticks(pid: int) -> int:
    """Processor time a process has used, user and system, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_arrivals_are_kept_and_idle_engines_rest(model: str, tmp_path: Path) -> None:
    settings = Settings(model, on_cpu=True, device_blocks=80, context_tokens=512)
    requests = (Request(0.0, 40, 20), Request(1.0, 40, 20), Request(1.0, 300, 1))
    workload = Workload("by hand", requests, seed=0)
    with Arms(settings, tmp_path) as arms:
        arms.start(Arm("one", None, device_blocks=81), Arm("other", "random:0.5"), Arm("third", "always-swap"))
        idle = arms.pid("other")
        before = cpu_ticks(idle)
        runs = [arms.serve("one", workload, block) for block in range(2)]
        assert cpu_ticks(idle) - before <= 5, "an idle engine took processor time"
        runs.append(arms.serve("other", workload, 2))
        assert arms.pid("other") == arms.pid("third") != arms.pid("one")
        runs.append(arms.serve("third", workload, 3))
    for run in runs:
        assert run.makespan_s >= 1.0
        assert [len(tokens) for tokens in run.tokens] == [20, 20, 1]
        assert all(ttft_s > 0 for ttft_s in run.ttft_s)
    assert len({run.tokens for run in runs}) == 1
