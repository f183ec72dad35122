"""What runs of an unfinished measurement depend on beside its arguments: versions, what its files hold, and variables.

Called by :mod:`kvpolicy_vllm.bench.run_bench` and :mod:`kvpolicy_vllm.bench.run_demo`, which resume nothing that was
begun with others. Loads no engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from kvpolicy import __version__
from kvpolicy.errors import InputError
from kvpolicy.tiers import weights_digest
from kvpolicy.workload.join_text import files_of
from kvpolicy_vllm import launch

PREFIX = "VLLM_"
SECRET = ("KEY", "TOKEN", "SECRET")
"""What is in the name of a variable that may hold a secret."""


def versions() -> dict[str, str]:
    """Of kvpolicy, and of the vLLM that is installed here; empty where none is."""
    return {"kvpolicy": __version__, "vllm": launch.vllm_version()}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """vLLM's variables in the environment of a server, which decide its cores and its memory: values by name, of one
    that may be a secret a digest."""
    return {
        name: f"sha256:{hashlib.sha256(value.encode()).hexdigest()}" if any(one in name for one in SECRET) else value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIX)
    }


def digests(workload: str | None, commands: Iterable[Sequence[str]], llm: str = "") -> dict[str, str]:
    """By path, digests of the files of a workload, and of the folders of cost models with which servers are started and
    of the model that they serve: by its name alone a file that has changed is the same.

    Of the model's weights, which may be large, samples are read, with the time of their last change. A model at a hub
    has no digest, and neither has a folder without weights.
    """
    folders = {Path(name) for command in commands if (name := _cost_model(command))}
    paths = [*files_of(workload or ""), *sorted(folder for folder in folders if folder.is_dir())]
    found = {str(path): _digest(path) for path in paths}
    if llm and Path(llm).is_dir():
        with suppress(InputError):
            found[llm] = weights_digest(Path(llm))
    return found


def _cost_model(command: Sequence[str]) -> str:
    """What the policy of a server names, which may be a folder; empty where it has none, or vLLM's flag is another
    one than kvpolicy writes."""
    for flag, value in pairwise(command):
        if flag == launch.TRANSFER:
            with suppress(ValueError, AttributeError):
                policy = json.loads(value).get("kv_connector_extra_config", {}).get("policy", "")
                return str(policy).partition(":")[2].partition(",")[0]
    return ""


def _digest(path: Path) -> str:
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    sha256 = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            sha256.update(hashlib.file_digest(opened, "sha256").digest())
    return sha256.hexdigest()
