"""Which tensors lie in memory when Inductor runs a graph: what a contest gives to the operations that it times, and
what it asks of them.

A pointwise value is a tensor only where a product or another operation that is no loop takes it, or where reading it
is cheaper than reading what it is made of (a residual stream); else each reader makes it again. Neither a sigmoid that
the graph shares nor a normalised stream before its gain is stored, unless the partitioner saves it for the backward:
that reads what is saved. (Under autocast a float32 stream normalised is as large as the stream, and is saved in its
place.)
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet

from torch import Tensor, fx

from coda_inductor.inductor.lowering import Kind, base_of, kind_of
from coda_inductor.inductor.paths import hint
from coda_inductor.patterns import graph as g

MADE_AGAIN: frozenset[Kind] = frozenset({"loop", "view", "part", "source"})
TAKING: frozenset[Kind] = frozenset({"extern", "output"})
TENSORS = (Tensor, list, tuple)  # a split is several
VECTORS = 1.1  # times its own bytes: a value of one tile and some vectors is made again rather than read


class Memory:
    """Of one graph, as it is when this is made, of which the partitioner saves the nodes of these names."""

    def __init__(self, graph: fx.Graph, saved: AbstractSet[str] = frozenset()) -> None:
        self._saved = {base_of(node) for node in graph.nodes if node.name in saved}
        self._found: dict[fx.Node, frozenset[fx.Node]] = {}
        self._later: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in graph.nodes:
            self._found[node] = self._of(node, late=g.is_backward(node))
            self._later[node] = self._found[node] if g.is_backward(node) else self._of(node, late=True)

    def of(self, node: fx.Node, late: bool = False) -> frozenset[fx.Node]:
        """The tensors in memory that the node is read from: itself, or what a loop makes it of; as the backward reads
        it if it is `late`."""
        return self._later[node] if late else self._found[node]

    def holds(self, node: fx.Node, late: bool = False) -> bool:
        """Does the node itself lie in memory?"""
        return node in self.of(node, late)

    def kept(self, node: fx.Node) -> frozenset[fx.Node]:
        """The tensors that the forward leaves to who reads the node in the backward."""
        parts = self.of(node, late=True)
        return parts & self._saved if self._saved else parts

    def _of(self, node: fx.Node, late: bool) -> frozenset[fx.Node]:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), TENSORS):
            return frozenset({node})
        kind = kind_of(node)
        if kind not in MADE_AGAIN:
            return frozenset({node})
        inputs = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), TENSORS)]
        parts = frozenset(p for a in inputs for p in self.of(a, late))
        if kind in ("view", "part"):
            return parts
        if late and self._saved and not g.is_backward(node):
            return frozenset({node}) if node in self._saved else parts
        if g.widens(node):
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
