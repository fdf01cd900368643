"""The triangle: a backward's statistic, a sum of q * (Z W^T) over the row that a product is still making, is taken
where Z is made, as a sum of Z * (q W).

q W must be there already, up to per-token factors: it is what the forward computed of the operand that the backward
differentiates. What q adds to that operand (a mean, a shift) is of rank one, v * g, and its g W a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns.terms import ONE, Term, Terms
from coda_inductor.rewrite.beside import beside
from coda_inductor.rewrite.program import Program
from coda_inductor.rewrite.separate import Factors, factors, rank_one
from coda_inductor.rewrite.sources import statistics


def triangle(program: Program, red: Term, adjoint: bool) -> Term:
    """sum_k q (Z W^T) = sum_n Z (q W) for every product in red's argument, if the epilogues that make Z can take the
    sums, or they can be taken beside what makes Z; else red as it is. `adjoint`: may that law be used?"""
    terms, x, over = program.lifted.terms, red.args[0], red.over
    if not x.hosts:
        return red
    powers = factors(x)
    found = [(f, cons) for f, p in powers.items() if p == 1 and (cons := _summed_products(f, over))]
    if len(found) != 1:
        return red
    factor, cons = found[0]
    q = {f: p for f, p in powers.items() if f is not factor}
    number = x.coefficient if x.kind == "mul" else ONE
    out = []
    for con, w in cons:
        taken = _taken(program, q, con, over, adjoint)
        if taken is None:
            return red
        out += [terms.mul(terms.const(w * number), t) for t in taken]
    return terms.add(*out)


def _taken(program: Program, q: Factors, con: Term, over: tuple[int, ...], adjoint: bool) -> list[Term] | None:
    """sum over `over` of q times the product `con`, as sums over con's own contraction."""
    terms, (z, weight) = program.lifted.terms, con.args
    vector = rank_one(terms, q, over)
    for part in [Part(None, *vector)] if vector else _parts(program, q, weight, over):
        sums = list[Term]()
        images = part.images(program, weight, over)
        for scale, image in images:
            total = terms.red("sum", terms.mul(z, image), con.over, program.lifted.extents(con.over))
            made = all(_summable(program, s) for s in statistics(total))
            found = total if made else beside(program, con, image, adjoint)
            sums += [terms.mul(scale, found)] if found is not None else []
        if len(sums) == len(images):
            return sums
    return None


@dataclass(frozen=True, slots=True)
class Part:
    """q as scale * (the operand of the product `forward`) + v * g: `forward` and scale may be None, g 1."""

    forward: tuple[Term, Term] | None
    v: Term | None
    g: Term | None

    def images(self, program: Program, weight: Term, over: tuple[int, ...]) -> list[tuple[Term, Term]]:
        """(per-token factor, q W) of the parts."""
        terms, out = program.lifted.terms, [self.forward] if self.forward else []
        if self.v is not None and self.g is not None:
            out.append((self.v, terms.red("sum", terms.mul(self.g, weight), over, program.lifted.extents(over))))
        return out


def _parts(program: Program, q: Factors, weight: Term, over: tuple[int, ...]) -> list[Part]:
    """The ways to write q by the operand of a product with the same weight."""
    terms, out = program.lifted.terms, []
    for forward in program.products_of.get((weight, over), ()):
        f = factors(forward.args[0])
        number = terms.const(1 / forward.args[0].coefficient if forward.args[0].kind == "mul" else ONE)
        scale = _divided(terms, q, f)
        if not scale.axes.intersection(over):
            out.append(Part((terms.mul(number, scale), forward), None, None))
            continue
        for a in (a for a in q if q[a] == 1 and a.axes.intersection(over) and a not in f):
            for b in (b for b in f if f[b] == 1 and b.axes.intersection(over) and b not in q):
                d = _difference(terms, a, b)
                rest = {t: p for t, p in q.items() if t is not a}
                scale = _divided(terms, rest, {t: p for t, p in f.items() if t is not b})
                vector = rank_one(terms, rest, over)
                if vector and not d.axes.intersection(over) and not scale.axes.intersection(over):
                    out.append(Part((terms.mul(number, scale), forward), terms.mul(d, vector[0]), vector[1]))
    return out


def _divided(terms: Terms, a: Factors, b: Factors) -> Term:
    """a / b without the factors that they share; the caller looks at what it varies over."""
    powers = {f: a.get(f, Fraction(0)) - b.get(f, Fraction(0)) for f in a | b}
    return terms.mul(*(terms.power(f, p) for f, p in powers.items() if p))


def _difference(terms: Terms, a: Term, b: Term) -> Term:
    """a - b without the summands that they share."""
    weights: dict[Term, Fraction] = {}
    number = Fraction(0)
    for t, sign in ((a, ONE), (b, -ONE)):
        number += sign * (t.coefficient if t.kind == "add" else 0)
        for s, w in zip(t.args, t.powers, strict=True) if t.kind == "add" else [(t, ONE)]:
            weights[s] = weights.get(s, Fraction(0)) + sign * w
    return terms.add(terms.const(number), *weights, signs=[ONE, *weights.values()])


def _summable(program: Program, s: Term) -> bool:
    """Can an epilogue take the sum s, or is it one over weights alone?"""
    if not s.deps:
        return True
    try:
        space = program.space(s.args[0])
        program.check(s.args[0], space)
    except Unsupported:
        return False
    return set(s.over) == set(space.columns) and s.axes <= set(space.rows)


def _summed_products(t: Term, over: tuple[int, ...]) -> list[tuple[Term, Fraction]]:
    """t as a weighted sum of products whose columns are `over`, flattened; empty if it is none."""
    if t.kind == "con":
        return [(t, ONE)] if set(over) <= t.args[1].axes else []
    if t.kind != "add" or t.coefficient:
        return []
    parts = [[(c, w * v) for c, v in _summed_products(a, over)] for a, w in zip(t.args, t.powers, strict=True)]
    return [p for part in parts for p in part] if all(parts) else []
