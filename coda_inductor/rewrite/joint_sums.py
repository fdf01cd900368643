"""A backward's sums of one gradient with two products are one sum with what they add up to: of d a and d b that of
d (a + b).

Example: a layer with an adapter behind a norm, y = r (x W + (x A) B). The norm's statistic is a sum of d (x W), and one
of the adapter's own gradient times x A. By the triangle, taken once more, that is a sum of d ((x A) B). Together both
are one of d y / r. So the backward reads y, as it does anyway, and neither product need be there by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.terms import ONE, Term
from coda_inductor.rewrite.program import Program
from coda_inductor.rewrite.separate import factors, number

NARROWER = 4
"""K of an adapter's second product is so many times less than its columns, at least."""


def widens(program: Program, con: Term) -> bool:
    """Does a product widen what it reads, as an adapter's second does?"""
    deep, wide = _sizes(program, con)
    return bool(deep and wide and NARROWER * deep <= wide)


def narrows(program: Program, t: Term) -> bool:
    """Is it a product of many features into few, as an adapter's first?"""
    deep, few = _sizes(program, t) if t.kind == "con" else (None, None)
    return bool(deep and few and NARROWER * few <= deep)


def _sizes(program: Program, con: Term) -> tuple[int | None, int | None]:
    """K of a product and its columns, if they are known: all of them, also of a lane, so that all lanes are alike."""
    if con.bit not in program.lifted.products:
        return None, None
    total = program.lifted.reading.axes.total
    return total(con.over).static, total(program.product(con).columns).static


def joint_sums(
    program: Program, sums: Sequence[Term], earlier: Callable[[Term, Term], Term], summable: Callable[[Term], bool]
) -> list[Term]:
    """The sums, of which some are one. `earlier`: a sum as it is taken one product earlier than a gradient that is
    among its factors, itself if it cannot be."""
    terms, left = program.lifted.terms, list(sums)
    for t in sums:
        red, of = _sum_of(t) if t in left else None, None
        if red is not None:
            of = next((f for f in factors(red.args[0]) if narrows(program, f) and _in_backward(program, f)), None)
        if red is None or of is None or (moved := earlier(red, of)) is red or _sum_of(moved) is None:
            continue
        moved = terms.mul(_without(program, t, red), moved)
        for other in [u for u in left if u is not t and _sum_of(u) is not None]:
            one = _one(program, other, moved)
            if one is not None and all(summable(f) for f in factors(one) if f.kind == "red"):
                left.remove(t)  # one, if it stands there twice
                left.remove(other)
                left.append(one)
                break
    return left


def _in_backward(program: Program, con: Term) -> bool:
    """Is it a product of the backward?"""
    return g.is_backward(program.product(con).node)


def _sum_of(t: Term) -> Term | None:
    """The one sum that t is, but for what multiplies it."""
    found = [f for f, p in factors(t).items() if f.kind == "red" and f.name == "sum" and p == 1]
    return found[0] if len(found) == 1 else None


def _without(program: Program, t: Term, factor: Term) -> Term:
    """t without a factor of power 1."""
    terms = program.lifted.terms
    rest = (terms.power(f, p) for f, p in factors(t).items() if f is not factor)
    return terms.mul(terms.const(number(t)), *rest)


def _one(program: Program, t: Term, u: Term) -> Term | None:
    """The sum of both, if they are of one gradient, and a value of the graph is the sum of the two others, but for a
    factor of its rows."""
    terms, reds = program.lifted.terms, (_sum_of(t), _sum_of(u))
    if reds[0] is None or reds[1] is None or reds[0].over != reds[1].over:
        return None
    inner = [factors(red.args[0]) for red in reds if red is not None]
    common = {f: p for f, p in inner[0].items() if inner[1].get(f) == p}
    others = [[f for f in some if f not in common] for some in inner]
    if not common or any(len(some) != 1 for some in others):
        return None
    weighed = []
    for total, red, some, (con,) in zip((t, u), reds, inner, others, strict=True):
        assert red is not None
        if con.kind != "con" or some[con] != ONE:
            return None
        weighed.append((con, terms.mul(_without(program, total, red), terms.const(number(red.args[0])))))
    for whole in program.sums_of_two.get(weighed[0][0], ()):
        ratios = {_ratio(program, whole, con, weight) for con, weight in weighed}
        (ratio,) = ratios if len(ratios) == 1 else (None,)
        if ratio is None or ratio.axes.intersection(reds[0].over) or ratio.hosts:
            continue
        gradient = terms.mul(*(terms.power(f, p) for f, p in common.items()))
        over = reds[0].over
        return terms.mul(ratio, terms.red("sum", terms.mul(gradient, whole), over, program.lifted.extents(over)))
    return None


def _ratio(program: Program, whole: Term, con: Term, weight: Term) -> Term | None:
    """The weight over that of the product in a sum of two."""
    terms = program.lifted.terms
    for a, w in zip(whole.args, whole.powers, strict=True):
        if factors(a).get(con) == ONE:
            return terms.mul(weight, terms.power(terms.mul(terms.const(w), _without(program, a, con)), -ONE))
    return None
