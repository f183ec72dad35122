"""Where vLLM looks the connector up, by module path or by entry point: first while it makes its configuration."""

from __future__ import annotations

from typing import Any

from kvpolicy_vllm.plugin import connector, register
from kvpolicy_vllm.plugin.config_refusals import refuse_early
from kvpolicy_vllm.plugin.tested_setups import warn_untested_setup
from kvpolicy_vllm.plugin.versions import UnsupportedEngine

CONNECTOR = "KVPolicyConnector"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == CONNECTOR:  # not a plain import: every look-up shall come through here
        register()  # MultiConnector looks its connectors' metrics up by name, also where VLLM_PLUGINS leaves ours out
        config = refuse_early()
        if config is not None:
            warn_untested_setup(config, None)
        return connector.KVPolicyConnector
    # With --kv-offloading-size vLLM puts its own connector's name in the place of ours and looks for it here.
    raise UnsupportedEngine(f"this module has only {CONNECTOR}, {name} was asked for; leave --kv-offloading-size out")
