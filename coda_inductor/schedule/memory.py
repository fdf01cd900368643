"""Which tensors lie in memory when Inductor runs a graph: what tuning gives to the operations that it times, and
what it asks of them.

A pointwise value is a tensor only where a product or another operation that is no loop takes it, or where reading it
is cheaper than reading what it is made of (a residual stream); else each reader makes it again. Neither a sigmoid that
the graph shares nor a normalised stream before its gain is stored, unless the partitioner saves it for the backward.
(Under autocast a float32 stream normalised is as large as the stream, and is saved in its place.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.sizes import assumed
from coda_inductor.schedule.kinds import Kind, base_of, kind_of

MADE_AGAIN: frozenset[Kind] = frozenset({"loop", "view", "part", "source"})
TAKING: frozenset[Kind] = frozenset({"extern", "output"})
TENSORS = (Tensor, list, tuple)  # a split is several
VECTORS = 1.1  # times its own bytes: a value of one tile and some vectors is made again rather than read


class Memory:
    """Of one graph, as it is when this is made, of which the partitioner saves the nodes of these names."""

    def __init__(self, graph: fx.Graph, saved: AbstractSet[str] = frozenset()) -> None:
        self._found: dict[fx.Node, frozenset[fx.Node]] = {}
        self._later: dict[fx.Node, frozenset[fx.Node]] = {}
        self._saved, firsts = set[fx.Node](), dict[tuple[str, ...], fx.Node]()
        names = {base_of(node) for node in graph.nodes if node.name in saved}
        equal: dict[fx.Node, fx.Node] = {}  # to the first of its kind: of equal operations the partitioner leaves one
        for node in graph.nodes:
            equal[node] = firsts.setdefault(operation(node, equal), node)
            self._found[node] = self._of(node, self._found)
            if node in names and not self.holds(node):
                self._saved.add(node)
            kept = equal[node] in self._saved
            self._later[node] = frozenset({node}) if kept else self._of(node, self._later)

    def of(self, node: fx.Node, late: bool = False) -> frozenset[fx.Node]:
        """The tensors in memory that the node is read from: itself, or what a loop makes it of; as the backward reads
        it if it is `late`."""
        return self._later[node] if late else self._found[node]

    def holds(self, node: fx.Node, late: bool = False) -> bool:
        """Does the node itself lie in memory?"""
        return node in self.of(node, late)

    def saves(self, node: fx.Node) -> bool:
        """Does the forward write the node for the backward alone?"""
        return node in self._saved

    def _of(self, node: fx.Node, found: dict[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), TENSORS):
            return frozenset({node})
        kind = kind_of(node)
        if kind not in MADE_AGAIN:
            return frozenset({node})
        inputs = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), TENSORS)]
        parts = frozenset(p for a in inputs for p in found[a])
        if kind in ("view", "part") or g.widens(node):
            return parts
        cheap = sum(map(_bytes, parts)) <= VECTORS * _bytes(node)
        return parts if cheap and not taken_whole(node) else frozenset({node})


def operation(node: fx.Node, operands: Mapping[fx.Node, Any]) -> tuple[str, ...]:
    """What the node computes of its inputs, which are looked up in `operands`: equal only for what is equal."""
    if node.op != "call_function" or kind_of(node) == "random":
        return (node.name,)
    return (str(node.target), *map(str, fx.map_arg((node.args, node.kwargs), operands.__getitem__)))


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
    return math.prod(assumed(s) for s in value.shape) * int(value.dtype.itemsize)
