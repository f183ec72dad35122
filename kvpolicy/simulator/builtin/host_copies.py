"""The host pool: the copies it holds, and the progress of each."""

from __future__ import annotations

from kvpolicy.events import Direction
from kvpolicy.simulator.base import Server
from kvpolicy.simulator.builtin.live_request import Account, Copy, LiveRequest


class HostPool:
    """Host slots and the copies in them, at most one copy per request."""

    def __init__(self, server: Server) -> None:
        self.total = server.host_blocks
        self.free = server.host_blocks
        self._block_bytes = server.block_bytes
        self._saves: list[Copy] = []
        self._loads: list[Copy] = []
        self._unsaved_blocks = 0
        self._loading_blocks = 0
        self._copy_count = 0

    def queued_bytes(self, direction: Direction) -> int:
        """Bytes of copies that are under way or not yet sent to the worker."""
        return (self._unsaved_blocks if direction == "save" else self._loading_blocks) * self._block_bytes

    def save(self, live: LiveRequest, account: Account, blocks: int) -> Copy:
        """Queue a save of the request's first ``blocks`` blocks. The caller has checked that as many slots are free."""
        self.forget(live)
        self._copy_count += 1
        copy = live.copy = Copy(self._copy_count, live, account, account.tokens, blocks)
        self.free -= blocks
        self._unsaved_blocks += blocks
        account.busy += 1
        self._saves.append(copy)
        return copy

    def loadable_tokens(self, live: LiveRequest, local: int) -> int:
        """Tokens a load would bring beyond the local hit. Changes nothing."""
        copy = live.copy
        if copy is None or copy.loading:
            return 0
        return max(0, min(copy.tokens, live.tokens - 1) - local)

    def begin_load(self, live: LiveRequest, tokens: int, block_size: int) -> None:
        """Queue a load of the last ``tokens`` tokens that can be loaded."""
        copy = live.copy
        assert copy is not None
        total = min(copy.tokens, live.tokens - 1)
        copy.loading, copy.load_tokens = True, tokens
        copy.load_blocks = -(-total // block_size) - (total - tokens) // block_size
        copy.account.busy += 1
        self._loading_blocks += copy.load_blocks
        self._loads.append(copy)

    def forget(self, live: LiveRequest) -> Copy | None:
        """Drop the request's copy. Its slots are free at once, since any later save follows this one in order.

        Return the copy where its save was not yet reported as done.
        """
        copy = live.copy
        if copy is None:
            return None
        assert not copy.loading, "a request that is being loaded can neither run nor end"
        live.copy = None
        copy.forgotten = True
        self.free += copy.blocks
        if copy.saved:
            return None
        self._unsaved_blocks -= copy.blocks
        if not copy.sent:
            self._saves.remove(copy)
            copy.account.busy -= 1
        return copy

    @property
    def waiting(self) -> bool:
        """Whether copies wait to be sent to the worker."""
        return bool(self._saves or self._loads)

    def take(self) -> tuple[list[Copy], list[Copy]]:
        """Remove and return the saves and loads that the step being scheduled brings to the worker."""
        saves, loads, self._saves, self._loads = self._saves, self._loads, [], []
        for copy in saves:
            copy.sent = True
        return saves, loads

    def saved(self, copy: Copy) -> None:
        """Note that the worker has completed the save."""
        copy.account.busy -= 1
        copy.saved = True
        if not copy.forgotten:
            self._unsaved_blocks -= copy.blocks

    def loaded(self, copy: Copy) -> None:
        """Note that the worker has completed the load, and free the slots."""
        copy.account.busy -= 1
        copy.live.copy = None
        self._loading_blocks -= copy.load_blocks
        self.free += copy.blocks
