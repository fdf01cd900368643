"""A product whose columns are read in parts is a product for each part of its weight: x [A B] = [x A, x B].

Gate and up in one weight so become what they are where they have weights of their own: one epilogue computes with both,
and the backward's writes both of their gradients. The backward's two products change with it. The parts' gradients
[a, b] beside each other times the weight are a A' + b B', which one accumulator adds up; the weight's gradient is made
part by part, one above the other. The parts of the weight are views.

Where not all of these products become Regions, one product is better than several: then the graph stays as it came.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import base
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.pointwise import POINTWISE
from coda_inductor.write.writing import Writing

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
UNIT = 8  # columns of which kernels' rows are made

Part = tuple[int, int]
"""From which column to which."""


@dataclass(slots=True)
class Family:
    """A product that is read in parts: the nodes that cut it, by part, and of a backward the tensor in which the parts'
    gradients lie beside each other, with the nodes that read that."""

    product: fx.Node
    parts: dict[Part, list[fx.Node]]
    joined: fx.Node | None = None
    inputs: list[fx.Node] = field(default_factory=list)
    """Gradients of what the product reads: joined @ weight."""
    weights: list[fx.Node] = field(default_factory=list)
    """Gradients of its weight: joined, transposed, times what it reads."""
    sums: list[fx.Node] = field(default_factory=list)
    """Gradients of its bias: sums of joined over the tokens."""
    made: list[fx.Node] = field(default_factory=list)
    """The products that took its place: of the parts, and of the gradients of what it read."""

    @property
    def name(self) -> str:
        """Of the product, as the graph came."""
        return self.product.name


def split_products(graph: fx.Graph, whole: frozenset[str] = frozenset()) -> tuple[Family, ...]:
    """Rewrites the graph in place, but for the products named `whole`."""
    joint = any(map(g.is_tangent, graph.nodes))
    joined = [n for n in graph.nodes if n.target is aten.cat.default and g.is_backward(n)]
    found = []
    products = [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default) and not g.is_backward(n)]
    for node in products:
        if node.name in whole or not g.operands(node).understood or not g.reads_weight(node):
            continue
        family = Family(node, parts) if (parts := parts_of(node)) else None
        if family is not None and (not joint or any(reads_all(family, cat) for cat in joined)):
            write(graph, family)
            found.append(family)
    return tuple(found)


def parts_of(product: fx.Node) -> dict[Part, list[fx.Node]]:
    """The parts in which a product is read, in order; {} if it is not read in parts alone, or a part is not computed
    with, as v of q, k and v, or its memory is told apart from memory of its own."""
    found, todo = dict[Part, list[fx.Node]](), list(product.users)
    width = product.meta["val"].shape[-1]
    biases = [tuple(bias.meta["val"].shape) for bias in g.operands(product).addends]
    if not isinstance(width, int) or any(shape != (width,) for shape in biases):
        return {}
    while todo:
        node = todo.pop()
        cut = g.cut(node)
        if cut is not None and cut[1] % cut[0].meta["val"].dim() == cut[0].meta["val"].dim() - 1:
            _, _, start, length = cut
            if not isinstance(start, int) or not isinstance(length, int) or length % UNIT or not length:
                return {}
            if not can_flatten(node):
                return {}
            found.setdefault((start, start + length), []).append(node)
        elif node.target in g.SPLITS or reshapes(node, width):
            todo += node.users
        else:
            return {}
    order = sorted(found)
    whole = len(order) > 1 and [a for a, _ in order] == [0, *(b for _, b in order[:-1])] and order[-1][1] == width
    if not whole or not all(any(map(computed, nodes)) for nodes in found.values()) or told_apart(product):
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
    through = lambda u: g.is_view(u) or u.target in g.SPLITS or g.cut(u) is not None  # noqa: E731
    seen = g.reached([node], lambda n: filter(through, n.users))
    return any(u.target in POINTWISE or g.is_cast(u) for n in seen for u in n.users)


def told_apart(product: fx.Node) -> bool:
    """Is a view of the product returned, which shares memory with the others, or read by its place in memory?"""
    views = g.reached([product], lambda n: [u for u in n.users if base(u) is product or u.target in g.SPLITS])
    return any(u.op == "output" or u.target is aten.as_strided.default for n in views for u in n.users)


def reads_all(family: Family, cat: fx.Node) -> bool:
    """Are the gradients of the family's parts put beside each other here, for these products alone? They are noted."""
    value, dim = cat.meta["val"], cat.args[1] if len(cat.args) > 1 else 0
    given = [d.meta["val"] for d in cat.args[0]]  # type: ignore[union-attr]
    widths = [d.shape[-1] if d.dtype == value.dtype else 0 for d in given]
    if dim not in (-1, value.dim() - 1) or not all(isinstance(n, int) for n in widths) or not can_flatten(cat):
        return False
    if widths != [stop - start for start, stop in family.parts]:
        return False
    reading, width = g.operands(family.product), sum(widths)
    weight, left = g.root(reading.right, g.is_view), g.root(reading.left, g.is_view)
    inputs, weights, sums = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    todo = [(node, cat, False) for node in cat.users]  # `turned`: is it transposed?
    while todo:
        node, read, turned = todo.pop()
        if node.target is aten.mm.default and node.args[0] is read and node.args[1] is not read:
            if g.root(node.args[1], g.is_view) is not (left if turned else weight):  # type: ignore[arg-type]
                return False
            (weights if turned else inputs).append(node)
        elif node.target is aten.sum.dim_IntList and not turned and sums_rows(node):
            sums.append(node)
        elif not turned and reshapes(node, width):
            todo += [(user, node, False) for user in node.users]
        elif node.target is aten.permute.default and node.args[1] == [1, 0]:
            todo += [(user, node, not turned) for user in node.users]
        else:
            return False
    if not inputs and not weights:
        return False
    family.joined, family.inputs, family.weights, family.sums = cat, inputs, weights, sums
    return True


def sums_rows(node: fx.Node) -> bool:
    """Does it sum over all dimensions but the last?"""
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return sorted(d % rank for d in node.args[1]) == [*range(rank - 1)]  # type: ignore[union-attr]


def write(graph: fx.Graph, family: Family) -> None:
    """Puts the products of the parts in the place of the product, and those of the backward in the places of its."""
    product, args = family.product, g.operands(family.product)
    for (start, stop), cuts in family.parts.items():
        writing = Writing(graph, product)
        given = [args.left, columns(writing, args.right, start, stop)]
        for bias in args.addends:
            given.insert(0, writing.call(bias, aten.slice.Tensor, bias, 0, start, stop))
        part = writing.call(product, product.target, *given)
        family.made.append(part)
        for cut in cuts:
            cut.replace_all_uses_with(Writing(graph, cut).reshape(part, list(cut.meta["val"].shape)))
    for node in family.inputs:
        writing, (_, weight) = Writing(graph, node), node.args
        made = []
        for d, (start, stop) in zip(pieces(writing, family), family.parts, strict=True):
            rows = writing.call(node, aten.slice.Tensor, weight, 0, start, stop)
            made.append(writing.call(node, aten.mm.default, d, rows))
        family.made += made
        total = made[0]
        for other in made[1:]:
            total = writing.call(node, aten.add.Tensor, total, other)
        node.replace_all_uses_with(total)
    for node in family.weights:
        writing = Writing(graph, node)
        turned = [writing.call(d, aten.permute.default, d, [1, 0]) for d in pieces(writing, family)]
        made = [writing.call(node, aten.mm.default, d, node.args[1]) for d in turned]
        node.replace_all_uses_with(writing.call(node, aten.cat.default, made, 0))
    for node in family.sums:
        writing, rest = Writing(graph, node), node.args[2:]
        made = [writing.call(node, node.target, d, [0], *rest, **node.kwargs) for d in pieces(writing, family)]
        both = writing.call(node, aten.cat.default, made, -1)
        node.replace_all_uses_with(writing.reshape(both, list(node.meta["val"].shape)))
    graph.eliminate_dead_code()


def pieces(writing: Writing, family: Family) -> list[fx.Node]:
    """The parts' gradients, each of two dimensions."""
    assert family.joined is not None
    return [flat(writing, d) for d in family.joined.args[0]]  # type: ignore[arg-type, union-attr]


def flat(writing: Writing, node: fx.Node) -> fx.Node:
    """Of two dimensions: rows of tokens."""
    value = node.meta["val"]
    return node if value.dim() == 2 else writing.call(node, aten.reshape.default, node, [-1, value.shape[-1]])


def columns(writing: Writing, right: fx.Node, start: int, stop: int) -> fx.Node:
    """Some columns of a product's right matrix: rows of the weight, where that is a transposed view of it."""
    if right.target is aten.permute.default:
        weight = right.args[0]
        rows = writing.call(right, aten.slice.Tensor, weight, 0, start, stop)
        return writing.call(right, aten.permute.default, rows, [1, 0])
    return writing.call(right, aten.slice.Tensor, right, 1, start, stop)
