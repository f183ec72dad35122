"""Write the support matrix: `python tools/feature_table.py [--check]` makes docs/features.md of docs/features.json.

The rows are what tests marked `feature` came to, recorded by `python -m pytest -p tests.feature_record`. With --check
nothing is written, and the exit status is 1 where the page is not what the record says. Needs nothing but the standard
library.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE, TESTS = ROOT / "docs" / "features.json", ROOT / "docs" / "features.md", ROOT / "tests"
BEGIN, END = "<!-- the table: tools/feature_table.py -->\n", "<!-- the end of the table -->\n"
VERSIONS = tuple(f"0.{minor}" for minor in range(24, 34))
ANY = "any"
"""Version of a test that needs no vLLM."""
WORDS = {"engine": "yes", "scheduler": "scheduler", "refused": "refused"}
"""What a cell says, by how the test that passed shows it, the strongest first."""
MARKS = ("feature", "shows")
"""Functions whose texts are features: `pytest.mark.feature`, and decorators that mark with several."""
BY_VALUE, BY_KEY = ("FEATURES",), ("REQUESTS", "ENGINES")
"""Names of dictionaries whose values, or keys up to a comma, are features that tests are marked with."""
PROFILED = ("sliding windows", "Mamba2 states", "GDN states", "MLA")
"""Kinds of layers of the families that are profiled in `tests/vllm/test_measured_families.py`."""
NOT_TESTED = {
    "a GPU": "every test in this table runs on a CPU; `make gpu-check` is separate, see [gpu.md](gpu.md)",
    "model runner v2": "needs Triton, which vLLM's CPU build lacks; models with states are refused on it unless "
    "a setting allows them",
    "LMCacheConnectorV1": "LMCache 0.5.6 runs it on no CPU; served with a warning beside kvpolicy's",
    "multimodal models": "but LLaVA and Qwen2-VL, with pictures: served, with a warning that the check gives, too",
    "SimpleCPUOffloadConnector in a real engine": "its worker does not start on a CPU: its scheduler side alone is "
    "driven; served with a warning beside kvpolicy's",
    "Mooncake, MoRIIO, FlexKV, HF3FS and other connectors": "served with a warning beside kvpolicy's",
    "asynchronous scheduling in a real engine": "vLLM's CPU build has none: only its scheduler is driven",
    "every token under pressure in bfloat16": "what is said depends on the batch; one request alone is compared",
    "Kimi": "Kimi K2 has the layers of DeepSeek V3, which are tested; Kimi Linear and Kimi K3, with latent KV beside "
    "states, are refused. On a CPU without AMX vLLM 0.32 itself refuses Kimi Linear unless prefix caching is off "
    "(--mamba-block-size can only be set with --enable-prefix-caching)",
    "layers that share KV": "the small Gemma 4 of the tests has none (`num_kv_shared_layers=0`): served, with a "
    "warning that the check gives, too",
    "data parallelism of MoE": "vLLM 0.32's CPU build ends with NotImplementedError (all_gatherv) at the first "
    "request, also without kvpolicy",
    "vLLM 0.33 in a real engine": "it has no CPU build: only its scheduler is driven, with made-up workers",
    "vLLM 0.25, 0.26, 0.27, 0.29, 0.30 in a real engine": "only their schedulers are driven",
}
"""What no test here runs, and why."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the support matrix from what its tests came to.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is out of date")
    arguments = parser.parse_args()
    rows = json.loads(RECORD.read_text())
    wanted = with_table(PAGE.read_text(), rows)
    if arguments.check:
        return int(PAGE.read_text() != wanted)
    PAGE.write_text(wanted)
    return 0


def marked_features() -> dict[str, set[str]]:
    """Files that name each feature: tests, and the models and engines that tests take their marks from."""
    found: dict[str, set[str]] = defaultdict(set)
    profiled: set[str] = set()
    for path in TESTS.glob("vllm/*.py"):
        tree = ast.parse(path.read_text())
        file = path.relative_to(TESTS).as_posix()
        for node in ast.walk(tree):
            for name in named_in(node):
                found[name].add(file)
        if "a profile of {families" in path.read_text():  # marked by family, of those that are kept
            profiled.add(file)
    kinds = [name for name, files in found.items() if "vllm/families.py" in files]
    return found | {f"a profile of {name}": profiled for name in kinds if profiled and name in PROFILED}


def named_in(node: ast.AST) -> list[str]:
    """Features that are named at this place of a module."""
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in MARKS:
            return texts(node.args)
        return texts(node.args[1:2]) if called == "Family" else []
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if names & {*BY_VALUE}:
            return texts(node.value.values)
        if names & {*BY_KEY}:
            return [text.split(",")[0] for text in texts(node.value.keys)]
    return []


def texts(nodes: Iterable[ast.expr | None]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def with_table(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with the table of these rows."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(table(rows)) + "\n\n" + END + after


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of the table, a feature a line, then of what was never recorded, of what was skipped, and of what is not
    tested."""
    lines = ["| feature | " + " | ".join(VERSIONS) + " | tests |", "| -- |" + " -- |" * (len(VERSIONS) + 1)]
    for feature in sorted({row["feature"] for row in rows}, key=str.lower):
        own = [row for row in rows if row["feature"] == feature]
        cells = [cell(row for row in own if row["version"] in (version, ANY)) for version in VERSIONS]
        files = sorted({row["test"].split("::")[0].removeprefix("tests/") for row in own})
        lines.append(f"| {feature} | {' | '.join(cells)} | {', '.join(f'`{name}`' for name in files)} |")
    recorded = {row["feature"] for row in rows}
    unrecorded = {name: files for name, files in marked_features().items() if name not in recorded}
    if unrecorded:
        lines += ["", "| marked in tests, and not recorded on any version yet | named in |", "| -- | -- |"]
    for feature in sorted(unrecorded, key=str.lower):
        lines.append(f"| {feature} | {', '.join(f'`{name}`' for name in sorted(unrecorded[feature]))} |")
    if any(skipped(rows)):
        lines += ["", "| skipped where the table says more | vLLM | cases |", "| -- | -- | -- |", *skipped(rows)]
    lines += ["", "| not tested | why |", "| -- | -- |"]
    return lines + [f"| {name} | {why} |" for name, why in NOT_TESTED.items()]


def cell(rows: Iterable[dict[str, Any]]) -> str:
    """What the tests of a feature came to on one version; empty where none ran."""
    ran = [row for row in rows if row.get("passed") or row.get("failed")]
    if any(row.get("failed") for row in ran):
        return "**fails**"
    shown = {row["how"] for row in ran}
    return next((word for how, word in WORDS.items() if how in shown), "")


def skipped(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each test and version of which cases have not run, where others of the feature have."""
    shown = {(row["feature"], row["version"]) for row in rows if row.get("passed") or row.get("failed")}
    return [
        f"| {row['feature']} | {row['version']} | `{row['test'].removeprefix('tests/')}`{named(row['skipped'])} |"
        for row in rows
        if row.get("skipped") and (row["feature"], row["version"]) in shown
    ]


def named(cases: list[str] | int) -> str:
    """Of a test without parameters, nothing; of a row with a number in the place of names, that."""
    if isinstance(cases, int):
        return f": {cases}"
    return f": {'; '.join(cases)}" if any(cases) else ""


if __name__ == "__main__":
    sys.exit(main())
