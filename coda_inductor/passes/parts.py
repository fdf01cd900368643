"""A product whose columns are read in parts is a product for each part of its weight: x [A B] = [x A, x B].

Gate and up in one weight so become what they are where they have weights of their own: one epilogue computes with both,
and the backward's writes both of their gradients. The backward's two products change with it. The parts' gradients
[a, b] beside each other times the weight are a A' + b B', which one accumulator adds up; the weight's gradient is made
part by part, one above the other. The parts of the weight are views.

Where not all of these products become Regions, one product is better than several: then the graph stays as it came.

The gradient of two tensors that lay beside each other, as attention's result and an MLP's, is read in parts, too. It
stays one product. cuDNN finds the plan of attention's backward by all layouts but that gradient's (torch 2.11): where
eager ran before, another layout is read out of bounds. Split, two of FLUX's single blocks took 27.87 ms for 27.90
(H200).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.effects import base
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.pointwise import POINTWISE
from coda_inductor.write.writing import Writing

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
UNIT = 8  # columns of which kernels' rows are made

Part = tuple[int, int]
"""From which column to which."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Gradients of the parts, which lie beside each other in a tensor, and the nodes that read that."""

    pieces: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    """Gradients of what the product reads: joined @ weight."""
    weights: tuple[fx.Node, ...]
    """Gradients of its weight: joined, transposed, times what it reads."""
    biases: tuple[fx.Node, ...]
    """Gradients of its bias: sums of joined over the tokens."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A product whose weight is several: its name as the graph came, and the products that took its place, of the parts
    and of the gradients of what it read."""

    name: str
    made: tuple[fx.Node, ...]


def split_products(graph: fx.Graph, whole: frozenset[str] = frozenset()) -> tuple[Packed, ...]:
    """Rewrites the graph in place, but for the products named `whole`."""
    joint = g.is_joint(graph)
    joins = [n for n in graph.nodes if n.target is aten.cat.default and g.is_backward(n)]
    products = [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default) and not g.is_backward(n)]
    found = []
    for product in products:
        if product.name in whole or not g.operands(product).understood or not g.reads_weight(product):
            continue
        if not (parts := parts_of(product)):
            continue
        joined = next(filter(None, (joined_in(cat, product, [*parts]) for cat in joins)), None)
        if joined is None and joint:
            continue
        made = write_forward(graph, product, parts)
        if joined is not None:
            made += write_backward(graph, joined, [*parts])
        found.append(Packed(product.name, tuple(made)))
        graph.eliminate_dead_code()
    return tuple(found)


def parts_of(product: fx.Node) -> dict[Part, list[fx.Node]]:
    """The parts in which a product is read, in order, with the nodes that cut them; {} if it is not read in parts
    alone, or a part is not computed with, as v of q, k and v, or they must share memory."""
    found, todo = dict[Part, list[fx.Node]](), list(product.users)
    width = product.meta["val"].shape[-1]
    biases = [tuple(bias.meta["val"].shape) for bias in g.operands(product).addends]
    vectors = all(len(shape) == 1 and isinstance(shape[0], int) for shape in biases)  # to compare a symbol adds a guard
    if not isinstance(width, int) or not vectors or any(shape != (width,) for shape in biases):
        return {}
    while todo:
        node = todo.pop()
        cut = slices.cut(node)
        if cut is not None and cut[1] % cut[0].meta["val"].dim() == cut[0].meta["val"].dim() - 1:
            _, _, start, length = cut
            fixed = isinstance(start, int) and isinstance(length, int)
            if not fixed or not length or length % UNIT or not can_flatten(node):
                return {}
            found.setdefault((start, start + length), []).append(node)
        elif node.target in slices.SPLITS or reshapes(node, width):
            todo += node.users
        else:
            return {}
    order = sorted(found)
    whole = len(order) > 1 and [a for a, _ in order] == [0, *(b for _, b in order[:-1])] and order[-1][1] == width
    if not whole or not all(any(map(computed, nodes)) for nodes in found.values()) or must_share_memory(product):
        return {}
    return {part: found[part] for part in order}


def can_flatten(node: fx.Node) -> bool:
    """Do its rows become rows of tokens without a guard on a size that is a symbol?"""
    shape = node.meta["val"].shape
    return len(shape) == 2 or all(isinstance(n, int) for n in shape)


def reshapes(node: fx.Node, width: int) -> bool:
    """Is the node a view in which the last dimension is what it was, of `width`, and the others are in their order?"""
    if node.target not in RESHAPES:
        return False
    last = node.meta["val"].shape[-1]
    return isinstance(last, int) and last == width


def computed(node: fx.Node) -> bool:
    """Is there arithmetic on the node, or on a view of it?"""
    through = lambda u: g.is_view(u) or u.target in slices.SPLITS or slices.cut(u) is not None  # noqa: E731
    seen = g.reached([node], lambda n: filter(through, n.users))
    return any(u.target in POINTWISE or g.is_cast(u) for n in seen for u in n.users)


def must_share_memory(product: fx.Node) -> bool:
    """Is a view of the product returned, or read by its place in memory?"""
    views = g.reached([product], lambda n: [u for u in n.users if base(u) is product or u.target in slices.SPLITS])
    return any(u.op == "output" or u.target is aten.as_strided.default for n in views for u in n.users)


def joined_in(cat: fx.Node, product: fx.Node, parts: list[Part]) -> Joined | None:
    """The gradients of a product's parts, if this puts them beside each other for the product's own backward alone."""
    value, dim = cat.meta["val"], cat.args[1] if len(cat.args) > 1 else 0
    pieces: tuple[fx.Node, ...] = tuple(cat.args[0])  # type: ignore[arg-type]
    widths = [d.meta["val"].shape[-1] for d in pieces]
    alike = all(d.meta["val"].dtype == value.dtype for d in pieces) and all(isinstance(n, int) for n in widths)
    if dim not in (-1, value.dim() - 1) or not alike or not can_flatten(cat):
        return None
    if widths != [stop - start for start, stop in parts]:
        return None
    weight, left = (g.root(n, g.is_view) for n in (g.operands(product).right, g.operands(product).left))
    inputs, weights, biases = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    todo = [(node, cat, False) for node in cat.users]  # who reads what, and whether that is transposed
    while todo:
        node, read, turned = todo.pop()
        if node.target is aten.mm.default and node.args[0] is read and node.args[1] is not read:
            if g.root(node.args[1], g.is_view) is not (left if turned else weight):  # type: ignore[arg-type]
                return None
            (weights if turned else inputs).append(node)
        elif node.target is aten.sum.dim_IntList and not turned and sums_rows(node):
            biases.append(node)
        elif not turned and reshapes(node, sum(widths)):
            todo += [(user, node, False) for user in node.users]
        elif node.target is aten.permute.default and node.args[1] == [1, 0]:
            todo += [(user, node, not turned) for user in node.users]
        else:
            return None
    return Joined(pieces, tuple(inputs), tuple(weights), tuple(biases)) if inputs or weights else None


def sums_rows(node: fx.Node) -> bool:
    """Does it sum over all dimensions but the last?"""
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return sorted(d % rank for d in node.args[1]) == [*range(rank - 1)]  # type: ignore[union-attr]


def write_forward(graph: fx.Graph, product: fx.Node, parts: dict[Part, list[fx.Node]]) -> list[fx.Node]:
    """Puts the products of the parts in the place of the product, and returns them."""
    writing, operands, made = Writing(graph, product), g.operands(product), list[fx.Node]()
    for (start, stop), cuts in parts.items():
        biases = [writing.call(b, aten.slice.Tensor, b, 0, start, stop) for b in operands.addends]
        right = sliced(writing, operands.right, 1, start, stop)
        made.append(writing.call(product, product.target, *biases, operands.left, right))
        for cut in cuts:
            cut.replace_all_uses_with(Writing(graph, cut).reshape(made[-1], list(cut.meta["val"].shape)))
    return made


def write_backward(graph: fx.Graph, joined: Joined, parts: list[Part]) -> list[fx.Node]:
    """Puts what is made of each gradient in the place of what was made of them together; returns the products that are
    added up."""
    added = list[fx.Node]()
    for node in joined.inputs:
        writing, weight = Writing(graph, node), node.args[1]
        rows = [writing.call(node, aten.slice.Tensor, weight, 0, start, stop) for start, stop in parts]
        pairs = zip(joined.pieces, rows, strict=True)
        made = [writing.call(node, aten.mm.default, flat(writing, d), w) for d, w in pairs]
        node.replace_all_uses_with(reduce(lambda a, b: writing.call(node, aten.add.Tensor, a, b), made))
        added += made
    for node in joined.weights:
        writing = Writing(graph, node)
        turned = [writing.call(d, aten.permute.default, flat(writing, d), [1, 0]) for d in joined.pieces]
        made = [writing.call(node, aten.mm.default, d, node.args[1]) for d in turned]
        node.replace_all_uses_with(writing.call(node, aten.cat.default, made, 0))
    for node in joined.biases:
        writing, rest = Writing(graph, node), node.args[2:]
        made = [writing.call(node, node.target, flat(writing, d), [0], *rest, **node.kwargs) for d in joined.pieces]
        both = writing.call(node, aten.cat.default, made, -1)
        node.replace_all_uses_with(writing.reshape(both, list(node.meta["val"].shape)))
    return added


def flat(writing: Writing, node: fx.Node) -> fx.Node:
    """Of two dimensions: rows of tokens."""
    value = node.meta["val"]
    return node if value.dim() == 2 else writing.call(node, aten.reshape.default, node, [-1, value.shape[-1]])


def sliced(writing: Writing, right: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
    """Some rows (dimension 0) or columns (1) of a product's right matrix; of a weight that it is the transposed view of
    these are columns or rows."""
    if right.target is aten.permute.default:
        cut = writing.call(right, aten.slice.Tensor, right.args[0], 1 - dim, start, stop)
        return writing.call(right, aten.permute.default, cut, [1, 0])
    return writing.call(right, aten.slice.Tensor, right, dim, start, stop)
