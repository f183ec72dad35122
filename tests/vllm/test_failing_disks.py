"""Engines whose files of KV are on disks that are full, hang, turn read-only, or lose and damage files: every token is
unmodified vLLM's, nothing is left behind, and what failed is counted. The disks are real ones, mounted for one engine.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.tiers.blocks import files_of
from tests.vllm import harness, test_file_index
from tests.vllm.conftest import job
from tests.vllm.test_faults_of_files import PATIENCE_S, engine, half_written
from tests.vllm.test_file_index import FLEETING, POLICIES, Servers, counted

MOUNTS = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "mkfs.ext4", "fsfreeze")))
pytestmark = [pytest.mark.slow, pytest.mark.feature("prompts in files, beyond restarts")]
mounted = pytest.mark.skipif(not MOUNTS, reason="needs root, unshare, mkfs.ext4 and fsfreeze, to mount a disk")
first, second = test_file_index.first, test_file_index.second

FULL = "mount -t tmpfs -o size=4m,mode=700 kv {kv}\n"
DISK = "mount -o loop,errors=remount-ro {image} {kv}\nrmdir {kv}/lost+found\n"
SOME_FILES = "until [ $(find {kv} -type f -path '*/[0-9a-f]/*' | wc -l) -gt 20 ]; do sleep .01; done"
BREAK = "echo broken > /sys/fs/ext4/$(basename $(findmnt -no SOURCE {kv}))/trigger_fs_error"
READ_ONLY = DISK + f"({SOME_FILES}; {BREAK}) &\n"
HANG = "fsfreeze -f {kv}; sleep 14; fsfreeze -u {kv}"
HANGING = DISK + f'setsid sh -c "{SOME_FILES.replace("$", chr(92) + "$")}; {HANG}" &\n'
"""It hangs for longer than anybody waits. Who ends that is in a session of its own, which nothing kills."""
ENDED = "\nfind {kv} -path '*/writing/*' > {left}\ntouch {kv}/probe 2> {probe}\nexit $status\n"


@pytest.fixture(scope="module")
def requests(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Conversations, their further turns, and these once more."""
    return [*first, *second, *second]


@pytest.fixture(scope="module")
def stock(model: str, requests: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Unmodified vLLM with memory enough and no prefix caching."""
    work = job(
        model, [], {"num_gpu_blocks_override": 800}, scenario="several", workloads={"all": requests}, gaps=True
    )  # fmt: skip
    return harness.run(work, tmp_path_factory.mktemp("stock"))


class Disk:
    """An engine with its files on a disk of its own. ``settings``: one of POLICIES."""

    def __init__(
        self,
        model: str,
        folder: Path,
        stock: dict[str, Any],
        requests: list[dict[str, Any]],
        settings: dict[str, Any],
    ) -> None:
        self.servers, self.folder = Servers(model, folder, stock), folder
        turns = len(requests) // 3
        waves = [[*range(at, at + turns)] for at in range(0, len(requests), turns)]
        self.job = self.servers.job(requests, **FLEETING | settings) | {"waves": waves}
        self.left, self.probe = folder / "left", folder / "probe"

    def counts(self, script: str) -> dict[str, Any]:
        """Counters of the engine after it has served everything on the disk that the script mounts."""
        files = {"kv": self.servers.files, "image": self.folder / "disk", "left": self.left, "probe": self.probe}
        if "{image}" in script:
            with files["image"].open("wb") as image:
                image.truncate(64 << 20)
            subprocess.run(["mkfs.ext4", "-q", str(files["image"])], check=True)
        self.servers.files.mkdir(mode=0o700)
        (self.folder / "job").write_text(json.dumps(self.job))
        result, output = self.folder / "result", self.folder / "output"
        run = f"{sys.executable} -m tests.vllm.engine_process {self.folder / 'job'} {result}; status=$?"
        script = "set -e\n" + script.format(**files) + "set +e\n" + run + ENDED.format(**files)
        with output.open("wb") as sink:
            status = subprocess.run(
                ["unshare", "--mount", "sh", "-c", script], env=harness.environment(), cwd=harness.ROOT,
                stdout=sink, stderr=sink, timeout=PATIENCE_S, check=False,
            ).returncode  # fmt: skip
        assert status == 0, output.read_text()[-4000:]
        return self.servers.judged("all", json.loads(result.read_text()))


@pytest.fixture
def disk(
    request: pytest.FixtureRequest, model: str, stock: dict[str, Any], requests: list[dict[str, Any]], tmp_path: Path
) -> Disk:
    return Disk(model, tmp_path, stock, requests, POLICIES[request.param])


def with_policies(*names: str) -> pytest.MarkDecorator:
    """Tests of a disk below host memory with these caching policies, and of servers that differ in all else, too."""
    return pytest.mark.parametrize("disk", names, indirect=True)


@mounted
@with_policies("lru", "s3fifo")
def test_a_full_disk(disk: Disk) -> None:
    """What fits is stored and loaded."""
    stats = disk.counts(FULL)
    assert counted(stats, "store_failed") > 0
    assert counted(stats, "stored") > 0 and counted(stats, "loaded") > 0
    assert not disk.left.read_text()


@mounted
@with_policies("lru", "cost", "arc")
def test_a_disk_that_turns_read_only(disk: Disk) -> None:
    """As a file system does that has found an error on its disk. What was stored before is loaded."""
    stats = disk.counts(READ_ONLY)
    assert "Read-only file system" in disk.probe.read_text()
    assert counted(stats, "store_failed") > 0
    assert counted(stats, "stored") > 20 and counted(stats, "loaded") > 0


@mounted
@with_policies("lru", "lfu")
def test_a_disk_that_hangs(disk: Disk) -> None:
    """Nobody waits for it for longer than some seconds, and it is used again when it goes on."""
    stats = disk.counts(HANGING)
    assert counted(stats, "late") > 0 and counted(stats, "stored") > 20
    assert not disk.left.read_text()


@with_policies(*POLICIES)
def test_files_that_are_lost_and_damaged_meanwhile(disk: Disk) -> None:
    rng, seen = random.Random(0), set[Path]()
    with engine(disk.job, disk.folder / "job") as (process, result):
        while process.poll() is None:
            for path in {*files_of(disk.servers.files)} - seen:
                seen.add(path)
                harm(path, rng.choice(["lost", "cut", "changed", "left alone", "left alone"]), rng)
            time.sleep(0.01)
        stats = disk.servers.judged("all", result())
    assert counted(stats, "load_failed") > 0 and counted(stats, "loaded") > 0
    assert harness.total(stats, "hinted_blocks") > 0
    assert not half_written(disk.servers.files)


def harm(path: Path, how: str, rng: random.Random) -> None:
    """Do that to a file, unless the engine has given it up meanwhile."""
    try:
        if how == "lost":
            path.unlink()
        elif how == "cut":
            os.truncate(path, rng.choice([0, 100, 4096, 5000]))
        elif how == "changed":
            with path.open("r+b") as file:
                file.seek(rng.randrange(path.stat().st_size))
                file.write(rng.randbytes(64))
    except FileNotFoundError:
        pass
