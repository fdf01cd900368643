"""Regions that would wait for themselves: an epilogue would read what other operations make of its own stores.

Terms do not show it. Where one weight multiplies a stream and its norm, both products are made of one accumulator. What
an operation that is not lifted makes of the norm's product then waits for that accumulator, and its term, a leaf, knows
of the product alone that the user wrote.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

from torch import fx

from coda_inductor.patterns.terms import Term
from coda_inductor.plan.built import Source, Table, Weight
from coda_inductor.plan.draft import Root, Stored, cycle
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.rewrite.space import Computed, Half, Lane

WHY = "it and what reads it would wait for each other"


def circular(plan: Plan) -> Limits:
    """What undoes a cycle of Regions, if there is one: no law is applied to its products, or, if none is, they become
    no Region."""
    late, made = _late(plan), _made(plan)
    waits = [_union(_waits(plan, source, late, made) for source in built.inputs) for built in plan.builts]
    found = cycle(waits, [1 << i for i in range(len(waits))])
    if not found:
        return Limits()
    builts = [plan.builts[i] for i in found]
    mask = _union(b.mask for b in builts)
    products, supplied = plan.program.lifted.products, {n for b in builts for n in b.draft.supplies}
    moved = (f.product for f in plan.firings if f.product >= 0)
    undeferred = _union(1 << p for p in moved if mask >> p & 1 or products[p].node in supplied)
    if undeferred & ~plan.program.limits.undeferred:
        return Limits(undeferred=undeferred)
    return Limits({p: WHY for p in products if mask >> p & 1})


def _union(bits: Iterator[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


def _made(plan: Plan) -> dict[Stored | Term, int]:
    """By store and sum the Region that makes it, as a bit."""
    made: dict[Stored | Term, int] = {}
    for i, b in enumerate(plan.builts):
        made |= dict.fromkeys(b.draft.stores, 1 << i) | dict.fromkeys(b.draft.sums, 1 << i)
    return made


def _late(plan: Plan) -> dict[fx.Node, int]:
    """By node the Regions whose stores and sums it is, or is made of, as a bit set."""
    makers = {n: 1 << i for i, b in enumerate(plan.builts) for n, s in b.draft.supplies.items() if not s.again}
    makers |= {n: 1 << i for i, b in enumerate(plan.builts) for n in b.draft.totals}
    late = dict[fx.Node, int]()
    for node in plan.program.lifted.graph.nodes:
        late[node] = makers[node] if node in makers else _union(late[x] for x in node.all_input_nodes)
    return late


def _waits(plan: Plan, source: Source, late: dict[fx.Node, int], made: dict[Stored | Term, int]) -> int:
    """The Regions that must have run before `source` can be read, as a bit set."""
    match source:
        case Stored() | Term():
            return made.get(source, 0)
        case fx.Node():
            return late[source]
        case Weight(node=node) | Lane(node=node):
            return late[node]
        case Half(whole=whole):
            return _waits(plan, whole, late, made)
        case Root(square=square):
            return _waits(plan, square, late, made)
        case Table(lanes=lanes):
            return _union(late[lane.node] for lane in lanes)
        case Computed():
            return _union(_waits(plan, read, late, made) for read in plan.reads(source))
    return 0
