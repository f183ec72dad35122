"""Reads `kv_connector_extra_config` strictly: a misspelt key is an error, not a default. Also writes the
`--kv-transfer-config` that contains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicy import cost, fields
from kvpolicy import policy as policies
from kvpolicy.cost import CostModel
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue, changed_values, option
from kvpolicy.order import Order
from kvpolicy.order import spec as orders
from kvpolicy.policy import Policy
from kvpolicy.settings import DEFAULT_HOST_GIB, GIB, ServerSettings
from kvpolicy.tiers import file_bytes_of, refuse_unsafe

DEFAULT_COPIER = "kvpolicy_vllm.plugin.copiers.factory.copier_for"
SCHEDULER = "kvpolicy_vllm.AdaptiveScheduler"
CONNECTOR = "KVPolicyConnector"
CONNECTOR_MODULE = "kvpolicy_vllm.connector"
MULTI_CONNECTOR = "MultiConnector"
"""vLLM's connector that stands for a list of others."""
SHUTDOWN_S = 20
"""Seconds that a server with a trace or an online state may take to shut down: for serving its requests to their end
and for the last writes together. Where the requests take longer, vLLM ends the engine, and the last two seconds of the
trace and the last five of what was learned are lost. Less than the 30 s after which Kubernetes kills."""
TEACH = "give it online=on, as in cheapest:COST_MODEL,online=on"


@dataclass(frozen=True, slots=True)
class Settings(ServerSettings):
    """Settings of a server, and further ones that only tests and measurements use."""

    source: str = option("What the trace's header says it is.", "production")
    copier: str = option(
        "Import path of what makes the worker-side copier. For tests that make copies fail.", DEFAULT_COPIER
    )
    policy_object: Policy | None = None
    """The policy itself, if the engine was made in Python with a policy object, which no file or flag can hold."""
    order_object: Order | None = None
    """The order of service itself, likewise."""

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        if self.copier != DEFAULT_COPIER and not self.allow_python_policies:
            raise WrongValue(
                "copier",
                f"is {self.copier!r}, an import path: a server imports one only where its settings have "
                '"allow_python_policies": true',
            )

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Read the settings. Raises WrongValue naming the key that is unknown, missing or wrong, and what is right."""
        values = dict(extra)
        policy, order = extra.get("policy"), extra.get("order")
        if isinstance(policy, Policy):
            values["policy"] = policies.load_policy(policy).name
        if isinstance(order, Order):
            del values["order"]
        read = fields.read(cls, values, "kv_connector_extra_config")
        return replace(
            read,
            policy_object=policy if isinstance(policy, Policy) else None,
            order_object=orders.load_order(order) if isinstance(order, Order) else None,
        )

    def load_policy(self, loader: Callable[[str], CostModel] = cost.load, name: str = "") -> Policy:
        """Load the policy of these settings or, with ``name``, another one under the same permissions.

        ``loader``: loads cost models by name. Raises as :func:`kvpolicy.policy.load`.
        """
        if self.policy_object is not None and not name:
            return self.policy_object
        return policies.load(name or self.policy, loader, self.allow_python_policies)

    def load_order(self, name: str = "") -> Order:
        """Load the order of service of these settings or, with ``name``, another one under the same permissions.

        Raises as :func:`kvpolicy.order.load`.
        """
        if self.order_object is not None and not name:
            return self.order_object
        return orders.load(name or self.order, self.allow_python_policies)

    @property
    def pool_gib(self) -> float:
        """Size of the host pools of one engine core, GiB. Where none was given, the one that was set while vLLM made
        its configuration, before any process of the engine started, so that all have the same."""
        return DEFAULT_HOST_GIB if self.host_gib is None else self.host_gib

    def refuse_too_much_memory(self, available: int, cores: int = 1) -> None:
        """Raise ValueError where the host pools would take more than half of the ``available`` bytes, unless forced.

        ``cores``: data-parallel engine cores on this machine, each with its own pool.
        """
        if self.pool_gib * cores * GIB <= available / 2 or self.force_host_gib or self.shadow:  # which takes none
            return
        requested = f"host_gib is {self.pool_gib:g}"
        if cores > 1:
            requested += f" for each of {cores} data-parallel engine cores here, {self.pool_gib * cores:g} in all"
        raise InputError(
            f"{requested}, more than half of the {available / GIB:.1f} GiB available now; "
            f'give at most {available / 2 / cores / GIB:.1f}, or "force_host_gib": true'
        )

    def refuse_small_files(self, block_bytes: int, ranks: int) -> None:
        """Raise InputError where the files of ``ranks`` ranks hold no block of so many bytes each."""
        needed = ranks * file_bytes_of(block_bytes)
        if self.cache_files_gib * GIB < needed:
            raise InputError(
                f"cache_files_gib {self.cache_files_gib:g} holds no file of a KV block, of {needed} bytes over {ranks} "
                f"ranks; give at least {-(-needed * 1000 // GIB) / 1000:g}, and what is asked for again takes more"
            )


def transfer_config(extra: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """``--kv-transfer-config`` for these keys. ``others``: the settings of each connector that serves beside
    kvpolicy's."""
    own = {
        "kv_connector": CONNECTOR,
        # With a consumer role asynchronous scheduling defers freeing blocks, and so preempts far more.
        "kv_role": "kv_producer",
        # vLLM's default ends every request whose load fails; this recomputes it.
        "kv_load_failure_policy": "recompute",
        # The module path is needed where VLLM_PLUGINS names other plugins: then the entry point is not loaded.
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_connector_extra_config": dict(extra),
    }
    if not others:
        return own
    return {
        "kv_connector": MULTI_CONNECTOR,
        "kv_role": "kv_both" if any(map(loads, others)) else "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [own, *map(dict, others)]},
    }


def loads(connector: Mapping[str, Any]) -> bool:
    """Whether a connector with these settings loads what others computed, by its role."""
    return connector.get("kv_role") in ("kv_both", "kv_consumer")


def options(settings: ServerSettings) -> dict[str, Any]:
    """The plugin's ``kv_connector_extra_config``. Raises as :func:`refuse_unloadable`."""
    refuse_unloadable(settings)
    return keys_of(settings)


def keys_of(settings: ServerSettings) -> dict[str, Any]:
    """The plugin's ``kv_connector_extra_config``: only settings that differ from the defaults, defined in one place.

    Folders become absolute, since the server may be started elsewhere.
    """
    return changed_values(replace(settings, policy=policies.anchored(settings.policy)))


def refuse_unloadable(settings: ServerSettings) -> None:
    """Raise KVPolicyError or OSError for a policy that cannot be loaded, WrongValue for an online state of a policy
    that learns nothing. One that needs the engine is not loaded: only the engine knows its model and device."""
    policy, state_file = settings.policy, settings.online_state
    if policies.needs_engine(policy):
        return
    loaded = policies.load(policies.anchored(policy), allow_python=settings.allow_python_policies)
    can_learn = isinstance(loaded, policies.LearningPolicy) and loaded.learned(loaded.initial_state()) is not None
    if state_file is not None and not can_learn:
        raise WrongValue(
            "online_state", f"is {state_file}, but policy {policy} learns nothing while it serves; {TEACH}"
        )


def refuse_unsafe_files(settings: ServerSettings) -> None:
    """Raise InputError where the folder of ``cache_files`` cannot be made on this machine, or others can change it.

    A worker finds out only when the model is loaded. What had to be made for it is removed again.
    """
    directory = settings.cache_files
    if directory is None:
        return
    made: list[Path] = []
    try:
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        refuse_unsafe(directory)
    except (InputError, OSError) as error:
        raise WrongValue("cache_files", f"cannot be used: {error}; give another folder, or leave it out") from error
    finally:
        with suppress(OSError):  # another process uses it by now
            for path in made:
                path.rmdir()


def writes_to_disk(extra: Mapping[str, Any]) -> bool:
    """Whether the plugin writes files."""
    return "trace" in extra or "online_state" in extra
