"""What the forward keeps for the backward: hardly more than Inductor would let it keep.

A sum that the triangle law takes beside an operation left whole may read a product's result that nothing else of the
backward reads: queries before they are rotated, or keys, queries and values as one product makes them. That result is
kept for the sum. It is worth that where other tensors are kept no more, because an epilogue of the backward makes them
again; so the whole graph is looked at, as the partitioner divides it. Where it keeps too much, sums go for which no
tensor is made again, and if that does not do, all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.sources import sources
from coda_inductor.rewrite.space import Computed
from coda_inductor.schedule.kinds import elements, kind_of
from coda_inductor.schedule.model import kept_bytes, partitioned

MORE = 1.02
"""Times what Inductor keeps: what a graph may keep."""


def kept_alone(plan: Plan) -> dict[str, bool]:
    """The names of the tensors that the backward would keep for sums beside other operations, and for nothing else.
    Does an epilogue that reads such a sum make a tensor again, which is kept no more?"""
    found = dict[str, bool]()
    for built in plan.builts:
        pays = any(stored.again for stored in built.draft.supplies.values())
        computed = (x for x in built.inputs if isinstance(x, Computed))
        pairs = filter(None, (plan.pair(s) for x in computed for s in sources(x.term)))
        for node in (n for each in pairs for n in each.tensors if not g.is_backward(n) and alone(n)):
            found[node.name] = pays or found.get(node.name, False)
    return found


def dearest(names: Mapping[str, bool]) -> frozenset[str]:
    """Those that are given up first: for which nothing is made again."""
    return frozenset(name for name, pays in names.items() if not pays) or frozenset(names)


def alone(node: fx.Node) -> bool:
    """Does nothing else keep the node: no operation of the backward that reads it, and none of the forward that is no
    loop, which gives what it has read to its backward? Be it a view, a copy of all of it, or a part that is none. Nor
    do loops of the backward read what loops make of it: they may make that themselves."""
    todo, seen = [(g.narrow(node), False, False, False)], set[object]()
    while todo:
        if (state := todo.pop()) in seen:
            continue
        seen.add(state)
        value, part, copy, made = state
        for user in value.users:
            kind = kind_of(user) if user.op == "call_function" else "output"
            if kind == "part" or g.is_view(user) or g.widens(user):
                now = part or kind == "part", copy or user.target in g.COPIES
                todo += [(user, *now, made)] if made or not all(now) else []
            elif kind in ("extern", "output"):
                if not made:
                    return False
            elif g.is_backward(user):
                return False
            elif kind == "loop" and elements(user) == elements(node):
                todo.append((user, part, copy, True))
    return True


def kept(graph: fx.Graph, owner: fx.GraphModule | None = None) -> int:
    """The bytes that the forward keeps for the backward; 0 if that is not known."""
    return kept_bytes(partitioned(graph, owner))


def most_kept(graph: fx.Graph, owner: fx.GraphModule) -> float:
    """How many a graph may keep that is made of this one, which was its owner's; without end if that is not known."""
    return MORE * kept(graph, owner) or math.inf
