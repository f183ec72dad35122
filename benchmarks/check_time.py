"""How long `kvpolicy check` takes until it has answered, and how much of that is importing vLLM.

    python benchmarks/check_time.py [LLM] [--runs N] [--json FILE] [-- VLLM FLAGS]

LLM: a model's folder or id; by default a Llama with the layers and widths of Llama-3.1-70B, without the weights, which
the check does not read. Runs of the command alternate with processes that import the check's modules, and so vLLM, and
end; the first run of either is not counted, as it fills the disk's cache. Printed are medians and the range, of the
clock's time and of the CPU time of a run's processes; ``--json`` has every counted run, and above them what was asked
for, the versions, the machine, and its load average before and after. Exits 1 where the model is not served.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from measured_on import head_of, load_average

from kvpolicy_vllm.bench.models import make_llama

LARGE = {
    "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16",
}  # fmt: skip
IMPORTS = ("-c", "import kvpolicy_vllm.check.lay_out")
CHECK, IMPORT = "kvpolicy check", "importing vLLM"
ASKED = ("llm", "runs", "vllm_flags")


@dataclass(frozen=True, slots=True)
class Run:
    """One process, with those that it started."""

    what: str
    wall_s: float
    cpu_s: float


def large_llama(folder: Path) -> Path:
    """Without weights."""
    made = make_llama(folder)
    for weights in made.glob("*.safetensors"):
        weights.unlink()
    config = made / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | LARGE))
    return made


def timed(what: str, *arguments: str) -> Run:
    """Raises CalledProcessError, with what was printed, where the process ends with another status than 0."""
    before, began_s = _children_cpu_s(), time.perf_counter()
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1"}
    subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
    return Run(what, time.perf_counter() - began_s, _children_cpu_s() - before)


def _children_cpu_s() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def line(what: str, runs: Sequence[Run]) -> str:
    parts = []
    for name, values in (("by the clock", [one.wall_s for one in runs]), ("of CPU time", [one.cpu_s for one in runs])):
        parts.append(f"{median(values):.1f} s {name} ({min(values):.1f} to {max(values):.1f})")
    return f"{what}: {', '.join(parts)}, medians of {len(runs)} runs"


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llm", nargs="?", metavar="LLM")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given[:at])
    options.vllm_flags = given[at + 1 :]
    loads = [load_average()]
    try:
        found = alternating(options.llm, options.runs, options.vllm_flags)
    except subprocess.CalledProcessError as error:
        print(f"{error.stdout}{error.stderr}", file=sys.stderr)
        return 1
    loads.append(load_average())
    for what in (CHECK, IMPORT):
        print(line(what, [one for one in found if one.what == what]))
    if options.json:
        written = head_of(options, ASKED) | {"loads": loads, "runs": [asdict(one) for one in found]}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


def alternating(llm: str | None, runs: int, vllm_flags: Sequence[str]) -> list[Run]:
    """Those that are counted. Raises CalledProcessError as :func:`timed`."""
    found: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        checked = llm or str(large_llama(Path(folder)))
        check = ("-m", "kvpolicy.cli", "check", checked, "--policy", "always-swap", "--host-gib", "0.5", *vllm_flags)
        for number in range(runs + 1):
            pair = (timed(CHECK, *check), timed(IMPORT, *IMPORTS))
            found += pair if number else ()
    return found


if __name__ == "__main__":
    sys.exit(main())
