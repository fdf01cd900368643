"""Products of 8-bit matrices in the form that Regions read: of one tensor cast once, and the right matrix as a
transposed view of [N, K].

torchao casts a transposed weight, and the result lies as that does: [K, N] whose columns are contiguous, and no view.
"""

from __future__ import annotations

import torch
from torch import fx

from coda_inductor.passes.casts import FAST, Cast
from coda_inductor.passes.tables import REPEATED, is_loop
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Memory, computes, effects
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import TRANSPOSES, dense
from coda_inductor.schedule.kinds import elements
from coda_inductor.write.writing import Writing, stored

ACCUMULATION = "use_fast_accum"
SIDES = (g.SIDE, "recompute", "ac_graph_id")


def share(graph: fx.Graph) -> None:
    """Lets nodes that compute the same of the same on the same side of the graph be one, in place: linears of torchao
    cast a tensor to 8 bits each for itself. The backward reads the forward's amaxes and scales, which are small. What
    is returned stays apart."""
    unstable = effects(graph).unstable
    memory = Memory(graph) if unstable else None
    returned = {g.root(n, g.is_view) for n in graph.output_node().all_input_nodes}
    known, firsts, reduced = dict[object, fx.Node](), dict[object, fx.Node](), set[fx.Node]()
    alike = dict[fx.Node, fx.Node]()  # to the first node of the same value, on whatever side
    for node in list(graph.nodes):
        if node.op != "call_function" or not computes(node) or node in returned or g.root(node, g.is_view) in returned:
            continue
        if memory is not None and memory.read(node) & unstable:
            continue
        value = node.target, repr(fx.map_arg((node.args, node.kwargs), lambda n: alike.get(n, n)))
        alike[node] = firsts.setdefault(value, node)
        if is_small(node, reduced):
            reduced.add(node)
        key = value, [] if node in reduced else [node.meta.get(tag) for tag in SIDES]
        if g.is_backward(first := known.setdefault(repr(key), node)) and not g.is_backward(node):
            known[repr(key)] = node
        elif first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def add_up_fast(graph: fx.Graph) -> tuple[Cast, ...]:
    """Lets 8-bit products with one scale for each tensor or row add up in the tensor core's own accumulator, in place,
    where they ask for float32 sums now and then. That accumulator keeps fewer bits; `numerics="fast"` allows it."""
    products = {n: g.operands(n) for n in graph.nodes if n.target in g.SCALED}
    slow = [n for n, read in products.items() if read.understood and not read.fast]
    for node in slow:
        place = [a.name for a in node.target._schema.arguments].index(ACCUMULATION)  # the last one
        node.args, node.kwargs = node.args[:place], {**node.kwargs, ACCUMULATION: True}
    return tuple(Cast.of(n, FAST, g.source_line(n)) for n in slow)


def store_scales(graph: fx.Graph) -> None:
    """Puts scales into memory, in place, where products read them anyway: an epilogue reads the scale, and need not
    know that it is made of the largest of a tensor. Scales made in float64 are left: no epilogue takes their amax."""
    for node in [n for n in graph.nodes if n.target in g.SCALED]:
        for scale in g.operands(node).scales:
            root = g.root(scale, g.is_view)
            made = g.reached([root], lambda n: () if g.reduction(n) is not None else n.all_input_nodes)
            if is_loop(root) and not any(n.meta["val"].dtype == torch.float64 for n in made if g.tensor(n) is not None):
                stored(graph, root)


def is_small(node: fx.Node, reduced: set[fx.Node]) -> bool:
    """Is it a reduction to few values, or made of no more than such?"""
    read = node.all_input_nodes
    most = max(map(elements, read), default=0)
    return elements(node) <= (most // REPEATED if g.reduction(node) is not None else most * reduced.issuperset(read))


def largest_of_rows(graph: fx.Graph) -> None:
    """The largest value of a tensor is that of the largest of its rows, which an epilogue takes, in place."""
    for node in [n for n in graph.nodes if n.target in (aten.max.default, aten.amax.default)]:
        x, over = node.args[0], node.args[1] if len(node.args) > 1 else ()
        rank = len(g.sizes(x))
        if rank < 2 or len({d % rank for d in over}) not in (0, rank):
            continue
        if g.is_weight(g.root(x, lambda n: n.target is aten.abs.default or g.is_view(n))):
            continue
        writing = Writing(graph, node)
        rows = writing.call(node, aten.amax.default, x, [-1], True)
        node.replace_all_uses_with(writing.call(node, aten.amax.default, rows, *node.args[1:]))
        graph.erase_node(node)


def in_rows(graph: fx.Graph) -> None:
    """Puts two transposes that cancel between each such matrix and its products, in place."""
    done = dict[fx.Node, fx.Node]()
    for node in list(graph.nodes):
        right = g.operands(node).right if node.target in g.SCALED else None
        if right is None or right.target in TRANSPOSES or not dense(right, (1, 0)):
            continue
        if right not in done:
            writing = Writing(graph, node)
            rows = writing.call(right, aten.permute.default, right, [1, 0])
            done[right] = writing.call(right, aten.permute.default, rows, [1, 0])
        node.replace_input_with(right, done[right])
