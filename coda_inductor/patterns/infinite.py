"""What becomes of infinite values, as of a score whose bias is -inf: sums, products and attention mix them in, and an
exponential, a maximum or a choice can drop them. What is dropped has a gradient of 0.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.pointwise import FUNCTIONS, POINTWISE
from coda_inductor.patterns.slices import SPLITS

DROPPING: frozenset[object] = frozenset({
    aten.sigmoid.default, aten.silu.default, aten.relu.default, aten.gather.default, aten.topk.default,
    aten.sort.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
}).union(*FUNCTIONS.values())  # fmt: skip
"""Operations that may be finite of what is not, or leave it out."""
MIXING = frozenset({"sum", "mean", "var"})
"""Reductions whose result is infinite, or no number, if one of their values is."""
ARRANGING = frozenset({*SPLITS, aten.slice.Tensor, aten.select.int, aten.cat.default, operator.getitem})
"""Operations whose numbers are those of what they read, or some of them."""
TIMES = frozenset({aten.mul.Tensor, aten.div.Tensor})


def may_drop(node: fx.Node) -> bool:
    """Does the forward read the node so that what is infinite in it may leave no trace? Not in x sigmoid(x), a factor
    of itself: infinity times 0 is no number, in eager as well."""
    carried = g.reached([node], lambda x: filter(_carries, _readers(x)))
    droppers = {user for x in carried for user in _readers(x) if _drops(user)}
    return not all(_meets(x, node, carried) for x in droppers)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The operations of the forward that read it."""
    return (user for user in node.users if not g.is_backward(user))


def _drops(node: fx.Node) -> bool:
    found = g.reduction(node)
    return node.target in DROPPING or (found is not None and found.name not in MIXING)


def _carries(node: fx.Node) -> bool:
    """Is its result infinite, or no number, where what it reads is?"""
    return not _drops(node) and (node.target in POINTWISE or node.target in ARRANGING or g.is_view(node))


def _meets(dropper: fx.Node, first: fx.Node, carried: set[fx.Node]) -> bool:
    """Is all that is made of the dropper's result, number by number, multiplied in the end with the same numbers of
    `first`, as `carried`?"""
    todo, part = [dropper], _part(dropper, first, carried)
    for x in todo:
        for user in _readers(x):
            others = carried.intersection(user.all_input_nodes) - {x}
            if user.target in TIMES and any(_part(a, first, carried) is part for a in others):
                continue
            if user.target not in POINTWISE and not g.is_view(user):
                return False
            todo += [] if user in todo else [user]
    return True


def _part(node: fx.Node, first: fx.Node, carried: set[fx.Node]) -> fx.Node:
    """The part of `first` whose numbers the node is computed of: the last slice, say, on the way; else `first`."""
    while node is not first and node.target not in ARRANGING:
        node = next(a for a in node.all_input_nodes if a in carried)
    return node
