"""`kv_connector_extra_config`, read once and strictly: a misspelt key is an error, not a default. And the flags of
vLLM's that it stands among."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvpolicy import cost, fields
from kvpolicy import policy as policies
from kvpolicy.cost import CostModel
from kvpolicy.errors import InputError
from kvpolicy.fields import option
from kvpolicy.policy import Policy
from kvpolicy.settings import ServerSettings

GIB = 1 << 30
DEFAULT_COPIER = "kvpolicy_vllm.plugin.copiers.factory.copier_for"
SCHEDULER = "kvpolicy_vllm.AdaptiveScheduler"
CONNECTOR = "KVPolicyConnector"
CONNECTOR_MODULE = "kvpolicy_vllm.connector"
TEACH = "give it online=on, as in cheapest:COST_MODEL,online=on"


@dataclass(frozen=True, slots=True)
class Settings(ServerSettings):
    """What a server is told, and what only tests and measurements tell it."""

    source: str = option("What the trace's header says it is.", "production")
    copier: str = option(
        "Import path of what makes the worker-side copier. For tests that make copies fail.", DEFAULT_COPIER
    )
    given: Policy | None = None
    """The policy itself, where whoever made the engine in Python gave that: no file and no flag can hold one."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises ValueError naming the key that is unknown, missing or wrong, and what would be right."""
        given = extra.get("policy")
        if not isinstance(given, Policy):
            return fields.read(cls, extra, "kv_connector_extra_config")
        named = dict(extra) | {"policy": policies.load_policy(given).name}
        return replace(fields.read(cls, named, "kv_connector_extra_config"), given=given)

    def load_policy(self, loader: Callable[[str], CostModel] = cost.load, name: str = "") -> Policy:
        """The policy that is to decide; by ``name`` another one, which these settings would have let in too.

        ``loader``: of cost models by name. Raises as :func:`kvpolicy.policy.load`.
        """
        if self.given is not None and not name:
            return self.given
        return policies.load(name or self.policy, loader, self.allow_python_policies)

    def refuse_too_much_memory(self, available: int, cores: int = 1) -> None:
        """Raises ValueError where the host pools would take more than half of the ``available`` bytes, unless forced.

        ``cores``: data-parallel engine cores on this machine; each has a pool of its own.
        """
        if self.host_gib * cores * GIB <= available / 2 or self.force_host_gib:
            return
        asked = f"host_gib is {self.host_gib:g}"
        if cores > 1:
            asked += f" for each of {cores} data-parallel engine cores here, {self.host_gib * cores:g} in all"
        raise InputError(
            f"{asked}, more than half of the {available / GIB:.1f} GiB available now; "
            f'give at most {available / 2 / cores / GIB:.1f}, or "force_host_gib": true'
        )


def transfer_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``--kv-transfer-config`` for these keys."""
    return {
        "kv_connector": CONNECTOR,
        # A consumer role makes asynchronous scheduling defer block frees, and with that preempt far more.
        "kv_role": "kv_producer",
        # vLLM's default ends every request whose load fails; this one computes it again.
        "kv_load_failure_policy": "recompute",
        # The entry point is not loaded where VLLM_PLUGINS names others.
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_connector_extra_config": dict(extra),
    }
