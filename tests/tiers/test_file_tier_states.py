"""The tier of files against a dictionary, under whatever order of stores, loads, drops, damage and restarts."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpolicy.caching import KINDS
from kvpolicy.tiers import digest_of_key
from tests.examples import examples
from tests.tiers.blocks import FILE_BYTES, bytes_of, files_of, load, opened, store

CARELESS = "python:tests.careless:Careless"
"""A policy of one's own, whose code fails."""
TREES = st.tuples(st.integers(0, 3), st.integers(1, 4))
BLOCKS = 6


def chain_of(tree: tuple[int, int]) -> list[bytes]:
    """Blocks of a prompt: all prompts share their first one."""
    number, length = tree
    return [b"shared", *(b"%d/%d" % (number, position) for position in range(1, length))]


class Files(RuleBasedStateMachine):
    """Holds what must be there at most; a tier may have given up any of it, and may hold nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.policy = "lru"
        self.tier = opened(self.directory, BLOCKS)
        self.stored: set[bytes] = set()
        self.damaged: set[bytes] = set()
        """Digests of blocks whose files were damaged since they were stored."""
        self.number = 0

    @rule(tree=TREES)
    def use(self, tree: tuple[int, int]) -> None:
        self.number += 1
        chain = chain_of(tree)
        self.tier.asked(chain)
        hits = self.tier.lookup(chain)
        assert {*chain[:hits]} <= self.stored
        failed = {digest_of_key(key) for key in load(self.tier, chain[:hits], -self.number)}
        assert failed == self.damaged & {digest_of_key(key) for key in chain[:hits]}
        assert not failed & {*self.tier.digests()}
        there = {*self.tier.digests()}
        assert store(self.tier, chain, self.number) == {}
        self.damaged -= {digest_of_key(key) for key in chain} - there
        self.stored |= {*chain}

    @rule(tree=TREES)
    def drop(self, tree: tuple[int, int]) -> None:
        chain = chain_of(tree)[1:]
        self.tier.drop(chain)
        self.stored -= {*chain}
        assert not any(self.tier.lookup([key]) for key in chain)

    @rule(at=st.integers(0, BLOCKS), cut=st.booleans())
    def damage(self, at: int, cut: bool) -> None:
        digest_of = {path: bytes.fromhex(path.name.partition("-")[0]) for path in files_of(self.directory)}
        paths = [path for path, digest in digest_of.items() if digest not in self.damaged]
        if at < len(paths):
            self.damaged.add(digest_of[paths[at]])
            if cut:
                os.truncate(paths[at], FILE_BYTES // 2)
            else:
                data = bytearray(paths[at].read_bytes())
                data[-1] ^= 1
                paths[at].write_bytes(data)

    @rule(policy=st.sampled_from([*sorted(KINDS), CARELESS]))
    def restart(self, policy: str) -> None:
        before = {digest_of_key(key) for key in self.stored if self.tier.lookup([key])}
        self.tier.close()
        self.tier = opened(self.directory, BLOCKS, policy=policy, allow_python=True)
        after = {*self.tier.digests()}
        assert after <= before and before - after <= self.damaged

    @invariant()
    def within_bounds(self) -> None:
        self.tier.wait_idle()
        usage = self.tier.usage()
        assert usage.used_bytes <= BLOCKS * FILE_BYTES and bytes_of(self.directory) <= BLOCKS * FILE_BYTES
        assert len(files_of(self.directory)) == usage.blocks == len(self.tier.digests())
        assert {*self.tier.digests()} <= {digest_of_key(key) for key in self.stored}

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)


TestFiles = Files.TestCase
TestFiles.settings = examples(12, stateful_step_count=25, deadline=None)
