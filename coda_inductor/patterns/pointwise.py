"""Pointwise ATen operations as terms: one row each. What is not in the table is opaque."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from torch import fx

from coda_inductor.core.ops import OPS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, aten_of, prims
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


def chain(node: fx.Node) -> list[fx.Node]:
    """What the node is computed of number by number, with numbers alone, and the steps to it: [source, ..., node]."""
    found = [node]
    while g.is_view(node) or (node.target in POINTWISE and len(node.all_input_nodes) == 1):
        node = node.all_input_nodes[0]
        found.insert(0, node)
    return found
