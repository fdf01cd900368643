"""A Region as it was built: what it reads, and what each of its outputs is."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import fx

from coda_inductor.core.region import Region
from coda_inductor.patterns.effects import base
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.draft import Draft, Loaded
from coda_inductor.rewrite.space import Lane


@dataclass(frozen=True, slots=True)
class Weight:
    """Rows (or, for "kn", columns) start to stop of a weight node; stop None is all of it."""

    node: fx.Node
    start: int = 0
    stop: int | None = None

    @property
    def ragged(self) -> bool:
        """Is it an input of the graph, or a part of one, whose rows do not begin at multiples of 16 bytes, as of 2730
        numbers? Then a copy is read. (What the graph computes, the lowering lays out.)"""
        value = self.node.meta["val"]
        given = base(self.node).op in ("placeholder", "get_attr")
        begins = (value.stride()[0], 0 if self.node.op == "placeholder" else value.storage_offset())
        return bool(given and value.dtype.itemsize > 1 and any(isinstance(n, int) and n % 8 for n in begins))


@dataclass(frozen=True, slots=True)
class Table:
    """Pairs that all heads share, [M, 2 * half]: of each lane one value, side by side. `rows` are the axes of M. A node
    that holds both has them as halves, or as `neighbours`."""

    lanes: tuple[Lane, Lane]
    rows: tuple[int, ...]
    half: int
    neighbours: bool

    @property
    def dtype(self) -> torch.dtype:
        """That of both nodes."""
        return torch.promote_types(*(lane.node.meta["val"].dtype for lane in self.lanes))


Source = Loaded | Weight | Table
"""Where an input comes from: what an epilogue loads (of lanes: the node or the table), or a weight."""


@dataclass(slots=True)
class Built:
    """A Region, its inputs in order, and what each output is: the drafts' stores, then its sums. `products` are what it
    computes, in the Region's order: its accumulators, and `added`, which one of them sums up with its own; `laws` are
    those by which it reads its inputs."""

    region: Region
    inputs: list[Source]
    draft: Draft
    products: list[Term]
    added: Term | None = None
    laws: frozenset[str] = frozenset()

    @property
    def only_sums(self) -> bool:
        """Does it add two products up and nothing else?"""
        r = self.region
        return self.added is not None and not (r.operands or r.lets or r.reductions)

    @property
    def mask(self) -> int:
        """These products, as a bit set."""
        return functools.reduce(int.__or__, (acc.hosts for acc in self.products))
