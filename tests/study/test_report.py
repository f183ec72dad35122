"""What a grid reports, in numbers and in words."""

from __future__ import annotations

import json
from pathlib import Path

from kvpolicy.headroom import Headroom
from kvpolicy.study.report import server_words
from tests.study.grids import simulate


def test_missing_figures_are_null_and_blank(hardware: str, tmp_path: Path) -> None:
    """Requests of one output token have no time between tokens; a file without requests fails alone, by name."""
    single, empty = tmp_path / "single.csv", tmp_path / "empty.csv"
    single.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,100,1\n0.5,50,1\n")
    empty.write_text("arrival_s,prompt_tokens,output_tokens\n")
    report = simulate(hardware, tmp_path / "c", workloads=[str(single), str(empty)], policies=["always-swap"])
    (one,) = report.results
    assert one["itl_s"] == {"mean": None, "p50": None, "p99": None} and one["e2e_s"]["mean"] > 0
    assert "null" in json.dumps(report.to_dict(), allow_nan=False) and "nan" not in report.text()
    (failed,) = report.failed
    assert "empty.csv" in failed.text() and "no request" in failed.error


def test_skipped_rows_are_reported(hardware: str, tmp_path: Path) -> None:
    file = tmp_path / "w.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,100,20\n0.5,x,30\n0.6,50,30\n")
    values = {"workloads": [f"{file}?skip_damaged=true&speed=2"], "policies": ["always-recompute"]}
    for parts in (1, 2):
        report = simulate(hardware, tmp_path / "c", **values, parts=parts)
        assert report.results[0]["rows"] == {"read": 3, "damaged": 1, "empty": 0}
        assert "of 3 rows read, 1 damaged ones were skipped" in report.text()
    assert simulate(hardware, tmp_path / "c").results[0]["rows"] is None


def test_an_unknown_device_is_reported(tmp_path: Path) -> None:
    serving = {"token_budget": 2048, "max_num_seqs": 256, "asynchronous": True}
    assert "defaults of vLLM 0.32 for this device" in server_words(serving, "H100-SXM")
    assert "Some Card is unknown: defaults for the smallest GPU" in server_words(serving, "Some Card")


def test_what_there_is_to_win_stands_below_the_table(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", policies=["always-swap", "always-recompute"])
    swapped, recomputed = report.results
    assert swapped["headroom"]["recomputed_tokens"] < recomputed["headroom"]["recomputed_tokens"]
    sentence = Headroom(**recomputed["headroom"]).sentence()
    assert f"under always-recompute, {sentence}" in report.text()
    assert "of throughput at saturation is to be won here by choosing better; about" in sentence
    only = simulate(hardware, tmp_path / "c", policies=["always-swap"])
    assert f"under always-swap, {Headroom(**swapped['headroom']).sentence()}" in only.text()
