"""A gradient that asks for a sign of what is dropped out asks for that of what is left.

With d = m c h, where m is 0 or 1 and c a number, a gradient of h is m c g where h is positive, and 0 elsewhere: it asks
for the sign of h and for m. But d is positive just where h is and m is 1. So it is c g where d is positive. The next
product reads d, and its weight's gradient does once more: neither signs nor m are kept for the backward. Of finite
values it is the same number; c is no less than 1, so that no d vanishes where h does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.write.linear import CONSTANTS
from coda_inductor.write.writing import Writing

MULTIPLIES = (aten.mul.Tensor, aten.mul.Scalar)
SAME = (aten.clone.default, aten.alias.default, aten.detach.default)
"""Operations whose result is what they are given, element by element."""
CHOSEN = {aten.le.Scalar: (1, 2), aten.gt.Scalar: (2, 1)}
"""Comparisons with 0 to the places, among the arguments of the choice, of the 0 and of the gradient."""


def read_dropped(graph: fx.Graph) -> None:
    """Lets such gradients read what is left, in place."""
    written = False
    for choice in graph.find_nodes(op="call_function", target=aten.where.self):
        sign = choice.args[0]
        if not g.is_backward(choice) or sign.target not in CHOSEN or sign.args[1] != 0:
            continue
        zero, place = CHOSEN[sign.target]
        value, gradient = same(sign.args[0]), choice.args[place]
        if not is_zero(choice.args[zero]) or not isinstance(gradient, fx.Node) or not alike(gradient, value):
            continue
        masks = {x for x in factors(gradient)[0] if is_mask(x) and alike(x, value)}
        if (found := left(value, masks)) is None:
            continue
        (dropped, mask), write = found, Writing(graph, choice)
        if dropped.target is not aten.mul.Tensor or mask not in dropped.args:
            dropped = masked_last(graph, dropped, value, mask)
        scaled, arguments = unmasked(write, gradient, mask), [*choice.args]
        arguments[0], arguments[place] = write.call(sign, sign.target, dropped, 0), scaled
        choice.args, written = tuple(arguments), True
    if written:
        graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or ordered(node))


def masked_last(graph: fx.Graph, node: fx.Node, value: fx.Node, mask: fx.Node) -> fx.Node:
    """The node as the mask times the rest: an epilogue reads all of it, and not what is not scaled yet."""
    write = Writing(graph, node)
    scaled = write.call(node, aten.mul.Tensor, value, factors(node, value)[1])
    new = write.call(node, aten.mul.Tensor, mask, scaled)
    node.replace_all_uses_with(new)
    return new


def left(value: fx.Node, masks: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """What is left of the value, and by which mask: what the forward makes of it by that and a number, and a product
    reads."""
    todo = [value]
    for node in todo:
        made = (u for u in node.users if u.target in (*MULTIPLIES, *SAME) and not g.is_backward(u) and alike(u, value))
        todo += [user for user in made if user not in todo]
        inside, number = factors(node, value)
        mask = next((m for m in masks if len(inside) == 2 and {*inside} == {m, value}), None)
        if mask is not None and 1 <= number < math.inf and multiplied(node):
            return node, mask
    return None


def factors(node: fx.Node, whole: fx.Node | None = None) -> tuple[list[fx.Node], float]:
    """What the node multiplies element by element, and the number beside it; `whole` is not looked into. Bools are
    meant as they are, before they are cast."""
    found, number, todo = list[fx.Node](), 1.0, [node]
    while todo:
        x = todo.pop()
        if x is not whole and (x.target in SAME or x.target in MULTIPLIES):
            todo += [a for a in x.args[:2] if isinstance(a, fx.Node)]
            number *= math.prod(a for a in x.args[:2] if isinstance(a, int | float))
        else:
            found.append(x.args[0] if g.is_cast(x) and is_mask(x.args[0]) else x)  # type: ignore[arg-type]
    return found, number


def unmasked(write: Writing, node: fx.Node, mask: fx.Node) -> fx.Node | float:
    """What the node would be if the mask, which is one of its factors, were 1 everywhere."""
    if node is mask or (g.is_cast(node) and node.args[0] is mask):
        return 1.0
    i = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and mask in factors(a)[0])
    inner = unmasked(write, node.args[i], mask)  # type: ignore[arg-type]
    if node.target in SAME:
        return write.call(node, node.target, inner, **node.kwargs) if isinstance(inner, fx.Node) else inner
    other: Any = node.args[1 - i]
    if isinstance(inner, fx.Node):
        return write.call(node, node.target, inner, other)
    if not isinstance(other, fx.Node):
        return float(inner * other)
    return write.call(node, aten.mul.Tensor, other, inner) if inner != 1 else other


def same(node: Any) -> fx.Node:
    """What the node is, element by element."""
    while node.target in SAME:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def is_mask(node: object) -> bool:
    value = g.tensor(node)
    return value is not None and value.dtype == torch.bool


def is_zero(node: object) -> bool:
    """Is it the constant?"""
    if not isinstance(node, fx.Node) or node.target not in CONSTANTS:
        return False
    return bool(node.args[0 if node.target is aten.scalar_tensor.default else 1] == 0)


def alike(node: fx.Node, value: fx.Node) -> bool:
    """Are both of one shape, and of one dtype unless a mask?"""
    return g.sizes(node) == g.sizes(value) and (is_mask(node) or g.tensor(node).dtype == g.tensor(value).dtype)  # type: ignore[union-attr]


def multiplied(node: fx.Node) -> bool:
    """Does a product of the forward read the node, or a view of it?"""
    users = g.reached(node.users, lambda user: user.users if g.is_view(user) else ())
    return any(user.target in g.PRODUCTS and not g.is_backward(user) for user in users)
