"""The host pool: which copies there are, and how far they are."""

from __future__ import annotations

from kvpolicy.events import Direction
from kvpolicy.simulator.base import Server
from kvpolicy.simulator.builtin.live_request import Account, Copy, Live


class CopyBook:
    """Host slots and the copies in them: one per request at most."""

    def __init__(self, server: Server) -> None:
        self.total = server.host_blocks
        self.free = server.host_blocks
        self._block_bytes = server.block_bytes
        self._saves: list[Copy] = []
        self._loads: list[Copy] = []
        self._unsaved_blocks = 0
        self._loading_blocks = 0
        self._made = 0

    def queued_bytes(self, direction: Direction) -> int:
        """On their way, or told to nobody yet."""
        return (self._unsaved_blocks if direction == "save" else self._loading_blocks) * self._block_bytes

    def save(self, live: Live, account: Account, blocks: int) -> Copy:
        """Queue a save of the request's first ``blocks`` blocks. The caller has seen that as many slots are free."""
        self.forget(live)
        self._made += 1
        copy = live.copy = Copy(self._made, live, account, account.tokens, blocks)
        self.free -= blocks
        self._unsaved_blocks += blocks
        account.busy += 1
        self._saves.append(copy)
        return copy

    def loadable_tokens(self, live: Live, local: int) -> int:
        """Tokens a load would bring beyond the local hit. Changes nothing."""
        copy = live.copy
        if copy is None or copy.loading:
            return 0
        return max(0, min(copy.tokens, live.tokens - 1) - local)

    def begin_load(self, live: Live, tokens: int, block_size: int) -> None:
        """Queue the load of the last ``tokens`` of what can be loaded."""
        copy = live.copy
        assert copy is not None
        total = min(copy.tokens, live.tokens - 1)
        copy.loading, copy.load_tokens = True, tokens
        copy.load_blocks = -(-total // block_size) - (total - tokens) // block_size
        copy.account.busy += 1
        self._loading_blocks += copy.load_blocks
        self._loads.append(copy)

    def forget(self, live: Live) -> Copy | None:
        """The request needs its copy no more; its slots are free at once, as the next save comes after this one.

        Returns it where nobody had said yet that it is saved.
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
        if not copy.told:
            self._saves.remove(copy)
            copy.account.busy -= 1
        return copy

    @property
    def waiting(self) -> bool:
        """Whether a step has something to bring to the worker."""
        return bool(self._saves or self._loads)

    def take(self) -> tuple[list[Copy], list[Copy]]:
        """Saves and loads that the step now scheduled brings to the worker."""
        saves, loads, self._saves, self._loads = self._saves, self._loads, [], []
        for copy in saves:
            copy.told = True
        return saves, loads

    def saved(self, copy: Copy) -> None:
        """The worker has made the copy."""
        copy.account.busy -= 1
        copy.saved = True
        if not copy.forgotten:
            self._unsaved_blocks -= copy.blocks

    def loaded(self, copy: Copy) -> None:
        """The worker has brought the copy back: its slots are free."""
        copy.account.busy -= 1
        copy.live.copy = None
        self._loading_blocks -= copy.load_blocks
        self.free += copy.blocks
