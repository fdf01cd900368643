"""A product of two tensors that are put beside each other first is a product of each: [x y] [A; B] = x A + y B.

One accumulator adds both up, step by step as it would have added up the one, and nothing puts x beside y. So what a
product's epilogue can make of y, as an MLP's activation beside attention, leaves that epilogue and is read where it
lies. Of the weight both products read a part, which is a view. (The second product is written first: what is added to
an accumulator comes behind its own.)

The gradient of a weight in rows is made of each as well: D^T [x y] = [D^T x, D^T y]. Inductor has both products write
into one tensor.

It is worth it only where both meet in one accumulator, and an epilogue makes x or y: else the copy, with all that
Inductor fuses into it, stays as it came. So it does where the copy is read by others, too.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from coda_inductor.passes.parts import UNIT, Packed, can_flatten, flat, reshapes, sliced
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Memory
from coda_inductor.patterns.graph import aten
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.write.writing import Writing

GIVEN = frozenset({"placeholder", "get_attr"})
JOINED = "coda_joined"
"""The mark, in a node's meta, of the two products and their sum."""


def split_joined(
    graph: fx.Graph, whole: frozenset[str] = frozenset(), overwritten: frozenset[str] = frozenset()
) -> tuple[Packed, ...]:
    """Rewrites the graph in place, but for the products named `whole`, and what lies in memory that is `overwritten`:
    a copy of it has to stay one."""
    products = [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default) and not g.is_backward(n)]
    memory, found, given = Memory(graph), list[Packed](), {n.name for n in graph.nodes if n.op in GIVEN}
    for product in products:
        operands = g.operands(product)
        if product.name in whole or not operands.understood or not g.reads_weight(product):
            continue
        pieces, gradients = pieces_of(operands.left, product)
        # The user may write to an input before the backward: its gradient reads the copy, which has it as it was.
        copied = overwritten | given if gradients else overwritten
        if pieces and not copied.intersection(map(memory.of, pieces)):
            for gradient in gradients:
                write_gradient(graph, gradient, pieces)
            found.append(Packed(product.name, write(graph, product, pieces)))
            graph.eliminate_dead_code()
    return tuple(found)


def pieces_of(left: fx.Node, reader: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The two tensors beside each other in a product's left operand, and the gradients of its weight, if nothing else
    reads that operand; else none."""
    width, source = left.meta["val"].shape[-1], left
    while reshapes(source, width):
        source = source.all_input_nodes[0]
    if source.target is not aten.cat.default:
        return [], []
    views = g.reached([source], lambda n: [u for u in n.users if reshapes(u, width)])
    gradients = [u for v in views for u in v.users if u not in views and u is not reader]
    if not all(is_gradient(n, views) for n in gradients):
        return [], []
    args: tuple[Any, ...] = source.args
    value, pieces, dim = source.meta["val"], [*args[0]], args[1] if len(args) > 1 else 0
    along_k = dim in (-1, value.dim() - 1) and len(pieces) == 2 and pieces[0] is not pieces[1]
    return (pieces, gradients) if along_k and all(fits(piece, value) for piece in pieces) else ([], [])


def is_gradient(node: fx.Node, operand: set[fx.Node]) -> bool:
    """Is it the product of a gradient, transposed, and the operand?"""
    product = node.target is aten.mm.default and g.is_backward(node)
    return product and node.args[1] in operand and node.args[0] not in operand


def fits(piece: fx.Node, value: Tensor) -> bool:
    """Can a product read a piece of a tensor in its place?"""
    made = piece.meta["val"]
    width = made.shape[-1]
    whole = isinstance(width, int) and width > 0 and width % UNIT == 0
    return whole and made.dtype == value.dtype and made.dim() == value.dim() and can_flatten(piece)


def write(graph: fx.Graph, product: fx.Node, pieces: list[fx.Node]) -> tuple[fx.Node, ...]:
    """Puts a sum of two products, and then of a bias, in the place of one; returns the two."""
    writing, of = Writing(graph, product), g.operands(product)
    ends = list(accumulate((x.meta["val"].shape[-1] for x in pieces), initial=0))
    parts = [*zip(pieces, ends[:-1], ends[1:], strict=True)]
    second, first = (
        writing.call(product, aten.mm.default, flat(writing, x), sliced(writing, of.right, 0, *cut))
        for x, *cut in reversed(parts)
    )
    whole = writing.call(product, aten.add.Tensor, first, second)
    for node in (first, second, whole):
        node.meta[JOINED] = True
    for bias in of.addends:
        whole = writing.call(product, aten.add.Tensor, whole, bias)
    product.replace_all_uses_with(whole)
    return first, second


def write_gradient(graph: fx.Graph, node: fx.Node, pieces: list[fx.Node]) -> None:
    """Puts products by each piece, beside each other, in the place of a weight's gradient."""
    writing = Writing(graph, node)
    made = [writing.call(node, aten.mm.default, node.args[0], flat(writing, x)) for x in pieces]
    node.replace_all_uses_with(writing.call(node, aten.cat.default, made, 1))
    graph.erase_node(node)


def is_joined(plan: Plan, built: Built) -> bool:
    """Does a Region add up what was one product?"""
    return built.added is not None and JOINED in plan.program.product(built.added).node.meta


def makers(plan: Plan, built: Built, builts: list[Built]) -> list[Built]:
    """The Regions whose epilogues make what lay beside each other, of what was one product; none of other Regions."""
    read = {con.args[0] for con in built.products} if is_joined(plan, built) else set()
    return [b for b in builts if any(s.term in read for s in b.draft.stores)]


def in_vain(plan: Plan, packed: tuple[Packed, ...]) -> frozenset[str]:
    """The names of products whose two did not meet in one accumulator, or of which no epilogue makes a piece."""
    taken = {
        frozenset(plan.program.product(acc).node for acc in b.products)
        for b in plan.builts
        if makers(plan, b, plan.builts)
    }
    return frozenset(p.name for p in packed if frozenset(p.made) not in taken)


def rejoined(graph: fx.Graph) -> fx.Graph:
    """The graph with what was one product as it came, in place."""
    for node in [n for n in graph.nodes if JOINED in n.meta and n.target is aten.add.Tensor]:
        if any(n.target is not aten.mm.default or len(n.users) > 1 for n in node.all_input_nodes):
            continue  # of a part of what was cut out
        first, second = (g.operands(n) for n in node.all_input_nodes)
        writing = Writing(graph, node)
        joined = writing.call(node, aten.cat.default, [first.left, second.left], 1)
        upper = first.right.meta["val"]  # behind which, in memory, the other lies
        sizes = [joined.meta["val"].shape[1], upper.shape[1]]
        whole = writing.call(node, aten.as_strided.default, first.right, sizes, [*upper.stride()])
        node.replace_all_uses_with(writing.call(node, aten.mm.default, joined, whole))
        for gone in (node, *node.all_input_nodes):
            graph.erase_node(gone)
    return graph
