"""What a study says of the server that it simulated: its order and classes, what it is compared with, and the command
that prints its flags."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.extensions import PREFIX

DEFAULT = "always-recompute"
"""What other policies are compared with: vLLM's own behaviour, unless an order of service is given."""
FCFS = "fcfs"
"""The order of stock vLLM."""


def order_of(inputs: Mapping[str, Any]) -> str:
    """The order of service. ``inputs``: those of a result."""
    return str(inputs["serving"].get("order", FCFS))


def names_of(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a table calls each of these runs: its policy, and its order where they have several. ``runs``: inputs."""
    several = len({order_of(inputs) for inputs in runs}) > 1
    return [f"{inputs['policy']}, order {order_of(inputs)}" if several else inputs["policy"] for inputs in runs]


def ordered_by(serving: Mapping[str, Any]) -> dict[str, str]:
    """The order of service and the classes of a server, by the flags that set them; without those at their default."""
    named = {"order": serving.get("order", FCFS), "classes": serving.get("classes", "")}
    return {name: text for name, text in named.items() if text not in ("", FCFS)}


def cache_words(serving: Mapping[str, Any]) -> str:
    """What host memory holds besides copies, to be added to other words of the server; empty where that is nothing."""
    if "host_cache" not in serving:
        return ""
    files = f", {serving['file_gib']:g} GiB of files at {serving['file_link']}" if "file_gib" in serving else ""
    return f", prompts in host memory by {serving['host_cache']}{files}"


def baseline_words(inputs: Mapping[str, Any]) -> str:
    """What the policies of these runs are compared with. ``inputs``: those of one of them."""
    order = order_of(inputs)
    return "vLLM's default" if order == FCFS else f"{DEFAULT} under the order {order}"


def config_line(policy: str, inputs: Mapping[str, Any], host_gib: float) -> str:
    """The ``kvpolicy config`` command for a policy. ``inputs``: those of its runs. Empty where the policy, its cost
    model or the order is an object: a command line cannot name it."""
    if "policy_digest" in inputs or "order_digest" in inputs["serving"] or uses_model_object(policy, inputs):
        return ""
    module = inputs.get("module", "")
    line = f"kvpolicy config --policy {shlex.quote(module or policy)}"
    line += "".join(f" --{name} {shlex.quote(text)}" for name, text in ordered_by(inputs["serving"]).items())
    cache = inputs["serving"].get("host_cache", "")
    line += f" --cache {shlex.quote(cache)}" if cache else ""
    line += " --allow-python-policies" if module or PREFIX in order_of(inputs) + cache else ""
    return f"{line} --host-gib {host_gib:g}"


def uses_model_object(policy: str, inputs: Mapping[str, Any]) -> bool:
    """Whether the policy's cost model is the hardware that was given as an object."""
    model = policy.partition(":")[2].partition(",")[0]
    return "hardware_digest" in inputs and model == inputs["hardware"]
