"""A trace with a share of its quiet steps gives the costs that all steps give."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from kvpolicy.attribution.offline import attribute, step_time_models
from kvpolicy.attribution.step_work import step_work
from kvpolicy.trace import Trace, TraceError
from kvpolicy_vllm.plugin.step_sampler import RUN_STEPS, StepSampler
from tests.attribution.step_rows import Row, calm_steps, costs, one_after_another, outcome, repeated, trace_of_cores
from tests.attribution.step_rows import transfer as transfer_of

STEPS = 6000
EVERY = 75


def served(noise: float = 0.0) -> dict[str, list[Row]]:
    """A server that preempts every 75 steps, recomputes and swaps in turn, on a machine of known step times."""
    rows = calm_steps(STEPS, np.random.default_rng(3), noise)
    outcomes, swaps = [], []
    for number in range(EVERY, STEPS - EVERY, EVERY):
        name, row, again = f"p{number}", rows[number], rows[number + 3]
        row["preemptions"] = 1
        if number // EVERY % 2:
            again |= {"scheduled_tokens": again["scheduled_tokens"] + 400, "recomputed_tokens": 400}
            again["repeated"] = [repeated(name, 400, 0, 400 * 401 // 2, 0)]
            again["chunk_context"] += 400 * 401 // 2
            again["duration_s"] += 400 * 3e-5 + 2e-9 * 400 * 401 // 2
            outcomes.append(outcome(name, recomputed_tokens=400, first_step=number, last_step=number + 3))
        else:
            row["saves"] = again["loads"] = 1
            again["duration_s"] += 5e-3
            rows[number + 4]["duration_s"] += 2e-3
            outcomes.append(outcome(name, loaded_tokens=400, first_step=number, last_step=number + 3))
            swaps.append((name, number))
    one_after_another(rows, 100.0)
    copies = []
    for name, number in swaps:
        begin, load, late = rows[number], rows[number + 3], rows[number + 9]
        copies.append(transfer_of(name, number, "save", begin["start_s"], begin["start_s"] + 1e-3))
        copies.append(transfer_of(name, number + 3, "load", load["start_s"], late["start_s"] + 1e-4))
    return {"steps": rows, "outcomes": outcomes, "transfers": copies}


def sampled(tables: dict[str, list[Row]], share: float, seed: int = 0, late_reports: bool = False) -> Trace:
    """What a server records with this share; a copy is reported in the step after its end, or never."""
    kept: list[Row] = []
    sampler = StepSampler(share, seed, kept.append)
    waiting = sorted(tables["transfers"], key=lambda copy: copy["end_s"])
    for row in tables["steps"]:
        sampler.add(row)
        while waiting and waiting[0]["end_s"] <= row["start_s"] and not late_reports:
            copy = waiting.pop(0)
            sampler.copied(copy["start_s"], copy["end_s"])
    sampler.release()
    return trace_of_cores({"a": tables | {"steps": kept}})


def test_costs_are_those_of_all_steps() -> None:
    tables = served()
    whole, part = trace_of_cores({"a": tables}), sampled(tables, 0.1)
    assert part.table("steps").num_rows < 0.5 * STEPS
    found, expected = costs(attribute(part)), costs(attribute(whole))
    assert len(expected) == len(found) == 78
    for name, (engine_s, others_s) in expected.items():
        assert engine_s is not None
        assert found[name] == (pytest.approx(engine_s, rel=1e-5), pytest.approx(others_s, rel=1e-5)), name


def test_with_noise_the_mean_cost_is_that_of_all_steps_within_the_noise_of_the_step_times() -> None:
    """Over draws of the noise the ratio is 1.00 with a deviation of 0.025: a fifth of the steps fits step times so."""
    tables = served(noise=0.05)
    means = [
        np.mean([engine_s for engine_s, _ in costs(attribute(trace)).values()])
        for trace in (trace_of_cores({"a": tables}), sampled(tables, 0.2))
    ]
    assert means[1] == pytest.approx(means[0], rel=0.075)


def test_sums_with_weights_are_those_of_all_steps_on_average() -> None:
    tables = served()
    whole = trace_of_cores({"a": tables}).table("steps")
    model = step_time_models(trace_of_cores({"a": tables}))["a"]
    expected = step_work(whole, model).work
    works = [step_work(sampled(tables, 0.25, seed).table("steps"), model).work for seed in range(30)]
    assert np.mean([work.decoded_tokens for work in works]) == pytest.approx(expected.decoded_tokens, rel=0.03)
    assert np.mean([work.busy_s for work in works]) == pytest.approx(expected.busy_s, rel=0.03)
    assert {work.recomputed_tokens for work in works} == {expected.recomputed_tokens}, "these steps are all kept"


def test_whoever_needs_every_step_refuses() -> None:
    tables = served()
    trace_of_cores({"a": tables}).refuse_sampled("this")
    with pytest.raises(TraceError, match="this needs every step, and the server recorded a share"):
        sampled(tables, 0.5).refuse_sampled("this")


def test_a_copy_over_steps_that_were_left_out_leaves_its_cost_unknown() -> None:
    """As where a copy is reported later than a quiet step waits for it: never a cost that lacks a part."""
    tables = served()
    found = costs(attribute(sampled(tables, 0.02, late_reports=True)))
    unknown = {name for name, (engine_s, _) in found.items() if engine_s is None}
    swaps = {copy["preemption_id"] for copy in tables["transfers"]}
    assert unknown and unknown <= swaps
    expected = costs(attribute(trace_of_cores({"a": tables})))
    for name in found.keys() - unknown:
        assert found[name][0] == pytest.approx(expected[name][0], rel=1e-5), name


def test_steps_that_are_lost_are_told_from_those_left_out() -> None:
    part = sampled(served(), 0.1)
    steps = part.table("steps")
    numbers = steps["step"].to_pylist()
    gone = numbers.index(EVERY + 3)  # the step in which the first victim is recomputed
    lost = Trace(part.headers, dict(part.tables) | {"steps": pa.concat_tables([steps[:gone], steps[gone + 1 :]])})
    found = costs(attribute(lost))
    assert found[f"p{EVERY}"][0] is None and found[f"p{2 * EVERY}"][0] is not None


def test_what_is_left_out_is_counted() -> None:
    kept: list[Row] = []
    sampler = StepSampler(0.3, 1, kept.append)
    for row in calm_steps(64 * RUN_STEPS, np.random.default_rng(0)):
        sampler.add(row)
    sampler.release()
    numbers = [row["step"] for row in kept]
    gaps = np.diff([-1, *numbers]) - 1
    assert [row["left_out"] for row in kept] == gaps.tolist()
    assert {row["weight"] for row in kept} == {1 / 0.3}
    assert 0.15 * 64 < len({number // RUN_STEPS for number in numbers}) < 0.45 * 64
