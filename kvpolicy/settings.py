"""Settings of engines: those of a server, which are the flags of `kvpolicy serve` and the keys that its plugin reads,
and those of a measurement, which are flags of `kvpolicy profile` and `kvpolicy characterize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpolicy.extensions import FORM, names_module
from kvpolicy.fields import AMOUNT, POSITIVE, Rule, WrongValue, option, validate
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.policy import HELP

LINK = "Simulated link, BYTES_PER_S[,LATENCY_S]; native without it."
SEED = "Seed of everything that is drawn."


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One field per flag and key. The command line, the checks and the plugin all derive from these fields."""

    policy: str = option(HELP)
    shadow: bool = option("Decide and record, but execute vLLM's own recompute.", False)
    host_gib: float = option("Total host memory for evicted KV over the ranks of one engine core, GiB.", 4.0, POSITIVE)
    force_host_gib: bool = option("Accept more than half of the available memory for it.", False)
    pin_memory: bool = option("Do not page-lock that memory.", True)
    trace: Path | None = option("Folder to record a trace into.", None)
    seed: int = option("Seed of a policy that draws.", 0, flag="--policy-seed")
    link: SimulatedLink | None = option(LINK, None)
    online_state: Path | None = option(
        "File that keeps what an online=on policy learned, over a restart.",
        None,
        Rule("a file, and there is a folder of that name", lambda path: not path.is_dir()),
    )
    allow_untested_version: bool = option("Serve with a vLLM newer than all that were tested.", False)
    allow_python_policies: bool = option(f"Let --policy name a module that the server runs, {FORM}.", False)

    def __post_init__(self) -> None:
        validate(self)
        if names_module(self.policy) and not self.allow_python_policies:
            raise WrongValue(
                "policy",
                f"is {self.policy!r}, which names a module to run: a server does so only where it is told "
                '--allow-python-policies, in its settings "allow_python_policies": true',
            )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Settings with which a live engine is measured."""

    llm: Path | None = option("Folder of a model; without it a small one is made.", None)
    quick: bool = option(
        "Fewer states, levels and repeats: minutes, or for a study on two cores a quarter of an hour.",
        False,
    )
    link: SimulatedLink | None = option(LINK, None)
    seed: int = option(SEED, 0, AMOUNT)

    def __post_init__(self) -> None:
        validate(self)
