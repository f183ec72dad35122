"""`benchmarks/family_survival.py` goes on where it was, and its rows are those of docs/family-survival.json."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm

from kvpolicy_vllm.plugin.versions import OLDEST_WITH_TABLES, engine_version
from kvpolicy_vllm.simulator.model_layers import MODELS
from tests.vllm.families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent.parent
RAW = json.loads((ROOT / "docs" / "family-survival.json").read_text())

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.skipif(engine_version() < OLDEST_WITH_TABLES, reason="several block tables are served from 0.32 on"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # vLLM's own
]


@pytest.fixture
def survival(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("family_survival")


@pytest.fixture
def ran(survival: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is measured from now on, by model, setting, outputs and seed; every row holds the same."""
    seen: list[Any] = []

    def measured(model: Any, setting: str, layers: Any, work: Any, share: float) -> Any:
        seen.append((model.name, setting, survival.output_mean(work), work.seed))
        return survival.Row(*seen[-1], 100, 16, 1000, 200, 2, 500, 300, 1, 0, 0, 0, 0)

    monkeypatch.setattr(survival, "measured", measured)
    return seen


ASKED = ["--models", "llama-3.1-8b", "gpt-oss-20b", "--outputs", "300"]
SETTINGS = [("llama-3.1-8b", "default")]
SETTINGS += [("gpt-oss-20b", setting) for setting in ("default", "retention None", "hybrid manager off")]


def test_what_the_file_has_is_not_run_again(survival: Any, ran: list[Any], tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "rows.json"
    assert survival.main([*ASKED, "--json", str(file)]) == 0
    assert ran == [(*of, 300, 0) for of in SETTINGS]
    assert "4 of 4: gpt-oss-20b, hybrid manager off, outputs of 300, seed 0: " in capsys.readouterr().err
    assert survival.main([*ASKED, "--seeds", "2", "--json", str(file)]) == 0
    assert ran[4:] == [(*of, 300, 1) for of in SETTINGS]
    printed, told = capsys.readouterr()
    assert printed.count("60% [7% to 99%]") == 4, "of the 4 victims of two loads"
    assert told.count("seed 1: ") == 4 and "seed 0: " not in told
    assert survival.main([*ASKED, "--seeds", "1", "--first-seed", "1", "--json", str(file)]) == 0
    assert len(ran) == 8 and capsys.readouterr().out.count("60% [1% to 100%]") == 4
    assert [row["seed"] for row in json.loads(file.read_text())["rows"]] == [0, 1] * 4


def test_an_interrupted_run_has_written_every_row_that_it_made(
    survival: Any, ran: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, measured = tmp_path / "rows.json", survival.measured

    def interrupted(*arguments: Any) -> Any:
        if len(ran) == 5:
            raise KeyboardInterrupt
        return measured(*arguments)

    monkeypatch.setattr(survival, "measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        survival.main([*ASKED, "--seeds", "2", "--json", str(file)])
    assert len(json.loads(file.read_text())["rows"]) == 5
    monkeypatch.setattr(survival, "measured", measured)
    survival.main([*ASKED, "--seeds", "2", "--json", str(file)])
    assert len(ran) == len(set(ran)) == 8


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--seeds", "0"], "--seeds is 0: should be 1 or more"),
        (["--first-seed", "-1"], "--first-seed is -1: should be 0 or more"),
        (["--requests", "24"], "is of requests 48, not 24: should be another file"),
    ],
)
def test_what_cannot_be_pooled_is_refused(
    wrong: list[str], said: str, survival: Any, ran: list[Any], tmp_path: Path, capsys: Any
) -> None:
    survival.write(tmp_path / "rows.json", {"requests": 48, "share": 0.6}, [])
    with pytest.raises(SystemExit):
        survival.main([*wrong, "--json", str(tmp_path / "rows.json")])
    assert said in capsys.readouterr().err and not ran


def test_each_seed_draws_another_load(survival: Any) -> None:
    loads = [survival.drawn(48, 300, seed).requests for seed in range(3)]
    assert len(set(loads)) == 3 and survival.drawn(48, 300, 1).requests == loads[1]


@pytest.mark.skipif(vllm.__version__.partition("+")[0] != RAW["vllm"], reason="the raw numbers are of another vLLM")
@pytest.mark.parametrize("model", ["gpt-oss-20b", "granite-4-h-small"])
def test_rows_of_the_file_are_measured_again(model: str, survival: Any) -> None:
    """Of its first and its last load with outputs of 300, by every setting."""
    rows = {row.key: row for row in survival.read(ROOT / "docs" / "family-survival.json", {"vllm": RAW["vllm"]})}
    seeds = sorted(seed for name, setting, outputs, seed in rows if (name, outputs) == (model, 300))
    for seed in {seeds[0], seeds[-1]}:
        for setting, layers in survival.settings_of(MODELS[model]):
            work = survival.drawn(RAW["requests"], 300, seed)
            row = survival.measured(MODELS[model], setting, layers, work, RAW["share"])
            assert row == rows[row.key] and row.key == (model, setting, 300, seed)


def test_families_without_rows_are_named_with_those_of_the_same_layers() -> None:
    """By the small models of the tests, which have none of Kimi K2."""
    models = {row["model"] for row in RAW["rows"]}
    assert not [name for name in models if name.startswith(("qwen3.5", "glm", "kimi"))]
    for name, alike, measured in (
        ("qwen3.5", "qwen3-next", "qwen3-next-80b-a3b"),
        ("glm-4.7", "deepseek-v3", "deepseek-v3"),
    ):
        assert (FAMILIES[name].feature, FAMILIES[name].groups) == (FAMILIES[alike].feature, FAMILIES[alike].groups)
        assert measured in models
    page = " ".join((ROOT / "docs" / "model-families.md").read_text().split())
    assert "Qwen 3.5, GLM-4.7-Flash and Kimi K2 have no rows: Qwen3-Next has the kinds of layers of the first" in page
