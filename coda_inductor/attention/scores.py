"""What a graph computes of the scores of attention that its author wrote out, element by element.

    p = softmax(q @ k.mT * 0.125 + mask);  out = p @ v

Scores are what the first product makes. From there elementwise operations, sums over the keys and views lead to the
operands of other products: of the result, and in the backward of the gradients. The axes of the views
(patterns/axes.py) say of every tensor between which of its dimensions are the queries' and the keys'.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from coda_inductor.attention.positions import narrowed
from coda_inductor.attention.repeats import Dims, behind, permuted
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.axes import Axes, Ids, Misfit
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import TRANSPOSES
from coda_inductor.patterns.sizes import ONE

PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
"""The products of attention: [samples and heads, rows, inner] and [samples and heads, inner, columns]."""
ANALYTIC = frozenset(
    {"add", "sub", "mul", "div", "neg", "reciprocal", "exp", "log", "where", "convert_element_type", "fma"}
)
"""What is computed of scores. Comparisons and bounds are not: meaning.py compares at a few points. Nor is a number that
is added, which may be too small to be seen there. So no mask is made of scores."""
EXACT = (torch.float32, torch.float64)
"""Dtypes to which scores are cast without a loss."""
REDUCTIONS = ("sum", "max")
"""What a softmax and its gradient take over the keys."""


def factors(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What it multiplies, the left one and the right one."""
    left, right = product.args[-2:]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return left, right


def added(product: fx.Node) -> fx.Node | None:
    """What it adds to the products; None if it adds nothing, as where beta is 0, whatever lies there."""
    if product.target is not aten.baddbmm.default or product.kwargs.get("beta", 1) == 0:
        return None
    addend = product.args[0]
    return addend if isinstance(addend, fx.Node) else None


@dataclass(frozen=True, slots=True)
class Operand:
    """A factor of a product, [samples and heads, rows, numbers] of which one number each belongs to a feature; `turned`
    where the node has rows and numbers the other way round."""

    node: fx.Node
    turned: bool

    @classmethod
    def of(cls, node: fx.Node, turned: bool) -> Operand:
        """The same, behind transposes."""
        while node.target in TRANSPOSES and permuted(node) == [0, 2, 1]:
            node, turned = node.all_input_nodes[0], not turned
        return cls(node, turned)

    @property
    def width(self) -> int:
        """How many features it has. Raises Misfit of a symbol."""
        return number(self.node.meta["val"].shape[1 if self.turned else 2])

    def products(self) -> Iterator[Product]:
        """The products of each of its rows with rows of something else, number by number."""
        found = g.reached([self.node], lambda n: (u for u in n.users if Operand.of(u, False).node is self.node))
        for user in sorted({u for n in found for u in n.users if u.target is aten.bmm.default}):
            left, right = factors(user)
            if right in found and Operand.of(right, True) == self:
                yield Product(user, Operand.of(left, False))
            elif left in found and Operand.of(left, False) == self:
                yield Product(user, Operand.of(right, True), turned=True)


@dataclass(frozen=True, slots=True)
class Product:
    """A product [samples and heads, queries, keys] of `by` and something else; `turned`: [.., keys, queries]."""

    node: fx.Node
    by: Operand
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """A product that reads a tensor of scores. It adds up over queries or over keys; `by`: what it multiplies these
    with; `turned`: its result has features as rows."""

    product: fx.Node
    scores: fx.Node
    over_keys: bool
    by: Operand
    turned: bool


@dataclass(slots=True)
class Scores:
    """The tensors that are computed of some scores, with the axes of their dimensions, those that come from elsewhere,
    and the products that read the first. `sums`: sums of them over more than the keys, or fewer, and of what."""

    first: fx.Node
    axes: Axes = field(default_factory=Axes)
    apart: int = 0
    queries: int = 0
    keys: int = 0
    own: dict[fx.Node, Dims] = field(default_factory=dict)
    others: dict[fx.Node, Dims] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @classmethod
    def of(cls, *products: Product, strictly: bool = True) -> Scores:
        """All that is computed of what these products make. Raises Misfit where something else reads it; unless
        `strictly`, that is left out."""
        axes, first = Axes(), products[0]
        apart, rows, columns = map(axes.new, g.sizes(first.node))
        found = cls(first.node, axes, apart, *((columns, rows) if first.turned else (rows, columns)))
        for product in products:
            found.own[product.node] = found.square(product.turned)
            if (addend := added(product.node)) is not None:
                found.others[addend] = narrowed(addend, found.own[product.node])
        found._grow(strictly)
        return found

    def square(self, turned: bool = False) -> Dims:
        """The axes of a tensor [samples and heads, queries, keys], or [samples and heads, keys, queries]."""
        rows, columns = (self.keys, self.queries) if turned else (self.queries, self.keys)
        return (self.apart,), (rows,), (columns,)

    def _grow(self, strictly: bool) -> None:
        todo = sorted({user for node in self.own for user in node.users})
        while todo:
            node = heapq.heappop(todo)
            if node in self.own or node.target in PRODUCTS or node.op == "output":
                continue
            try:
                self.own[node] = self.dims_of(node)
            except Misfit:
                reduction = g.reduction(node)
                if reduction is not None and reduction.name == "sum":
                    self.sums[node] = reduction.source
                elif strictly:
                    raise
                continue
            for user in node.users:
                heapq.heappush(todo, user)
        for scores, user in [(n, user) for n in self.own for user in n.users if user not in {**self.own, **self.sums}]:
            try:
                self.reads.append(self.read(scores, user))
            except Misfit:
                if strictly:
                    raise

    def dims_of(self, node: fx.Node) -> Dims:
        """The axes of what is computed of scores. Raises Misfit of other operations."""
        if node.target is aten.expand.default:
            return self._expanded(node)
        if g.is_view(node):
            return behind(self.axes, self.own[node.all_input_nodes[0]], [node])
        if (reduction := g.reduction(node)) is not None and reduction.name in REDUCTIONS:
            dims = self.own[reduction.source]
            if tuple(i for d in reduction.dims for i in self.axes.roots(dims[d])) != self.axes.roots([self.keys]):
                raise Misfit("a sum of scores over queries, or over heads")
            over = set(reduction.dims)
            return tuple(() if d in over else dim for d, dim in enumerate(dims) if reduction.keepdim or d not in over)
        name = g.name_of(node)
        if name not in ANALYTIC or not g.floating(node):
            raise Misfit(f"{name or node.op} of scores")
        if g.is_cast(node) and g.tensor(node).dtype not in (*EXACT, g.tensor(self.first).dtype):  # type: ignore[union-attr]
            raise Misfit("scores that are rounded")
        if name in ("add", "sub", "fma") and any(self._number(a) for a in node.args):
            raise Misfit("a number that is added to scores")
        return self._together(node)

    def _number(self, value: object) -> bool:
        """Is it one number for all scores?"""
        if not isinstance(value, fx.Node):
            return True
        return value not in self.own and g.tensor(value) is not None and all(n == ONE for n in g.sizes(value))

    def _expanded(self, node: fx.Node) -> Dims:
        """One number a row stands for all keys."""
        source = node.all_input_nodes[0]
        dims, sizes = self.own[source], g.sizes(node)
        grown = [d for d, (a, b) in enumerate(zip(g.sizes(source), sizes, strict=False)) if a != b]
        to_keys = all(not dims[d] and sizes[d] == self.axes.size[self.keys] for d in grown)
        if len(dims) != len(sizes) or len(grown) > 1 or not to_keys:
            raise Misfit("scores that are repeated")
        return tuple((self.keys,) if d in grown else dim for d, dim in enumerate(dims))

    def _together(self, node: fx.Node) -> Dims:
        sizes = g.sizes(node)
        dims: list[Ids] = [()] * len(sizes)
        for source in filter(self.own.__contains__, node.all_input_nodes):
            its = self.own[source]
            for d, dim in enumerate(map(self.axes.roots, its), len(sizes) - len(its)):
                if dim and self.axes.roots(dims[d]) not in ((), dim):
                    raise Misfit("scores and others in another order")
                dims[d] = dim or dims[d]
        if any(self.axes.total(dim) != size for dim, size in zip(dims, sizes, strict=True)):
            raise Misfit("scores that are repeated")
        for source in node.all_input_nodes:
            if g.tensor(source) is None:
                raise Misfit("scores and a size")
            if source not in self.own:
                its = narrowed(source, tuple(dims))
                if self._roots(self.others.setdefault(source, its)) != self._roots(its):
                    raise Misfit("one tensor in two orders")
        return tuple(dims)

    def read(self, scores: fx.Node, user: fx.Node) -> Read:
        """How what is computed of no scores element by element reads them. Raises Misfit of all but products."""
        if user.target is not aten.bmm.default or factors(user)[0] is factors(user)[1]:
            raise Misfit("the graph returns scores" if user.op == "output" else "another product reads scores")
        left, right = factors(user)
        dims, turned = self._roots(self.own[scores]), scores is right
        by = Operand.of(left, True) if turned else Operand.of(right, False)
        if dims not in map(self._roots, (self.square(), self.square(turned=True))):
            raise Misfit("a product of one number a row")
        return Read(user, scores, (dims == self._roots(self.square())) != turned, by, turned)

    def _roots(self, dims: Sequence[Ids]) -> Dims:
        return tuple(map(self.axes.roots, dims))


def number(size: object) -> int:
    """A size as a number. Raises Misfit of a symbol."""
    if not isinstance(size, int):
        raise Misfit("a symbolic size")
    return size
