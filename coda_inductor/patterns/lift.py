"""The graph lifted to terms: every floating-point node gets the term that it computes.

Second pass of reading, over final axes. Casts between floating-point dtypes vanish (the algebra is exact; values are
rounded where the program stores them), unless `rounding` asks to keep every rounding of the original as an operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import fx

from coda_inductor.core.dtypes import NARROW
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.effects import Memory, behind_tangents, effects
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.infer import Reading, read_axes
from coda_inductor.patterns.pointwise import POINTWISE, chain
from coda_inductor.patterns.samples import conditions
from coda_inductor.patterns.terms import Term, Terms, is_number


@dataclass(slots=True)
class Product:
    """A matrix product of the graph: acc[rows, columns] = x[rows, K] @ w[K, columns]. Batched ones are not listed."""

    node: fx.Node
    x: fx.Node
    w: fx.Node
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def stored(self) -> torch.dtype:
        """In what its epilogue stores a tile that no node of the graph holds: as its operands are, or in 16 bits."""
        of = self.node if self.node.target in g.SCALED else self.x
        dtype: torch.dtype = of.meta["val"].dtype
        return dtype


@dataclass(slots=True)
class Lifted:
    """A graph read: the term of each node, the products that every node waits for, and the products by their bits.
    `read` are all terms that this took, arguments before their users: deriving adds others to the table."""

    graph: fx.Graph
    reading: Reading
    terms: Terms
    term: dict[fx.Node, Term]
    deps: dict[fx.Node, int]
    products: dict[int, Product]
    leaves: dict[str, fx.Node] = field(default_factory=dict)
    bits: dict[fx.Node, int] = field(default_factory=dict)
    """The number of every product that is read as one, whose bit says that a term waits for it."""
    read: tuple[Term, ...] = ()
    totalled: frozenset[Term] = frozenset()
    """What the graph adds up over some of its axes."""
    place: dict[fx.Node, int] = field(default_factory=dict)
    """Where each node stands in the graph."""
    joint: bool = False
    """Is a backward part of it?"""
    scaled: set[Term] = field(default_factory=set)
    """Products of 8-bit operands that are multiplied by their scales by an operation of its own."""
    computed: frozenset[fx.Node] = frozenset()
    """What makes scores of a product's result, if a logsumexp is taken of these: it reads that as it is stored."""
    layouts: dict[fx.Node, tuple[tuple[int, ...], bool]] = field(default_factory=dict)
    """How nodes lie, once somebody has asked: Program.lies."""

    def node(self, leaf: Term) -> fx.Node:
        """The node whose tensor a leaf is."""
        return self.leaves[leaf.name]

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes as they stand in the graph."""
        return sorted(nodes, key=self.place.__getitem__)

    def extents(self, ids: tuple[int, ...]) -> dict[int, int]:
        """The static sizes of axes."""
        sizes = {i: self.reading.axes.size[i].static for i in ids}
        return {i: s for i, s in sizes.items() if s is not None}

    def can_permute(self, order: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Can a vector over one order of axes be permuted to the other? Of its sizes one may be a symbol, which a view
        to them infers."""
        return order == wanted or (sorted(order) == sorted(wanted) and len(self.extents(order)) >= len(order) - 1)


def lift(
    graph: fx.Graph,
    rounding: bool = False,
    cut: Callable[[fx.Node], bool] = lambda node: False,
    matrices: Collection[fx.Node] = (),
) -> Lifted:
    """Reads a functional ATen graph with fake tensors in meta["val"]. Adds no guard and changes nothing. What is `cut`
    is a tensor of which nothing else is said; `matrices` are among those that have features as columns."""
    lifted = Lifted(graph, read_axes(graph, matrices), Terms(rounding), {}, {}, {})
    waits = _order(lifted)
    joint = any(map(g.is_backward, graph.nodes))
    of_samples = set[fx.Node]() if joint else conditions(lifted.reading, graph)  # in training nobody reads them so
    left = {node for node in graph.nodes if node in of_samples or _left(lifted, node) or cut(node)}
    products = (node for node in graph.nodes if node.target in g.PRODUCTS and node not in left)
    lifted.bits = {node: i for i, node in enumerate(products)}
    forward = _forward(lifted)
    lifted.computed = frozenset(n for r in graph.nodes if (n := _first_step(r)) is not None)
    for node in graph.nodes:
        deps = forward if g.is_tangent(node) else 0
        for a in (*node.all_input_nodes, *waits.get(node, ())):
            deps |= lifted.deps[a]
        if node in lifted.reading.dims:
            term = None if node in left else _understood(lifted, node)
            if term is None:
                lifted.leaves[node.name] = node
                term = lifted.terms.leaf(node.name, (i for d in lifted.reading.roots(node) for i in d), deps)
            elif rounding and not g.is_view(node) and slices.lane(node) is None:
                name = NARROW.get(g.tensor(node).dtype)  # type: ignore[union-attr]
                term = lifted.terms.fn(name, term) if name else term
            lifted.term[node] = term
            deps |= term.deps
        lifted.deps[node] = deps
    lifted.place = {node: i for i, node in enumerate(graph.nodes)}
    lifted.joint = joint
    lifted.read = tuple(lifted.terms)
    lifted.totalled = frozenset(t.args[0] for t in lifted.read if t.kind == "red" and t.name == "sum")
    return lifted


def _order(lifted: Lifted) -> dict[fx.Node, list[fx.Node]]:
    """What each node waits for although it reads nothing of it. Operations on memory that is read after it was
    overwritten become opaque: a term does not say which of its contents it means."""
    graph, found = lifted.graph, effects(lifted.graph)
    if found.unstable:
        memory = Memory(graph)
        for node in lifted.reading.dims:
            if memory.read(node) & found.unstable:
                lifted.reading.opaque.setdefault(node, "it reads memory that is overwritten")
    return found.waits(graph)


def _forward(lifted: Lifted) -> int:
    """The products of the forward, as a bit set: the gradient of an output comes after all of them."""
    backward, products = behind_tangents(lifted.graph), 0
    for node, bit in lifted.bits.items():
        products |= (node not in backward) << bit
    return products


def _left(lifted: Lifted, node: fx.Node) -> bool:
    """Is nothing said of what the node computes, and is it a tensor to others? A product of one row is. A cast to or
    from float64 or eight bits is a rounding, or an island of another precision."""
    if node not in lifted.reading.dims or node in lifted.reading.opaque:
        return True
    if g.is_row(node):
        return True
    if node.target in g.SCALED:
        return False  # which widens its operands itself
    return any(g.precision(a) not in (None, g.precision(node)) for a in node.all_input_nodes)


def _understood(lifted: Lifted, node: fx.Node) -> Term | None:
    """The node's term, None if a detail of it is not understood after all."""
    ts, reading = lifted.terms, lifted.reading
    if (part := slices.lane(node)) is not None:
        lane, index = reading.lanes[node]
        term = lifted.term[part[0]]
        for axis, digit in _digits(lifted, lane, index):
            term = ts.select(term, axis, digit)
        return term
    if (choice := g.choice(node)) is not None:
        op, nodes = choice
        return ts.fn(op, *(lifted.term[n] for n in nodes))
    if node.target in POINTWISE:
        return _pointwise(lifted, node)
    if g.is_view(node):
        return lifted.term[node.args[0]]  # type: ignore[index]
    if node.target in g.PRODUCTS:
        return _product(lifted, node)
    if (reduction := g.reduction(node)) is not None:
        return _reduction(lifted, reduction)
    if node.target in (aten.cat.default, aten.stack.default):
        over = reading.axes.roots((reading.lanes[node][0],))
        return ts.cat(over, lifted.extents(over), [lifted.term[p] for p in node.args[0]])  # type: ignore[union-attr,index]
    if (scattered := slices.scattered(node)) is not None:
        source, _, count, index = scattered
        over = reading.axes.roots((reading.lanes[node][0],))
        parts = [lifted.term[source] if i == index else ts.const(0.0) for i in range(count)]
        return ts.cat(over, lifted.extents(over), parts)
    try:
        return ts.const(node.args[-1] if node.target is aten.full.default else node.args[0])  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None


def _digits(lifted: Lifted, lane: int, index: int) -> list[tuple[int, int]]:
    """The index of a lane axis in the atomic axes that it was split into since."""
    out = []
    for axis in reversed(lifted.reading.axes.roots((lane,))):
        size = lifted.reading.axes.size[axis].static
        assert size is not None
        out.append((axis, index % size))
        index //= size
    return out


def _pointwise(lifted: Lifted, node: fx.Node) -> Term | None:
    if node.target is prims.convert_element_type.default:
        return lifted.term[node.args[0]]  # type: ignore[index]
    if node.target is aten.mul.Tensor and (term := _rescaled(lifted, node)) is not None:
        return term
    try:
        of = _stored if node in lifted.computed else lambda lifted, a: lifted.term[a]
        args = [of(lifted, a) if isinstance(a, fx.Node) else lifted.terms.const(a) for a in node.args]  # type: ignore[arg-type]
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            args[1] = lifted.terms.mul(args[1], lifted.terms.const(alpha))  # type: ignore[arg-type]
        term = POINTWISE[node.target](lifted.terms, *args)
        float(term.coefficient)
    except (ValueError, TypeError, KeyError, OverflowError):  # infinite literals, symbolic scalars, unusual exponents
        return None
    if is_number(term) != all(map(is_number, args)):  # x - x is not 0 where x is infinite; exp(2) is no rational
        return None
    return term


def _product(lifted: Lifted, node: fx.Node) -> Term:
    of, ts = g.operands(node), lifted.terms
    over = lifted.reading.roots(of.left)[-1]
    con = ts.con(lifted.term[of.left], lifted.term[of.right], over, lifted.bits[node])
    dims = lifted.reading.roots(node)
    if node.target is not aten.bmm.default and con.bit == lifted.bits[node]:
        lifted.products[con.bit] = Product(node, of.left, of.right, dims[0], dims[1])
    value = _scaled(ts, con, *(lifted.term[s] for s in of.scales)) if of.scales else con
    return ts.add(value, *(lifted.term[b] for b in of.addends)) if of.addends else value


def _scaled(ts: Terms, con: Term, rows: Term, columns: Term) -> Term:
    """A product of 8-bit operands times both operands' scales: one value, which is stored as such."""
    if is_number(rows) and is_number(columns):
        return con
    one = not rows.axes and not columns.axes  # two numbers are read as one
    return ts.fn("scaled", con, *((ts.const(1.0), ts.mul(rows, columns)) if one else (rows, columns)))


def _rescaled(lifted: Lifted, node: fx.Node) -> Term | None:
    """The term of a product of 8-bit operands without scales, which is multiplied by them afterwards: by the product of
    a vector over rows and one over columns."""
    found = [a for a in node.all_input_nodes if g.narrow(a).target in g.SCALED]
    both = [a for a in node.all_input_nodes if a.target is aten.mul.Tensor]
    if lifted.terms.rounding or not len(found) == len(both) == 1 or lifted.term[found[0]].kind != "con":
        return None
    con, scales = lifted.term[found[0]], [a for a in both[0].args if isinstance(a, fx.Node)]
    if con.bit not in lifted.products or len(scales) != 2:
        return None
    product = lifted.products[con.bit]
    for rows, columns in (scales, scales[::-1]):
        spans = lifted.term[rows].axes, lifted.term[columns].axes
        if spans == (frozenset(product.rows), frozenset(product.columns)):
            lifted.scaled.add(term := _scaled(lifted.terms, con, lifted.term[rows], lifted.term[columns]))
            return term
    return None


def _first_step(node: fx.Node) -> fx.Node | None:
    """The first operation of those that make the scores of a logsumexp of a product's result; None if there is none."""
    found = g.reduction(node)
    if found is None or found.name not in REDUCTIONS or not REDUCTIONS[found.name].stored:
        return None
    product, *steps = chain(found.source)
    made = (n for n in steps if not g.is_view(n) and not g.is_cast(n))
    return next(made, None) if product.target in g.MATRIX_PRODUCTS else None


def _stored(lifted: Lifted, node: fx.Node) -> Term:
    """The node's term, rounded as the narrow tensor is that it is widened from. Who subtracts a logsumexp from the
    scores relies on that: with one of unrounded scores the losses of 300 steps of a small model by autocast were 5e-4
    from eager's, with Inductor 2e-4 (tests/whole/test_training_bf16.py)."""
    return _as_stored(lifted.terms, g.narrow(node), lifted.term[node])


def _as_stored(ts: Terms, node: fx.Node, term: Term) -> Term:
    """The term, rounded to the node's dtype."""
    name = NARROW.get(g.tensor(node).dtype)  # type: ignore[union-attr]
    return ts.fn(name, term) if name else term


def _reduction(lifted: Lifted, r: g.Reduction) -> Term | None:
    ts, x, dims = lifted.terms, lifted.term[r.source], lifted.reading.roots(r.source)
    gone = tuple(i for d in r.dims for i in dims[d])
    extents = lifted.extents(gone)
    if r.name in REDUCTIONS and REDUCTIONS[r.name].stored:
        return ts.red(r.name, _stored(lifted, r.source), gone, extents) if x.axes.issuperset(gone) else None
    if r.name in REDUCTIONS:
        return ts.red(r.name, x, gone, extents)
    count = Fraction(math.prod(extents.values()))
    if r.name == "var" and count <= r.correction:
        return None
    mean = ts.mul(ts.const(1 / count), ts.red("sum", x, gone, extents))
    if r.name == "mean":
        return mean
    square = ts.power(ts.add(x, mean, signs=[Fraction(1), Fraction(-1)]), Fraction(2))
    return ts.mul(ts.const(1 / (count - Fraction(r.correction))), ts.red("sum", square, gone, extents))
