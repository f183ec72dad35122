"""The built-in engine: vLLM V1's scheduling rules as discrete events, without vLLM."""

from kvpolicy.simulator.builtin.scheduler import Victims, VllmVictims
from kvpolicy.simulator.builtin.simulator import Builtin

__all__ = ["Builtin", "Victims", "VllmVictims"]
