"""What the server's log says of the plugin: one line at the start, and at DEBUG one line per preemption.

The plugin's loggers stand in vLLM's tree (``vllm.kvpolicy_vllm...``), so that its handlers and its level hold for them,
``VLLM_LOGGING_LEVEL`` included: loggers outside of it show nothing below a warning.
"""

from __future__ import annotations

import logging
from typing import Any

from kvpolicy.order import Order
from kvpolicy.policy import Policy
from kvpolicy_vllm.plugin.observers import Observer, Pending
from kvpolicy_vllm.plugin.settings import Settings

logger = logging.getLogger(f"vllm.{__name__}")


def named(policy: Policy) -> str:
    """A policy with the digest of its cost model."""
    digest = "" if policy.cost_model is None else str(policy.cost_model.digest)
    return f"{policy.name} (cost model {digest[:12]})" if digest else policy.name


def start_line(
    settings: Settings, policy: Policy, order: Order, slots: int, tokens: int | None, pinned: bool, untested: str
) -> str:
    """What this engine core is about to do; what is refused ends the start instead.

    ``tokens``: what the host pool's ``slots`` hold, None where a token takes several blocks; ``pinned``: whether the
    memory is page-locked; ``untested``: what was never tested of this setup, empty where there is nothing.
    """
    held = f"{slots:,} blocks" + ("" if tokens is None else f", {tokens:,} tokens")
    parts = [
        f"policy {named(policy)}",
        f"order {order.name}",
    ]
    memory = f"{settings.pool_gib:g} GiB of host memory, {held}"
    if settings.shadow:
        parts += ["shadow: decides and records, every victim is recomputed", f"as if it had {memory}"]
    else:
        parts.append(f"{memory}, {'page-locked' if pinned else 'pageable'}")
    parts += [f"cache {settings.cache}"] if settings.cache != "off" else []
    parts += [f"trace in {settings.trace}"] if settings.trace else []
    parts += [f"controlled by {settings.control}"] if settings.control else []
    return "; ".join([*parts, f"untested: {untested}"] if untested else parts)


class PreemptionLog(Observer):
    """One line per decision, for an engine that is started with a logger at DEBUG."""

    trouble = "a preemption could not be logged"

    def executed(self, pending: Pending) -> None:
        logger.debug("kvpolicy: %s", preemption_line(pending))


def preemption_line(pending: Pending) -> str:
    """Who lost its blocks, what is executed, for which reason, and what was predicted of each option."""
    situation, decision, identity = pending.situation, pending.decision, pending.identity
    reason = f", not {decision.intended} ({decision.reason})" if decision.reason else ""
    costs: list[Any] = list(zip(decision.options, decision.costs, strict=False))
    priced = ", ".join(f"{option.kind} {1e3 * cost.engine_s:.2f} ms" for option, cost in costs) or "no prices"
    return (
        f"request {identity.request_id} preempted ({situation.cause}) at {situation.computed_tokens} tokens: "
        f"{decision.executed}{reason} by {decision.policy}; {priced}"
    )
