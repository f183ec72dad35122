"""The built-in engine: vLLM V1's scheduling rules as discrete events, without vLLM."""

from kvpolicy.simulator.builtin.engine import Builtin
from kvpolicy.simulator.builtin.scheduler import Victims, VllmVictims

__all__ = ["Builtin", "Victims", "VllmVictims"]
