"""What loops of the forward make of a Region's store, and the backward reads, the backward makes again of the store.

A cross-entropy in bf16 leaves the logarithms of its softmax, in as many bytes as the scores of which it makes them. A
partitioner may keep either (torch 2.11 to 2.15); where it keeps the logarithms, the forward writes them for that alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor.ops.custom import REGION
from coda_inductor.patterns import graph as g
from coda_inductor.schedule.kinds import elements, kind_of
from coda_inductor.write.kept import RECOMPUTE, users

SHORT = 64
"""How many times longer a store is, at least, than what the backward reads beside it."""


def make_again(graph: fx.Graph) -> None:
    """Has partitioners of a joint graph keep no such value. In place."""
    for store in graph.nodes:
        if is_store(store) and not g.is_backward(store):
            for node in made_of(store):
                if node.meta["val"].dtype == store.meta["val"].dtype and written_late(node):
                    node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE


def is_store(node: fx.Node) -> bool:
    """Is it a matrix that a Region stores?"""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is REGION and node.meta["val"].dim() > 1


def made_of(store: fx.Node) -> Iterator[fx.Node]:
    """What loops of the forward make of a store, in its size, and of what is short beside it. Not what must be kept:
    it reads memory that is overwritten later (kept.py), or a user's checkpoint says so."""
    size, made, todo = elements(store), {store}, list(store.users)
    heapify(todo)  # by their order in the graph: a graph has many stores, and each few readers
    while todo:
        if (node := heappop(todo)) in made or node.op != "call_function" or g.is_backward(node):
            continue
        if RECOMPUTE in node.meta or g.tensor(node) is None or elements(node) != size:
            continue
        beside = all(elements(n) * SHORT <= size for n in node.all_input_nodes if n not in made)
        if g.is_view(node) or (kind_of(node) == "loop" and beside):
            made.add(node)
            for user in node.users:
                heappush(todo, user)
            if not g.is_view(node):
                yield node


def written_late(node: fx.Node) -> bool:
    """Does the backward read it, and nothing of the forward from memory?"""
    readers = users(node)
    early = {kind_of(n) if n.op == "call_function" else n.op for n in readers if not g.is_backward(n)}
    return any(map(g.is_backward, readers)) and not early & {"extern", "output"}
