"""Products of 8-bit matrices in the form that Regions read: of one tensor cast once, and the right matrix as a
transposed view of [N, K].

torchao casts a transposed weight, and the result lies as that does: [K, N] whose columns are contiguous, and no view.
"""

from __future__ import annotations

from torch import fx

from coda_inductor.core.dtypes import EIGHT_BITS
from coda_inductor.passes.tables import readers
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Memory, computes, effects
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.rewrite.state import TRANSPOSES
from coda_inductor.write.writing import Writing, stored

SIDES = ("partitioner_tag", "recompute", "ac_graph_id")


def share(graph: fx.Graph) -> None:
    """Lets nodes that compute the same of the same on the same side of the graph be one, in place: linears of torchao
    cast a tensor to 8 bits each for itself. What is returned stays apart."""
    unstable = effects(graph).unstable
    memory = Memory(graph) if unstable else None
    returned = {g.root(n, g.is_view) for n in graph.output_node().all_input_nodes}
    known = dict[object, fx.Node]()
    for node in list(graph.nodes):
        if node.op != "call_function" or not computes(node) or node in returned or g.root(node, g.is_view) in returned:
            continue
        if memory is not None and memory.read(node) & unstable:
            continue
        key = node.target, repr((node.args, node.kwargs)), repr([node.meta.get(tag) for tag in SIDES])
        if (first := known.setdefault(key, node)) is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def largest_of_rows(graph: fx.Graph) -> None:
    """The largest value of a tensor is that of the largest of its rows, which an epilogue takes, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.max.default):
        x = node.args[0]
        if g.is_weight(g.root(x, lambda n: n.target is aten.abs.default or g.is_view(n))) or len(g.sizes(x)) < 2:
            continue
        writing = Writing(graph, node)
        rows = writing.call(node, aten.amax.default, x, [-1], True)
        node.replace_all_uses_with(writing.call(node, aten.amax.default, rows))
        graph.erase_node(node)


def store_shared(graph: fx.Graph) -> None:
    """Puts 8-bit tensors into memory that several products read, in place: Inductor would compute a view of a value
    again for each of them."""
    for cast in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        if cast.args[1] in EIGHT_BITS and len(set(readers(cast))) > 1:
            stored(graph, cast)


def in_rows(graph: fx.Graph) -> None:
    """Puts two transposes that cancel between each such matrix and its products, in place."""
    done = dict[fx.Node, fx.Node]()
    for node in list(graph.nodes):
        right = g.operands(node).right if node.target in g.SCALED else None
        if right is None or right.target in TRANSPOSES or not g.dense(right, (1, 0)):
            continue
        if right not in done:
            writing = Writing(graph, node)
            rows = writing.call(right, aten.permute.default, right, [1, 0])
            done[right] = writing.call(right, aten.permute.default, rows, [1, 0])
        node.replace_input_with(right, done[right])
