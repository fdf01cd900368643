"""New nodes of a graph, with what the nodes that they replace say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from coda_inductor.core.errors import Unsupported
from coda_inductor.ops.custom import STORED
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.sizes import size_of

ORIGIN = ("stack_trace", "nn_module_stack", "seq_nr", "original_aten", "partitioner_tag", "recompute", "ac_graph_id")
"""What a new node takes over from the one that it replaces: its line, its side of a joint graph, its checkpoint."""

REPLACES = "coda_replaces"
"""The key of a node's meta that holds the names of the user's nodes in whose place it stands."""


@dataclass(slots=True)
class Writing:
    """A graph that is written to, before the node `anchor`."""

    graph: fx.Graph
    anchor: fx.Node

    def call(self, like: fx.Node, target: object, *args: object, **kwargs: object) -> fx.Node:
        """A new node with its fake value; origin and source line are those of `like`."""
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        fakes = tree_map_only(fx.Node, lambda n: n.meta["val"], args)
        node.meta["val"] = target(*fakes, **kwargs)  # type: ignore[operator]
        for key in ORIGIN:
            if key in like.meta:
                node.meta[key] = like.meta[key]
        return node

    def instead(self, old: fx.Node, target: object, *args: object, **kwargs: object) -> fx.Node:
        """As `call`, of a node in whose place it stands: what becomes of the new one becomes of that."""
        node = self.call(old, target, *args, **kwargs)
        node.meta[REPLACES] = (*old.meta.get(REPLACES, ()), old.name)
        return node

    def reshape(
        self, node: fx.Node, shape: Sequence[int | torch.SymInt], target: object = aten.view.default
    ) -> fx.Node:
        """node, viewed in `shape`; symbolic sizes are those of the graph's own nodes. `target`: view, or reshape where
        that may copy."""
        value = g.tensor(node)
        assert value is not None
        if [*map(size_of, value.shape)] == [*map(size_of, shape)]:
            return node
        symbolic = [i for i, s in enumerate(shape) if not isinstance(s, int)]
        inferred = next((i for i in symbolic if len(symbolic) == 1 or self._holder(shape[i]) is None), None)
        sizes = [s if isinstance(s, int) else -1 if i == inferred else self._size(s) for i, s in enumerate(shape)]
        return self.view(node, sizes, target)

    def can_reshape(self, shape: Sequence[int | torch.SymInt]) -> bool:
        """Are all its symbolic sizes but one the graph's own nodes?"""
        return sum(not isinstance(s, int) and self._holder(s) is None for s in shape) <= 1

    def view(self, node: fx.Node, sizes: Sequence[int | fx.Node], target: object = aten.view.default) -> fx.Node:
        """node, viewed in a shape. To Inductor's patterns of attention a `view` of a bmm, to whatever sizes, is their
        result of four dimensions."""
        of = aten.reshape.default if node.target is aten.bmm.default else target
        return self.call(node, of, node, sizes)

    def _size(self, size: torch.SymInt) -> fx.Node:
        if (node := self._holder(size)) is None:
            raise Unsupported(f"no node of the graph holds the size {size}")
        return node

    def _holder(self, size: int | torch.SymInt) -> fx.Node | None:
        """The first node whose value is this size."""
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and size_of(value) == size_of(size):
                return node  # type: ignore[no-any-return]
        return None


def stored(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The node's value, in memory from where the node stands; all read that."""
    with graph.inserting_after(node):
        new = graph.call_function(STORED, (node,))
    new.meta = {key: node.meta[key] for key in (*ORIGIN, "val") if key in node.meta}
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new
