"""README's quick start "Your own server", command by command as it is printed, with a small model as its LLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvpolicy import cost, trace
from kvpolicy_vllm.bench.models import make_llama
from tests.snippets import block_below
from tests.vllm import harness
from tests.vllm.test_server import (
    ROUNDS,
    all_answered,
    by_label,
    free_port,
    metrics,
    settled,
    started,
    vllm_flags,
    wait_until,
)

MINUTES = os.environ.get("KVPOLICY_TEST_PROFILE_MINUTES", "15")
"""Of the profile, in the place of the printed 30."""
CONTEXT_TOKENS = 2048
"""Of the small model: victims are up to half as long, so that many are measured in a few minutes."""
CLIENTS = 32
Server = AbstractContextManager[tuple[str, "subprocess.Popen[bytes]"]]


def pressed(base: str) -> dict[str, float]:
    """Metrics after clients have pressed the server for memory, and all were answered."""
    for number in range(ROUNDS):
        all_answered(base, CLIENTS, number)
        wait_until(lambda: settled(metrics(base)), lambda: f"the metrics do not settle: {metrics(base)}")
        if metrics(base)["preemptions_total"]:
            break
    return metrics(base)


@pytest.fixture
def environment() -> dict[str, str]:
    """That of a server's user, whose PATH leads to the programs beside this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return harness.environment(1, multiprocess=True) | {"PATH": path, "VLLM_CPU_OMP_THREADS_BIND": "0"}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """What a command prints that ends with that status."""

    def output(words: list[str], status: int = 0) -> str:
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, f"{words}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    return output


@pytest.fixture
def serve(environment: dict[str, str], tmp_path: Path) -> Callable[[list[str]], Server]:
    """Starts a printed line with a small server's flags added: host, port, name, eager, blocks of 32 tokens, 1,024
    tokens a request, and memory for 48 blocks, so that few requests fill it. The data type is vLLM's own, as it is
    without a flag."""

    def server(words: list[str]) -> Server:
        port = free_port()
        return started(["env", *words, *vllm_flags(port, dtype="auto")], port, tmp_path, environment, tmp_path)

    return server


@pytest.mark.slow
def test_your_own_server_as_printed(
    tmp_path: Path, run: Callable[..., str], serve: Callable[[list[str]], Server]
) -> None:
    """On a device without a data sheet, so in the order that README has for it: profile and train come first, and the
    learned model looks in the place of cheapest:analytic. The profile takes ``MINUTES``, and the servers have flags
    added; `pip install kvpolicy` runs in tests/test_packaging.py. The rest is as printed.
    """
    llm = str(make_llama(tmp_path / "llm", context_tokens=CONTEXT_TOKENS))
    printed = block_below("**Your own server.**")
    install, check, look, profile, train, decide = [
        [llm if word == "LLM" else word for word in line] for line in printed
    ]
    assert install == ["pip", "install", "kvpolicy"] and look[1:] == decide[1:] == ["vllm", "serve", llm]
    refused = run(check, 1)
    assert "no hardware sheet for device 'cpu'" in refused and "`kvpolicy profile`, then `kvpolicy train`" in refused

    profile[profile.index("--minutes") + 1] = MINUTES
    run(profile)
    assert trace.read(tmp_path / "traces" / "mine").table("decisions").num_rows
    run(train)
    learned = cost.load(tmp_path / "models" / "mine")

    assert "served by" in run(measured(check))
    assert measured(look[:1]) == ["KVPOLICY=cheapest:models/mine,shadow=on"]
    with serve(measured(look)) as (base, _):
        found = pressed(base)
        assert by_label(base, "shadow")['engine="0"'] == 1.0
        assert found["shadow_preemptions_total"] > 0 == found["loaded_tokens_total"], "recorded, and recomputed"

    assert decide[0] == "KVPOLICY=cheapest:models/mine,order=mlfq:base=256"
    with serve(decide) as (base, _):
        assert pressed(base)["preemptions_total"] > 0
        assert by_label(base, "order")['order="mlfq:base=256"'] == 1.0
        in_force = by_label(base, "cost_model")
        assert in_force[f'digest="{learned.digest}"'] == 1.0, in_force
        assert any(label.startswith('policy="cheapest') for label in in_force)
        assert not by_label(base, "shadow")['engine="0"']


def measured(words: list[str]) -> list[str]:
    """With the model that was learned here in the place of one from a data sheet."""
    return [word.replace("cheapest:analytic", "cheapest:models/mine") for word in words]
