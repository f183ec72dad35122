"""A serving engine keeps arrivals and rests when it is idle."""

from __future__ import annotations

from pathlib import Path

from kvpolicy.workload import Request, Workload, open_workload
from kvpolicy_vllm.bench.overload import Arm, Arms, Settings, Targets, summary


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


def test_urgent_requests_come_in_before_a_batch_that_fills_memory(model: str, tmp_path: Path) -> None:
    """Five of six of the batch fit, and none once they have grown; every arm gives the same tokens. Behind the plugin
    and with vLLM's own priorities the urgent ones, which arrive last, have their first tokens before all the batch."""
    settings = Settings(model, on_cpu=True, device_blocks=24, context_tokens=256)
    rows = {"batch": ["0.0,100,100"] * 6, "urgent": ["0.05,40,10"] * 3}
    for name, lines in rows.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    batch = f"{tmp_path}/batch.csv?class=batch&priority=1"
    source = open_workload(f"{batch} + {tmp_path}/urgent.csv?class=urgent&ttft=5")
    work = Workload(source.name, tuple(source), source.seed)
    assert [request.class_name for request in work].count("urgent") == 3
    with Arms(settings, tmp_path) as arms:
        arms.start(
            Arm("stock", None), Arm("priority", None, order="priority"), Arm("urgent", "always-swap", order="urgent")
        )
        runs = {name: arms.serve(name, work, 0) for name in arms.names}
    assert len({run.tokens for run in runs.values()}) == 1
    assert sum(runs["urgent"].preemptions.values()) > 0
    figures = {name: summary([run], Targets(5.0, 5.0)) for name, run in runs.items()}
    for name, one in figures.items():
        told = one["classes"]
        assert {kind: told[kind]["requests"] for kind in told} == {"batch": 6, "urgent": 3}, name
        assert sum(told[kind]["output_tokens"] for kind in told) == work.output_tokens
        assert one["e2e_s"]["mean"] <= runs[name].makespan_s and 0 < one["fairness"] <= 1
    for name in ("priority", "urgent"):
        run = runs[name]
        firsts = {
            kind: [
                arrival_s + ttft_s
                for request, arrival_s, ttft_s in zip(run.requests, run.arrival_s, run.ttft_s, strict=True)
                if request.class_name == kind
            ]
            for kind in ("batch", "urgent")
        }
        assert max(firsts["urgent"]) < max(firsts["batch"]), name
