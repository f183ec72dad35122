"""Which change of a server's flags would have the plugin serve it: each is tried, none is guessed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from kvpolicy.settings import NO_FILES
from kvpolicy_vllm.plugin.connector_list import give_own, own_settings
from kvpolicy_vllm.plugin.settings import Settings


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change, as a user makes it."""

    name: str
    """What to give, or to leave out."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's engine arguments by name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The plugin's settings by name."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def changes(self, arguments: Any) -> bool:
        """Whether it would change anything. An argument that this vLLM does not have cannot be changed."""
        settings = Settings.read(own_settings(arguments.kv_transfer_config))
        return (
            any(getattr(arguments, name, value) != value for name, value in self.arguments.items())
            or any(getattr(settings, name) != value for name, value in self.settings.items())
            or any(os.environ.get(name) != value for name, value in self.environment.items())
        )

    def changed(self, arguments: Any) -> Any:
        """A copy of the arguments with the change; the environment is left alone."""
        copy = deepcopy(arguments)
        for name, value in self.arguments.items():
            setattr(copy, name, value)
        for name, value in self.settings.items():
            give_own(copy.kv_transfer_config, name, value)
        return copy


NO_DRAFTS = dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"))
"""vLLM makes the first of the others, which are flags, too."""
REMEDIES = (
    Remedy("--disable-hybrid-kv-cache-manager", {"disable_hybrid_kv_cache_manager": True}),
    Remedy("VLLM_USE_V2_MODEL_RUNNER=0 in the environment", environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    Remedy("--no-async-scheduling", {"async_scheduling": False}),
    Remedy("no --speculative-config", NO_DRAFTS),
    Remedy("--kv-cache-dtype auto", {"kv_cache_dtype": "auto"}),
    Remedy("--mamba-cache-mode align", {"mamba_cache_mode": "align"}),
    Remedy("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    Remedy("--pipeline-parallel-size 1", {"pipeline_parallel_size": 1}),
    Remedy("--decode-context-parallel-size 1", {"decode_context_parallel_size": 1}),
    Remedy("no --enable-return-routed-experts", {"enable_return_routed_experts": False}),
    Remedy("no --enable-fault-tolerance and no --fault-tolerance-config", {"enable_fault_tolerance": False}),
    Remedy("--scheduling-policy fcfs", {"scheduling_policy": "fcfs"}),
    Remedy("--policy always-swap", settings={"policy": "always-swap", "online_state": None}),
    Remedy("--order fcfs", settings={"order": "fcfs"}),
    Remedy("no --cache-files", settings=NO_FILES),
    Remedy("--cache off", settings={"cache": "off", **NO_FILES}),
    Remedy("--no-pin-memory", settings={"pin_memory": False}),
    Remedy("--allow-untested-version", settings={"allow_untested_version": True}),
    Remedy("--allow-untested-states-v2", settings={"allow_untested_states_v2": True}),
)
"""In the order in which they are named. What costs memory or speed says so in the documentation, not here."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of a server's arguments."""

    served: bool
    """For certain."""
    groups: Sequence[Mapping[str, Any]] = ()
    """Those of the model's layers, where they were made before it was refused."""


def helping(arguments: Any, judge: Callable[[Any], Verdict], groups: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """The names of the changes with any one of which the server's arguments would be served; where there is none, of
    those with which it would be in small steps besides. ``groups``: as in the verdict of these arguments."""
    remedies = (*_room_for_prompts(arguments), *_steps_within_a_block(arguments, groups), *REMEDIES)
    tried = [(remedy, _tried(remedy, arguments, judge)) for remedy in remedies if remedy.changes(arguments)]
    alone = [remedy.name for remedy, verdict in tried if verdict.served]
    return alone or [
        name for remedy, verdict in tried for name in _in_small_steps(remedy, arguments, judge, verdict.groups)
    ]


def _in_small_steps(
    remedy: Remedy, arguments: Any, judge: Callable[[Any], Verdict], groups: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """The change and a limit on a step, both named, if both together help: a server's default on a CPU exceeds a block
    of states, whatever else is refused. ``groups``: of the layers, as they are with the change."""
    changed = remedy.changed(arguments)
    for steps in _steps_within_a_block(changed, groups):
        with _environment(remedy.environment):
            if steps.changes(changed) and _tried(steps, changed, judge).served:
                yield f"{remedy.name}, and {steps.name}"


def _room_for_prompts(arguments: Any) -> list[Remedy]:
    """As many tokens in a step as the model's length, where too few of them may have a server refused: where tokens are
    drafted, or the scheduler's limit is given, see :func:`kvpolicy_vllm.plugin.prompt_room.longer_than_a_step`."""
    if not _limits_the_scheduler(arguments) and getattr(arguments, "speculative_config", None) is None:
        return []
    return [_tokens_in_a_step(arguments, deepcopy(arguments).create_model_config().max_model_len)]


def _steps_within_a_block(arguments: Any, groups: Sequence[Mapping[str, Any]]) -> list[Remedy]:
    """As many tokens in a step as a block of states has, where more of them may have a server refused: see
    :func:`kvpolicy_vllm.plugin.state_steps.beyond_a_block_of_states`."""
    sizes = [int(group["block_size"]) for group in groups if group["kind"] == "MambaSpec"]
    return [_tokens_in_a_step(arguments, min(sizes))] if sizes else []


def _tokens_in_a_step(arguments: Any, tokens: int) -> Remedy:
    name = "scheduled" if _limits_the_scheduler(arguments) else "batched"
    return Remedy(f"--max-num-{name}-tokens {tokens}", {f"max_num_{name}_tokens": tokens})


def _limits_the_scheduler(arguments: Any) -> bool:
    return getattr(arguments, "max_num_scheduled_tokens", None) is not None  # which older versions do not have


def _tried(remedy: Remedy, arguments: Any, judge: Callable[[Any], Verdict]) -> Verdict:
    with _environment(remedy.environment):
        return judge(remedy.changed(arguments))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that hold for as long as the context does."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
