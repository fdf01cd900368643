"""Statistics beside an operation that is left whole: a backward's sum of Z * (q W) where attention's backward makes Z.

No epilogue can take it. It is taken of tensors that lie there anyway: Z itself and what the forward gave to attention,
whose scale and rank-one parts leave the sum; or, through a rotary embedding, by the adjoint, attention's own gradient
and the rotated tensor that it read. So nothing more is kept from the forward, and one pass reads it all.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.infinite import may_drop
from coda_inductor.patterns.layout import dense
from coda_inductor.patterns.lift import Lifted
from coda_inductor.patterns.pointwise import POINTWISE
from coda_inductor.patterns.terms import ONE, Term, Terms, is_number, positive
from coda_inductor.rewrite.laws import ADJOINT
from coda_inductor.rewrite.program import Program
from coda_inductor.rewrite.separate import Factors, addends, factors, number, rank_one
from coda_inductor.rewrite.sources import leaves

Rest = list[tuple[Term, Term]]


@dataclass(frozen=True, slots=True)
class Pair:
    """The sum over the dimensions `dims` of the product of one or two `tensors` of equal dimensions and of `vector`,
    which varies over the last dimension or not at all."""

    tensors: tuple[fx.Node, ...]
    vector: Term
    dims: tuple[int, ...]

    def tokens(self, program: Program) -> tuple[int, ...]:
        """The axes of the sums, in the order in which they leave."""
        dims = program.lifted.reading.roots(self.tensors[0])
        return tuple(a for i, d in enumerate(dims) if i not in self.dims for a in d)

    def nodes(self, lifted: Lifted) -> list[fx.Node]:
        """What it reads."""
        return [*self.tensors, *(lifted.node(leaf) for leaf in leaves(self.vector))]


def pair(program: Program, red: Term) -> Pair | None:
    """A sum over tensors that lie in memory as the graph has them, as `beside` writes it; None for any other."""
    terms, reading = program.lifted.terms, program.lifted.reading
    if red.kind != "red":  # of what does not vary there, or a multiple of one
        return None
    powers = factors(red.args[0])
    tensors = [program.held[f] for f in powers if f in program.held]
    if red.name != "sum" or not 1 <= len(tensors) <= 2 or any(powers[f] != 1 for f in powers if f in program.held):
        return None
    dims = reading.roots(tensors[0])
    over = tuple(i for i, d in enumerate(dims) if d and set(d) <= set(red.over))
    vector = terms.mul(*(terms.power(f, p) for f, p in powers.items() if f not in program.held))
    if {a for i in over for a in dims[i]} != set(red.over) or vector.deps or reading.roots(tensors[-1]) != dims:
        return None
    if vector.axes - set(dims[-1]) or not (is_number(vector) or over == (len(dims) - 1,)):
        return None
    return Pair(tuple(tensors), vector, over)


def holding(program: Program, t: Term) -> list[fx.Node]:
    """The nodes that hold t; last those that are only read rounded, which nobody needs to store."""
    return sorted(program.nodes.get(t, ()), key=g.only_rounded)


def of_tensors(program: Program, t: Term, q: Factors, over: tuple[int, ...], rows: tuple[int, ...]) -> Term | None:
    """The sum of t * q over the row, of tensors in memory: t, and the one tile that q is made of with vectors."""
    terms, extents = program.lifted.terms, program.lifted.extents(over)
    tiles = [f for f, p in q.items() if f.axes.intersection(over) and f.axes - set(over)]
    vectors = rank_one(terms, {f: p for f, p in q.items() if f not in tiles}, over)
    first = next((n for n in holding(program, t) if dense(n)), None)
    if first is None or vectors is None or len(tiles) > 1 or any(q[f] != 1 for f in tiles):
        return None
    dims = program.lifted.reading.roots(first)
    out = []
    summands = [(t, ONE) for t in tiles] or [(terms.const(ONE), ONE)]
    if tiles and not program.nodes.get(tiles[0]):
        summands = addends(tiles[0])
        constant = tiles[0].coefficient if tiles[0].kind == "add" else Fraction(0)
        summands += [(terms.const(ONE), constant)] if constant else []
    for x, w in summands:
        inside = bool(x.axes.intersection(over))
        fitting = (n for n in holding(program, x) if n.name not in program.limits.unread)
        second = next((n for n in fitting if program.lifted.reading.roots(n) == dims), None)
        if inside and second is None:
            return None
        tile = program.hold(second) if inside and second is not None else terms.const(ONE)
        red = terms.red("sum", terms.mul(program.hold(first), tile, vectors[1]), over, extents)
        if _paired(program, rows, red) is None:
            return None
        out.append(terms.mul(terms.const(w), vectors[0], red, *([] if inside else [x])))
    return terms.add(*out)


def beside(program: Program, con: Term, image: Term, adjoint: bool) -> Term | None:
    """The sum, over what the product `con` contracts, of its left operand Z times `image`: another product with con's
    weight, or a vector. `adjoint`: may that law be used?"""
    terms, (z, _), over = program.lifted.terms, con.args, con.over
    if not {c.bit for c in (con, image) if c.kind == "con"} <= program.lifted.products.keys():
        return None  # a batched one
    product, extents = program.product(con), program.lifted.extents(over)
    reading = program.lifted.reading
    columns = reading.roots(product.x)[-1]
    fitting = (n for n in holding(program, z) if program.layout(n) == (product.rows + columns, True))
    node = next((n for n in fitting if reading.roots(n)[-1] == columns), None)
    if node is None:
        return None
    held = program.hold(node)
    if image.kind != "con":
        return _paired(program, product.rows, terms.red("sum", terms.mul(held, image), over, extents))
    forward = read_anyway(program, image, z, over)
    if forward.name in program.limits.unread:
        return None
    whole = program.new[program.lifted.term[forward]]
    parts = affine(terms, whole, image, over)
    if parts is None:
        return None
    scale, rest = parts
    biased = any(f.kind != "red" for _, u in rest for f in factors(u))  # which a vector of the weights is not
    if biased and may_drop(forward):
        return None  # where a bias is -inf, z may be 0, and 0 times infinity is no number
    turned = through(program, z, whole, over) if adjoint else None
    turned = None if turned and turned[1].name in program.limits.unread else turned
    same = next((n for n in holding(program, z) if reading.roots(n) == reading.roots(forward)), node)
    total = terms.red("sum", terms.mul(program.hold(same), program.hold(forward)), over, extents)
    if turned:
        direct, total = total, terms.red("sum", terms.mul(*map(program.hold, turned)), over, extents)
        program.turned.append((ADJOINT.name, direct, total))
    out = [_paired(program, product.rows, total)]
    for v, u in rest:
        found = _paired(program, product.rows, terms.red("sum", terms.mul(held, u), over, extents))
        out.append(found and terms.mul(terms.const(-ONE), v, found))
    return terms.mul(terms.power(scale, -ONE), terms.add(*out)) if all(out) else None  # type: ignore[arg-type]


def read_anyway(program: Program, con: Term, z: Term, over: tuple[int, ...]) -> fx.Node:
    """The product `con` as a node, or what the forward makes of it by vectors, as by a bias, if attention, say, reads
    that and so it lies there anyway; of the dimensions of a node of z, with which it is multiplied."""
    reading, product = program.lifted.reading, program.product(con).node
    shapes = [reading.roots(n) for n in holding(program, z)]
    chain, todo = list[fx.Node](), [product]
    while todo:
        node = todo.pop()
        chain.append(node)
        pointwise = (user for user in node.users if user.target in POINTWISE and not g.is_backward(user))
        todo += [user for user in (*pointwise, *filter(g.is_view, node.users)) if user not in chain]
    for node in chain:
        if (term := program.lifted.term.get(node)) is None or reading.roots(node) not in shapes:
            continue
        made = node in program.nodes.get(program.new[term], ()) and _read_whole(node)
        if made and affine(program.lifted.terms, program.new[term], con, over) is not None:
            return node
    return product


def _read_whole(node: fx.Node) -> bool:
    """Does an operation of the forward that is neither loop nor copy read the node, or a view of it?"""
    readers = [user for user in node.users if not g.is_backward(user) and user.target not in g.COPIES]
    return any(
        _read_whole(u) if g.is_view(u) else u.target not in POINTWISE and u.target not in g.LOOPS for u in readers
    )


def _paired(program: Program, rows: tuple[int, ...], red: Term) -> Term | None:
    """red if it can be taken so, token by token in the order of `rows`."""
    found = pair(program, red)
    return red if found is not None and found.tokens(program) == rows else None


def affine(terms: Terms, whole: Term, con: Term, over: tuple[int, ...]) -> tuple[Term, Rest] | None:
    """(s, [(v, u), ...]) such that whole = s * con + sum of v * u, with s and v per token, u per feature, and s not 0;
    None if whole is nothing of the kind."""
    scale, rest, todo = None, Rest(), [(whole, ONE)]
    while todo:
        t, w = todo.pop()
        powers, weight = factors(t), terms.const(w * number(t))
        if t.kind == "add":
            rest += [(terms.const(w * t.coefficient), terms.const(ONE))] if t.coefficient else []
            todo += [(a, w * p) for a, p in addends(t)]
        elif powers.get(con) == 1 and scale is None:
            scale = terms.mul(weight, *(terms.power(f, p) for f, p in powers.items() if f is not con))
        elif (vector := rank_one(terms, powers, over)) is not None:
            rest.append((terms.mul(weight, vector[0]), vector[1]))
        else:
            return None
    if scale is None or scale.axes.intersection(over) or not scale.coefficient:
        return None
    inverts = all(p < 0 or positive(f) for f, p in factors(scale).items())  # a negative power is never 0
    return (scale, rest) if inverts else None


def through(program: Program, z: Term, whole: Term, over: tuple[int, ...]) -> tuple[fx.Node, fx.Node] | None:
    """(g, x): by the adjoint the sum of z * whole is that of g * x, if z is a linear map of g between a few lanes, and
    x that map's adjoint of whole, which the forward has made. Nodes of the same dimensions."""
    terms, roots = program.lifted.terms, program.lifted.reading.roots
    for axis in sorted(_lane_axes(z) & set(over)):
        count = program.lifted.reading.axes.size[axis].static or 0

        def lanes(t: Term, axis: int = axis, count: int = count) -> list[Term]:
            return [terms.select(t, axis, i) for i in range(count)]

        weights = _linear(terms, lanes(z), z.axes - {axis})
        alike = {t: lanes(t) for t in program.nodes if t.axes == z.axes} if weights else {}
        of = {f for _, f in weights}
        parts = lanes(whole) if weights else []
        for t, given in alike.items():
            if not of <= set(given) or len(set(given)) < count:
                continue
            images = [
                terms.add(*(terms.mul(weights[i, f], x) for i, x in enumerate(parts) if (i, f) in weights))
                for f in given
            ]
            made = [n for x in alike if x.hosts and alike[x] == images for n in holding(program, x)]
            pairs = ((source, n) for source in holding(program, t) for n in made)
            if (pair := next((p for p in pairs if roots(p[0]) == roots(p[1])), None)) is not None:
                return pair
    return None


def _lane_axes(t: Term) -> set[int]:
    """The axes over which t puts lanes together, through pointwise operations."""
    found, seen, todo = set[int](), set[Term](), [t]
    while todo:
        x = todo.pop()
        if x not in seen:
            seen.add(x)
            found |= set(x.over) if x.kind == "lanes" else set()
            todo += x.args if x.kind in ("mul", "add", "lanes") else ()
    return found


def _linear(terms: Terms, lanes: list[Term], axes: frozenset[int]) -> dict[tuple[int, Term], Term]:
    """The weights w such that each of the lanes i is the sum over f of w[i, f] * f, with f over all `axes`; none if a
    lane is nothing of the kind."""
    weights: dict[tuple[int, Term], Term] = {}
    for i, x in enumerate(lanes):
        for t, w in addends(x):
            powers = factors(t)
            made = [f for f, p in powers.items() if f.axes == axes and p == 1]
            if len(made) != 1 or (i, made[0]) in weights or (x.kind == "add" and x.coefficient):
                return {}
            weight = terms.const(w * number(t))
            weights[i, made[0]] = terms.mul(weight, *(terms.power(f, p) for f, p in powers.items() if f is not made[0]))
    return weights
