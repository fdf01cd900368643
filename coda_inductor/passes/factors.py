"""A number that multiplies a product multiplies the smallest of its three tensors: s (x B) = (s x) B.

Example: an adapter (LoRA) returns s ((x A) B), which is added to the layer's own product. As (s (x A)) B it is a
product alone, so that one accumulator adds up both, and s is in the epilogue that makes x A, sixteen columns wide. In
the backward s d, as large as the layer's result, is read by two products. With s (d B^T) and s (d^T (x A)) they read d
itself, which the layer's own products read, too.

A power of two rounds nothing; another number is rounded in another place. Not in float16, where s x may leave the range
that s (x B) does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Memory, ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.schedule.kinds import elements
from coda_inductor.write.writing import REPLACES, Writing

MULTIPLIES = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DTYPES = frozenset({torch.bfloat16, torch.float32, torch.float64})
SMALLER = 4
"""How much smaller the tensor that the number moves to is, at least."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A node that is a number times another."""

    node: fx.Node
    source: fx.Node
    number: float


def move_factors(graph: fx.Graph, overwritten: frozenset[str] = frozenset()) -> None:
    """Moves numbers from what products return to what they read, and from that to what they return, in place; but for
    what lies in memory that is `overwritten`, which is not read later than it was."""
    found = [made for node in graph.nodes if (made := scaled(node)) is not None]
    memory = Memory(graph) if overwritten and found else None
    moved = False
    for x in found:
        safe = memory is None or memory.of(x.source) not in overwritten
        moved |= to_left(graph, x) or (safe and to_results(graph, x))
    if moved:
        graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or ordered(node))


def scaled(node: fx.Node) -> Scaled | None:
    """The node as a number times another, in the dtype of both."""
    if node.target not in MULTIPLIES:
        return None
    sources = [a for a in node.args if isinstance(a, fx.Node)]
    numbers = [float(a) for a in node.args if isinstance(a, int | float) and not isinstance(a, bool)]
    if len(sources) != 1 or len(numbers) != 1 or not math.isfinite(numbers[0]) or numbers[0] == 0:
        return None
    value, source = g.tensor(node), g.tensor(sources[0])
    alike = value is not None and source is not None and value.dtype == source.dtype and value.dtype in DTYPES
    return Scaled(node, sources[0], numbers[0]) if alike else None


def to_left(graph: fx.Graph, x: Scaled) -> bool:
    """s (l r) becomes (s l) r if a product makes l, which is much smaller, and nothing else reads l r."""
    views, product = list[fx.Node](), x.source
    while g.is_view(product) and len(product.users) == 1:
        views.append(product)
        product = product.args[0]  # type: ignore[assignment]
    if product.target is not aten.mm.default or len(product.users) != 1:
        return False
    left, right = g.operands(product).left, g.operands(product).right
    if g.root(left, g.is_view).target not in g.PRODUCTS or SMALLER * elements(left) > elements(product):
        return False
    writing = Writing(graph, product)
    made = writing.instead(product, aten.mm.default, writing.call(x.node, aten.mul.Tensor, left, x.number), right)
    stand_for(made, x.node)
    x.node.replace_all_uses_with(viewed(Writing(graph, x.node), made, views[::-1]))
    return True


def to_results(graph: fx.Graph, x: Scaled) -> bool:
    """(s d) r becomes s (d r), and l (s d) s (l d), if only products read s d, whose results are much smaller, and a
    product reads d itself."""
    read, others = readers(x.node)
    products = [product for product, _ in read]
    if not read or others or len(set(products)) < len(products) or not readers(x.source)[0]:
        return False
    if any(SMALLER * elements(product) > elements(x.node) for product in products):
        return False
    for product, views in read:
        writing, end, sides = Writing(graph, product), views[-1] if views else x.node, g.operands(product)
        other = sides.right if sides.left is end else sides.left
        known = next((y for y in other.users if y < product and scaled(y) == Scaled(y, other, x.number)), None)
        plain = viewed(writing, x.source, views)
        made = writing.instead(
            product, aten.mm.default, *(plain if a is end else known or a for a in (sides.left, sides.right))
        )
        if not g.is_weight_gradient(product):  # which never is a Region
            stand_for(made, x.node)
        product.replace_all_uses_with(made if known else writing.call(x.node, aten.mul.Tensor, made, x.number))
    return True


def stand_for(made: fx.Node, gone: fx.Node) -> None:
    """What becomes of the product becomes of the number beside it."""
    made.meta[REPLACES] = (*made.meta[REPLACES], *gone.meta.get(REPLACES, ()), gone.name)


Read = tuple[fx.Node, list[fx.Node]]
"""A product, and the views through which it reads something."""


def readers(node: fx.Node) -> tuple[list[Read], bool]:
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
