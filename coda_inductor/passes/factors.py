"""A number that multiplies a product multiplies the smallest of its three tensors: s (x B) = (s x) B.

Example: an adapter (LoRA) returns s ((x A) B), which is added to the layer's own product. As (s (x A)) B it is a
product alone, so that one accumulator adds up both, and s is in the epilogue that makes x A, sixteen columns wide. In
the backward s d, as large as the layer's result, is read by two products. With s (d B^T) and s (d^T (x A)) they read d
itself, which the layer's own products read, too.

Scores of 49155 columns, say, are divided by 16 (Granite). If they are returned, no epilogue writes rows of that length:
there, in inference, the norm before the head takes the 1 / 16.

A power of two rounds nothing; another number is rounded in another place. Not in float16, where s x may leave the range
that s (x B) does not. And only where s times a tensor lies in memory as the tensor does: the views of one are made of
the other, and a gradient may be one row that is repeated, or a part of a larger tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from coda_inductor.passes.casts import ALIGNED, Cast
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import strides
from coda_inductor.patterns.sizes import size_of
from coda_inductor.schedule.kinds import elements
from coda_inductor.write.writing import REPLACES, Writing

MULTIPLIES = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIVIDES = frozenset({aten.div.Tensor, aten.div.Scalar})
DTYPES = frozenset({torch.bfloat16, torch.float32, torch.float64})
LARGEST = 2.0**30
"""Of a number that moves: beyond, or below its inverse, what it multiplies may leave the range of float32."""
SMALLER = 4
"""How much smaller the tensor that the number moves to is, at least."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A node that is a number times another."""

    node: fx.Node
    source: fx.Node
    number: float


def move_factors(graph: fx.Graph) -> tuple[Cast, ...]:
    """Moves numbers from what products return to what they read, and from that to what they return, in place. Also
    returns those of scores, of which no Region tells."""
    moved, told = False, list[Cast]()
    for node in list(graph.nodes):
        if (x := scaled(node)) is None:
            continue
        if to_left(graph, x, of_scores):
            told.append(Cast.of(node, f"multiplied by {x.number:g} before its product", g.source_line(node)))
        else:
            moved |= to_left(graph, x, of_product) or to_results(graph, x)
    if moved or told:
        graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or ordered(node))
    return tuple(told)


def scaled(node: fx.Node) -> Scaled | None:
    """The node as a number times another, in the dtype of both."""
    if node.target not in MULTIPLIES | DIVIDES or node.kwargs:
        return None
    sources = [a for a in node.args if isinstance(a, fx.Node)]
    numbers = [float(a) for a in node.args if isinstance(a, int | float) and not isinstance(a, bool)]
    if len(sources) != 1 or len(numbers) != 1 or not 1 / LARGEST <= abs(numbers[0]) <= LARGEST:
        return None
    if node.target in DIVIDES:
        numbers = [1 / numbers[0]]
    value, source = g.tensor(node), g.tensor(sources[0])
    if value is None or source is None or value.dtype != source.dtype or value.dtype not in DTYPES:
        return None
    return Scaled(node, sources[0], numbers[0]) if strides(value) == strides(source) else None


def of_product(left: fx.Node, product: fx.Node) -> bool:
    """Does a product make what another one reads?"""
    return g.root(left, g.is_view).target in g.PRODUCTS


def of_scores(left: fx.Node, product: fx.Node) -> bool:
    """Do loops make what a product reads that has rows which no epilogue writes, if they are returned?"""
    ragged = size_of(product.meta["val"].shape[1]).over(size_of(ALIGNED)) is None
    return ragged and g.is_pointwise(g.root(left, g.is_view)) and not g.is_joint(product.graph)


def to_left(graph: fx.Graph, x: Scaled, fits: Callable[[fx.Node, fx.Node], bool]) -> bool:
    """s (l r) becomes (s l) r if l `fits`, and is much smaller, and nothing else reads l r."""
    views, product = list[fx.Node](), x.source
    while g.is_view(product) and len(product.users) == 1:
        views.append(product)
        product = product.args[0]  # type: ignore[assignment]
    if product.target is not aten.mm.default or len(product.users) != 1:
        return False
    left, right = g.operands(product).left, g.operands(product).right
    if not fits(left, product) or SMALLER * elements(left) > elements(product):
        return False
    writing = Writing(graph, product)
    made = writing.instead(product, aten.mm.default, writing.call(x.node, aten.mul.Tensor, left, x.number), right)
    stand_for(made, x.node)
    x.node.replace_all_uses_with(viewed(Writing(graph, x.node), made, views[::-1]))
    return True


def to_results(graph: fx.Graph, x: Scaled) -> bool:
    """(s d) r becomes s (d r), and l (s d) s (l d), if only products read s d, whose results are much smaller, and a
    product reads d itself."""
    read, others = products_reading(x.node)
    products = [product for product, _ in read]
    if not read or others or len(set(products)) < len(products) or not products_reading(x.source)[0]:
        return False
    if any(SMALLER * elements(product) > elements(x.node) for product in products):
        return False
    for product, views in read:
        writing, end, sides = Writing(graph, product), views[-1] if views else x.node, g.operands(product)
        other = sides.right if sides.left is end else sides.left
        # s (l d) is (s l) d. The forward of an adapter has s l already, before this product.
        known = next((y for y in other.users if y < product and scaled(y) == Scaled(y, other, x.number)), None)
        plain = viewed(writing, x.source, views)
        made = writing.instead(
            product, aten.mm.default, *(plain if a is end else known or a for a in (sides.left, sides.right))
        )
        if not g.is_weight_gradient(product):  # which is no Region, and would count as what is left
            stand_for(made, x.node)
        product.replace_all_uses_with(made if known else writing.call(x.node, aten.mul.Tensor, made, x.number))
    return True


def stand_for(made: fx.Node, gone: fx.Node) -> None:
    """Lets the report count the multiplication that is gone where it counts the product: with its Region."""
    made.meta[REPLACES] = (*made.meta[REPLACES], *gone.meta.get(REPLACES, ()), gone.name)


Read = tuple[fx.Node, list[fx.Node]]
"""A product, and the views through which it reads something."""


def products_reading(node: fx.Node) -> tuple[list[Read], bool]:
    """The products that read a node, as it is or through views, and whether anything else reads it."""
    found, others, todo = list[Read](), False, [(node, list[fx.Node]())]
    while todo:
        read, views = todo.pop()
        for user in read.users:
            if g.is_view(user) and user.args[0] is read:
                todo.append((user, [*views, user]))
            elif user.target is aten.mm.default and [*user.args].count(read) == 1:
                found.append((user, views))
            else:
                others = True
    return found, others


def viewed(writing: Writing, node: fx.Node, views: Sequence[fx.Node]) -> fx.Node:
    """The node through views of another."""
    for view in views:
        node = writing.call(view, view.target, node, *view.args[1:], **view.kwargs)
    return node
