"""The simulator of a name: the built-in one, or one that an installed package registers."""

from __future__ import annotations

from kvpolicy import engines
from kvpolicy.simulator import Simulator
from kvpolicy.simulator.builtin import Builtin


def simulator_of(name: str) -> Simulator:
    """Raises EngineMissing, a ValueError that says what to install, where there is none of that name."""
    if name == "builtin":
        return Builtin()
    found: Simulator = engines.simulator(name)
    return found
