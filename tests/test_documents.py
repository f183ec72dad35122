"""What the documents show runs, and what they name exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import kvpolicy
from kvpolicy import Family, Policy, Request, integrations, load_policy, open_workload
from kvpolicy.cli import app, main
from kvpolicy.latency import ClassSummary
from kvpolicy.policy import probabilities_of
from kvpolicy.policy.cheapest import Cheapest
from kvpolicy.study.class_report import SERVICE
from kvpolicy.training.family import family_of
from kvpolicy.workload import Format
from kvpolicy_vllm import launch
from kvpolicy_vllm.plugin.settings import SCHEDULER, Settings
from tests.policy.ten_line_policy import Longer
from tests.snippets import Shown, commands, names_of, shown, snippets
from tests.synthetic import options_for, situation
from tests.test_environment import tool
from tests.test_imports import LAYERS
from tests.test_public_names import NAMES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = sorted(str(path.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md"))
WITH_SNIPPETS = [page for page in PAGES if snippets(page)]
MAX_COLUMNS = 120


@pytest.mark.parametrize("document", WITH_SNIPPETS)
def test_snippets_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a library that a snippet needs is not installed, that snippet is left out."""
    monkeypatch.chdir(tmp_path)
    left_out = [name for snippet in snippets(document) if (name := _missing(snippet)) or names_of(snippet) is None]
    if left_out:
        pytest.skip(f"not installed: {', '.join(left_out)}")


def _missing(snippet: str) -> str:
    """The first library of :data:`OPTIONAL` that a snippet imports and that is not installed."""
    needed = re.findall(r"^import (\w+)", snippet, re.MULTILINE)
    return next((name for name in needed if name in OPTIONAL and find_spec(name) is None), "")


OPTIONAL = {"duckdb", "pandas", "polars"}
"""What readers of a trace may use, and nothing here does; `make docs` runs their snippets."""


def test_the_readme_is_short_and_begins_with_a_gain_and_where_there_is_none() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("|")]
    assert "end-to-end time 0." in rows[2] and "1.00: nothing" in rows[3]


def test_the_picture_is_that_of_the_figures() -> None:
    drawn = tool("gain_picture")
    assert drawn.PICTURE.read_text() == drawn.picture(drawn.PAGE.read_text())


def test_the_picture_of_hit_rates_is_that_of_the_raw_numbers() -> None:
    drawn = tool("hit_rate_picture")
    rows = json.loads(drawn.RAW.read_text())["rows"]
    assert drawn.PICTURE.read_text() == drawn.picture(rows)
    page = (ROOT / "docs" / "caching.md").read_text()
    for share in sorted({row["prefixed"] for row in rows}):
        whole = [f"{row['hit_rate']:.1%} ({100 * min(row['rounds']):.1f} to {100 * max(row['rounds']):.1f})"
                 for row in rows if row["prefixed"] == share]  # fmt: skip
        fifths = [", ".join(f"{one:.0%}".rstrip("%") for one in row["by_fifth"]) + "%" for row in rows
                  if row["prefixed"] == share]  # fmt: skip
        assert f"| {share:.0%} | {' | '.join([*whole, *fifths])} |" in page


@pytest.mark.parametrize(("name", "key"), [("order_tables", "places"), ("regime_tables", "rows")])
def test_tables_are_those_of_the_raw_numbers(name: str, key: str) -> None:
    tables = tool(name)
    page, raw = tables.PAGE.read_text(), json.loads(tables.RAW.read_text())
    assert tables.COMMENT in page and tables.drawn(page, raw[key]) == page
    unspaced = re.sub(rf"({tables.COMMENT}[^>]*-->\n)\n", r"\1", page, count=1)
    with pytest.raises(SystemExit, match="should be followed by an empty line"):
        tables.drawn(unspaced, raw[key])


@pytest.mark.parametrize("name", ["order_tables", "regime_tables"])
def test_tools_that_write_tables_say_what_they_take(name: str) -> None:
    shown_help = subprocess.run(
        [sys.executable, ROOT / "tools" / f"{name}.py", "--help"], capture_output=True, text=True, check=True
    )
    assert "[FILE ...]" in shown_help.stdout
    command = [sys.executable, ROOT / "tools" / f"{name}.py", "nowhere.json"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and refused.stderr.endswith("error: nowhere.json is no file\n")


def test_a_table_of_promotions_is_one_by_its_comment() -> None:
    tables = tool("order_tables")
    places = json.loads(tables.RAW.read_text())["places"]
    place = "machine=H100-SXM requests=800 kv_blocks=26000 seeds=2"
    heads = {kind: tables.drawn(f"<!-- places: {kind}{place} -->\n\n", places).splitlines()[2] for kind in KINDS}
    assert heads["table=promotion "].startswith("| promote, s") and heads[""].startswith("| load")
    for wrong, why in (
        ("table=other " + place, "should be table=promotion"),
        ("table=promotion requests=800", "of one"),
    ):
        with pytest.raises(SystemExit, match=why):
            tables.drawn(f"<!-- places: {wrong} -->\n\n", places)


KINDS = ("", "table=promotion ")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    links = [link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)]
    paths = [(ROOT / page).parent / file if file else ROOT / page for file, _, _ in links]
    assert [str(path) for path in paths if not path.exists()] == []
    anchors = [(path, anchor) for path, (_, _, anchor) in zip(paths, links, strict=True) if anchor]
    assert [f"{path}#{anchor}" for path, anchor in anchors if anchor not in _anchors(path)] == []


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_has_a_place_on_the_site() -> None:
    """mkdocs says so, too, but only `make docs` asks it."""
    placed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    beside = {"index.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples.md"}
    assert placed - beside == {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: (.*)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert set(map(resolve_name, listed)) == {getattr(kvpolicy, name) for name in NAMES}
    assert len(listed) == len(set(listed)), "each once"


SHOWN = [(page, shown) for page in PAGES if page != "CHANGELOG.md" for shown in commands(page)]
OURS = [(page, shown) for page, shown in SHOWN if shown.words[0] == "kvpolicy" and len(shown.words) > 1]


def test_documents_show_commands() -> None:
    assert len(OURS) > 30 and {page for page, _ in OURS} >= {"README.md", "docs/serving.md", "docs/train.md"}


def test_every_command_of_a_page_is_found(tmp_path: Path) -> None:
    """Behind a block in another language, with variables anywhere, and over several lines."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport kvpolicy\n```\nkvpolicy of the prose\n```\npython -c \"print(\n1)\"\nMORE='--a --b=2'\n"
        "kvpolicy run $MORE \\\n    --c it  # isn't read\nother $MORE\n```\n```json\nmake none\n```\n"
    )
    assert [shown.words for shown in commands(str(page))] == [
        ("python", "-c", "print(\n1)"), ("kvpolicy", "run", "--a", "--b=2", "--c", "it"),
    ]  # fmt: skip


@pytest.mark.parametrize(("page", "shown"), OURS, ids=[f"{page} {' '.join(shown.words)}" for page, shown in OURS])
def test_a_command_that_is_shown_is_taken(page: str, shown: Shown) -> None:
    """Those flags that are to be vLLM's are asked for in tests/vllm/test_launch_flags.py."""
    command, words = _command_of(shown)
    takes_more = command.context_settings.get("ignore_unknown_options", False)
    assert takes_more or not not_ours(shown)
    if shown.whole:
        command.make_context(command.name, words)


def _command_of(shown: Shown) -> tuple[Any, list[str]]:
    command, words = typer.main.get_command(app), list(shown.words[1:])
    while hasattr(command, "commands") and not words[0].startswith("-"):
        command = command.commands[words.pop(0)]
    return command, words


def not_ours(shown: Shown) -> frozenset[str]:
    """The flags of a command of kvpolicy that it does not have itself."""
    command, _ = _command_of(shown)
    ours = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return shown.flags - ours


HERE = [words for _, words in OURS if any("cpu-llama" in word for word in words.words)]


@pytest.mark.parametrize("shown", HERE, ids=[" ".join(shown.words) for shown in HERE])
def test_a_command_on_what_ships_runs(
    shown: Shown, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write a file
    if shown.words[1] == "serve" and find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    unchecked = ["--no-check"] if shown.words[1] == "serve" else []  # its LLM is a placeholder
    with pytest.raises(SystemExit) as stopped:
        main([*shown.words[1:], *unchecked])
    assert not stopped.value.code and capsys.readouterr().out


OTHERS = [(page, shown) for page, shown in SHOWN if shown.words[0] != "kvpolicy"]


@pytest.mark.parametrize(("page", "shown"), OTHERS, ids=[f"{page} {' '.join(shown.words)}" for page, shown in OTHERS])
def test_targets_scripts_and_extras_that_are_shown_exist(page: str, shown: Shown) -> None:
    program, *rest = shown.words
    if program == "make":
        targets = set(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = {word for word in rest if "=" not in word and not word.startswith(".")}
        assert named <= {name for line in targets for name in line.split()}
    elif program == "pip":
        extras = {name for word in rest for name in re.findall(r"kvpolicy\[(\w+)\]", word)}
        assert extras <= set(metadata("kvpolicy").get_all("Provides-Extra") or ())
    elif rest[0].endswith(".py"):
        sources = "".join(_with_its_modules(ROOT / rest[0]))
        assert [
            flag for flag in shown.flags if f'"{flag}"' not in sources and f'"--no-{flag[2:]}"' not in sources
        ] == []


def _with_its_modules(script: Path) -> list[str]:
    """The texts of a script and of what it imports from its folder."""
    texts, named = {script: script.read_text()}, [script]
    while named:
        imported = set(re.findall(r"^(?:from|import) (?:benchmarks\.)?(\w+)", texts[named.pop()], re.MULTILINE))
        found = [path for name in imported if (path := script.with_name(f"{name}.py")).is_file() and path not in texts]
        texts |= {path: path.read_text() for path in found}
        named += found
    return [*texts.values()]


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
    monkeypatch.setattr(integrations.subprocess, "Popen", lambda command, env: made.append(command))
    monkeypatch.setattr(launch, "server", lambda llm: ["vllm", "serve", llm])
    monkeypatch.setattr(integrations, "check", lambda *asked: SimpleNamespace(served=True, untested=""))
    shown("start", "docs/own-policies.md")("some/llm")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda llm, **more: made.append(more)))
    shown("engine", "docs/own-policies.md")("some/llm")
    command, arguments = made
    assert command[:3] == ["vllm", "serve", "some/llm"] and command[-4:] == ["--port", "8001", "--max-num-seqs", "64"]
    assert "python:tests.policy.ten_line_policy:Longer" in " ".join(command)
    assert arguments["scheduler_cls"] == SCHEDULER
    settings = Settings.read(arguments["kv_transfer_config"]["kv_connector_extra_config"])
    assert settings.load_order().name == "short-prompts"
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


ELSEWHERE = {
    "mine.py", "benchmarks/multi_turn/benchmark_serving_multi_turn.py", "kv_offload/cpu/swap_blocks_triton.py",
    "ops/cpu/mamba_ssm.py",
}  # fmt: skip
"""A reader's own module, and files of vLLM."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_modules_that_are_named_exist(page: str) -> None:
    """With or without the folder that they are in."""
    folders = ("kvpolicy", "integrations", "tests", "benchmarks", "tools")
    modules = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text())) - ELSEWHERE
    assert [name for name in sorted(named) if not any(module.endswith(f"/{name}") for module in modules)] == []


GROUPS = {"kvpolicy.policies", "kvpolicy.orders", "kvpolicy.families", "kvpolicy.yaml", "kvpolicy.preemption"}
"""Groups of entry points, a file, and a span: no names of Python."""


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
