"""The simulator of a name: the built-in one, or one that an installed package registers."""

from __future__ import annotations

from kvpolicy import engines
from kvpolicy.simulator import Simulator
from kvpolicy.simulator.builtin import Builtin

BUILTIN_RULES = "0.32"
"""The version of vLLM whose scheduling rules the built-in one is asked to follow."""


def simulator_of(name: str) -> Simulator:
    """Raises EngineMissing, a ValueError that says what to install, where there is none of that name."""
    if name == "builtin":
        return Builtin()
    found: Simulator = engines.simulator(name)
    return found


def rules_of(name: str) -> str:
    """What a server's ``rules`` have to be for that simulator: one made of vLLM's own code has those of its version."""
    return str(getattr(simulator_of(name), "rules", BUILTIN_RULES))
