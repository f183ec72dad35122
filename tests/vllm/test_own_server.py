"""The user's own server: measured with its flags, in a limited time, and served by what was learned.

Unlike those of other profiles its engine finds the environment of the tests, as a server does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpolicy import cost
from kvpolicy import trace as traces
from kvpolicy.errors import InputError
from kvpolicy.settings import Measurement, ServerSettings
from kvpolicy_vllm.bench.profile_parts import Extent
from kvpolicy_vllm.bench.run_characterize import CharacterizeReport, characterize
from kvpolicy_vllm.bench.run_profile import PLAN, profile
from kvpolicy_vllm.check import check
from tests.snippets import block_below
from tests.vllm import harness
from tests.vllm.test_quick_start import MINUTES
from tests.vllm.test_run_characterize import TINY as STUDIED
from tests.vllm.test_server import (
    PATIENCE_S,
    ROUNDS,
    by_label,
    complete,
    free_port,
    metrics,
    settled,
    started,
    vllm_flags,
    wait_until,
)

TINY = Extent((128,), 5, 2, 1, 1, 400, 9, 1200, 1024, max_extra=1)
CLIENTS = 12
"""Of a server whose memory holds some four of their requests."""
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4", "--max-num-batched-tokens", "640")


@pytest.fixture(autouse=True)
def as_on_a_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the environment of an engine with so many ranks; at first with one."""

    def set_ranks(ranks: int) -> None:
        for name, value in harness.environment(ranks).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")

    set_ranks(1)
    return set_ranks


@pytest.fixture
def hub_id(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An id under which the model is in a cache of a hub, laid out as huggingface_hub does it. There is no network."""
    folder, commit = tmp_path / "hub" / "models--org--small", "5" * 40
    for name in ("refs", "snapshots"):
        (folder / name).mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).symlink_to(model)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return "org/small"


def test_an_id_at_a_hub_is_checked(hub_id: str) -> None:
    found = check(hub_id, ServerSettings("always-swap", host_gib=0.25), FLAGS)
    assert found.ok and found.llm == hub_id and found.block_bytes


@pytest.mark.feature("a profile of a server with its flags")
def test_the_engine_is_the_servers(hub_id: str, tmp_path: Path) -> None:
    """A model at a hub; block size and length from a file of vLLM's. The second part is not begun, since the time is
    over by then."""
    file, out, passed_s = tmp_path / "server.yaml", tmp_path / "trace", [0.0]
    file.write_text("block-size: 32\nmax-model-len: 600\nport: 8001\n")

    def tell(part: str, done: int, total: int) -> None:
        passed_s[0] = 7200.0 if total else 0.0

    how = Measurement(hub_id, vllm_flags=(*FLAGS, "--config", str(file)), minutes=60)
    report = profile(out, how, tell, TINY, lambda: time.monotonic() + passed_s[0])
    (header,) = traces.read(out).headers.values()
    assert (header.block_size, header.token_budget, header.geometry["dtype"]) == (32, 640, "float32")
    assert report.states == TINY.states + 2 and report.missing.not_begun == ("b32-pass1",)
    assert "parts not begun: b32-pass1; the same command" in report.text()
    decisions = traces.read(out).rows("decisions")
    assert max(row["computed_tokens"] for row in decisions) > 200, "up to half of the length"
    assert max(row["running_requests"] for row in decisions) == 3, "beside the victim, as --max-num-seqs lets run"
    plan = json.loads((out / PLAN).read_text())
    assert (plan["not_begun"], plan["asked"]["llm"]) == (["b32-pass1"], hub_id)
    with pytest.raises(InputError, match="was begun with vllm_flags"):
        profile(out, Measurement(hub_id), extent=TINY)


def test_a_study_of_a_model_at_a_hub_ends_with_its_time(hub_id: str, tmp_path: Path) -> None:
    """What is begun is finished and what is left out is named; the same command goes on with that alone."""
    out, passed_s, parts = tmp_path / "trace", [0.0], set[str]()
    figures = ("sequence-length", "block-size")

    def tell(part: str, done: int, total: int) -> None:
        parts.add(part.split(" (")[0])
        passed_s[0] = 7200.0 if total else 0.0

    def study(minutes: float | None) -> CharacterizeReport:
        parts.clear()
        how = Measurement(hub_id, vllm_flags=FLAGS, minutes=minutes)
        return characterize(out, figures, how, tell, STUDIED, lambda: time.monotonic() + passed_s[0])

    first = study(60)
    assert parts == {"sequence-length-b32-pass0"} and first.not_begun == ("block-size-b32-pass0",)
    assert "  left out: block-size-b32-pass0; the same command goes on with them" in first.text().splitlines()
    tokens = {f"sequence-length/{length}" for length in STUDIED.lengths}
    assert set(first.windows) == tokens
    (header,) = traces.read(out).headers.values()
    assert (header.block_size, header.token_budget) == (32, 640), "the study's size, the flags' budget"
    assert json.loads((out / PLAN).read_text())["asked"]["llm"] == hub_id
    second = study(None)
    assert parts == {"block-size-b32-pass0"} and second.not_begun == () and "left out" not in second.text()
    assert set(second.windows) == {*tokens, "block-size/32"}


def test_what_would_not_start_is_refused_with_the_reason(model: str, tmp_path: Path) -> None:
    out = tmp_path / "trace"
    with pytest.raises(InputError, match="unrecognized arguments: --no-such-flag"):
        profile(out, Measurement(Path(model), vllm_flags=("--no-such-flag",)))
    with pytest.raises(InputError, match="org/no-such-model"):
        profile(tmp_path / "hub", Measurement(Path("org/no-such-model")))
    for wrong in (("--kv-transfer-config", "{}"), ("--num-gpu-blocks-override", "9")):
        with pytest.raises(InputError, match=f"{wrong[0]} cannot be given"):
            profile(out, Measurement(Path(model), vllm_flags=wrong))
    with pytest.raises(InputError, match=r"--block-size cannot be given .*: the study has block sizes of its own"):
        characterize(out, ("block-size",), Measurement(Path(model), vllm_flags=("--block-size", "32")))
    with pytest.raises(InputError, match="none: no such folder"):
        profile(out, Measurement(tmp_path / "none"))


def command(words: Sequence[str]) -> list[str]:
    """A line that the page shows, as this Python runs it."""
    program, *others = words
    assert program == "kvpolicy"
    return [sys.executable, "-m", "kvpolicy.cli", *others]


def run(words: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command(words), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def train(words: Sequence[str], folder: Path) -> None:
    """As printed; where that is refused for the noise of two ranks on two cores, with the flag that the page has for
    it."""
    done = subprocess.run(command(words), cwd=folder, capture_output=True, text=True)
    if done.returncode:
        assert "noise.variation is " in done.stderr and done.stderr.strip().endswith("or --force it"), done.stderr
        run([*words, "--force"], folder)


@pytest.mark.slow
@pytest.mark.feature("a profile of two ranks")
def test_two_ranks_from_nothing_to_a_learned_policy(
    model: str, tmp_path: Path, as_on_a_server: Callable[[int], None]
) -> None:
    """The page's own commands, for a small model in float32. Memory is short on the server: every victim's options are
    priced by what was learned. The model that comes out is refused for one rank, and said why."""
    as_on_a_server(2)
    (tmp_path / "server.yaml").write_text("enforce-eager: true\nblock-size: 32\nmax-model-len: 1024\n")
    here = {"LLM": model, "30": MINUTES, "bfloat16": "float32"}
    printed = block_below("vLLM's flags of that server follow a `--`", "docs/own-server.md")
    profiled, trained, checked, served = [[here.get(word, word) for word in line] for line in printed]
    run(profiled, tmp_path)
    train(trained, tmp_path)
    learned = tmp_path / "models" / "mine"
    heads = json.loads((Path(model) / "config.json").read_text())["num_attention_heads"]
    assert cost.load(learned).provenance.geometry.heads == heads // 2
    assert "served by" in run(checked, tmp_path)

    port, environment = free_port(), harness.environment(2, multiprocess=True)
    line = [*command(served), "--host-gib", "0.25", "--trace", str(tmp_path / "served"), *vllm_flags(port)]
    with started(line, port, tmp_path, environment, tmp_path) as (base, process):
        told = pressed(base)
        in_force = by_label(base, "cost_model")
        process.terminate()
        process.wait(timeout=PATIENCE_S)
    assert in_force[f'digest="{cost.load(learned).digest}"'] == 1.0, in_force
    assert told["priced_preemptions_total"] == told["preemptions_total"] == told["resumed_total"] >= 4
    assert told["predicted_cost_microseconds_total"] > 0 and told["fallbacks_total"] == 0
    for row in traces.read(tmp_path / "served").rows("decisions"):
        assert sorted(option["kind"] for option in row["options"]) == ["recompute", "swap"] and len(row["costs"]) == 2

    as_on_a_server(1)
    flags = ("--dtype", "float32", "--config", str(tmp_path / "server.yaml"))
    refused = check(model, ServerSettings(f"cheapest:{learned}"), flags)
    assert "measured with 2 times as many tensor-parallel ranks" in refused.refused
    assert refused.helps == ("--policy always-swap",)


def pressed(base: str) -> dict[str, float]:
    """Metrics after long requests have pressed the server for memory, and all were answered."""
    for number in range(ROUNDS):
        seeds = range(CLIENTS * number, CLIENTS * (number + 1))
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda seed: complete(base, seed, (300, 400)), seeds))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [one["wanted"] for one in answers]
        wait_until(lambda: settled(metrics(base)), lambda: f"the metrics do not settle: {metrics(base)}")
        if metrics(base)["preemptions_total"] >= 4:
            break
    return metrics(base)
