"""Small computations outside any Region, written as plain ATen for Inductor: per-token vectors that combine several
sums, and the products of a weight with a gain or bias that bilinearity splits off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from coda_inductor.core.dtypes import ROUNDED
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.lift import Lifted
from coda_inductor.patterns.pointwise import FUNCTIONS
from coda_inductor.patterns.sizes import size_of
from coda_inductor.patterns.terms import Term, is_number
from coda_inductor.rewrite.beside import Pair
from coda_inductor.rewrite.space import Computed

TOKENS = -1  # stands for all row axes, flattened, in a tensor's order
Order = tuple[int, ...]

COMPARISONS = {name: comparison for comparison, name in g.BY_SIGN.items()}


@dataclass(slots=True)
class Vectors:
    """Writes terms with `call(like, target, *args)`. Values are float32 (float64 for float64 graphs), [M] for tokens,
    and dimensions in a stated order of axes otherwise."""

    lifted: Lifted
    call: Callable[..., fx.Node]
    sum_of: Callable[[Term, Order], tuple[fx.Node, Order] | None]
    """A sum that an epilogue takes of rows that can be turned to this order, and theirs."""
    statistic: Callable[[Term, Order], tuple[fx.Node, Fraction]]
    """A node that holds a sum but for a factor, over rows in an order."""
    pair: Callable[[Term], Pair | None]
    compute: torch.dtype
    combined: Mapping[Term, Order] = field(default_factory=dict)
    """Sums of per-token vectors that `sum_of` gives, too, and their rows' axes."""
    done: dict[tuple[Term, Order], tuple[fx.Node, Order]] = field(default_factory=dict)
    """By term and the order of its rows, which is empty for a vector over features."""

    def write(self, c: Computed) -> fx.Node:
        """The vector's node, of one dimension."""
        node, order = self._value(c.term, c.order if c.extent == "token" else ())
        if c.extent == "token":
            return node
        if not set(order) <= set(c.order):
            raise BrokenInvariant(f"a vector over {order} where one over {c.order} was wanted")
        own = [i for i in c.order if i in order]
        if own != list(order):
            node = self.call(node, aten.permute.default, node, [order.index(i) for i in own])
        if len(own) < len(c.order):  # equal along the others
            sizes = self.lifted.extents(c.order)
            node = self.call(node, aten.reshape.default, node, [sizes[i] if i in order else 1 for i in c.order])
            node, order = self.call(node, aten.expand.default, node, [sizes[i] for i in c.order]), c.order
            # Kernels read elements that lie side by side.
            node = self.call(node, aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(node, aten.reshape.default, node, [-1]) if len(order) != 1 else node

    def _value(self, t: Term, rows: Order) -> tuple[fx.Node, Order]:
        if (t, rows) not in self.done:
            self.done[t, rows] = self._new(t, rows)
        return self.done[t, rows]

    def _new(self, t: Term, rows: Order) -> tuple[fx.Node, Order]:
        if t.kind == "leaf":
            return self._leaf(t, rows)
        if (t.kind == "red" or t in self.combined) and (made := self.sum_of(t, rows)) is not None:
            return self._turned(*made, rows), (TOKENS,)
        if t.kind == "red":
            if rows and not t.axes and not t.deps:
                return self._value(t, ())
            if rows and (pair := self.pair(t)) is not None:
                return self._summed(pair, self._product(pair)), (TOKENS,)
            if rows:
                node, factor = self.statistic(t, rows)
                out = self._wide(self.call(node, aten.view.default, node, [-1]))
                return out if factor == 1 else self.call(out, aten.mul.Tensor, out, float(factor)), (TOKENS,)
            node, order = self._value(t.args[0], rows)
            over = [order.index(i) for i in t.over]
            reduced = self.call(node, g.aten_of(REDUCTIONS[t.name].aten), node, over)
            return reduced, tuple(i for i in order if i not in t.over)
        if t.kind == "fn":
            vectors, order = self._aligned(tuple(a for a in t.args if not is_number(a)), rows)
            like, others = vectors[0], iter(vectors)
            of = {"dtype": like.meta["val"].dtype, "device": like.meta["val"].device}
            args = [  # full_like has no lowering
                self.call(like, aten.scalar_tensor.default, float(a.coefficient), **of)
                if is_number(a)
                else next(others)
                for a in t.args
            ]
            if t.name in ROUNDED:
                narrow = self.call(args[0], prims.convert_element_type.default, args[0], ROUNDED[t.name])
                return self.call(narrow, prims.convert_element_type.default, narrow, self.compute), order
            if t.name in COMPARISONS:
                args[0] = self.call(args[0], COMPARISONS[t.name], args[0], 0)
                return self.call(args[0], aten.where.self, *args), order
            return self.call(args[0], FUNCTIONS[t.name][0], *args), order
        if t.kind == "lanes":
            args, order = self._aligned(t.args, rows)
            sizes = self.lifted.extents(order)
            args = [self.call(a, aten.expand.default, a, [sizes[i] for i in order]) for a in args]
            parts = [self.call(a, aten.unsqueeze.default, a, -1) for a in args]  # stack has no lowering
            return self.call(args[0], aten.cat.default, parts, -1), (*order, *t.over)
        if t.kind not in ("mul", "add"):
            raise BrokenInvariant(f"no vector is a {t.kind}")
        if t.kind == "mul":
            args, order = self._aligned(t.args, rows)
            args = [self._power(a, p) for a, p in zip(args, t.powers, strict=True)]
            return self._folded(aten.mul.Tensor, args, t.coefficient, 1), order
        addends, number = list(zip(t.args, t.powers, strict=True)), t.coefficient
        known, order = list[fx.Node](), Order()
        if rows and (part := self._part(t, rows)) is not None:
            addends = [(a, w) for a, w in addends if a not in part.args]
            vector, order = self._value(part, rows)
            known, number = [vector], number - part.coefficient
        together, rest = self._alike(addends, rows) if rows else ([], addends)
        args, own = self._aligned(tuple(a for a, _ in rest), rows) if rest else ([], ())
        order = own or order or ((TOKENS,) if together else ())  # beside scalars only, say
        args = [self._times(a, w) for a, (_, w) in zip(args, rest, strict=True)]
        return self._folded(aten.add.Tensor, known + args + together, number, 0), order

    def _part(self, t: Term, rows: Order) -> Term | None:
        """The largest part of a sum whose vector there is. (The mean of a residual stream has an addend for every layer
        before it, and the last layer's mean has all but one or two.)"""
        mine = dict(zip(t.args, t.powers, strict=True))
        there = {x for x, own in self.done if own == rows and x.kind == "add"}
        there |= {x for x, own in self.combined.items() if own == rows}
        found = [x for x in there if all(mine.get(a) == w for a, w in zip(x.args, x.powers, strict=True))]
        return max(found, key=lambda x: (len(x.args), -x.id), default=None)

    def _folded(self, op: object, args: list[fx.Node], coefficient: Fraction, neutral: int) -> fx.Node:
        """The product or the sum of `args` and a number."""
        out = args[0]
        for a in args[1:]:
            out = self.call(out, op, out, a)
        return out if coefficient == neutral else self.call(out, op, out, float(coefficient))

    def _times(self, a: fx.Node, w: Fraction) -> fx.Node:
        return a if w == 1 else self.call(a, aten.mul.Tensor, a, float(w))

    def _alike(
        self, addends: list[tuple[Term, Fraction]], rows: Order
    ) -> tuple[list[fx.Node], list[tuple[Term, Fraction]]]:
        """Of an addition's sums over tensors that are not ours to make, those over one shape as one sum: one pass reads
        them all, as dq * q + dk * k + dv * v. And the other addends."""
        groups, rest = defaultdict[Any, list[tuple[Term, Fraction, Pair]]](list), list[tuple[Term, Fraction]]()
        for arg, w in addends:
            beside = arg.kind == "red" and self.sum_of(arg, rows) is None and (arg, rows) not in self.done
            if beside and (pair := self.pair(arg)) is not None:
                shape = g.tensor(pair.tensors[0]).shape  # type: ignore[union-attr]
                groups[pair.dims, tuple(map(size_of, shape))].append((arg, w, pair))
            else:
                rest.append((arg, w))
        together = list[fx.Node]()
        for alike in groups.values():
            if len(alike) == 1:
                rest.append(alike[0][:2])
                continue
            products = [self._times(self._product(pair), w) for _, w, pair in alike]
            together.append(self._summed(alike[0][2], self._folded(aten.add.Tensor, products, Fraction(0), 0)))
        return together, rest

    def _turned(self, node: fx.Node, made: Order, rows: Order) -> fx.Node:
        """A vector over tokens in one order, [M], in another, as windows of an image are not the image row by row."""
        if made == rows:
            return node
        sizes = self.lifted.extents(made)
        out = self.call(node, aten.reshape.default, node, [sizes.get(i, -1) for i in made])
        out = self.call(node, aten.permute.default, out, [made.index(i) for i in rows])
        return self.call(node, aten.reshape.default, out, [-1])

    def _wide(self, node: fx.Node) -> fx.Node:
        """The node in the dtype that is computed in."""
        if g.tensor(node).dtype == self.compute:  # type: ignore[union-attr]
            return node
        return self.call(node, prims.convert_element_type.default, node, self.compute)

    def _product(self, pair: Pair) -> fx.Node:
        """What is summed of tensors that are not ours to make."""
        first = pair.tensors[0]
        out = self._wide(first)
        for other in pair.tensors[1:]:
            out = self.call(first, aten.mul.Tensor, out, self._wide(other))
        if not is_number(pair.vector):
            order = self.lifted.reading.roots(first)[-1]
            out = self.call(first, aten.mul.Tensor, out, self.write(Computed(pair.vector, "feature", order)))
        return out

    def _summed(self, pair: Pair, product: fx.Node) -> fx.Node:
        """Its sums, [M]."""
        out = self.call(pair.tensors[0], aten.sum.dim_IntList, product, list(pair.dims))
        return self.call(pair.tensors[0], aten.reshape.default, out, [-1])

    def _power(self, a: fx.Node, p: Fraction) -> fx.Node:
        if p == 1:
            return a
        return (
            self.call(a, aten.rsqrt.default, a)
            if p == Fraction(-1, 2)
            else self.call(a, aten.pow.Tensor_Scalar, a, float(p))
        )

    def _aligned(self, args: tuple[Term, ...], rows: Order) -> tuple[list[fx.Node], Order]:
        """The arguments with their dimensions in one order, missing ones of size 1."""
        values = [self._value(a, rows) for a in args]
        order = max((o for _, o in values), key=len)
        order += tuple(i for _, o in values for i in o if i not in order)
        out = []
        for node, own in values:
            if own != order:
                node = self.call(
                    node, aten.permute.default, node, sorted(range(len(own)), key=lambda d: order.index(own[d]))
                )
                for d, axis in enumerate(order):
                    node = node if axis in own else self.call(node, aten.unsqueeze.default, node, d)
            out.append(node)
        return out, order

    def _leaf(self, t: Term, rows: Order) -> tuple[fx.Node, Order]:
        """A tensor of the graph, one dimension for each of its axes, at the leaf's lanes."""
        node = self.lifted.node(t)
        order: Order = tuple(i for d in self.lifted.reading.roots(node) for i in d)
        if rows:
            order = (TOKENS,) if order else ()
            out = self.call(node, aten.reshape.default, node, [-1] if order else [])
        else:
            sizes = self.lifted.extents(order)
            out = self.call(node, aten.reshape.default, node, [sizes[i] for i in order])
        for axis, index in t.lanes:
            out = self.call(out, aten.select.int, out, order.index(axis), index)
            order = tuple(i for i in order if i != axis)
        return self._wide(out), order
