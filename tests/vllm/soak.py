"""Many drawn schedules on every vLLM version that kvpolicy claims to serve: ``python -m tests.vllm.soak``.

::

    make soak                                            # 1,000 schedules a version, taken up where it was
    python -m tests.vllm.soak --versions 0.30.0 --seeds 100:200 --fix scheduling=priority
    python -m tests.vllm.soak --versions 0.30.0 --replay 'Setup(seed=7, ...)'

What is done is remembered in ``.soak``, by version and by a digest of the code: the plugin, what it decides with, and
the fuzz. Prints a line per version, with what the memory of its processes grew by, and for the first failures a line
that replays each; exit status 1 where one failed, memory grew by more than :data:`tests.vllm.memory.MAX_GROWTH_KIB`,
or a version has no sources.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm import harness, memory
from tests.vllm.setups import Setup
from tests.vllm.versions import CLAIMED, INSTALLED, ROOT, source_of

DONE = ROOT / ".soak"
COUNT = 1000
CHUNK = 125
"""Schedules of one process: importing vLLM takes as long as 30 of them."""
CHUNK_TIMEOUT_S = 3600.0
SHOWN_FAILURES = 3
TOTALS = ("steps", "preemptions", "swaps", "displaced")
PARTS = (
    "alone", "disturbances", "fuzz", "harness", "kv_caches", "memory", "pictures", "places", "setups", "symbolic",
)  # fmt: skip
CODE = (
    "integrations/kvpolicy_vllm/plugin",
    "integrations/kvpolicy_vllm/connector.py",
    "kvpolicy",
    "tests/careless.py",
    "tests/holds.py",
    "tests/unruly.py",
    *(f"tests/vllm/{name}.py" for name in PARTS),
)


class NoSources(Exception):
    """A version whose sources are not here."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of one version's schedules."""

    version: str
    outcomes: tuple[dict[str, Any], ...]
    grown_kib: int | None = None
    """What the memory of a process grew by, at most of those that ran them; None where too few ran in one."""

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [outcome for outcome in self.outcomes if outcome["problems"]]

    @property
    def leaks(self) -> bool:
        """Whether a process took more and more memory."""
        return self.grown_kib is not None and self.grown_kib > memory.MAX_GROWTH_KIB

    def __str__(self) -> str:
        total = {name: sum(outcome[name] for outcome in self.outcomes) for name in TOTALS}
        waits = sorted(wait for outcome in self.outcomes for wait in outcome["waits"])
        longest = max((outcome.get("longest_wait", 0) for outcome in self.outcomes), default=0)
        turns = sum(outcome.get("turns", 0) for outcome in self.outcomes)
        hits = sum(outcome.get("cache_hits", 0) for outcome in self.outcomes)
        p90 = f"{waits[len(waits) * 9 // 10]} steps" if waits else "none"
        return (
            f"{self.version}: {len(self.outcomes)} schedules, {len(self.failed)} failed; {total['steps']} steps, "
            f"{total['swaps']} swaps of {total['preemptions']} preemptions, {total['displaced']} of them displaced, "
            f"loaded requests waited p90 {p90}, others under promotion {longest} steps at most, "
            f"{turns} further inputs, {hits} hits in the cache of prompts, {self._memory()}"
        )

    def _memory(self) -> str:
        if self.grown_kib is None:
            return "memory not compared: too few schedules in a process"
        grown = f"memory grew by {self.grown_kib / 1024:.1f} MiB"
        return f"{grown}, more than {memory.MAX_GROWTH_KIB / 1024:g}" if self.leaks else grown

    def replays(self) -> list[str]:
        """For the first failures: what went wrong, and the command that shows it again."""
        return [
            f"  {'; '.join(outcome['problems'])}\n"
            f"  python -m tests.vllm.soak --versions {self.version} --replay '{quoted(outcome['setup'])}'"
            for outcome in self.failed[:SHOWN_FAILURES]
        ]


def quoted(setup: str) -> str:
    """A setup's `repr` for between single quotes of a shell."""
    return setup.replace("'", '"')


def run(version: str, setups: Iterable[Setup], folder: Path) -> Summary:
    """Every schedule of ``setups`` that ``folder`` does not hold the outcome of, in one process.

    Raises :class:`NoSources`, and RuntimeError with the last lines of a process that ended badly.
    """
    source = source_of(version)
    if source is None:
        raise NoSources(f"no sources of vLLM {version}")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [repr(setup) for setup in setups]
    name = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:16]
    job, results = folder / f"{name}.json", folder / f"{name}.jsonl"
    done = {outcome["setup"] for outcome in read(results)}
    missing = [setup for setup in wanted if setup not in done]
    if missing:
        job.write_text(json.dumps({"setups": missing}))
        _run_process(version, source, job, results)
    return Summary(version, tuple(read(results)), memory.read_growth(results))


def _run_process(version: str, source: str, job: Path, results: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.fuzz", str(job), str(results)],
        env=harness.environment() | {"KVPOLICY_VLLM_SOURCE": source, "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=CHUNK_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"vLLM {version}, {job}: exit status {done.returncode}\n{done.stdout[-4000:]}")


def read(results: Path) -> list[dict[str, Any]]:
    """Outcomes so far; a line that was cut off in the middle is left out, and from the file as well."""
    if not results.exists():
        return []
    lines = results.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if whole != lines:
        results.write_text("".join(whole))
    return [json.loads(line) for line in whole]


def digest() -> str:
    """Of all code that a schedule's outcome depends on."""
    total = hashlib.sha256()
    for place in CODE:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            total.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return total.hexdigest()[:12]


def soak(versions: Sequence[str], seeds: range, fixed: dict[str, Any], workers: int) -> list[Summary]:
    """All versions' schedules, ``workers`` processes at a time, a line as each version is done."""
    folder = DONE / digest()
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    tell = threading.Lock()

    def chunk(version: str, part: range) -> Summary:
        setups = [Setup.draw(seed, **fixed) for seed in part]
        began_s = time.monotonic()
        found = run(version, setups, folder / version)
        with tell:
            print(f"  {found} ({time.monotonic() - began_s:.0f} s)", flush=True)
        return found

    summaries = []
    with ThreadPoolExecutor(workers) as pool:
        started = {version: [pool.submit(chunk, version, part) for part in chunks] for version in versions}
        for version, parts in started.items():
            found = [part.result() for part in parts]
            growths = [one.grown_kib for one in found if one.grown_kib is not None]
            outcomes = tuple(outcome for one in found for outcome in one.outcomes)
            summaries.append(Summary(version, outcomes, max(growths, default=None)))
    return summaries


def main() -> int:
    arguments = _arguments()
    missing = [version for version in arguments.versions if source_of(version) is None]
    if missing:
        print(f"no sources of vLLM {', '.join(missing)}; fetch them: "
              f"python tools/vllm_sources.py .vllm-sources {' '.join(missing)}", file=sys.stderr)  # fmt: skip
        return 1
    if arguments.replay:
        setups = [Setup.parse(arguments.replay)]
        folder = DONE / "replays" / str(time.time_ns())
        summaries = [run(version, setups, folder / version) for version in arguments.versions]
    else:
        summaries = soak(arguments.versions, arguments.seeds, dict(arguments.fix), arguments.workers)
    for summary in summaries:
        print(summary)
        for line in summary.replays():
            print(line)
    return int(any(summary.failed or summary.leaks for summary in summaries))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Drawn schedules over vLLM's scheduler alone, on many versions.")
    parser.add_argument("--versions", nargs="+", default=list(CLAIMED), help=f"or {INSTALLED}; default: all claimed")
    parser.add_argument("--seeds", type=_seeds, default=range(COUNT), metavar="FIRST:END", help=f"default: 0:{COUNT}")
    parser.add_argument("--fix", type=_fixed, action="append", default=[], metavar="FIELD=VALUE",
                        help="a field of every drawn setup, as scheduling=priority")  # fmt: skip
    parser.add_argument("--replay", metavar="SETUP", help="one schedule, as a failure printed it")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    return parser.parse_args()


def _seeds(text: str) -> range:
    first, end = text.split(":")
    return range(int(first), int(end))


def _fixed(text: str) -> tuple[str, Any]:
    name, value = text.split("=", 1)
    if name not in Setup.__dataclass_fields__:
        raise argparse.ArgumentTypeError(f"no field {name!r}; the fields are {', '.join(Setup.__dataclass_fields__)}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
