"""Pointwise ATen operations as terms: one row each. What is not in the table is opaque."""

from __future__ import annotations

import operator
from collections.abc import Callable
from fractions import Fraction

from torch import fx

from coda_inductor.core.ops import OPS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, aten_of, prims
from coda_inductor.patterns.slices import SPLITS
from coda_inductor.patterns.terms import Term, Terms, is_number

Meaning = Callable[..., Term]


def _number(t: Term) -> Fraction:
    """The value of a literal exponent. Raises ValueError for anything that is no number."""
    if not is_number(t):
        raise ValueError("an exponent that is no number")
    return t.coefficient


def _power(ts: Terms, x: Term, p: Term) -> Term:
    exponent = _number(p)
    if exponent.denominator > 8:
        raise ValueError(f"the power {exponent}")
    return ts.const(1.0) if exponent == 0 else ts.power(x, exponent)


def _sigmoid(ts: Terms, x: Term) -> Term:
    return ts.power(ts.add(ts.const(1.0), ts.fn("exp", ts.mul(ts.const(-1.0), x))), Fraction(-1))


def _divide(ts: Terms, x: Term, y: Term) -> Term:
    """x / y. Raises ValueError for the number 0, whose inverse is no number."""
    if is_number(y) and not y.coefficient:
        raise ValueError("a division by zero")
    return ts.mul(x, ts.power(y, Fraction(-1)))


def _minus(ts: Terms, x: Term, y: Term) -> Term:
    return ts.add(x, y, signs=[Fraction(1), Fraction(-1)])


def _fn(name: str) -> Meaning:
    return lambda ts, *args: ts.fn(name, *args)


FUNCTIONS = {name: tuple(map(aten_of, op.aten)) for name, op in OPS.items() if op.aten}
"""The operations of an epilogue that ATen has under a name of its own."""

# fmt: off
POINTWISE: dict[object, Meaning] = {
    aten.add.Tensor:            Terms.add,
    aten.add.Scalar:            Terms.add,
    aten.sub.Tensor:            _minus,
    aten.sub.Scalar:            _minus,
    aten.rsub.Scalar:           lambda ts, x, y: _minus(ts, y, x),
    aten.mul.Tensor:            Terms.mul,
    aten.mul.Scalar:            Terms.mul,
    aten.div.Tensor:            _divide,
    aten.div.Scalar:            _divide,
    aten.neg.default:           lambda ts, x: ts.mul(ts.const(-1.0), x),
    aten.reciprocal.default:    lambda ts, x: ts.power(x, Fraction(-1)),
    aten.sqrt.default:          lambda ts, x: ts.power(x, Fraction(1, 2)),
    aten.rsqrt.default:         lambda ts, x: ts.power(x, Fraction(-1, 2)),
    aten.square.default:        lambda ts, x: ts.power(x, Fraction(2)),
    aten.pow.Tensor_Scalar:     _power,
    aten.sigmoid.default:       _sigmoid,
    aten.silu.default:          lambda ts, x: ts.mul(x, _sigmoid(ts, x)),
    aten.relu.default:          lambda ts, x: ts.fn("max", x, ts.const(0.0)),
    prims.convert_element_type.default: lambda ts, x, _=None: x,
    **{op: _fn(name) for name, ops in FUNCTIONS.items() for op in ops},
}
# fmt: on


DROPPING: frozenset[object] = frozenset({
    aten.sigmoid.default, aten.silu.default, aten.relu.default, aten.gather.default, aten.topk.default,
    aten.sort.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
}).union(*FUNCTIONS.values())  # fmt: skip
"""Operations that may be finite of what is not, as an exponential of -inf is 0, or leave it out."""
FACTORS = (aten.mul.Tensor, aten.div.Tensor)
ARRANGING = {*SPLITS, aten.slice.Tensor, aten.select.int, aten.cat.default, operator.getitem}


def may_drop(node: fx.Node) -> bool:
    """Does the forward read the node so that what is infinite in it may leave no trace, and has a gradient of 0? Sums,
    products and attention mix it in; so does a factor of itself, as in x sigmoid(x): infinity times 0 is no number."""
    carried, droppers = [node], list[fx.Node]()
    for x in carried:
        for user in (u for u in x.users if not g.is_backward(u) and u not in carried):
            sums = g.reduction(user)
            if user.target in DROPPING or (sums is not None and sums.name not in ("sum", "mean", "var")):
                droppers.append(user)
            elif user.target in POINTWISE or user.target in ARRANGING or g.is_view(user):
                carried.append(user)
    return not all(_meets(x, carried) for x in droppers)


def _meets(node: fx.Node, carried: list[fx.Node]) -> bool:
    """Is all that the forward makes of the node, number by number, multiplied in the end with something `carried` of
    the same numbers?"""
    todo, part = [node], _part(node, carried)
    for x in todo:
        for user in (u for u in x.users if not g.is_backward(u) and u not in todo):
            others = [a for a in user.all_input_nodes if a is not x and a in carried]
            if user.target in FACTORS and any(_part(a, carried) is part for a in others):
                continue
            if user.target not in POINTWISE and not g.is_view(user):
                return False
            todo.append(user)
    return True


def _part(node: fx.Node, carried: list[fx.Node]) -> fx.Node:
    """The last of those `carried` to the node that is a part of another, as a slice; the first if none is."""
    while node is not carried[0] and node.target not in ARRANGING:
        node = next(a for a in node.all_input_nodes if a in carried)
    return node


def chain(node: fx.Node) -> list[fx.Node]:
    """What the node is computed of number by number, with numbers alone, and the steps to it: [source, ..., node]."""
    found = [node]
    while g.is_view(node) or (node.target in POINTWISE and len(node.all_input_nodes) == 1):
        node = node.all_input_nodes[0]
        found.insert(0, node)
    return found
