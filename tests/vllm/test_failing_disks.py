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
from tests.vllm.test_faults_of_files import PATIENCE_S, engine, mostly_slow
from tests.vllm.test_file_index import CONVERSATIONS, FLEETING, POLICIES, Servers, counted

MOUNTS = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "mkfs.ext4", "fsfreeze")))
pytestmark = pytest.mark.feature("prompts in files, beyond restarts")
mounted = pytest.mark.skipif(not MOUNTS, reason="needs root, unshare, mkfs.ext4 and fsfreeze, to mount a disk")
first, second = test_file_index.first, test_file_index.second

FULL = "mount -t tmpfs -o size=4m,mode=700 kv {kv}\n"
DISK = "mount -o loop,errors=remount-ro {image} {kv}\nrmdir {kv}/lost+found\n"
AWAIT = "wait_for() {{ for _ in $(seq $2); do [ -e $1 ] && return; sleep .01; done; }}\nwait_for {stored} 120000\n"
BREAK = "echo broken > /sys/fs/ext4/$(basename $(findmnt -no SOURCE {kv}))/trigger_fs_error\n"
READ_ONLY = AWAIT + BREAK + "touch {faulty} {over}\n"
HANG = AWAIT + "fsfreeze -f {kv}\ntouch {faulty}\nwait_for {served} 30000\nfsfreeze -u {kv}\ntouch {over}\n"
"""Until the engine has served without the disk, and at most five minutes where it fails: a process that writes to a
disk that hangs cannot be killed."""
ENDED = """
touch {stored} {served}
touch {kv}/probe 2> {probe}
exit $status
"""
STOPS: dict[int, dict[str, Any]] = {
    1: {"says": "stored"}, 2: {"awaits": "faulty"}, 3: {"says": "served", "awaits": "over", "settles": True},
}  # fmt: skip
"""Where an engine and a fault of its disk wait for each other, by wave. What the first wave has computed is in files
then; while the second one is served, the disk fails; the third one finds what the first one stored, and the fourth one
has something to store. How many files there are by what time would depend on what else the machine does."""


@pytest.fixture(scope="module")
def requests(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Conversations, their further turns, these once more, and turns after them."""
    more = harness.prompts(CONVERSATIONS, (20, 60), (30, 60), seed=7)
    third = [b | {"prompt": a["prompt"] + b["prompt"]} for a, b in zip(second, more, strict=True)]
    return [*first, *second, *second, *third]


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
        turns = len(requests) // 4
        waves = [[*range(at, at + turns)] for at in range(0, len(requests), turns)]
        self.job = self.servers.job(requests, **FLEETING | settings) | {"waves": waves, "only_files": True}
        self.probe = folder / "probe"
        self.begun: list[dict[str, Any]] = []
        """The engine's counters at the beginning of each wave."""

    def stops_at(self, stops: dict[int, dict[str, Any]]) -> None:
        """The engine waits for others there; files are given by their names in the folder."""
        paths = {wave: {key: str(self.folder / value) if isinstance(value, str) else value
                        for key, value in what.items()} for wave, what in stops.items()}  # fmt: skip
        self.job["stops"] = {str(wave): what for wave, what in paths.items()}

    def counts(self, mount: str, fault: str = "") -> dict[str, Any]:
        """Counters of the engine after it has served everything on a disk that is mounted so, and fails so."""
        names = ("disk", "probe", "stored", "faulty", "served", "over")
        files = {name: self.folder / name for name in names} | {"kv": self.servers.files, "image": self.folder / "disk"}
        if "{image}" in mount:
            with files["image"].open("wb") as image:
                image.truncate(64 << 20)
            subprocess.run(["mkfs.ext4", "-q", str(files["image"])], check=True)
        if fault:
            self.stops_at(STOPS)
            (self.folder / "fault").write_text(fault.format(**files))
            mount += f"setsid sh {self.folder / 'fault'} &\n"  # in a session of its own, which nothing kills
        self.servers.files.mkdir(mode=0o700)
        (self.folder / "job").write_text(json.dumps(self.job))
        result, output = self.folder / "result", self.folder / "output"
        run = f"{sys.executable} -m tests.vllm.engine_process {self.folder / 'job'} {result}; status=$?"
        script = "set -e\n" + mount.format(**files) + "set +e\n" + run + ENDED.format(**files)
        with output.open("wb") as sink:
            status = subprocess.run(
                ["unshare", "--mount", "sh", "-c", script], env=harness.environment(), cwd=harness.ROOT,
                stdout=sink, stderr=sink, timeout=PATIENCE_S, check=False,
            ).returncode  # fmt: skip
        assert status == 0, output.read_text()[-4000:]
        return self.judged(json.loads(result.read_text()))

    def judged(self, result: dict[str, Any]) -> dict[str, Any]:
        self.begun = result["begun"]
        return self.servers.judged("all", result)

    def counted_from(self, wave: int, event: str, until: dict[str, Any]) -> float:
        """Blocks of files from the beginning of a wave on, until these counters."""
        return counted(until, event) - counted(self.begun[wave], event)


@pytest.fixture
def disk(
    request: pytest.FixtureRequest, model: str, stock: dict[str, Any], requests: list[dict[str, Any]], tmp_path: Path
) -> Disk:
    return Disk(model, tmp_path, stock, requests, POLICIES[request.param])


def with_policies(*names: str) -> pytest.MarkDecorator:
    """Tests of a disk below host memory with these caching policies, and of servers that differ in all else, too."""
    return pytest.mark.parametrize("disk", mostly_slow(names), indirect=True)


@mounted
@with_policies("lru", "s3fifo", "cost")
def test_a_full_disk(disk: Disk) -> None:
    """What fits is stored and loaded."""
    stats = disk.counts(FULL)
    assert counted(stats, "store_failed") > 0
    assert counted(stats, "stored") > 0 and counted(stats, "loaded") > 0
    assert not disk.servers.half_written


@mounted
@pytest.mark.slow
@with_policies("lru", "cost", "arc")
def test_a_disk_that_turns_read_only(disk: Disk) -> None:
    """As a file system does that has found an error on its disk. What was stored before is loaded afterwards, too."""
    stats = disk.counts(DISK, READ_ONLY)
    assert "Read-only file system" in disk.probe.read_text()
    assert counted(disk.begun[1], "stored") > 20 and counted(disk.begun[1], "store_failed") == 0
    assert disk.counted_from(2, "loaded", disk.begun[3]) > 0
    assert disk.counted_from(1, "store_failed", stats) > 0, "once it has, nothing is stored for ten minutes"


@mounted
@pytest.mark.slow
@with_policies("lru", "lfu", "cost")
def test_a_disk_that_hangs(disk: Disk) -> None:
    """Nobody waits for it for longer than some seconds, and it is used again when it goes on."""
    stats = disk.counts(DISK, HANG)
    assert counted(disk.begun[1], "stored") > 20
    assert disk.counted_from(1, "late", disk.begun[3]) > 0
    assert disk.counted_from(3, "stored", stats) > 0 and disk.counted_from(3, "loaded", stats) > 0
    assert not disk.servers.half_written


@with_policies(*POLICIES)
def test_files_that_are_lost_and_damaged_meanwhile(disk: Disk) -> None:
    """Each once, as soon as it is seen; those of the first wave before the second one asks for them."""
    seen = set[Path]()
    stored, harmed = disk.folder / "stored", disk.folder / "harmed"
    disk.stops_at({1: {"says": "stored", "awaits": "harmed"}})
    with engine(disk.job, disk.folder / "job") as (process, result):
        while process.poll() is None:
            all_there = stored.exists()
            for path in {*files_of(disk.servers.files)} - seen:
                seen.add(path)
                harm(path, random.Random(path.name))
            if all_there:
                harmed.touch()
            time.sleep(0.01)
        stats = disk.judged(result())
    assert counted(disk.begun[1], "stored") > 20
    assert disk.counted_from(1, "load_failed", stats) > 0 and disk.counted_from(1, "loaded", stats) > 0
    assert harness.total(stats, "hinted_blocks") > 0
    assert not disk.servers.half_written


def harm(path: Path, rng: random.Random) -> None:
    """Do something to a file, or nothing, unless the engine has given it up meanwhile."""
    how = rng.choice(["lost", "cut", "changed", "left alone", "left alone"])
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
