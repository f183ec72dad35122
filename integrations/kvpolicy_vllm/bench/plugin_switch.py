"""One engine with and without the plugin: taken out of it, and put back.

Two processes of one and the same program can differ by several percent in speed for as long as they live. Whoever asks
what the plugin costs, or gains, has to compare within one process.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state

from kvpolicy_vllm.plugin.scheduler import Asking


class Silent:
    """In :class:`Asking`'s place among a scheduler's bases: asks nothing. An object can change its class only to one of
    the same layout, and vLLM's own class, with one base less, has another."""


class PluginSwitch:
    """Of an engine core in this process, which must be idle when it is switched.

    Without the plugin the scheduler does what vLLM's own class does, and neither it nor the worker has a connector.
    What stays is memory: the host pool.
    """

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._ours = type(core.scheduler)
        self._stock = _without_plugin(self._ours)
        self._connector = core.scheduler.connector
        self._agent = kv_transfer_state._KV_CONNECTOR_AGENT
        self.there = issubclass(self._ours, Asking)
        """Whether there is a plugin to switch."""

    def set(self, on: bool) -> None:
        """Raises ValueError for an engine that was started without the plugin, or is not idle."""
        scheduler = self._scheduler
        if on and not self.there:
            raise ValueError("this engine was started without the plugin")
        if not self.there:
            return
        if scheduler.requests:
            raise ValueError("the plugin is switched between workloads only: the engine has requests")
        scheduler.__class__ = self._ours if on else self._stock
        scheduler.connector = self._connector if on else None
        if hasattr(self._runner, "kv_connector"):  # model runner v2 has a switch of its own
            self._runner.kv_connector.set_disabled(not on)
        else:
            kv_transfer_state._KV_CONNECTOR_AGENT = self._agent if on else None


def _without_plugin(ours: type) -> type:
    """vLLM's class that the plugin's scheduler extends, laid out like it."""
    bases = ours.__bases__
    return type(f"Silent{bases[-1].__name__}", (Silent, *bases[1:]), {}) if bases[0] is Asking else ours
