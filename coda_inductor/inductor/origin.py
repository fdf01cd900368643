"""New nodes in the place of others, from which they take over line, side and checkpoint."""

from __future__ import annotations

from torch import fx
from torch.utils._pytree import tree_map_only

ORIGIN = ("stack_trace", "nn_module_stack", "seq_nr", "original_aten", "partitioner_tag", "recompute", "ac_graph_id")
"""What a new node takes over from the one that it replaces: its line, its side of a joint graph, its checkpoint."""


def called(before: fx.Node, like: fx.Node, target: object, *args: object, **kwargs: object) -> fx.Node:
    """A new node with its fake value, where `before` stands; its origin is that of `like`."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
    fakes = tree_map_only(fx.Node, lambda n: n.meta["val"], args)
    node.meta["val"] = target(*fakes, **kwargs)  # type: ignore[operator]
    node.meta |= {key: like.meta[key] for key in ORIGIN if key in like.meta}
    return node
