"""The connector's options: what is wrong is named, and the host pools leave memory to others."""

from __future__ import annotations

from typing import Any

import pytest

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


class TestHostMemory:
    def test_every_core_of_this_machine_has_a_pool(self) -> None:
        settings = Settings(policy="always-swap", host_gib=4.0)
        settings.refuse_too_much_memory(16 << 30, cores=2)
        with pytest.raises(ValueError, match=r"4 for each of 3 .* engine cores here, 12 in all, .* give at most 2.7"):
            settings.refuse_too_much_memory(16 << 30, cores=3)
        Settings(policy="always-swap", host_gib=4.0, force_host_gib=True).refuse_too_much_memory(16 << 30, cores=3)
