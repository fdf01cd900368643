"""What the forward keeps for the backward: hardly more than Inductor would let it keep.

A sum that the triangle law takes beside an operation left whole may read a product's result that nothing else of the
backward reads: queries before they are rotated, or keys, queries and values as one product makes them. That result is
kept for the sum. It is worth that where other tensors are kept no more, because an epilogue of the backward makes them
again; so the whole graph is looked at, as the partitioner divides it.
"""

from __future__ import annotations

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.plan.draft import Computed
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.sources import sources
from coda_inductor.schedule.kinds import kind_of
from coda_inductor.schedule.model import kept_bytes, partitioned

MORE = 1.02
"""Times what Inductor keeps: what a graph may keep."""


def kept_alone(plan: Plan) -> frozenset[str]:
    """The names of the tensors that the backward would keep for sums beside other operations, and for nothing else."""
    computed = (x for b in plan.builts for x in b.inputs if isinstance(x, Computed))
    pairs = (plan.pair(s) for x in computed for s in sources(x.term))
    return frozenset(n.name for found in pairs if found for n in found.tensors if not g.is_backward(n) and alone(n))


def alone(node: fx.Node) -> bool:
    """Does no operation of the backward read the node, and none of the forward that is no loop, which gives what it has
    read to its backward? Nor as a view, a copy of all of it, or a part that is none."""
    todo = [(g.narrow(node), False, False)]
    while todo:
        value, part, copy = todo.pop()
        for user in value.users:
            kind = kind_of(user) if user.op == "call_function" else "output"
            if kind == "part" or g.is_view(user) or g.widens(user):
                now = part or kind == "part", copy or user.target in g.COPIES
                todo += [] if all(now) else [(user, *now)]
            elif kind in ("extern", "output") or g.is_backward(user):
                return False
    return True


def kept(graph: fx.Graph) -> int:
    """The bytes that the forward keeps for the backward; 0 if that is not known."""
    return kept_bytes(partitioned(graph))


def most_kept(graph: fx.Graph) -> float:
    """How many a graph may keep that is made of this one."""
    return MORE * kept(graph)
