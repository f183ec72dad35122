"""A request that was loaded holds its blocks: it must get its turn, and soon.

Below vLLM 0.31 a request that finds no memory ends the scan of the waiting ones; where it stands before those that
were loaded and hold the memory, nothing is scheduled any more. On every version a request loses its place in the
batch when it is preempted, and gets one again only when it has been loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import soak
from tests.vllm.setups import Setup
from tests.vllm.test_soak import PRESSED
from tests.vllm.versions import CLAIMED, FETCHED_BY_MAKE, INSTALLED, source_or_skip

LOCKED_OUT: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "by a better priority": ({"scheduling": "priority"}, (1, 3, 47, 48)),
    "by one that waited for an adapter": ({"adapters": 4}, (2, 7, 8, 12)),
    "by one that waited for its grammar": ({"grammars": True}, ()),
}
"""What stands before the loaded ones, and seeds at which an engine of vLLM 0.30 stood still for good."""

versions = pytest.mark.parametrize("version", [INSTALLED, FETCHED_BY_MAKE])


@pytest.mark.parametrize("version", [FETCHED_BY_MAKE, CLAIMED[0]])
@pytest.mark.parametrize("before", LOCKED_OUT)
def test_nobody_is_locked_out_by_those_who_wait_for_their_memory(before: str, version: str, tmp_path: Path) -> None:
    source_or_skip(version)
    fixed, seeds = LOCKED_OUT[before]
    done = soak.run(version, [Setup.draw(seed, **PRESSED | fixed) for seed in seeds], tmp_path)
    assert not done.failed, "\n".join(done.replays())


PLACES: tuple[dict[str, Any], ...] = (
    {"max_running": 4, "spare_blocks": 20, "max_prompt_tokens": 100, "max_output_tokens": 400},
    {"max_running": 8, "spare_blocks": 70, "max_prompt_tokens": 30, "max_output_tokens": 400},
)
"""Memory and places in the batch run out at about the same load."""
PLACE_SEEDS = range(4)


@versions
@pytest.mark.parametrize("places", PLACES, ids=lambda places: f"{places['max_running']} places")
def test_a_loaded_request_finds_a_place_in_the_batch(places: dict[str, Any], version: str, tmp_path: Path) -> None:
    """Newcomers do not take it meanwhile: it would hold its blocks for nothing, and others be preempted for them."""
    source_or_skip(version)
    fixed = PRESSED | places | {
        "asynchronous": False, "prefix_caching": False, "token_budget": 2048, "ranks": 1, "host_gib": 0.25,
        "stops": False, "max_late_steps": 4,
    }  # fmt: skip
    setups = {
        policy: [Setup.draw(seed, **fixed | {"policy": policy}) for seed in PLACE_SEEDS]
        for policy in ("always-swap", "always-recompute")
    }
    done = soak.run(version, [setup for both in setups.values() for setup in both], tmp_path)
    assert not done.failed, "\n".join(done.replays())
    swapped, recomputed = (
        [outcome for outcome in done.outcomes if f"policy='{policy}'" in outcome["setup"]] for policy in setups
    )
    waits = sorted(wait for outcome in swapped for wait in outcome["waits"])
    assert len(waits) > 100
    assert waits[len(waits) * 9 // 10] <= 1, "steps that loaded requests waited, 90th percentile"
    preemptions = [sum(outcome["preemptions"] for outcome in some) for some in (swapped, recomputed)]
    assert preemptions[0] <= 1.15 * preemptions[1], "preemptions with swap and with recompute"
