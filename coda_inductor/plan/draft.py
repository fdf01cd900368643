"""The records of a plan: what an epilogue stores and sums, and where its inputs come from."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from torch import fx

from coda_inductor.patterns.terms import Term
from coda_inductor.rewrite.limits import Limits
from coda_inductor.rewrite.space import Computed, Half, Lane, Space


class Stored(NamedTuple):
    """A value and the dtype in which it is stored; `again`: the backward's own copy of what the forward had."""

    term: Term
    dtype: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Root:
    """The square root of a tile, which is what there is of the value."""

    square: fx.Node | Stored


Loaded = fx.Node | Stored | Term | Computed | Lane | Half | Root
"""Where an epilogue's input comes from: a node, a store, a sum (its reduction), a small computation, half a node, or
the root of a tile."""

MAX_INLINE = 2  # vectors that an epilogue combines itself, rather than reading the result of a computation
MAX_READ = 12  # vectors and tiles that an epilogue may read: Target.max_operands, which a test compares
CROWDED = 8  # with more, per-token vectors are combined outside: eight beside the tile spill in 128x192 already
SPARED = 4  # reads that combining may spare an epilogue: a guess; the next round of planning counts


@dataclass(slots=True)
class Draft:
    """A Region in the making: its space, what it stores and sums, and the graph's nodes that its stores replace."""

    space: Space
    stores: list[Stored] = field(default_factory=list)
    sums: list[Term] = field(default_factory=list)
    supplies: dict[fx.Node, Stored] = field(default_factory=dict)
    totals: dict[fx.Node, tuple[Term, Fraction]] = field(default_factory=dict)
    """Nodes that are a number times one of the sums, over tokens: gradients of gains and biases."""
    added: Term | None = None
    """Another product that its accumulator takes in."""

    @property
    def values(self) -> list[Term]:
        """What its epilogue makes: all that is stored or summed."""
        return [s.term for s in self.stores] + [s.args[0] for s in self.sums]

    @property
    def nodes(self) -> frozenset[fx.Node]:
        """The graph's nodes that its stores and sums replace."""
        return frozenset((*self.supplies, *self.totals))

    @property
    def deps(self) -> int:
        """The products that must have run before all of its outputs exist."""
        return functools.reduce(int.__or__, (t.deps for t in self.values), 0)


def cycle(waits: Sequence[int], masks: Sequence[int]) -> list[int]:
    """Regions of which each waits for the next, and the last for the first; none if there are no such. All of a Region
    runs at one time. By Region, as bit sets: what it waits for, and what it makes."""
    pending, ready = [*range(len(waits))], 1
    while pending and ready:
        blocked = functools.reduce(int.__or__, (masks[i] for i in pending))
        ready = len(pending)
        pending = [i for i in pending if waits[i] & blocked]
        ready -= len(pending)
    path = pending[:1]
    while path and (following := next(i for i in pending if waits[path[-1]] & masks[i])) not in path:
        path.append(following)
    return path[path.index(following) :] if path else []


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that stays with Inductor although it follows a product, and the first condition that failed."""

    node: fx.Node
    reason: str


class Conflict(Exception):
    """Two decisions exclude each other; planning starts again with these limits as well."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(str(limits))
        self.limits = limits
