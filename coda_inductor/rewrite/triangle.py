"""The triangle: a backward's statistic, a sum of q * (Z W^T) over the row that a product is still making, is taken
where Z is made, as a sum of Z * (q W).

q W must be there already, up to per-token factors: it is what the forward computed of the operand that the backward
differentiates. What q adds to that operand (a mean, a shift) is of rank one, v * g, and its g W a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch

from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.lift import Product
from coda_inductor.patterns.terms import ONE, Term, Terms, is_number
from coda_inductor.rewrite.beside import affine, beside, of_tensors
from coda_inductor.rewrite.joint_sums import joint_sums
from coda_inductor.rewrite.laws import ADJOINT, RELU
from coda_inductor.rewrite.program import Program
from coda_inductor.rewrite.separate import Factors, addends, factors, number, rank_one
from coda_inductor.rewrite.sources import reductions, statistics
from coda_inductor.rewrite.worth import dear


def triangle(program: Program, red: Term, laws: frozenset[str], of: Term | None = None) -> Term:
    """sum_k q (Z W^T) = sum_n Z (q W) for every product in red's argument, if the epilogues that make Z can take the
    sums, or they can be taken beside what makes Z; else red as it is. `laws`: the names of those that may be used.
    `of`: the factor of red's argument that is meant, if it has several such."""
    terms, x, over = program.lifted.terms, red.args[0], red.over
    product = program.lifted.products.get(x.hosts.bit_length() - 1)
    if product is None or not g.is_backward(product.node):
        return red  # a forward's sum is taken where it is made: what waits for it can be deferred
    powers = factors(x)
    meant = powers if of is None else {of: powers[of]}
    found = [(f, parts) for f, p in meant.items() if p == 1 and (parts := _summed(program, f, over))]
    if len(found) != 1:
        return red
    factor, parts = found[0]
    q = {f: p for f, p in powers.items() if f is not factor}
    out = []
    if (before := _before_the_last(program, q, parts, over)) is not None:
        out.append(terms.mul(terms.const(number(x)), before[0]))
        parts = [part for part in parts if part not in before[1]]
    for part, w in parts:
        if part.kind == "con":
            taken = _taken(program, q, part, over, laws)
        else:
            taken = _made_earlier(program, q, part, over, product.rows)
        if taken is None:
            return red
        out += [terms.mul(terms.const(w * number(x)), t) for t in taken]
    if len(out) > 1:
        out = joint_sums(program, out, lambda s, of: triangle(program, s, laws, of), partial(_summable, program))
    return red if _dear(program, out, parts, product, over) else terms.add(*out)


def _dear(program: Program, sums: list[Term], parts: Weighted, product: Product, over: tuple[int, ...]) -> bool:
    """Do the sums read the products' weights once more, and is that more than the pass that they spare?"""
    total = program.lifted.reading.axes.total
    if not any(s.axes and not s.deps for t in sums for s in reductions(t)):
        return False
    features = sum(total(c.over).static or 0 for c, _ in parts if c.kind == "con")
    return dear(features, total(over).static or 0, product)


def _before_the_last(
    program: Program, q: Factors, parts: Weighted, over: tuple[int, ...]
) -> tuple[Term, Weighted] | None:
    """Of several products that add up, the last one's epilogue has the row late; the others' sum of q times them can be
    taken where they are added. That reads q once, where the triangle reads two tensors beside attention for each:
    (that sum, the parts that it is of) where these are wider."""
    terms, total = program.lifted.terms, program.lifted.reading.axes.total
    products = [(c, w) for c, w in parts if c.kind == "con"]
    last = max(c.bit for c, _ in products)
    early = [(c, w) for c, w in products if c.bit != last]
    depths, width = [total(c.over).static for c, _ in early], total(over).static
    if any(c.args[0].hosts or c.args[0] in program.lifted.totalled for c, _ in early):
        return None  # an epilogue has it, and q W, at hand, or a pass reads it anyway, for the gradient of a bias
    if width is None or None in depths:
        return None
    if 2 * sum(depths) <= width:  # type: ignore[arg-type]
        return None
    added = terms.add(*(c for c, _ in early), signs=[w for _, w in early])
    s = terms.red(
        "sum", terms.mul(added, *(terms.power(f, p) for f, p in q.items())), over, program.lifted.extents(over)
    )
    return (s, early) if s.kind == "red" and _summable(program, s) else None


def _made_earlier(
    program: Program, q: Factors, part: Term, over: tuple[int, ...], rows: tuple[int, ...]
) -> list[Term] | None:
    """The sum of q times what is added to the products, where that is made."""
    terms = program.lifted.terms
    x = terms.mul(part, *(terms.power(f, p) for f, p in q.items()))
    total = terms.red("sum", x, over, program.lifted.extents(over))
    if all(_summable(program, s) for s in statistics(total)):
        return [total]
    found = of_tensors(program, part, q, over, rows)
    return None if found is None else [found]


def _taken(program: Program, q: Factors, con: Term, over: tuple[int, ...], laws: frozenset[str]) -> list[Term] | None:
    """sum over `over` of q times the product `con`, as sums over con's own contraction."""
    terms, (z, weight) = program.lifted.terms, con.args
    vector = rank_one(terms, q, over)
    for expansion in [Expansion(None, [vector])] if vector else _expansions(program, q, weight, over):
        sums = list[Term]()
        images = expansion.images(program, weight, over)
        for scale, image in images:
            total = terms.red("sum", terms.mul(z, image), con.over, program.lifted.extents(con.over))
            if RELU.name in laws and (behind := _behind_relu(program, z, image, con.over)) is not None:
                direct, (total, image) = total, behind
                program.turned.append((RELU.name, direct, total))
            made = all(_summable(program, s) for s in statistics(total))
            found = total if made else beside(program, con, image, ADJOINT.name in laws)
            sums += [terms.mul(scale, found)] if found is not None else []
        if len(sums) == len(images):
            return sums
    return None


def is_relu(t: Term) -> bool:
    """Is t max(z, 0)? Its gradient asks only for the sign of what it gave, which the next product reads anyway."""
    return t.kind == "fn" and t.name == "max" and is_number(t.args[1]) and t.args[1].coefficient == 0


def _relu_of(program: Program, t: Term) -> tuple[Term, Fraction] | None:
    """(max(x, 0), c) such that t is c times that wherever t is positive: what a product reads of it, be it that some
    was dropped out."""
    if t.kind == "leaf":
        node = program.lifted.node(t)
        rest = [a for a in node.all_input_nodes if a.meta["val"].dtype != torch.bool]
        if node.target is not torch.ops.aten.mul.Tensor or len(rest) != 1 or len(node.all_input_nodes) != 2:
            return None
        t = program.new[program.lifted.term[rest[0]]]
    (relu, power), *more = factors(t).items() or [(t, ONE)]
    return (relu, number(t)) if not more and power == 1 and number(t) > 0 and is_relu(relu) else None


def _behind_relu(program: Program, z: Term, image: Term, over: tuple[int, ...]) -> tuple[Term, Term] | None:
    """(The sum of `image` times z, what stands for the image in it), if z is a gradient that came through the ReLU of
    the image, up to a per-token factor: what that ReLU gave; less its rank-one parts, as biases, if the ReLU's input
    has any beside the image, a product. These are sums of their own."""
    terms, extents = program.lifted.terms, program.lifted.extents(over)
    through = z.kind == "fn" and z.name == "if_nonpositive" and z.args[1] is terms.const(0.0)
    found = _relu_of(program, z.args[0]) if through else None
    if found is None:
        return None
    relu, weight = found
    before, after = relu.args[0], terms.mul(terms.const(1 / weight), z.args[0])
    scale = terms.mul(terms.const(number(image) / number(before)), _divided(terms, factors(image), factors(before)))
    if not scale.axes.intersection(over) and not scale.hosts:
        return terms.red("sum", terms.mul(z, scale, after), over, extents), terms.mul(scale, after)
    parts = affine(terms, before, image, over) if image.kind == "con" else None
    if parts is None:
        return None
    vectors = dict[Term, list[Term]]()  # of rows: what they multiply
    for v, u in parts[1]:
        vectors.setdefault(v, []).append(u)
    sums = [(terms.const(ONE), terms.mul(z, after))]
    for v, us in vectors.items():  # inside the choice: a bias of -inf is one that ReLU has dropped
        chosen = terms.fn(z.name, *z.args[:2], terms.mul(z.args[2], terms.add(*us)))
        sums.append((terms.mul(terms.const(-ONE), v), chosen))
    total = terms.add(*(terms.mul(v, terms.red("sum", x, over, extents)) for v, x in sums))
    return terms.mul(terms.power(parts[0], -ONE), total), image


@dataclass(frozen=True, slots=True)
class Expansion:
    """q as scale * (the operand of the product `forward`) + sum of v * g: (scale, forward) may be None."""

    forward: tuple[Term, Term] | None
    vectors: list[tuple[Term, Term]]

    def images(self, program: Program, weight: Term, over: tuple[int, ...]) -> list[tuple[Term, Term]]:
        """(per-token factor, q W) of the parts."""
        terms, extents = program.lifted.terms, program.lifted.extents(over)
        ranked = [(v, terms.red("sum", terms.mul(g, weight), over, extents)) for v, g in self.vectors]
        return ([self.forward] if self.forward else []) + ranked


def _expansions(program: Program, q: Factors, weight: Term, over: tuple[int, ...]) -> list[Expansion]:
    """The ways to write q by the operand of a product with the same weight."""
    terms, out = program.lifted.terms, list[Expansion]()
    for forward in program.products_of.get((weight, over), ()):
        operand = forward.args[0]
        if operand.kind == "add" and operand.coefficient:
            continue
        for t, w in addends(operand):
            if not w * number(t):  # zero times any tensor
                continue
            by = _by(terms, q, t, over)
            rest = [(a, u, rank_one(terms, factors(a), over)) for a, u in addends(operand) if a is not t]
            if by is None or not all(ranked for _, _, ranked in rest):
                continue
            scale, vectors = terms.mul(terms.const(1 / w), by[0]), list(by[1])
            for a, u, ranked in rest:
                vectors += [(terms.mul(scale, terms.const(-u * number(a)), ranked[0]), ranked[1])] if ranked else []
            out.append(Expansion((scale, forward), vectors))
    return out


def _by(terms: Terms, q: Factors, t: Term, over: tuple[int, ...]) -> tuple[Term, list[tuple[Term, Term]]] | None:
    """(s, [(v, g)]) such that q = s * t + v * g."""
    f = factors(t)
    weight = terms.const(1 / number(t))
    scale = _divided(terms, q, f)
    if not scale.axes.intersection(over):
        return terms.mul(weight, scale), []
    for a in (a for a in q if q[a] == 1 and a.axes.intersection(over) and a not in f):
        for b in (b for b in f if f[b] == 1 and b.axes.intersection(over) and b not in q):
            d = _difference(terms, a, b)
            rest = {x: p for x, p in q.items() if x is not a}
            scale = _divided(terms, rest, {x: p for x, p in f.items() if x is not b})
            vector = rank_one(terms, rest, over)
            if vector and not d.axes.intersection(over) and not scale.axes.intersection(over):
                return terms.mul(weight, scale), [(terms.mul(d, vector[0]), vector[1])]
    return None


def _divided(terms: Terms, a: Factors, b: Factors) -> Term:
    """a / b without the factors that they share; the caller looks at what it varies over."""
    powers = {f: a.get(f, Fraction(0)) - b.get(f, Fraction(0)) for f in a | b}
    return terms.mul(*(terms.power(f, p) for f, p in powers.items() if p))


def _difference(terms: Terms, a: Term, b: Term) -> Term:
    """a - b without the summands that they share; one may be a summand of the other."""
    weights: dict[Term, Fraction] = {}
    number = Fraction(0)
    for t, other, sign in ((a, b, ONE), (b, a, -ONE)):
        whole = t.kind != "add" or (other.kind == "add" and t in other.args)
        number += 0 if whole else sign * t.coefficient
        for s, w in [(t, ONE)] if whole else zip(t.args, t.powers, strict=True):
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


Weighted = list[tuple[Term, Fraction]]


def _summed(program: Program, t: Term, over: tuple[int, ...]) -> Weighted:
    """t as a weighted sum of products whose columns are `over`, and of what was made before them; empty if it is
    none."""
    made, others = _products(t, over)
    first = min((c.bit for c, _ in made), default=0)
    earlier = all(a.hosts and a.hosts >> first == 0 for a, _ in others)
    const, mul = program.lifted.terms.const, program.lifted.terms.mul
    return made + [(mul(const(w), a), ONE) for a, w in others] if made and earlier else []


def _products(t: Term, over: tuple[int, ...]) -> tuple[Weighted, Weighted]:
    """The products whose columns are `over` that t adds up, through sums of such, and what else it adds."""
    if t.kind == "con" and set(over) <= t.args[1].axes:
        return [(t, ONE)], []
    made, others = Weighted(), Weighted()
    for a, w in zip(t.args, t.powers, strict=True) if t.kind == "add" and not t.coefficient else ():
        inner, beyond = _products(a, over)
        made += [(c, w * v) for c, v in inner]
        others += [(c, w * v) for c, v in beyond] if inner else [(a, w)]
    return (made, others) if made else ([], [(t, ONE)])
