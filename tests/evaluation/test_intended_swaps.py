"""What is known of the swaps that a policy without prices intended."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.cli import main
from kvpolicy.evaluation.intended_swaps import IntendedSwaps
from kvpolicy.evaluation.shadow_run import savings_of, shadow_savings
from kvpolicy.trace import Trace
from tests.evaluation.test_log_headroom import Rates
from tests.evaluation.test_shadow_run import found, served, shadowed

__all__ = ["served"]
"""The fixture."""


def test_without_prices_it_says_what_is_known_of_the_swaps_and_how_to_price_them(served: Trace) -> None:
    """As of `always-swap`, which predicts nothing."""
    rows, spent_s = served.rows("decisions"), [row["engine_s"] for row in served.rows("outcomes")]
    one = savings_of({"traces/my shadow": shadowed(served)})
    tokens, blocks = (sum(row[name] for row in rows) for name in ("computed_tokens", "held_blocks"))
    assert (one.swaps.number, one.swaps.computed_tokens, one.swaps.held_blocks) == (len(rows), tokens, blocks)
    assert one.swaps.measured == len(rows) and one.swaps.measured_s == pytest.approx(sum(spent_s))
    assert f"victims had computed {tokens:,} tokens in {blocks:,} blocks" in one.text()
    assert f"{len(rows)} of their recomputes were measured: {sum(spent_s):.3g} s" in one.text()
    assert one.headroom.bound is not None, "which needs no prices"
    assert "for prices: kvpolicy shadow 'traces/my shadow' --cost-model NAME" in one.text()
    assert "for prices" not in found(shadowed(served), Rates(1e-3)).text()
    assert one.to_dict()["swaps"]["computed_tokens"] == tokens


def test_of_a_window_the_command_that_it_names_has_the_window_too(
    served: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shadowed(served).write(tmp_path / "shadow")
    one = shadow_savings([tmp_path / "shadow"], between=("-1s", "end"))
    assert one.to_dict()["between"] == ["-1s", "end"] and one.to_dict()["traces"] == [str(tmp_path / "shadow")]
    command = f"kvpolicy shadow {tmp_path / 'shadow'} --between -1s end --cost-model"
    assert f"for prices: {command} NAME" in one.text()
    with pytest.raises(SystemExit) as left:
        main([*command.split()[1:], "cpu-llama-native"])
    assert not left.value.code and one.text().splitlines()[1] in capsys.readouterr().out, "of as many preemptions"


def test_without_a_measured_recompute_or_without_time_only_sizes_are_told() -> None:
    row = {"computed_tokens": 1500, "held_blocks": 47}
    sums = IntendedSwaps.of([(row, None), (row, {"engine_s": None}), (row, {"engine_s": 0.5})])
    assert (sums.number, sums.measured, sums.measured_s) == (3, 1, 0.5)
    sizes, spent = sums.lines(2.0, 1.0)
    assert "3,000" not in sizes and "had computed 4,500 tokens in 141 blocks" in sizes
    assert "1 of their recomputes were measured: 0.5 s, or 0.25 s of engine time per hour" in spent
    assert "0.014% of the time in steps" in spent
    assert [*sums.lines(None, None)] == [sizes] and [*IntendedSwaps().lines(2.0, 1.0)] == []
