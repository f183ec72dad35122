"""Where a measurement is made: device, driver, versions, and how large it is to be."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpolicy_vllm.bench.engine_process import environment

MINUTES = 9.0
TINY, FULL = "tiny", "full"
ASKING = """
import json, torch, vllm
cuda = torch.cuda.is_available()
p = torch.cuda.get_device_properties(0) if cuda else None
print("PLACE " + json.dumps({
    "vllm": vllm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda if cuda else None,
    "device": p.name if cuda else "cpu", "memory_bytes": p.total_memory if cuda else None,
    "capability": f"{p.major}.{p.minor}" if cuda else None}))
"""


@dataclass(frozen=True, slots=True)
class Place:
    """One machine with one engine, at one scale."""

    device: str
    """The accelerator's name, or ``cpu``."""
    memory_bytes: int | None
    """Of the accelerator."""
    capability: str | None
    driver: str | None
    cuda: str | None
    torch: str
    vllm: str
    python: str
    scale: str

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def tiny(self) -> bool:
        return self.scale == TINY

    @property
    def short_name(self) -> str:
        """For folders: ``h200``, ``h100``, ``cpu-tiny``."""
        words = [word for word in self.device.lower().replace("-", " ").split() if any(c.isdigit() for c in word)]
        name = words[0] if words else self.device.lower().replace(" ", "-")
        return f"{name}-tiny" if self.tiny else name

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        cuda = "no CUDA device" if self.on_cpu else f"CUDA {self.cuda}, driver {self.driver}"
        warning = "; TINY SCALE: these figures try the program out and say nothing of a GPU" if self.tiny else ""
        return f"{self.device} ({cuda}), vLLM {self.vllm}, torch {self.torch}, scale {self.scale}{warning}"


def find_place(scale: str | None) -> Place:
    """CUDA where torch sees a device, else the CPU. ``scale``: None takes ``full`` on a device and ``tiny`` on a CPU.

    Asked of another process: importing vLLM takes seconds and binds this one to cores. Raises RuntimeError with what
    that process said where vLLM cannot be imported.
    """
    process = subprocess.run([sys.executable, "-c", ASKING], env=environment(), capture_output=True, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("PLACE ")]
    if not lines:
        raise RuntimeError(f"vLLM could not be imported by {sys.executable}:\n{process.stderr[-2000:]}")
    facts = json.loads(lines[-1].removeprefix("PLACE "))
    return Place(
        **facts,
        driver=None if facts["device"] == "cpu" else _driver(),
        python=platform.python_version(),
        scale=scale or (TINY if facts["device"] == "cpu" else FULL),
    )


def _driver() -> str | None:
    """As reported by the driver's own tool; None without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    process = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, env=os.environ
    )
    return process.stdout.strip().splitlines()[0] if process.returncode == 0 and process.stdout.strip() else None


def arguments(what: str, description: str) -> argparse.ArgumentParser:
    """Options that all programs here share."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu.{what}", description=description)
    parser.add_argument(
        "--out", type=Path, default=Path("out/gpu") / what, help="folder for the parts; an earlier run in it is resumed"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="nothing is begun that would take longer")
    parser.add_argument("--scale", choices=(TINY, FULL), help="by default full on a CUDA device, else tiny")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="a piece's name, or how names begin with a * behind; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="name the pieces and end")
    return parser


def chosen(pieces: list[Any], options: argparse.Namespace) -> list[Any]:
    """Those that ``--only`` asks for. Raises SystemExit for names that nothing has, and after ``--list``."""
    for pattern in options.only:
        if not any(_means(pattern, piece.name) for piece in pieces):
            names = ", ".join(piece.name for piece in pieces)
            raise SystemExit(f"--only {pattern}: no such piece; there are {names}")
    selected = [
        piece for piece in pieces if not options.only or any(_means(pattern, piece.name) for pattern in options.only)
    ]
    if options.list:
        print("\n".join(f"{piece.name}  about {piece.seconds:.0f} s" for piece in selected))
        raise SystemExit(0)
    return selected


def _means(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
