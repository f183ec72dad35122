"""How long loads last, in engine steps, and how many blocks the running requests take meanwhile.

The plugin's scheduler and the built-in simulator begin a load only where it fits together with this growth, so that it
does not cause the next preemption.
"""

from __future__ import annotations

from math import ceil

SHARE = 0.125
"""Share of the latest load in the mean duration: about the last eight loads count."""


class LoadGrowth:
    """The growth to expect while a load lasts. One per scheduler.

    ``block_size``: tokens that a request computes for each block that it takes.
    """

    def __init__(self, block_size: float) -> None:
        self.steps = 0
        """Steps scheduled so far that compute something. The scheduler counts them."""
        self._block_size = block_size
        self._mean_steps: float | None = None

    def ended(self, began: int) -> None:
        """Learn from a load whose request is about to be admitted. ``began``: value of :attr:`steps` at its begin."""
        lasted = self.steps - began
        self._mean_steps = (
            lasted if self._mean_steps is None else self._mean_steps + SHARE * (lasted - self._mean_steps)
        )

    def forget(self) -> None:
        """Treat the duration of loads as unknown, for tools that keep memory free for a load themselves."""
        self._mean_steps = None

    def blocks(self, running: int) -> int:
        """Blocks that must stay free beside a load that begins while ``running`` requests run; 0 where none runs.

        Every running request takes a block once in as many steps as a block has tokens. One more block is the next one
        of the loaded request. Before the first load has ended its duration is unknown, and that block alone counts.
        """
        if not running:
            return 0
        steps = 0.0 if self._mean_steps is None else self._mean_steps
        return ceil(running * steps / self._block_size) + 1
