"""Drafted tokens beside swaps, on the scheduler alone: no step reads what a rejected draft left behind, whatever fails,
comes late, is aborted or forced out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import harness
from tests.vllm.test_same_schedule import BASE
from tests.vllm.test_symbolic import assert_right, with_tables
from tests.vllm.versions import source_or_skip

pytestmark = pytest.mark.scheduler

SEEDS = range(1, 4)


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no-prefixes", "prefixes"])
@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param("ngram", marks=pytest.mark.feature("speculation by ngram")),
        pytest.param("draft_model", marks=pytest.mark.feature("speculation by a draft model")),
    ],
)
@with_tables
def test_every_position_is_right_beside_drafts(
    version: str, drafter: str, prefix_caching: bool, model: str, tmp_path: Path
) -> None:
    """A model that drafts has KV of its own, and blocks for it ahead of the tokens."""
    size = {"requests": 60, "blocks": 140, "budget": 512, "drafter": drafter, "prefix_caching": prefix_caching}
    environment = harness.environment() | {"KVPOLICY_VLLM_SOURCE": source_or_skip(version)}
    job = BASE | size | {"model": model, "seeds": [*SEEDS]}
    for result in harness.run_module("tests.vllm.drafting", job, tmp_path, environment)["runs"]:
        assert_right(result)
        assert result["accepted"] > 500 and result["rejected"] > 500
        assert harness.total(result["stats"], "preemptions", executed="swap") > 20
        assert harness.total(result["stats"], "loaded_tokens") > 0
        assert harness.total(result["stats"], "fallbacks", reason="load_failed") > 0
