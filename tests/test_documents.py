"""What the documents for contributors show runs, and what they name exists."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy import Family, Policy, Request, integrations, load_policy, open_workload
from kvpolicy.latency import ClassSummary
from kvpolicy.policy import probabilities_of
from kvpolicy.policy.cheapest import Cheapest
from kvpolicy.study.class_report import SERVICE
from kvpolicy.training.family import family_of
from kvpolicy.workload import Format
from kvpolicy_vllm import launch
from kvpolicy_vllm.plugin.settings import SCHEDULER, Settings
from tests.policy.ten_line_policy import Longer
from tests.snippets import names_of, shown, snippets
from tests.synthetic import options_for, situation
from tests.test_imports import LAYERS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md")
WITH_SNIPPETS = ("CONTRIBUTING.md", "docs/own-policies.md", "docs/workloads.md")
PAGES = sorted(str(path.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md"))
MAX_COLUMNS = 120


@pytest.mark.parametrize("document", WITH_SNIPPETS)
def test_snippets_run(document: str) -> None:
    assert snippets(document)
    for snippet in snippets(document):
        names_of(snippet)


def test_the_policy_decides_as_it_says() -> None:
    longest = shown("Longest")
    assert issubclass(longest, Policy)
    for tokens, expected in ((100, [1.0, 0.0]), (5000, [0.0, 1.0])):
        one = situation(tokens, running_requests=2, batch_tokens=2000)
        assert longest().probabilities(one, options_for(one), None) == expected
    assert longest().probabilities(one, options_for(one)[:1], None) == [1.0], "what must be recomputed is"


def test_the_family_is_one() -> None:
    assert isinstance(family_of(shown("Plain")()), Family)


def test_a_policy_decides_by_the_cost_model() -> None:
    """Its contract is in tests/cost/test_contract.py."""
    policy = load_policy(Cheapest("by-rates", shown("Rates")()))
    for tokens, expected in ((16, (1.0, 0.0)), (5000, (0.0, 1.0))):
        one = situation(tokens)
        assert probabilities_of(policy, one, options_for(one), policy.initial_state()) == expected


def test_the_source_reads_a_file_that_its_name_opens(tmp_path: Path) -> None:
    """Damage is tried in tests/workload/test_damage.py."""
    answers, file = shown("Answers"), tmp_path / "mine.jsonl"
    file.write_text('{"prompt": 5, "answer": 6}\n{"prompt": 7, "answer": 8}\n')
    known = Format("JSONL: prompt, answer", lambda path, options: answers(path, None, 0), lambda path: False)
    source = open_workload(f"answers:{file}?scale=2", {"answers": known})
    assert list(source) == [Request(0.0, 10, 12), Request(0.0, 14, 16)]


def test_a_server_and_an_engine_are_started_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started runs in tests/vllm: test_started_from_python, and the object in test_own_process."""
    made: list[Any] = []
    monkeypatch.setattr(integrations.subprocess, "Popen", made.append)
    monkeypatch.setattr(launch, "server", lambda llm: ["vllm", "serve", llm])
    monkeypatch.setattr(integrations, "check", lambda *asked: SimpleNamespace(served=True))
    shown("start", "docs/own-policies.md")("some/llm")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda llm, **more: made.append(more)))
    shown("engine", "docs/own-policies.md")("some/llm")
    command, arguments = made
    assert command[:3] == ["vllm", "serve", "some/llm"] and command[-4:] == ["--port", "8001", "--max-num-seqs", "64"]
    assert "python:tests.policy.ten_line_policy:Longer" in " ".join(command)
    assert arguments["scheduler_cls"] == SCHEDULER
    settings = Settings.read(arguments["kv_transfer_config"]["kv_connector_extra_config"])
    assert isinstance(settings.load_policy(), Longer)


def test_the_workload_of_two_classes_is_one() -> None:
    """The page's other example, for the command line, is simulated in tests/study/test_run_cell.py."""
    requests = list(open_workload(shown("MIXED", "docs/workloads.md")))
    urgent = [request for request in requests if request.class_name == "urgent"]
    assert {request.ttft_s for request in urgent} == {1.0} and {request.priority for request in urgent} == {-1}
    assert len({request.arrival_s for request in urgent}) == 10
    assert {request.priority for request in requests} == {-1, 0}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:kvpolicy|integrations|tests|benchmarks|tools|docs)/[\w/.-]+)`|\]\(([\w/.-]+)\)", text)
    paths = [first or second for first, second in named]
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).exists()] == []


ELSEWHERE = {"mine.py", "kv_offload/cpu/swap_blocks_triton.py"}
"""A reader's own module, and a file of vLLM."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_modules_that_are_named_exist(page: str) -> None:
    """With or without the folder that they are in."""
    folders = ("kvpolicy", "integrations", "tests", "benchmarks", "tools")
    modules = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text())) - ELSEWHERE
    assert [name for name in sorted(named) if not any(module.endswith(f"/{name}") for module in modules)] == []


GROUPS = {"kvpolicy.policies", "kvpolicy.families", "kvpolicy.yaml"}
"""Groups of entry points, and a file: no names of Python."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_names_in_python_that_are_told_exist(page: str) -> None:
    told = set(re.findall(r"\bkvpolicy(?:\.[A-Za-z_]\w*)+", (ROOT / page).read_text())) - GROUPS
    assert [name for name in sorted(told) if not exists(name)] == []


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def prose_of(page: str) -> list[str]:
    """Lines outside of code and tables."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if not line.startswith("|")]


def test_the_figures_of_a_class_are_all_told() -> None:
    text = (ROOT / "docs/simulating.md").read_text()
    (table,) = re.findall(r"\| field \| of the finished requests.*?\n\n", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", table)) >= {one.name for one in fields(ClassSummary)}
    (cells,) = re.findall(r"The JSON holds for each cell: .*?\n\n", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", cells)) >= set(SERVICE) | {"longest_pause_s", "steady_tok_s"}


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_can_be_read_in_a_terminal(page: str) -> None:
    """A line that cannot be broken, as a long command in backticks, may be longer."""
    assert [
        line for line in prose_of(page) if len(line) > MAX_COLUMNS and not re.fullmatch(r"\s*(\S|`[^`]*`)+", line)
    ] == []


def test_the_layers_that_are_shown_are_those_of_the_imports() -> None:
    (table,) = re.findall(r"```\n(errors .*?)\n\n", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    shown = [re.split(r"  +", line)[:-1] for line in table.splitlines()]
    assert [set(line) for line in shown] == [set(layer) for layer in LAYERS]
