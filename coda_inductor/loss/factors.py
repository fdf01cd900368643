"""The factors of a gradient's rows, where the gradient t of the loss is 1.

A z-loss has (a + b) softmax - a onehot, with b of each row's logsumexp. What is stored at the target needs the shares
a / (a + b) and b / (a + b), in the forward, before t is known. Both are proportional to t (write/linear.py), so they
are made with 1 in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor, fx

from coda_inductor.loss.parts import NotRead, Parts
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.write.linear import Degree, NotLinear, degree, product

Call = Callable[..., fx.Node]


def tangent_of(parts: Parts) -> fx.Node | None:
    """The gradient of the loss, to which all terms are proportional; None if none depends on one. Raises NotRead."""
    late = _late(parts)
    found = [n for n in late if g.is_tangent(n)]
    if len(found) > 1 or any(n.meta["val"].dim() for n in found):
        raise NotRead(
            "its softmax and one-hot have different factors, of several gradients or of one that is no number"
        )
    degrees: dict[fx.Node, Degree | tuple[Degree, ...]] = dict.fromkeys(found, 1)
    try:
        for node in sorted(late - {*found}):
            degrees[node] = degree(node, degrees)
        of_terms = {product(degrees.get(row, 0) for row in p.rows) for p in parts}  # type: ignore[misc]
    except NotLinear as why:
        raise NotRead(f"its softmax and one-hot have different factors, with {why} in the loss's gradient") from why
    if of_terms != {len(found)}:
        raise NotRead("its softmax and one-hot have different factors, of which some have the loss's gradient")
    return found[0] if found else None


def _late(parts: Parts) -> set[fx.Node]:
    """What of the terms' factors depends on a gradient of a result."""
    rows = [row for part in parts for row in part.rows]
    read = g.reached(rows, lambda n: n.all_input_nodes)
    behind = g.reached([n for n in read if g.is_tangent(n)], lambda n: n.users)
    return {*read} & {*behind}


def at_one(call: Call, parts: Parts, like: Tensor) -> fx.Node:
    """The sum of the terms' factors where the loss's gradient is 1, in the forward, [rows or 1, 1], as `like`."""
    late, made = _late(parts), dict[fx.Node, fx.Node]()

    def copied(node: fx.Node) -> fx.Node:
        if node not in late:
            return node
        if node not in made:
            if g.is_tangent(node):
                value = node.meta["val"]
                made[node] = call(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
            else:
                made[node] = call(node.target, *fx.map_arg(node.args, copied), **fx.map_arg(node.kwargs, copied))
        return made[node]

    return added(call, parts, like, copied)


def added(call: Call, parts: Parts, like: Tensor, of: Callable[[fx.Node], fx.Node] = lambda n: n) -> fx.Node:
    """The sum of the terms' factors, [rows or 1, 1], of values that `of` makes, in the dtype of `like`."""

    def term(number: float, rows: Iterable[fx.Node]) -> fx.Node:
        values = [_column(call, of(row), like.dtype) for row in rows]
        if not values:
            return call(aten.full.default, [1, 1], number, dtype=like.dtype, device=like.device)
        made = reduce(lambda a, b: call(aten.mul.Tensor, a, b), values)
        return made if number == 1 else call(aten.mul.Tensor, made, number)

    return reduce(lambda a, b: call(aten.add.Tensor, a, b), [term(p.number, p.rows) for p in parts])


def _column(call: Call, row: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Values of the rows, or one for all of them, beside a matrix."""
    value = row.meta["val"]
    made = call(aten.reshape.default, row, [value.numel(), 1])
    return made if value.dtype == dtype else call(prims.convert_element_type.default, made, dtype)


def shares(call: Call, hot: fx.Node, rest: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Of softmax * (hot + rest) - onehot * hot: hot + rest, which is no zero unless both are, and the shares of both.
    `dtype`: in which the quotient is stored, at the target. Where the sum is zero it is a rest too small to be seen."""
    value, whole = rest.meta["val"], call(aten.add.Tensor, hot, rest)
    zero, one = (call(aten.full.default, [], n, dtype=value.dtype, device=value.device) for n in (0.0, 1.0))
    least = call(aten.mul.Tensor, rest, torch.finfo(dtype).eps / 16)
    whole = call(aten.where.self, call(aten.eq.Tensor, whole, zero), least, whole)
    divisor = call(aten.where.self, call(aten.eq.Tensor, whole, zero), one, whole)
    return whole, call(aten.div.Tensor, hot, divisor), call(aten.div.Tensor, rest, divisor)
