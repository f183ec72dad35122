"""Noise of a machine, and the repeats that it asks for."""

from __future__ import annotations

from kvpolicy_vllm.bench.job import Noise


def test_a_noisy_machine_gets_more_repeats_up_to_a_limit() -> None:
    assert Noise.of([1.0, 1.1, 1.0, 0.9, 1.0]).factor == 1
    assert Noise.of([1.0, 1.2, 1.0, 0.85, 1.0]).factor == 2
    assert Noise.of([1.0, 9.0, 1.0, 1.0, 1.0]).factor == 3
