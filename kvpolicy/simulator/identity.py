"""What tells one simulated run from another, and what stands at the head of its trace."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from kvpolicy.policy import Policy
from kvpolicy.simulator.base import NULL_BLOCK, Server, Times
from kvpolicy.trace import Header
from kvpolicy.workload import Source

FIXED_DAY = "1970-01-01T00:00:00Z"
"""When a simulated trace was made, unless told otherwise: equal runs give equal traces."""


@dataclass(frozen=True, slots=True)
class Identity:
    """All that a run follows from, beside the simulator itself."""

    requests: Source
    policy: Policy
    server: Server
    times: Times
    seed: int

    def core(self, simulator: str) -> str:
        """The same for equal runs, different for others, so that their traces can be read together."""
        told = repr(
            (self.requests.name, self.requests.seed, self.policy.name, self.server, self.times.source, self.seed)
        )
        return f"{simulator}-{blake2b(told.encode(), digest_size=6).hexdigest()}"

    def header(self, core: str, engine: str, created: str) -> Header:
        server = self.server
        return Header(
            run_id=core,
            source="simulation",
            created=created,
            engine=engine,
            hardware=dict(server.hardware),
            geometry=dict(server.geometry),
            block_size=server.block_size,
            block_bytes=server.block_bytes,
            device_blocks=server.device_blocks + NULL_BLOCK,
            host_blocks=server.host_blocks,
            policy=self.policy.name,
            seed=self.seed,
            notes=f"workload {self.requests.name}; times: {self.times.source}",
            token_budget=server.token_budget,
        )
