"""The connector's options: what is wrong is named, and the host pools leave memory to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.errors import InputError
from kvpolicy.settings import GIB
from kvpolicy_vllm.plugin.settings import Settings


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "policy"),
        ({"policy": "always-swap", "hostgib": 1}, "hostgib"),
        ({"policy": "always-swap", "shadow": "yes"}, "shadow"),
        ({"policy": "always-swap", "shadow": True, "cache": "lru"}, "cache is given with --shadow"),
        ({"policy": "always-swap", "seed": 1.5}, "seed"),
        ({"policy": "always-swap", "host_gib": float("inf")}, "host_gib"),
        ({"policy": "always-swap", "link": "1e9,-1"}, "link"),
        (
            {"policy": "always-swap", "copier": "somebody.elses"},
            "copier is 'somebody.elses', an import path: .*allow_p",
        ),
    ],
)
def test_settings_name_what_is_wrong(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings.read(extra)


def test_files_that_hold_no_block_are_named_with_what_would_do() -> None:
    """Of 2 MiB, of which each rank keeps its own part, behind a page."""
    files: dict[str, Any] = {"cache": "lru", "cache_files": Path("kv")}
    with pytest.raises(InputError, match=r"cache_files_gib 0.001 holds no file .* 4202496 bytes over 2 .* least 0.004"):
        Settings("always-swap", cache_files_gib=0.001, **files).refuse_small_files(2 << 20, 2)
    Settings("always-swap", cache_files_gib=0.004, **files).refuse_small_files(2 << 20, 2)
    assert 0.004 * GIB >= 4202496


class TestHostMemory:
    def test_every_core_of_this_machine_has_a_pool(self) -> None:
        settings = Settings(policy="always-swap", host_gib=4.0)
        settings.refuse_too_much_memory(16 << 30, cores=2)
        with pytest.raises(ValueError, match=r"4 for each of 3 .* engine cores here, 12 in all, .* give at most 2.7"):
            settings.refuse_too_much_memory(16 << 30, cores=3)
        Settings(policy="always-swap", host_gib=4.0, force_host_gib=True).refuse_too_much_memory(16 << 30, cores=3)
