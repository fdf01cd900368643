"""The lifted graph, and each of its terms as the laws have left it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns.layout import contiguous_rows, dense
from coda_inductor.patterns.lift import Lifted, Product
from coda_inductor.patterns.terms import Term
from coda_inductor.rewrite.limits import NONE, Limits
from coda_inductor.rewrite.space import Axes

BATCHED = "it follows a batched product"


@dataclass(slots=True)
class State:
    """`new` maps each lifted term to its derived form, `nodes` each derived form to the graph's nodes that hold it."""

    lifted: Lifted
    limits: Limits = NONE
    new: dict[Term, Term] = field(default_factory=dict)
    nodes: dict[Term, list[fx.Node]] = field(default_factory=dict)
    products_of: dict[tuple[Term, tuple[int, ...]], list[Term]] = field(default_factory=dict)
    """Contractions by their right operand and the axes that they sum over."""
    wholes: set[Term] = field(default_factory=set)
    """What the graph's products compute as they stand there, biases included, unless a law has changed them."""
    held: dict[Term, fx.Node] = field(default_factory=dict)
    """Tensors that are named as they lie in memory, whatever they are made of, and their nodes."""
    sums_of_two: dict[Term, list[Term]] = field(default_factory=dict)
    """By what they add up, the values of the graph that are the sum of two products, each but for factors."""
    gradients: set[Term] = field(default_factory=set)
    """What the products of the backward multiply: it lies in memory anyway."""
    squares: dict[Term, Term] = field(default_factory=dict)
    """The squares, which products read, of what gradients ask for: max(z, 0)."""
    turned: list[tuple[str, Term, Term]] = field(default_factory=list)
    """A law's name, and a sum before and after it, of the laws that the triangle uses: in the order of their uses."""
    sums: dict[tuple[Term, tuple[int, ...]], Term] = field(default_factory=dict)
    """Every sum of the graph as it was derived, by what is summed and the axes."""

    @property
    def undeferred(self) -> frozenset[int]:
        """The products whose operands stay as the user wrote them."""
        return frozenset(i for i in self.lifted.products if self.limits.undeferred >> i & 1)

    def hold(self, node: fx.Node) -> Term:
        """The node's tensor as a term without arguments."""
        lifted = self.lifted
        lifted.leaves[node.name] = node
        axes = (i for d in lifted.reading.roots(node) for i in d)
        leaf = lifted.terms.leaf(node.name, axes, lifted.deps[node])
        self.held[leaf] = node
        return leaf

    def narrow(self, con: Term) -> bool:
        """Has the product's operand too few exponents (float16) to be stored before it is normalised? Nothing bounds
        the range of a residual stream."""
        product = self.lifted.products.get(con.bit)
        return product is not None and product.x.meta["val"].dtype == torch.float16

    def columns(self, acc: Term) -> tuple[int, ...]:
        """The axes of an accumulator's columns."""
        lanes = {axis for axis, _ in acc.lanes}
        return tuple(i for i in self.product(acc).columns if i not in lanes)

    def product(self, acc: Term) -> Product:
        """The graph's product behind an accumulator. Raises Unsupported for a batched one."""
        if acc.bit not in self.lifted.products:
            raise Unsupported(BATCHED)
        return self.lifted.products[acc.bit]

    def accumulators(self, t: Term) -> list[Term]:
        """The contractions that t reaches through pointwise operations."""
        found, seen, todo = [], set[Term](), [t]
        while todo:
            x = todo.pop()
            if x in seen or not x.hosts:
                continue
            seen.add(x)
            if x.kind == "con":
                found.append(x)
            else:
                todo += x.args
        return sorted(found, key=lambda c: (c.bit, c.lanes))

    def by_rows(self, product: Product) -> bool:
        """Is the product's weight [N, K]?"""
        return weight_of(product)[1] == "nk"

    def layout(self, node: fx.Node) -> tuple[Axes, bool]:
        """The node's axes, major to minor in its dimensions, and does it lie in memory in that order?"""
        known = self.lifted.layouts  # a graph is planned many times
        if node not in known:
            known[node] = tuple(i for d in self.lifted.reading.roots(node) for i in d), dense(node)
        return known[node]


def weight_of(product: Product) -> tuple[fx.Node, str]:
    """The tensor that holds a product's weight, and its layout: "nk" for [N, K], "kn" for [K, N]. Raises
    Unsupported."""
    rows = contiguous_rows(product.w)
    if rows is None:
        raise Unsupported(f"the weight of {product.node} is neither row- nor column-major")
    return rows, "kn" if rows is product.w else "nk"
