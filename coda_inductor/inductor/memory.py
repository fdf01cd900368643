"""Which tensors lie in memory when Inductor runs a graph: what a contest gives to the operations that it times, and
what it asks of them.

A pointwise value is a tensor only where a product or another operation that is no loop takes it, or where reading it
is cheaper than reading what it is made of (a residual stream); else each reader makes it again, in the forward and in
the backward alike. Neither a sigmoid that the graph shares nor a normalised stream before its gain is ever stored.
"""

from __future__ import annotations

import math

from torch import Tensor, fx

from coda_inductor.inductor.lowering import Kind, base_of, kind_of
from coda_inductor.inductor.paths import hint
from coda_inductor.patterns import graph as g

MADE_AGAIN: frozenset[Kind] = frozenset({"loop", "view", "part", "source"})
TAKING: frozenset[Kind] = frozenset({"extern", "output"})
TENSORS = (Tensor, list, tuple)  # a split is several
VECTORS = 1.1  # times its own bytes: a value of one tile and some vectors is made again rather than read


class Memory:
    """Of one graph, as it is when this is made."""

    def __init__(self, graph: fx.Graph) -> None:
        self._found: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in graph.nodes:
            self._found[node] = self._of(node)

    def of(self, node: fx.Node) -> frozenset[fx.Node]:
        """The tensors in memory that the node is read from: itself, or what a loop makes it of."""
        return self._found[node]

    def holds(self, node: fx.Node) -> bool:
        """Does the node itself lie in memory?"""
        return node in self.of(node)

    def _of(self, node: fx.Node) -> frozenset[fx.Node]:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), TENSORS):
            return frozenset({node})
        kind = kind_of(node)
        if kind not in MADE_AGAIN:
            return frozenset({node})
        parts = frozenset(p for a in node.all_input_nodes if isinstance(a.meta.get("val"), TENSORS) for p in self.of(a))
        if kind in ("view", "part") or g.widens(node):
            return parts
        cheap = sum(map(_bytes, parts)) <= VECTORS * _bytes(node)
        return parts if cheap and not taken_whole(node) else frozenset({node})


def in_loop(node: fx.Node) -> bool:
    """Does a loop make the tensor, or is it a view or a split of one?"""
    return node.op == "call_function" and isinstance(node.meta.get("val"), TENSORS) and kind_of(node) in MADE_AGAIN


def taken_whole(node: fx.Node) -> bool:
    """Does an operation that is no loop take the node, or a view of it?"""
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if user.op == "output" or kind_of(user) in TAKING:
            return True
        if base_of(user) is not user:
            todo += user.users
    return False


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return math.prod(hint(s) for s in value.shape) * int(value.dtype.itemsize)
