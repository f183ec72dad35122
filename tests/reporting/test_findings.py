"""Claims of a report and the evidence for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvpolicy import overflow
from kvpolicy.overflow import FIGURES
from kvpolicy.reporting.findings import MOMENTS, Finding, findings, lengths, missing, pool_changes
from kvpolicy.reporting.measurements import Material, material
from tests.reporting.measured_runs import relabelled, served_run, with_runs
from tests.synthetic import CostLaw, make_trace


def told(found: Material, figure: str) -> dict[str, Finding]:
    return {one.claim: one for one in findings(found, figure, np.random.default_rng(0))}


def test_a_profile_fills_the_figure_of_lengths_and_says_what_it_cannot() -> None:
    found = material(make_trace(states=40, repeats=2))
    assert {figure for figure in FIGURES if not missing(found, figure)} == {"sequence-length"}
    assert "characterize --figure block-size" in missing(found, "block-size")
    assert len(lengths(found)) == 40 * 2 * 2
    assert not findings(found, "memory", np.random.default_rng(0))
    with pytest.raises(ValueError, match="figure heat: should be one of block-size"):
        missing(found, "heat")


def test_a_law_that_grows_is_found_to_grow() -> None:
    found = told(material(make_trace(states=40, repeats=2)), "sequence-length")
    for kind in ("recompute", "swap"):
        assert found[f"the cost of {kind} grows with the number of tokens"].evidence.answer == "yes"


@pytest.mark.parametrize(("s_per_byte", "answer"), [(1e-10, "yes"), (4e-7, "no")])
def test_whether_swap_is_better_for_long_sequences_follows_the_link(s_per_byte: float, answer: str) -> None:
    law = CostLaw(s_per_byte=s_per_byte, copy_latency_s=0.0, s_per_segment=0.0)
    found = told(material(make_trace(states=40, repeats=2, law=law)), "sequence-length")
    one = found["swap costs less than recompute for long sequences"]
    assert one.evidence.answer == answer and one.evidence.count == 14
    assert one.sentence().startswith("holds here: swap costs" if answer == "yes" else "does not hold here: swap costs")


def test_block_sizes_are_told_by_windows_that_are_named_after_them() -> None:
    given = make_trace(states=2, repeats=6, block_sizes=(32, 64))
    names = {
        row["state_id"]: overflow.state_id("block-size", row["block_size"])
        for row in given.rows("decisions", ("state_id", "block_size"))
    }
    found = material(relabelled(given, names))
    assert missing(found, "block-size") == "" and {one.level for one in found.overflows_of("block-size")} == {32, 64}
    claims = told(found, "block-size")
    assert claims["pinned memory beats pageable at blocks of 64"].evidence.answer == "cannot tell"
    assert "accelerator" in claims["pinned memory beats pageable at blocks of 64"].note
    assert claims["the cost of swap falls as blocks grow"].evidence.why.endswith("at 3 are needed")


def test_spikes_where_requests_come_back_and_a_pool_that_mirrors_the_cache() -> None:
    found = told(with_runs(served_run()), "timeline")
    assert [one.evidence.answer for one in found.values()] == ["yes", "yes"]
    assert len(pool_changes(served_run())) == MOMENTS


def test_spikes_elsewhere_and_a_pool_that_follows_the_cache() -> None:
    run = served_run()
    found = with_runs(replace(run, returning=tuple(not one for one in run.returning), host_bytes=tuple(run.used_share)))
    assert [one.evidence.answer for one in told(found, "timeline").values()] == ["no", "no"]


def test_overhead_that_falls_with_memory_and_is_lowest_at_thirty() -> None:
    cost_s = {10: 9.0, 20: 6.0, 30: 1.0, 40: 2.0, 60: 5.0}
    runs = [
        served_run(figure="memory", level=level, repeat=repeat, arm="recompute", overhead_s=seconds + 0.1 * repeat)
        for level, seconds in cost_s.items()
        for repeat in range(3)
    ]
    found = told(with_runs(*runs), "memory")
    assert [one.evidence.answer for one in found.values()] == ["yes", "yes"]
