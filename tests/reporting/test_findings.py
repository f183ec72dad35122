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


def claims_of(found: Material, figure: str) -> dict[str, Finding]:
    return {finding.claim: finding for finding in findings(found, figure, np.random.default_rng(0))}


def test_a_profile_fills_the_figure_of_lengths_and_says_what_it_cannot() -> None:
    result = material(make_trace(states=40, repeats=2))
    assert {figure for figure in FIGURES if not missing(result, figure)} == {"sequence-length"}
    assert "characterize --figure block-size" in missing(result, "block-size")
    assert len(lengths(result)) == 40 * 2 * 2
    assert not findings(result, "memory", np.random.default_rng(0))
    with pytest.raises(ValueError, match="figure is 'heat', should be one of block-size"):
        missing(result, "heat")


def test_a_law_that_grows_is_found_to_grow() -> None:
    claims = claims_of(material(make_trace(states=40, repeats=2)), "sequence-length")
    for kind in ("recompute", "swap"):
        assert claims[f"the cost of {kind} grows with the number of tokens"].evidence.answer == "yes"


@pytest.mark.parametrize(("s_per_byte", "answer"), [(1e-10, "yes"), (4e-7, "no")])
def test_whether_swap_is_better_for_long_sequences_follows_the_link(s_per_byte: float, answer: str) -> None:
    law = CostLaw(s_per_byte=s_per_byte, copy_latency_s=0.0, s_per_segment=0.0)
    claims = claims_of(material(make_trace(states=40, repeats=2, law=law)), "sequence-length")
    one = claims["swap costs less than recompute for long sequences"]
    assert one.evidence.answer == answer and one.evidence.count == 14
    assert one.sentence().startswith("holds here: swap costs" if answer == "yes" else "does not hold here: swap costs")


def test_block_sizes_come_from_the_names_of_windows() -> None:
    trace = make_trace(states=2, repeats=6, block_sizes=(32, 64))
    names = {
        row["state_id"]: overflow.state_id("block-size", row["block_size"])
        for row in trace.rows("decisions", ("state_id", "block_size"))
    }
    result = material(relabelled(trace, names))
    assert missing(result, "block-size") == "" and {one.level for one in result.overflows_of("block-size")} == {32, 64}
    claims = claims_of(result, "block-size")
    assert claims["pinned memory beats pageable at blocks of 64"].evidence.answer == "cannot tell"
    assert "accelerator" in claims["pinned memory beats pageable at blocks of 64"].note
    assert claims["the cost of swap falls as blocks grow"].evidence.why.endswith("at 3 are needed")


def test_spikes_where_requests_come_back_and_a_pool_that_mirrors_the_cache() -> None:
    claims = claims_of(with_runs(served_run()), "timeline")
    assert [one.evidence.answer for one in claims.values()] == ["yes", "yes"]
    assert len(pool_changes(served_run())) == MOMENTS


def test_spikes_elsewhere_and_a_pool_that_follows_the_cache() -> None:
    run = served_run()
    result = with_runs(
        replace(run, returning=tuple(not one for one in run.returning), host_bytes=tuple(run.used_share))
    )
    assert [one.evidence.answer for one in claims_of(result, "timeline").values()] == ["no", "no"]


def test_overhead_that_falls_with_memory_and_is_lowest_at_thirty() -> None:
    cost_s = {10: 9.0, 20: 6.0, 30: 1.0, 40: 2.0, 60: 5.0}
    runs = [
        served_run(figure="memory", level=level, repeat=repeat, arm="recompute", overhead_s=seconds + 0.1 * repeat)
        for level, seconds in cost_s.items()
        for repeat in range(3)
    ]
    claims = claims_of(with_runs(*runs), "memory")
    assert [one.evidence.answer for one in claims.values()] == ["yes", "yes"]
