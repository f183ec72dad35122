"""Memory that may be taken: the system's, within the limits of the control groups this process is in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.hardware import Geometry
from kvpolicy.hardware.geometry import _memory_groups, available_memory_bytes, total_memory_bytes
from kvpolicy.shape import ModelShape
from tests.shape.configs import (
    DEEPSEEK_V3,
    GEMMA_2_9B,
    GEMMA_3_27B,
    GPT_OSS_20B,
    GRANITE_4_SMALL,
    LLAMA_2_7B,
    LLAMA_31_8B,
    MIXTRAL_8X7B,
    NEMOTRON_H_8B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
)

MIB = 1 << 20


GIB = 1 << 30


V1_NO_LIMIT = 9223372036854771712


class System:
    """A made-up /proc and the control groups that it tells of."""

    def __init__(self, folder: Path, available: int = 16 * GIB) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self._mounts: list[str] = []
        self._groups: list[str] = []
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {available // 1024} kB\n")

    def mount(self, kind: str, options: str = "rw", root: str = "/", name: str = "cgroup") -> Path:
        point = self.folder / name
        point.mkdir(exist_ok=True)
        escaped = str(point).replace(" ", "\\040")
        self._mounts.append(f"31 30 0:29 {root} {escaped} rw,relatime shared:9 - {kind} cgroup {options}")
        (self.proc / "self" / "mountinfo").write_text("\n".join(["29 1 8:1 / / rw - ext4 /dev/vda rw", *self._mounts]))
        return point

    def within(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def available(self) -> int:
        return available_memory_bytes(self.proc)


def group(folder: Path, files: Mapping[str, object], stat: Mapping[str, int] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in (stat or {}).items()))


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


@pytest.fixture
def v2(system: System) -> tuple[System, Path]:
    system.within("0::/pod/box")
    return system, system.mount("cgroup2")


@pytest.fixture
def v1(system: System) -> tuple[System, Path]:
    system.within("5:devices:/box", "4:hugetlb,memory:/box")
    return system, system.mount("cgroup", "rw,hugetlb,memory")


class TestUnified:
    def test_the_cache_of_weights_just_read_is_there_to_be_taken(self, v2: tuple[System, Path]) -> None:
        """2 GiB, of which all but 0.54 are used, 1.36 of them by files that were read."""
        system, root = v2
        cache = {"inactive_file": 1000 * MIB, "active_file": 360 * MIB, "slab_reclaimable": 33 * MIB, "file": 1 << 40}
        group(root / "pod" / "box", {"memory.max": 2 * GIB, "memory.current": 2 * GIB - 540 * MIB}, cache)
        assert system.available() == (540 + 1000 + 360 + 33) * MIB

    def test_what_must_be_written_first_or_lies_in_a_tmpfs_is_not(self, v2: tuple[System, Path]) -> None:
        system, root = v2
        stat = {
            "inactive_file": 500 * MIB, "active_file": 0, "shmem": 300 * MIB, "inactive_anon": 300 * MIB,
            "file_dirty": 100 * MIB, "file_writeback": 50 * MIB, "unevictable": 70 * MIB, "slab_unreclaimable": 9 * MIB,
        }  # fmt: skip
        group(root / "pod" / "box", {"memory.max": 2 * GIB, "memory.current": GIB}, stat)
        assert system.available() == GIB + 350 * MIB

    def test_files_that_are_all_dirty_free_nothing(self, v2: tuple[System, Path]) -> None:
        system, root = v2
        stat = {"inactive_file": 10 * MIB, "file_dirty": 100 * MIB, "slab_reclaimable": MIB}
        group(root / "pod" / "box", {"memory.max": GIB, "memory.current": GIB}, stat)
        assert system.available() == MIB

    def test_the_tightest_level_counts(self, v2: tuple[System, Path]) -> None:
        system, root = v2
        group(root / "pod" / "box", {"memory.max": "max", "memory.current": GIB})
        group(root / "pod", {"memory.max": 4 * GIB, "memory.current": 3 * GIB}, {"active_file": 100 * MIB})
        assert system.available() == GIB + 100 * MIB
        group(root / "pod" / "box", {"memory.max": 2 * GIB, "memory.current": GIB + 1})
        assert system.available() == GIB - 1

    def test_beyond_memory_high_everything_is_slowed_down(self, v2: tuple[System, Path]) -> None:
        system, root = v2
        group(root / "pod" / "box", {"memory.max": 4 * GIB, "memory.high": 3 * GIB, "memory.current": GIB})
        assert system.available() == 2 * GIB

    def test_more_than_the_limit_may_be_in_use(self, v2: tuple[System, Path]) -> None:
        system, root = v2
        group(root / "pod" / "box", {"memory.max": GIB, "memory.current": GIB + 4096})
        assert system.available() == 0

    def test_no_limit_or_a_wide_one_leaves_the_systems_own(self, v2: tuple[System, Path]) -> None:
        system, root = v2
        assert system.available() == 16 * GIB
        group(root / "pod" / "box", {"memory.max": 64 * GIB, "memory.current": GIB})
        assert system.available() == 16 * GIB


class TestVersionOne:
    def test_its_limit_is_seen(self, v1: tuple[System, Path]) -> None:
        system, root = v1
        stat = {
            "cache": 900 * MIB, "inactive_file": 1, "active_file": 1, "total_inactive_file": 500 * MIB,
            "total_active_file": 200 * MIB, "total_shmem": 200 * MIB, "total_dirty": 30 * MIB, "total_writeback": MIB,
        }  # fmt: skip
        group(root / "box", {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB}, stat)
        assert system.available() == GIB + 669 * MIB

    def test_its_no_limit_is_none(self, v1: tuple[System, Path]) -> None:
        system, root = v1
        group(root / "box", {"memory.limit_in_bytes": V1_NO_LIMIT, "memory.usage_in_bytes": GIB})
        assert system.available() == 16 * GIB

    def test_the_tightest_level_counts(self, v1: tuple[System, Path]) -> None:
        system, root = v1
        group(root / "box", {"memory.limit_in_bytes": V1_NO_LIMIT, "memory.usage_in_bytes": GIB})
        group(root, {"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": GIB})
        assert system.available() == 2 * GIB


class TestWhereItIsMounted:
    def test_a_container_that_sees_its_own_group_as_the_mount(self, system: System) -> None:
        """Without a namespace of its own it reads its path as the host sees it."""
        system.within("4:memory:/docker/abc/inner")
        root = system.mount("cgroup", "rw,memory", root="/docker/abc")
        group(root, {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 2 * GIB})
        assert system.available() == 2 * GIB
        group(root / "inner", {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB})
        assert system.available() == GIB

    @pytest.mark.parametrize("path", ["/../../other", "/elsewhere"])
    def test_a_group_outside_of_what_is_mounted(self, system: System, path: str) -> None:
        """The mount itself is what is known of it."""
        system.within(f"0::{path}")
        root = system.mount("cgroup2", root="/docker/abc")
        group(root, {"memory.max": GIB, "memory.current": 0})
        assert system.available() == GIB

    def test_both_versions_at_once(self, system: System) -> None:
        """A hybrid: memory is version 1's, and version 2 has no files of it."""
        system.within("4:memory:/box", "0::/box")
        system.mount("cgroup", "rw,cpu,cpuacct", name="cpu")
        v1, v2 = system.mount("cgroup", "rw,memory", name="memory"), system.mount("cgroup2", name="unified")
        group(v1 / "box", {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB})
        (v2 / "box").mkdir()
        assert system.available() == GIB

    def test_a_folder_with_a_space(self, tmp_path: Path) -> None:
        system = System(tmp_path / "a b")
        system.within("0::/")
        group(system.mount("cgroup2"), {"memory.max": GIB, "memory.current": 0})
        assert system.available() == GIB

    def test_no_control_groups_at_all(self, system: System) -> None:
        assert system.available() == 16 * GIB
        system.within("0::/box")
        assert system.available() == 16 * GIB

    def test_values_that_cannot_be_read_set_no_limit(self, v2: tuple[System, Path]) -> None:
        system, root = v2
        group(root / "pod" / "box", {"memory.max": GIB})
        assert system.available() == 16 * GIB

    def test_the_total_is_that_of_the_tightest_level(self, v2: tuple[System, Path]) -> None:
        system, root = v2
        assert total_memory_bytes(system.proc) == 32 * GIB, "the machine's"
        group(root / "pod" / "box", {"memory.max": "max", "memory.current": GIB})
        group(root / "pod", {"memory.max": 6 * GIB, "memory.high": 5 * GIB, "memory.current": GIB})
        assert total_memory_bytes(system.proc) == 5 * GIB

    def test_a_system_that_does_not_tell_what_is_available(self, system: System) -> None:
        (system.proc / "meminfo").write_text("MemTotal: 1 kB\n")
        with pytest.raises(OSError, match="MemAvailable"):
            system.available()


READ_AND_TELL = """
import os, pathlib, sys
group, file = map(pathlib.Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(os.getpid()))
file.read_bytes()
from kvpolicy.hardware import available_memory_bytes
print(available_memory_bytes())
"""


@pytest.fixture
def real_group() -> Iterator[tuple[Path, int]]:
    """A group below the one that runs this, limited to 256 MiB; skipped where it may not be made."""
    inner = next((folder for folder in _memory_groups(Path("/proc")) if (folder / "memory.stat").exists()), None)
    if inner is None:
        pytest.skip("this process is in no control group that counts memory")
    made, limit = inner / f"kvpolicy-test-{os.getpid()}", 256 * MIB
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        names = [name for name in ("memory.max", "memory.limit_in_bytes") if (made / name).exists()]
        if not names:
            pytest.skip("groups below this one do not count memory")
        (made / names[0]).write_text(str(limit))
        yield made, limit
    finally:
        made.rmdir()


def test_in_a_real_group_a_file_that_was_read_does_not_count(real_group: tuple[Path, int], tmp_path: Path) -> None:
    folder, limit = real_group
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(128 * MIB))
    # Clean and out of the cache, so that it is read anew, and charged to the group that reads it.
    with weights.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = subprocess.run(
        [sys.executable, "-c", READ_AND_TELL, str(folder), str(weights)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert limit - 100 * MIB < int(done.stdout) < limit


@pytest.mark.parametrize("config", [LLAMA_31_8B, LLAMA_2_7B, MIXTRAL_8X7B, QWEN3_30B_A3B, GEMMA_2_9B, GEMMA_3_27B])
def test_what_traces_record_has_the_shapes_linear_work(config: dict[str, Any]) -> None:
    expected = ModelShape.from_config(config).linear_flops_per_token
    assert Geometry.from_config(config).linear_flops_per_token == pytest.approx(expected, rel=0.005)


def test_what_traces_record_of_a_shape_is_unchanged() -> None:
    geometry = Geometry.from_config(LLAMA_31_8B)
    assert geometry == Geometry.from_dict(geometry.to_dict())
    assert set(geometry.to_dict()) == {
        "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "weight_bytes", "kv_bytes",
        "dtype",
    }  # fmt: skip
    assert (geometry.kv_heads, geometry.head_dim, geometry.intermediate, geometry.weight_bytes) == (8, 128, 14336, 2)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (GEMMA_3_27B, {"window_layers": 52, "window_tokens": 1024}),
        (GPT_OSS_20B, {"window_layers": 12, "window_tokens": 128}),
        (QWEN3_NEXT_80B, {"state_layers": 36}),
        (GRANITE_4_SMALL, {"state_layers": 36}),
        (NEMOTRON_H_8B, {"state_layers": 24, "mlp_layers": 24}),
        (DEEPSEEK_V3, {}),
    ],
    ids=["gemma3", "gpt-oss", "qwen3-next", "granite-4", "nemotron-h", "deepseek-v3"],
)
def test_layers_that_are_not_of_full_attention_are_told_apart(config: dict[str, Any], kinds: dict[str, int]) -> None:
    shape, geometry = ModelShape.from_config(config), Geometry.from_config(config)
    layers = {name: geometry.kinds[name] for name in ("window_layers", "window_tokens", "state_layers", "mlp_layers")}
    assert layers == dict.fromkeys(layers, 0) | kinds
    assert Geometry.from_dict(geometry.to_dict()) == geometry
    assert geometry.linear_flops_per_token == pytest.approx(shape.linear_flops_per_token, rel=0.005)
    assert geometry.attention_flops_per_pair == shape.attention_flops_per_pair
    assert geometry.window_flops_per_pair == shape.window_flops_per_pair
    assert geometry.kv_bytes_per_token == shape.kv_bytes_per_token


def test_of_two_ranks_each_has_half_of_the_work() -> None:
    one, half = (Geometry.of_shape(ModelShape.from_config(GRANITE_4_SMALL), ranks) for ranks in (1, 2))
    assert half.linear_flops_per_token == one.linear_flops_per_token / 2
    assert half.attention_flops_per_pair == one.attention_flops_per_pair / 2 and half.kinds["state_layers"] == 36


def test_blocks_of_a_request_over_all_its_tables() -> None:
    """gpt-oss: 12 layers of full attention and 12 with a window of 128; blocks of 32 tokens of 12 layers each.

    After 300 tokens the next one sees tokens 173 to 299 and itself: blocks 5 to 9 of the window.
    """
    geometry = Geometry.from_config(GPT_OSS_20B)
    assert geometry.block_tables == 2
    assert geometry.held_blocks(300, 32, 12) == 10 + 5
    assert geometry.held_blocks(100, 32, 12) == 4 + 4
    assert geometry.held_blocks(300, 32, 24) == 10, "one table, with the windows stored whole"


def test_a_state_is_one_block() -> None:
    geometry = Geometry.from_config(GRANITE_4_SMALL)
    assert geometry.block_tables == 1 + 9
    assert geometry.held_blocks(1000, 528, 4) == 2 + 9 and geometry.held_blocks(1, 528, 4) == 1 + 9
    assert Geometry.from_config(NEMOTRON_H_8B).block_tables == 1 + 6
    assert Geometry.from_config(LLAMA_31_8B).block_tables == 1
    assert Geometry.from_config(LLAMA_31_8B).held_blocks(33, 16, 32) == 3


def test_vllm_pads_groups_where_the_kinds_are_nearly_as_many() -> None:
    """10 layers of full attention and 52 with a window: six tables of windows with up to ten layers each."""
    assert Geometry.from_config(GEMMA_3_27B).block_tables == 1 + 6
    kinds = ["full_attention"] * 13 + ["sliding_attention"] * 11
    assert Geometry.from_config(GPT_OSS_20B | {"layer_types": kinds}).block_tables == 2
