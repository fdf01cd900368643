"""Deriving: the laws applied to every term, on demand. Only what is late is rewritten.

A product and its epilogue are one moment; a sum over that epilogue is known just after. A matrix operand that needs
such a sum of its own producer is late: it could only be made by a pass of its own. Bilinearity takes the late factors
out of the product, and the gauge makes all products that read the operand agree on the one scaling that is stored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import fx

from coda_inductor.core.dtypes import NARROW
from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.terms import ONE, Term, Terms
from coda_inductor.rewrite.beside import affine
from coda_inductor.rewrite.joint_sums import narrows, widens
from coda_inductor.rewrite.laws import BILINEARITY, GAUGE, MOMENTS, RELU, ROOT, SHIFT, TRIANGLE
from coda_inductor.rewrite.program import Program
from coda_inductor.rewrite.separate import Part, factors, is_late, number, separate, total
from coda_inductor.rewrite.sources import statistics
from coda_inductor.rewrite.triangle import is_relu, triangle


@dataclass(frozen=True, slots=True)
class Firing:
    """One use of a law: the terms before and after are equal, which tests check in float64. `product` is the bit of the
    product that was rewritten, -1 where it was a sum."""

    law: str
    before: Term
    after: Term
    product: int


def derive(program: Program, laws: frozenset[str]) -> list[Firing]:
    """Fills program.new and program.nodes; returns what fired. `laws` are the names of those that may."""
    firings: list[Firing] = []
    held: dict[Term, list[fx.Node]] = defaultdict(list)
    for node, term in program.lifted.term.items():
        held[term].append(node)
    readers: dict[Term, int] = defaultdict(int)
    terms = program.lifted.terms
    wholes = {program.lifted.term[p.node] for p in program.lifted.products.values()} | program.lifted.scaled
    by_sign = {t.args[0] for t in program.lifted.read if t.kind == "fn" and t.name == "if_nonpositive"}
    for t in program.lifted.read:
        if t.kind == "con":
            readers[t.args[0]] |= t.hosts
    squared = _squared(program, by_sign) if ROOT.name in laws else set[Term]()
    for t in program.lifted.read:
        before = after = terms.rebuild(t, [program.new[a] for a in t.args]) if t.args else t
        law = BILINEARITY.name
        if t.kind == "con" and law in laws and not _undeferred(program, readers[t.args[0]], laws):
            after = defer(program, before)
        elif t.kind == "red" and t.name == "sum":
            law, after = moments(program, before, laws)
            if after is before and TRIANGLE.name in laws:
                law, after = TRIANGLE.name, triangle(program, before, laws)
                program.read_plain(_read(after) if after is not before else set())
            program.sums[before.args[0], t.over] = after
        for con in program.accumulators(after) if t.kind == "con" else ():
            program.products_of.setdefault((con.args[1], con.over), []).append(con)
            product = program.lifted.products.get(con.bit)
            if product is not None and g.is_backward(product.node) and g.is_weight(product.w):
                program.gradients.add(con.args[0])
        firings += [Firing(*turned, -1) for turned in program.turned]
        program.turned.clear()
        if after is not before:
            firings.append(Firing(law, before, after, t.bit if t.kind == "con" else -1))
        if t in squared and is_relu(after):
            program.squares[after] = terms.power(after, Fraction(2))
            firings.append(Firing(ROOT.name, after, terms.fn("sqrt", program.squares[after]), -1))
        program.new[t] = after
        if after.kind == "add" and len(after.args) == 2 and not after.coefficient:
            for con in (f for a in after.args for f, p in factors(a).items() if f.kind == "con" and p == 1):
                program.sums_of_two.setdefault(con, []).append(after)
        behind_relu = t in by_sign and is_relu(after) and _of_one(program, after.args[0], laws)
        if behind_relu or (t in wholes and _plain(after)):
            program.wholes.add(after)
        program.nodes.setdefault(after, []).extend(held[t])
    return firings


def _squared(program: Program, wanted: set[Term]) -> set[Term]:
    """Those of which products read the squares, and none reads them; not in float16, where small squares vanish."""
    operands = dict[Term, set[torch.dtype]]()
    for t in program.lifted.read:
        if t.kind == "con" and (product := program.lifted.products.get(t.bit)) is not None:
            operands.setdefault(t.args[0], set()).add(product.x.meta["val"].dtype)
    squares = {t: operands.get(program.lifted.terms.power(t, Fraction(2)), {torch.float16}) for t in wanted}
    return {t for t, dtypes in squares.items() if torch.float16 not in dtypes and t not in operands}


def _of_one(program: Program, t: Term, laws: frozenset[str]) -> bool:
    """Is t what a product stores, or, where no sum need ask for that product, one by per-token factors and with what
    varies over rows or columns alone?"""
    accs = program.accumulators(t)
    if t in program.wholes or len(accs) != 1 or accs[0].bit not in program.lifted.products or RELU.name not in laws:
        return t in program.wholes
    return affine(program.lifted.terms, t, accs[0], program.columns(accs[0])) is not None


def _plain(t: Term) -> bool:
    """Is t a product, with scales and its bias at most? (Where roundings are kept, a bias and
    its sum with a product are rounded.)"""
    if t.kind == "fn" and t.name in NARROW.values():
        return t.args[0].kind == "add" and _plain(t.args[0])
    if t.kind == "add":
        biases = [a.args[0] if a.kind == "fn" and a.name in NARROW.values() else a for a in t.args]
        return all(a.kind == "leaf" or (a.kind != "add" and _plain(a)) for a in biases)
    return t.kind == "con" or (t.kind == "fn" and t.name == "scaled")


def _read(sums: Term) -> set[Term]:
    """The products that these sums are taken of."""
    return {f for s in statistics(sums) for f in factors(s.args[0]) if f.kind == "con"}


def _undeferred(program: Program, readers: int, laws: frozenset[str]) -> bool:
    """Must this operand stay as it is? By the gauge all its readers agree; without it, deferral needs a single
    reader."""
    if GAUGE.name not in laws and readers.bit_count() > 1:
        return True
    return any(readers >> bit & 1 for bit in program.undeferred)


def defer(program: Program, con: Term) -> Term:
    """sum_k (r x + v g)_k w_k = r sum_k x_k w_k + v sum_k g_k w_k for late r and v, if x can then leave its
    producer's epilogue."""
    terms, (x, w) = program.lifted.terms, con.args
    makers = program.makers(x)
    if program.narrow(con):
        return con
    parts = separate(terms, x, makers, con.over)
    tiles = [p for p in parts if p.rest.hosts]
    vectors = [p for p in parts if not p.rest.hosts]
    if not any(is_late(p.late, makers, con.over) for p in parts):
        return _early(program, con)
    if len(tiles) != 1:
        return con
    if any(p.rest.axes - set(con.over) for p in vectors):
        return con
    tile, vectors = _shifted(program, tiles[0], vectors, con.over)
    try:
        space = program.space(tile.rest)
        program.check(tile.rest, space)
        product = program.product(con)
        if product.rows != space.rows or program.lifted.reading.roots(product.x)[-1] != space.columns:
            raise Unsupported(f"the operand of {product.node} is laid out otherwise than its producer's tile")
        for part in (tile, *vectors):
            _check_statistics(program, part.late, makers)
    except Unsupported:
        return con
    out = terms.mul(tile.late, terms.con(tile.rest, w, con.over, con.bit, con.lanes))
    extents = program.lifted.extents(con.over)
    return terms.add(
        out, *(terms.mul(p.late, terms.red("sum", terms.mul(p.rest, w), con.over, extents)) for p in vectors)
    )


def _early(program: Program, con: Term) -> Term:
    """(r x) W = r (x W) of a narrow x, as an adapter's, and an r that its producer knows: the layer's own product,
    which r leaves too, and this one are then one sum."""
    terms, (x, w) = program.lifted.terms, con.args
    if x.kind != "mul" or not widens(program, con):
        return con
    try:
        product = program.product(con)
        outside = [(f, p) for f, p in factors(x).items() if f.deps and f.axes and f.axes <= set(product.rows)]
        inside = [f for f, p in factors(x).items() if (f, p) not in outside]
        if not outside or len(inside) != 1 or not narrows(program, inside[0]):
            return con
        r = terms.mul(*(terms.power(f, p) for f, p in outside))
        rest = terms.mul(x, terms.power(r, Fraction(-1)))
        space = program.space(rest)
        program.check(rest, space)
        program.check(r, space)
        columns = program.lifted.reading.roots(product.x)[-1]  # of the operand, as it lies
        if (product.rows, columns) != (space.rows, space.columns):
            return con
    except Unsupported:
        return con
    return terms.mul(r, terms.con(rest, w, con.over, con.bit, con.lanes))


def _check_statistics(program: Program, late: Term, makers: int) -> None:
    """Raises Unsupported unless every late statistic is a sum over the row of one product, which its epilogue can
    take."""
    for s in statistics(late):
        if s.deps & makers:
            own = program.space(s.args[0])
            program.check(s.args[0], own)
            if s.name != "sum" or set(s.over) != set(own.columns) or not s.axes <= set(own.rows):
                raise Unsupported("the statistic is no sum over the row of one product")


def _shifted(program: Program, tile: Part, vectors: list[Part], over: tuple[int, ...]) -> tuple[Part, list[Part]]:
    """r g h + v g = r g (h - c) + (v + r c) g: stored near zero, which keeps 8 bits of a bfloat16 for what matters."""
    terms = program.lifted.terms
    bases = list(tile.rest.args) if tile.rest.kind == "mul" else [tile.rest]
    h = next((f for f in bases if f.hosts), None)
    if h is None or (tile.rest.kind == "mul" and tile.rest.powers[bases.index(h)] != 1):
        return tile, vectors
    gain = terms.const(ONE)
    for f, p in zip(tile.rest.args if tile.rest.kind == "mul" else (), tile.rest.powers, strict=False):
        gain = gain if f is h else terms.mul(gain, terms.power(f, p))
    scale = number(tile.rest)
    mean = next((v for v in vectors if _unit(terms, v.rest)[1] is gain), None)
    c = None if mean is None else shift(program, h, over)
    if c is None or mean is None:
        return tile, vectors
    quotient = _quotient(terms, mean.late, tile.late)
    if quotient is None:
        return tile, vectors
    away = total(terms, terms.mul(quotient, terms.const(_unit(terms, mean.rest)[0] / scale)), c)
    scaled = terms.mul(gain, terms.const(scale))
    moved = Part(terms.mul(tile.late, away), scaled)
    return Part(tile.late, terms.mul(scaled, minus(terms, h, c))), [moved if v is mean else v for v in vectors]


def _quotient(terms: Terms, a: Term, b: Term) -> Term | None:
    """a / b where b's factors are among a's."""
    left = list(factors(a).items())
    for f in factors(b).items():
        if f not in left:
            return None
        left.remove(f)
    return terms.mul(terms.const(number(a) / number(b)), *(terms.power(f, p) for f, p in left))


def _unit(terms: Terms, t: Term) -> tuple[Fraction, Term]:
    """t as a number times a term without one."""
    if t.kind != "mul" or not t.coefficient:
        return ONE, t
    return t.coefficient, terms.mul(t, terms.const(1 / t.coefficient))


def minus(terms: Terms, h: Term, c: Term) -> Term:
    """h - c, with h kept as the one stored value that it is."""
    return h if c.kind == "mul" and c.coefficient == 0 else terms.add(h, c, signs=[ONE, -ONE])


def shift(program: Program, h: Term, over: tuple[int, ...]) -> Term | None:
    """A per-token vector that is known before h's own product has run and lies near h's mean over `over`.

    h is a residual stream: something earlier plus what the product adds. Its earlier part's mean, where that is
    known, is the shift; a part that was normalised has a mean near 0. None: nothing is known of the mean.
    """
    makers = program.makers(h)
    early = [a for a in _summed_tiles(h, over) if not a.deps & makers]
    c = _near_mean(program, early[0], over, makers) if len(early) == 1 else None
    return None if c is None else total(program.lifted.terms, c, *_added_means(program, h, over, makers))


def _added_means(program: Program, h: Term, over: tuple[int, ...], makers: int) -> list[Term]:
    """The means over `over` of the biases that the stream h adds up, if it is kept in float32: where eager rounds the
    stream, that error is as large as the one of storing it far from its mean, but a wide one it does not round."""
    dtypes = {g.tensor(node).dtype for node in program.nodes.get(h, ())}  # type: ignore[union-attr]
    if dtypes != {torch.float32}:
        return []
    terms, extents = program.lifted.terms, program.lifted.extents(over)
    count, means, todo = terms.const(Fraction(1, math.prod(extents.values()))), list[Term](), [(h, ONE)]
    while todo:
        t, w = todo.pop()
        if t.kind == "add" and t.deps & makers:
            todo += [(a, w * p) for a, p in zip(t.args, t.powers, strict=True)]
        elif t.axes and t.axes <= set(over) and not t.deps:
            means.append(terms.mul(count, terms.const(w), terms.red("sum", t, over, extents)))
    return means


def _summed_tiles(t: Term, over: tuple[int, ...]) -> list[Term]:
    """The tiles that t adds up, as they are; none if t is no sum."""
    pairs = zip(t.args, t.powers, strict=True) if t.kind == "add" else ()
    return [a for a, w in pairs if w == 1 and a.axes.intersection(over) and a.axes - set(over)]


def _near_mean(program: Program, t: Term, over: tuple[int, ...], makers: int) -> Term | None:
    """The mean of t, or of the one part of it whose mean is known; 0 for what was normalised."""
    terms, known = program.lifted.terms, program.sums.get((t, over))
    if known is not None and not known.deps & makers:
        count = math.prod(program.lifted.extents(over).values())
        return total(terms, terms.mul(terms.const(Fraction(1, count)), known))
    means = [m for a in _summed_tiles(t, over) if (m := _near_mean(program, a, over, makers)) is not None]
    if means:
        return means[0]
    return terms.const(Fraction(0)) if any(s.name == "sum" for s in statistics(t)) else None


def moments(program: Program, red: Term, laws: frozenset[str]) -> tuple[str, Term]:
    """sum h = sum (h - c) + K c, and sum (h + v)^2 for a late v by the moments of h - c; else red as it is."""
    terms = program.lifted.terms
    if red.kind != "red" or not red.args[0].hosts:
        return "", red
    x, over = red.args[0], red.over
    product = program.lifted.products.get(program.accumulators(x)[-1].bit)
    if product is None or set(over).intersection(product.rows):
        return "", red  # a sum over tokens: the gradient of a gain or a bias
    extents = program.lifted.extents(over)
    count = terms.const(Fraction(math.prod(extents.values())))
    if SHIFT.name in laws and (c := shift(program, x, over)) is not None:
        return SHIFT.name, terms.add(terms.red("sum", minus(terms, x, c), over, extents), terms.mul(count, c))
    if x.kind != "mul" or x.powers != (Fraction(2),) or x.args[0].kind != "add" or MOMENTS.name not in laws:
        return "", red
    parts = separate(terms, x.args[0], program.makers(x), over)
    tiles = [p for p in parts if p.rest.hosts]
    if len(parts) != 2 or len(tiles) != 1 or tiles[0].late is not terms.const(ONE):
        return "", red
    h, v = tiles[0].rest, next(terms.mul(p.late, p.rest) for p in parts if p is not tiles[0])
    c = shift(program, h, over)
    if c is None or v.axes.intersection(over):
        return "", red
    d, u = minus(terms, h, c), total(terms, v, c)
    first, second = terms.red("sum", d, over, extents), terms.red("sum", terms.power(d, Fraction(2)), over, extents)
    cross, last = terms.mul(terms.const(Fraction(2)), u, first), terms.mul(count, terms.power(u, Fraction(2)))
    return MOMENTS.name, total(terms, second, cross, last)
