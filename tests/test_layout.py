"""Where the tests of a module stand: under its own name in the folder that mirrors its package, or as the table says.

Modules of both packages share the folders; what needs vLLM stands in ``tests/vllm``, without folders.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PACKAGES = (ROOT / "kvpolicy", ROOT / "integrations" / "kvpolicy_vllm")
LOGIC = (
    ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Raise, ast.With, ast.Match, ast.comprehension, ast.BoolOp,
    ast.BinOp, ast.Assert,
)  # fmt: skip
"""A module whose functions hold none of these needs no tests of its own."""
CROSS_CUTTING = {"vllm", "golden"}
"""Folders of tests that mirror no package."""

ELSEWHERE = {
    "kvpolicy.cli.bench": ["bench/test_run_bench.py"],
    "kvpolicy.cli.catalog": ["test_cli.py"],
    "kvpolicy.cli.flags": ["test_cli.py"],
    "kvpolicy.cli.measure": ["test_cli.py"],
    "kvpolicy.cli.study": ["study/test_commands.py"],
    "kvpolicy.hardware.engine_time": ["simulator/hardware/test_table_times.py"],
    "kvpolicy.json_values": ["test_stats.py"],
    "kvpolicy.caching.base": ["caching/test_by_use.py"],
    "kvpolicy.lazy_names": ["test_public_names.py"],
    "kvpolicy.settings": ["test_launch.py"],
    "kvpolicy.stored_tables": ["trace/test_parts.py"],
    "kvpolicy.simulator.base": ["simulator/test_oracle.py"],
    "kvpolicy.simulator.hardware.layout": ["simulator/hardware/test_layouts.py"],
    "kvpolicy.trace.header": ["trace/test_table.py"],
    "kvpolicy.trace.schemas": ["trace/test_rows.py"],
    "kvpolicy.training.reports": ["training/test_log_fits.py"],
    "kvpolicy.simulator.builtin.live_request": ["simulator/builtin/test_blocks.py"],
    "kvpolicy_vllm.bench.analytics_load": ["bench/test_run_bench.py"],
    "kvpolicy_vllm.bench.load_kinds": ["bench/test_run_bench.py"],
    "kvpolicy_vllm.bench.load_report": ["bench/test_run_bench.py"],
    "kvpolicy_vllm.bench.rate_kind": ["bench/test_rate_load.py"],
    "kvpolicy_vllm.bench.inspect_model": ["vllm/test_run_profile.py"],
    "kvpolicy_vllm.bench.measure_engine": ["vllm/test_run_profile.py"],
    "kvpolicy_vllm.bench.measured_window": ["vllm/test_run_profile.py"],
    "kvpolicy_vllm.bench.pressure": ["vllm/test_run_characterize.py"],
    "kvpolicy_vllm.bench.weightless": ["vllm/test_check.py"],
    "kvpolicy_vllm.check.lay_out": ["vllm/test_check.py"],
    "kvpolicy_vllm.connector": ["test_launch.py"],
    "kvpolicy_vllm.integration": ["test_integrations.py"],
    "kvpolicy_vllm.plugin.copiers.cuda": ["vllm/test_cuda_order.py"],
    "kvpolicy_vllm.plugin.copiers.indexing": ["plugin/copiers/test_base.py"],
    "kvpolicy_vllm.plugin.offloading_names": ["vllm/test_offloading.py"],
    "kvpolicy_vllm.plugin.messages": ["plugin/test_host_copies.py"],
    "kvpolicy_vllm.plugin.order_limits": ["vllm/test_config_refusals.py"],
    "kvpolicy_vllm.plugin.scheduler": ["vllm/test_live_decision.py"],
    "kvpolicy_vllm.plugin.served_weights": ["vllm/test_file_namespace.py"],
    "kvpolicy_vllm.simulator.controller": ["vllm/test_vllm_simulator.py"],
    "kvpolicy_vllm.simulator.deployment": ["vllm/test_vllm_simulator.py"],
    "kvpolicy_vllm.simulator.engine": ["vllm/test_vllm_simulator.py"],
    "kvpolicy_vllm.simulator.virtual_worker": ["vllm/test_vllm_simulator.py"],
}
"""Modules whose tests have another name, and the files that hold them; each of these imports or names the module."""


def modules() -> dict[str, Path]:
    """Files by dotted name; packages' ``__init__`` and ``__main__`` are left out."""
    return {
        ".".join(file.relative_to(package.parent).with_suffix("").parts): file
        for package in PACKAGES
        for file in sorted(package.rglob("*.py"))
        if not file.name.startswith("__")
    }


MODULES = modules()


def mirrored(module: str) -> list[Path]:
    """The files under the module's own name."""
    _, *folders, name = module.split(".")
    in_folder = TESTS.joinpath(*folders, f"test_{name}.py")
    needing_vllm = TESTS / "vllm" / f"test_{name}.py"
    files = [in_folder] if in_folder.exists() else []
    if module.startswith("kvpolicy_vllm.") and needing_vllm.exists():
        # Names that stand in several packages are told apart by what the file imports.
        namesakes = [other for other in MODULES if other.startswith("kvpolicy_vllm.") and other.endswith(f".{name}")]
        if len(namesakes) == 1 or mentions(needing_vllm, module):
            files.append(needing_vllm)
    return files


def mentions(file: Path, module: str) -> bool:
    """Whether a test file imports the module, or names it by its dotted name or its path."""
    text = file.read_text()
    package, _, name = module.rpartition(".")
    imports = any(
        isinstance(node, ast.ImportFrom) and node.module == package and name in [alias.name for alias in node.names]
        for node in ast.walk(ast.parse(text))
    )
    return imports or module in text or f"{module.replace('.', '/')}.py" in text


def has_logic(file: Path) -> bool:
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return any(isinstance(node, LOGIC) for function in functions for line in function.body for node in ast.walk(line))


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_tests_where_a_reader_looks_for_them(module: str) -> None:
    if module in ELSEWHERE:
        assert not mirrored(module), f"{module} has tests of its own name: take it out of the table"
    elif has_logic(MODULES[module]):
        assert mirrored(module), (
            f"{module} has no tests/.../test_{module.rpartition('.')[2]}.py and no row in the table"
        )


@pytest.mark.parametrize(("module", "names"), ELSEWHERE.items())
def test_the_table_names_files_that_name_the_module(module: str, names: list[str]) -> None:
    assert module in MODULES, f"there is no module {module}"
    for name in names:
        assert (TESTS / name).exists(), f"there is no tests/{name}"
        assert mentions(TESTS / name, module), f"tests/{name} neither imports nor names {module}"


def test_the_table_stays_short() -> None:
    assert len(ELSEWHERE) <= 40


def test_folders_of_tests_mirror_packages() -> None:
    folders = {file.relative_to(package).parent for package in PACKAGES for file in package.rglob("*.py")}
    names = {folder.relative_to(TESTS) for folder in TESTS.rglob("*") if folder.is_dir() and folder.name[0] not in "._"}
    strangers = {folder for folder in names if folder not in folders and folder.parts[0] not in CROSS_CUTTING}
    assert not strangers, "these mirror no package"
