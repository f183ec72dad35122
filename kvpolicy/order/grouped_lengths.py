"""Output lengths seen so far by class and prompt length: the state of an order whose predictor tells requests apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpolicy.order.seen_lengths import DECAY, LEVELS, Lengths, Weights, level_of

MAX_CLASSES = 8
"""Classes with lengths of their own, the first ones seen; those of others count among all alone."""
PROMPT_LEVELS = 21
"""Levels of prompt length, each twice the one before; the last one holds all from 2^20 tokens on."""
SHRINKAGE = 32.0
"""Weight of what is known of more requests, in lengths: n seen in a group count by n / (n + 32) for it."""
_CELLS = PROMPT_LEVELS + 1
"""Histograms of a class: one for each level of prompt length, and one of them all."""
_EMPTY: Weights = ()


@dataclass(frozen=True, slots=True)
class GroupedLengths:
    """Histograms of output lengths: of all requests, by class, and by class and prompt length. Frozen: an order's
    state."""

    pooled: Lengths = field(default_factory=Lengths)
    classes: tuple[str, ...] = ()
    groups: tuple[Weights, ...] = ()
    """For each class those of its prompt lengths, then that of all of them; empty before the first length."""
    _lengths: dict[int, Lengths] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By position among the groups, what :meth:`of` has made of it."""

    def seen(self, class_name: str, prompt_tokens: int, tokens: int) -> GroupedLengths:
        pooled, classes, groups = self.pooled.seen(tokens), self.classes, list(self.groups)
        if class_name not in classes:
            if len(classes) == MAX_CLASSES:
                return GroupedLengths(pooled, classes, self.groups)
            classes = (*classes, class_name)
            groups += [_EMPTY] * _CELLS
        first = classes.index(class_name) * _CELLS
        for at in (first + prompt_level(prompt_tokens), first + PROMPT_LEVELS):
            weights = [DECAY * weight for weight in groups[at]] or [0.0] * LEVELS
            weights[level_of(tokens)] += 1.0
            groups[at] = tuple(weights)
        return GroupedLengths(pooled, classes, tuple(groups))

    def of(self, class_name: str, prompt_tokens: int) -> Lengths:
        """What is known of requests like this one: its group's lengths, shrunk towards its class's, and these towards
        all."""
        if class_name not in self.classes:
            return self.pooled
        first = self.classes.index(class_name) * _CELLS
        at = first + prompt_level(prompt_tokens)
        found = self._lengths.get(at)
        if found is None:
            of_class = _shrunk(self.groups[first + PROMPT_LEVELS], self.pooled.weights)
            found = self._lengths[at] = Lengths(_shrunk(self.groups[at], of_class))
        return found


def prompt_level(tokens: int) -> int:
    """Number of the level that a prompt's length is in."""
    return min(PROMPT_LEVELS - 1, max(1, tokens).bit_length() - 1)


def _shrunk(group: Weights, more: Weights) -> Weights:
    """The group's weights with those of more requests, which count as :data:`SHRINKAGE` lengths."""
    if not group:
        return more
    share = SHRINKAGE / sum(more)
    return tuple(weight + share * other for weight, other in zip(group, more, strict=True))
