"""Names of modules and constants: nouns, one name for one thing, MAX_ and MIN_ for bounds."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvpolicy", "integrations/kvpolicy_vllm")
MODULES = sorted(
    path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not path.stem.startswith("__")
)
NOUNS = {"breakdown", "indexing", "offloading", "ordering", "scaling", "staging", "streaming"}
"""That end as participles do."""
ONE_ROLE = {
    "base": "the class that the package's others extend",
    "connector": "where vLLM looks it up, and what it finds there",
    "controller": "the plugin's, and the same on a virtual clock",
    "engine": "the engine of a simulator",
    "file_tier": "KV in files, and the same on a virtual clock",
    "host_copies": "copies in host memory, and how far they are",
    "ordering": "an order of service, carried out by a scheduler",
    "pipeline": "the steps of one command",
    "progress": "a progress bar",
    "report": "what a command found, as text and as JSON",
    "scheduler": "vLLM's scheduling, extended and rule by rule",
    "settings": "a server's options, and those that only tests set",
    "spec": "the text that names one",
    "trace_writer": "rows of a trace",
}
"""File names of several packages, and the one role that they have."""
BOUNDS = re.compile(r"_?(MOST|LEAST|FEWEST|LONGEST|SHORTEST|HIGHEST)_[A-Z]")


def test_no_module_is_named_by_a_bare_participle() -> None:
    stems = {path.stem for path in MODULES}
    assert {stem for stem in stems if re.fullmatch(r"[a-z]+(ing|ed|wn)", stem)} == NOUNS


def test_no_file_name_has_two_roles() -> None:
    folders = defaultdict(set)
    for path in MODULES:
        folders[path.stem].add(path.parent)
    assert {stem for stem, where in folders.items() if len(where) > 1} == set(ONE_ROLE)


def test_bounds_are_called_max_and_min() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {node.id}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and BOUNDS.match(node.id)
    ]
    assert found == []
