"""Separable form: a value as a sum of (late vector) * (what its producer's epilogue can make).

All that the laws need from algebra: which factors and summands wait for a sum over the value's own row, and the
distribution that brings them to the outside. Nothing here decides anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from coda_inductor.patterns.terms import ONE, Term, Terms

Factors = dict[Term, Fraction]
MOST = 512  # summands: of more, as where each step of a long chain reads the two before it, a value stays whole


def factors(t: Term) -> Factors:
    """The factors of t with their powers, without its number."""
    return dict(zip(t.args, t.powers, strict=True)) if t.kind == "mul" else {t: ONE}


def number(t: Term) -> Fraction:
    """The number that t is multiplied by."""
    return t.coefficient if t.kind == "mul" else ONE


def addends(t: Term) -> list[tuple[Term, Fraction]]:
    """What t adds up with its weights, but for a number; t itself if it is no sum."""
    return list(zip(t.args, t.powers, strict=True)) if t.kind == "add" else [(t, ONE)]


def rank_one(terms: Terms, q: Factors, over: tuple[int, ...]) -> tuple[Term, Term] | None:
    """q as v * g, v not varying over `over` and g over nothing else; None if a factor does both."""
    inside = [(f, p) for f, p in q.items() if f.axes.intersection(over)]
    if any(f.hosts or f.axes - set(over) for f, _ in inside):
        return None
    g = terms.mul(*(terms.power(f, p) for f, p in inside))
    return terms.mul(*(terms.power(f, p) for f, p in q.items() if not f.axes.intersection(over))), g


@dataclass(frozen=True, slots=True)
class Part:
    """One summand, late * rest; `late` does not vary over the summed axes."""

    late: Term
    rest: Term


def is_late(t: Term, makers: int, over: Iterable[int]) -> bool:
    """Does t wait for the products `makers` by way of a reduction, without varying over the axes `over`?"""
    return bool(t.deps & makers) and not t.hosts & makers and not t.axes.intersection(over)


def separate(terms: Terms, x: Term, makers: int, over: tuple[int, ...]) -> list[Part]:
    """x, which the products `makers` make, as a sum of parts; parts of one late factor are one part."""
    parts: dict[Term, list[Term]] = {}
    summands = list(itertools.islice(_summands(terms, x, makers, over), MOST + 1))
    for s in summands if len(summands) <= MOST else [x]:
        late, rest = terms.const(ONE), terms.const(ONE)
        factors = zip(s.args, s.powers, strict=True) if s.kind == "mul" else [(s, ONE)]
        for f, p in factors:
            if is_late(f, makers, over):
                late = terms.mul(late, terms.power(f, p))
            else:
                rest = terms.mul(rest, terms.power(f, p))
        number = terms.const(s.coefficient) if s.kind == "mul" else terms.const(ONE)
        parts.setdefault(late, []).append(terms.mul(number, rest))
    return [Part(late, terms.add(*rests)) for late, rests in parts.items()]


def _summands(terms: Terms, x: Term, makers: int, over: tuple[int, ...]) -> Iterator[Term]:
    """The summands of x, distributed only as far as something late is added to something that is not."""
    if is_late(x, makers, over) or not _adds_late(x, makers, over):
        yield x
        return
    if x.kind == "add":
        if x.coefficient:
            yield terms.const(x.coefficient)
        for a, w in zip(x.args, x.powers, strict=True):
            for s in _summands(terms, a, makers, over):
                yield terms.mul(terms.const(w), s)
        return
    i = next(i for i, a in enumerate(x.args) if _adds_late(a, makers, over) and x.powers[i] == 1)
    outside = terms.const(x.coefficient)
    for j, (a, p) in enumerate(zip(x.args, x.powers, strict=True)):
        outside = outside if j == i else terms.mul(outside, terms.power(a, p))
    for s in _summands(terms, x.args[i], makers, over):
        yield from _summands(terms, terms.mul(outside, s), makers, over)


def _adds_late(x: Term, makers: int, over: tuple[int, ...]) -> bool:
    """Is there a sum in x, reached through products of first powers, that mixes late summands with others?"""
    seen, todo = set[Term](), [x]
    while todo:
        t = todo.pop()
        if t in seen or not t.hosts & makers:
            continue
        seen.add(t)
        if t.kind == "add":
            if any(is_late(f, makers, over) for a in t.args for f in (a, *(a.args if a.kind == "mul" else ()))):
                return True
            todo += t.args
        elif t.kind == "mul":
            todo += [a for a, p in zip(t.args, t.powers, strict=True) if p == 1]
    return False


def total(terms: Terms, *vectors: Term) -> Term:
    """The sum of per-token vectors, flat, so that what cancels does."""
    args, signs, number = list[Term](), list[Fraction](), Fraction(0)
    todo = [(v, ONE) for v in vectors]
    while todo:
        v, w = todo.pop()
        if v.kind == "mul" and len(v.args) == 1 and v.powers == (ONE,) and v.args[0].kind == "add":
            v, w = v.args[0], w * v.coefficient
        if v.kind == "add":
            number += w * v.coefficient
            todo += [(a, w * p) for a, p in zip(v.args, v.powers, strict=True)]
        else:
            args.append(v)
            signs.append(w)
    return terms.add(terms.const(number), *args, signs=[ONE, *signs], merge=True)
