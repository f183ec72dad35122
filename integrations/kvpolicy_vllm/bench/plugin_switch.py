"""Switches the plugin of a running engine off and on.

Two processes of the same program can differ by several percent in speed for as long as they live. What the plugin
costs or gains can therefore be measured only within one process.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state

from kvpolicy_vllm.plugin.scheduler import PolicyHooks


class Silent:
    """Replaces :class:`PolicyHooks` among a scheduler's bases and does nothing.

    An object's class can be changed only to one of the same layout. vLLM's own class has one base fewer, and thus
    another layout.
    """


class PluginSwitch:
    """Switches the plugin of an engine core in this process, which must be idle.

    With the plugin off, the scheduler behaves as vLLM's own class, and neither it nor the worker has a connector. Only
    the memory of the host pool stays allocated.
    """

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        worker = getattr(core.model_executor, "driver_worker", None)
        self._runner = None if worker is None else worker.worker.model_runner
        """None where workers are processes of their own, as a server's on the CPU. There the plugin stays on."""
        self._plugin_class = type(core.scheduler)
        self._stock_class = _without_plugin(self._plugin_class)
        self._connector = core.scheduler.connector
        self._agent = kv_transfer_state._KV_CONNECTOR_AGENT
        self.available = issubclass(self._plugin_class, PolicyHooks)
        """Whether the engine was started with the plugin."""

    def set(self, on: bool) -> None:
        """Switch the plugin on or off. Raises ValueError if the engine was started without it, is not idle, or would be
        without the plugin in an order of the plugin's or with workers that are processes of their own."""
        scheduler = self._scheduler
        if on and not self.available:
            raise ValueError("this engine was started without the plugin")
        if not self.available:
            return
        if scheduler.requests:
            raise ValueError("the plugin is switched between workloads only: the engine has requests")
        if not on and scheduler.ordering is not None:
            raise ValueError(
                f"the plugin is switched off only in vLLM's own order: {scheduler.ordering.order.name} has queues of "
                "its own"
            )
        if self._runner is None:
            if not on:
                raise ValueError("the plugin is switched off only where the worker is in the engine's own process")
            return
        scheduler.__class__ = self._plugin_class if on else self._stock_class
        scheduler.connector = self._connector if on else None
        if hasattr(self._runner, "kv_connector"):  # model runner v2 has its own switch
            self._runner.kv_connector.set_disabled(not on)
        else:
            kv_transfer_state._KV_CONNECTOR_AGENT = self._agent if on else None


def _without_plugin(plugin_class: type) -> type:
    """A class that behaves as the vLLM scheduler below the plugin's and has the plugin class's layout."""
    bases = plugin_class.__bases__
    return type(f"Silent{bases[-1].__name__}", (Silent, *bases[1:]), {}) if bases[0] is PolicyHooks else plugin_class
