"""The built-in engine: vLLM V1's scheduling rules as discrete events, without vLLM."""

from kvpolicy.simulator.builtin.simulating import Builtin
from kvpolicy.simulator.builtin.victims import Victims, VllmVictims

__all__ = ["Builtin", "Victims", "VllmVictims"]
