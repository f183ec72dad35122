"""All-reduces of several ranks are part of a step, and steps without them say so."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.cost import ModelWarning
from kvpolicy.simulator.hardware.operator_tables import TableError
from kvpolicy.simulator.hardware.table_times import load_hardware
from tests.simulator import tables
from tests.simulator.hardware.step_loads import SHAPE, step_load
from tests.simulator.tables import CONFIG, LAYERS

BYTES_PER_TOKEN = 2 * CONFIG["hidden_size"]
SIZES = (1024, 65_536, 1_048_576, 4_194_304)


def all_reduce_ms(workers: int, size: float) -> float:
    """Milliseconds, linear in bytes, so that a test can compute what is between and beyond the measured points."""
    return workers * (5e-3 + 1e-8 * size)


def all_reduce(folder: Path, as_published: bool = False, workers: tuple[int, ...] = (2, 4)) -> Path:
    """Two and four ranks in one node, and two across nodes, which take a hundred times as long."""
    rows: list[dict[str, Any]] = []
    for count in workers:
        for in_node, times in ((count, 1.0), (1, 100.0)):
            for size in SIZES:
                ms = times * all_reduce_ms(count, size)
                row = {"num_workers": count, "devices_per_node": in_node}
                row |= ({"time_stats.all_reduce.median": ms, "size": size, "collective": "all_reduce"} if as_published
                        else {"median_ms": ms, "size_bytes": size})  # fmt: skip
                rows.append(row)
    return tables.write(folder / "all_reduce.csv", rows)


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("tokens", [1, 100, 900, 2500, 9000])
def test_a_step_of_two_ranks_has_two_all_reduces_a_layer_and_one_for_the_embedding(
    tmp_path: Path, tokens: int, as_published: bool
) -> None:
    files = tables.llmservingsim(tmp_path)
    with pytest.warns(ModelWarning, match="no table of all-reduces of 2 ranks of A: steps are WITHOUT communication"):
        without = kvpolicy.import_profile(files, tmp_path / "without", SHAPE, 2, "A", "pcie5")
    with pytest.warns(ModelWarning, match="WITHOUT communication"):
        alone = load_hardware(tmp_path / "without")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = all_reduce(tmp_path, as_published)
        full = kvpolicy.import_profile(files, tmp_path / "with", SHAPE, 2, "A", "pcie5", all_reduce=table)
        together = load_hardware(tmp_path / "with")
    load = step_load(chunks=((tokens, 0),))
    expected = 1e-3 * (2 * LAYERS + 1) * all_reduce_ms(2, tokens * BYTES_PER_TOKEN)
    assert together.step_s(load) - alone.step_s(load) == pytest.approx(expected, rel=1e-3)
    assert "WITHOUT communication" in alone.source and "WITHOUT" not in together.source
    assert "all-reduces of 2 ranks" in [source["told"] for source in full.model.inputs]
    assert full.model.tokens.at[-1] == without.model.tokens.at[-1], "extrapolated where the operators are"


def test_a_table_without_these_ranks_or_of_something_else_is_refused(tmp_path: Path) -> None:
    files = tables.llmservingsim(tmp_path)

    def read(file: Path, ranks: int = 2) -> None:
        kvpolicy.import_profile(files, tmp_path / "out", SHAPE, ranks, link="pcie5", all_reduce=file)

    table = all_reduce(tmp_path, workers=(4, 8))
    with pytest.raises(TableError, match=r"all_reduce\.csv: fewer than two sizes.* 2 ranks in one node.* for 4, 8$"):
        read(table)
    with pytest.raises(TableError, match=r"dense\.csv: not a table of all-reduces; its columns are layer, tokens"):
        read(files[1])
    row = {"num_workers": 2, "devices_per_node": 2, "size_bytes": 8}
    wrong = tables.write(tmp_path / "w.csv", [row | {"median_ms": 1.0}, row | {"median_ms": 0.0}])
    with pytest.raises(TableError, match=r"w\.csv, row 1: median_ms is 0\.0, should be a number above 0"):
        read(wrong)
    with pytest.raises(ValueError, match=r"all_reduce is .*should be given with 2 ranks or more"):
        read(table, ranks=1)
    assert not (tmp_path / "out").exists()


def test_the_command_warns_in_one_line_and_takes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(file) for file in tables.llmservingsim(tmp_path)]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(CONFIG)))
    command = ["import-profile", *files, "--out", str(tmp_path / "out"), "--geometry", str(config), "--link", "pcie5"]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--ranks", "2"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvpolicy: warning: ") and "2 ranks" in line and "--all-reduce FILE" in line
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--ranks", "2", "--all-reduce", str(all_reduce(tmp_path))])
    shown = capsys.readouterr()
    assert not shown.err and "all-reduces of 2 ranks" in shown.out
