"""Rows that are put back beside what is made of the others, as a vision transformer's class token beside patches that a
rotary embedding turns.

    cat([x[:1], x[1:] * cos + turned(x[1:]) * sin]) = x * cat([1, cos]) + turned(x) * cat([0, sin])

On the right stands one value of all rows, which an epilogue makes; Inductor reads and writes x once more for the left.
Of the tables a few rows are written: of cosines 1, of sines 0. A factor of 1 is exact, and so is a sum with 0, as long
as x is finite: of an infinite number 0 times makes NaN. So x must be what a product or attention's gradient makes,
which no mask has filled. Gradients have the same form.

The left is dense, the right lies as x does: it is written only where nobody sees how it lies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.effects import Memory
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.schedule.kinds import is_attention, seen
from coda_inductor.write.writing import REPLACES, Writing

CAST = prims.convert_element_type.default
RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
SUMS_AND_PRODUCTS = (aten.add.Tensor, aten.mul.Tensor)
MOVES: frozenset[object] = RESHAPES | {
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.clone.default, aten.neg.default, aten.cat.default,
    aten.slice_scatter.default, CAST,
}  # fmt: skip
"""Operations that move numbers, change their sign or their dtype: of finite ones they make finite ones."""
ALONG: dict[object, int] = {
    aten.slice.Tensor: 1, aten.select.int: 1, aten.cat.default: 1, aten.slice_scatter.default: 2,
}  # fmt: skip
"""Where these say along which dimension: the argument's place."""
PARTS = (CAST, operator.getitem, *slices.SPLITS, aten.slice.Tensor, aten.select.int)
"""What may stand between a product and the rows, beside views."""
MOST = 64
"""Nodes between the rows and the cat, at most: a rotary embedding has ten, its gradient fifteen."""
SMALL = 4
"""Times as many numbers as a table has x, at least: rows are added to it in a pass over memory."""
Values = Mapping[fx.Node, float]
"""What tables hold in the rows that stay: 1 or 0."""


class Unfit(Exception):
    """No value of all rows."""


@dataclass(slots=True)
class Changed:
    """What is made of the rows from `start` on of `x`, as many as lie in `length`, along dimension `dim`."""

    x: fx.Node
    dim: int
    start: int
    length: int
    rows: dict[fx.Node, int | None] = field(default_factory=dict)
    """Which dimension of a node the rows are; None for what is not made of them."""
    known: dict[tuple[float, fx.Node], Values | None] = field(default_factory=dict)
    """What `with_tables` has found."""
    _made: set[fx.Node] = field(default_factory=set)
    """All nodes that the rows lead to."""

    def along(self, node: fx.Node) -> int | None:
        """`rows` of a node. Raises Unfit if it is made of the rows in another way than we know."""
        if not self._made:
            self._made = g.reached(filter(self.is_part, parts_of(self.x)), lambda n: n.users)
        if node not in self.rows:
            self.rows[node] = self._along(node) if node in self._made else None
        return self.rows[node]

    def _along(self, node: fx.Node) -> int:
        if self.is_part(node):
            return self.dim
        if not (moves(node) or node.target in SUMS_AND_PRODUCTS) or len(self.rows) > MOST or not g.floating(node):
            raise Unfit
        self.rows[node] = None  # counts, while it is looked into
        places = {a: self.along(a) for a in read(node)}
        found = {self._through(node, a, place) for a, place in places.items() if place is not None}
        if len(found) != 1 or node.meta["val"].shape[(place := found.pop())] != self.length:
            raise Unfit
        return place

    def is_part(self, node: fx.Node) -> bool:
        """Is the node these rows of x?"""
        found = slices.cut(node)
        if found is None or found[0] is not self.x:
            return False
        return (found[1] % rank(self.x), *found[2:]) == (self.dim, self.start, self.length)

    def _through(self, node: fx.Node, a: fx.Node, place: int) -> int:
        """Where the rows of `a` are in what is made of it."""
        args: tuple[Any, ...] = node.args
        if node.target in RESHAPES:
            before = math.prod(a.meta["val"].shape[:place])
            sizes = node.meta["val"].shape
            fits = [i for i, s in enumerate(sizes) if s == self.length and math.prod(sizes[:i]) == before]
            if len(fits) != 1:
                raise Unfit
            return fits[0]
        if node.target is aten.unsqueeze.default:
            return place + int(args[1] % rank(node) <= place)
        if node.target in SUMS_AND_PRODUCTS:
            return place + rank(node) - rank(a)
        along = ALONG.get(node.target)
        cut = slices.cut(node) if is_piece(node) else None
        dim = cut[1] if cut else None if along is None else args[along] if len(args) > along else 0
        if dim is not None and dim % rank(a) == place:
            raise Unfit
        return place - (node.target is aten.select.int and args[1] % rank(a) < place)

    def with_tables(self, node: fx.Node, value: float) -> Values | None:
        """With which values of its tables the node is `value` (1 or 0) times the rows, where these are finite; None:
        with none. (Of zeros it need not be the rows as they lie.)"""
        if (value, node) not in self.known:
            self.known[value, node] = self._unchanged(node) if value else self._vanished(node)
        return self.known[value, node]

    def _unchanged(self, node: fx.Node) -> Values | None:
        if self.is_part(node):
            return {}
        if self.along(node) is None:
            return None
        a = node.all_input_nodes
        if node.target is CAST:
            dtype = node.meta["val"].dtype
            exact = torch.promote_types(self.x.meta["val"].dtype, dtype) == dtype
            return self.with_tables(a[0], 1.0) if exact else None
        if node.target is aten.mul.Tensor:
            return self._times(node, 1.0)
        for x, y in (a, a[::-1]) if is_sum(node) else ():
            if (found := both(self.with_tables(x, 1.0), self.with_tables(y, 0.0))) is not None:
                return found
        return None

    def _vanished(self, node: fx.Node) -> Values | None:
        if self.along(node) is None:
            return None
        if node.target is aten.mul.Tensor:
            return self._times(node, 0.0)
        found: Values | None = {} if moves(node) or is_sum(node) else None
        for a in read(node):
            found = both(found, self.with_tables(a, 0.0))
        return found

    def _times(self, product: fx.Node, value: float) -> Values | None:
        """A product is its first factor times `value` if the other, a table, is that."""
        a = product.all_input_nodes
        tables = [t for t in a if self.along(t) is None]
        if len(a) != 2 or len(tables) != 1:
            return None
        (table,), (x,) = tables, [t for t in a if t not in tables]
        place = self.along(product)
        assert place is not None
        held, back = table.meta["val"], rank(product) - place
        many = SMALL * held.numel() > self.x.meta["val"].numel()
        if back > held.dim() or held.shape[-back] != self.length or many:
            return None
        inner = self.with_tables(x, 1.0) if value else {} if self._moved(x) else None
        return both(inner, {table: value})

    def _moved(self, node: fx.Node) -> bool:
        """Are its numbers those of the rows, or zeros?"""
        inside = g.reached([node], lambda n: () if self.is_part(n) or self.along(n) is None else read(n))
        between = [n for n in inside if not self.is_part(n)]
        return all(self.along(n) is not None and moves(n) and not is_narrower(n) for n in between)


def parts_of(x: fx.Node) -> Iterator[fx.Node]:
    """Its readers, and the pieces that splits make of it."""
    for user in x.users:
        yield from (user, *(user.users if user.target in slices.SPLITS else ()))


def is_piece(node: fx.Node) -> bool:
    """Is the node one of several results of a split?"""
    return node.target is operator.getitem and slices.cut(node) is not None and rank(node) == rank(read(node)[0])


def read(node: fx.Node) -> list[fx.Node]:
    """What it reads; of a piece what was split, of what lies in zeros not these."""
    if node.target is operator.getitem and (cut := slices.cut(node)) is not None:
        return [cut[0]]
    if node.target is aten.slice_scatter.default and is_zero(node.args[0]):
        return [node.args[1]]  # type: ignore[list-item]
    return node.all_input_nodes


def moves(node: fx.Node) -> bool:
    """Does it only move numbers, or change their sign or dtype?"""
    return node.target in MOVES or is_piece(node)


def rank(node: fx.Node) -> int:
    """How many dimensions it has."""
    return node.meta["val"].dim()  # type: ignore[no-any-return]


def is_sum(node: fx.Node) -> bool:
    """Does it add up two tensors?"""
    return node.target is aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs


def is_narrower(node: fx.Node) -> bool:
    """Is it a cast to numbers of less range, which may make a finite one infinite?"""
    dtypes = [n.meta["val"].dtype for n in (node, *node.all_input_nodes)] if node.target is CAST else []
    return len(dtypes) == 2 and torch.finfo(dtypes[0]).max < torch.finfo(dtypes[1]).max


def is_zero(node: object) -> bool:
    """Is it a tensor of zeros?"""
    return isinstance(node, fx.Node) and node.target is aten.full.default and bool(node.args[1] == 0)


def both(a: Values | None, b: Values | None) -> Values | None:
    """Both, if no table holds two values."""
    if a is None or b is None or any(b.get(t, v) != v for t, v in a.items()):
        return None
    return {**a, **b}


@dataclass(slots=True)
class Whole:
    """Writes what was made of some rows for all rows, of which there are `total`, where `values` are the tables'."""

    writing: Writing
    of: Changed
    values: Values
    total: int
    tables: dict[object, fx.Node]
    """Those that are there already, for all cats of a graph."""
    done: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def made(self, node: fx.Node) -> fx.Node:
        """The node, of all rows."""
        place = self.of.along(node)
        if place is None:
            return node
        if node not in self.done:
            self.done[node] = self.of.x if self.of.is_part(node) else self._new(node, place)
        return self.done[node]

    def _new(self, node: fx.Node, place: int) -> fx.Node:
        args: tuple[Any, ...] = node.args
        instead, target = self.writing.instead, node.target
        if is_piece(node):
            source, dim, start, length = slices.cut(node)  # type: ignore[misc]
            return instead(node, aten.slice.Tensor, self.made(source), dim, start, start + length)
        if target is aten.mul.Tensor:
            back = rank(node) - place
            return instead(node, target, *(self._table(t, back) if t in self.values else self.made(t) for t in args))
        if target in RESHAPES:
            return instead(node, aten.reshape.default, self.made(args[0]), self._sizes(node, place))
        if target is aten.slice_scatter.default:
            zeros = args[0]
            base = self.writing.call(zeros, zeros.target, self._sizes(node, place), *zeros.args[1:], **zeros.kwargs)
            return instead(node, target, base, self.made(args[1]), *args[2:])
        return instead(node, target, *fx.map_arg(args, self.made), **node.kwargs)

    def _sizes(self, node: fx.Node, place: int) -> list[int]:
        return [self.total if i == place else s for i, s in enumerate(node.meta["val"].shape)]

    def _table(self, table: fx.Node, back: int) -> fx.Node:
        """A table with rows of 1 or 0 before and behind it."""
        value, before = self.values[table], self.of.start
        behind = self.total - before - self.of.length
        key = (table, value, back, before, behind)
        if key not in self.tables:
            pads = [0, 0] * (back - 1) + [before, behind]
            self.tables[key] = self.writing.call(table, aten.constant_pad_nd.default, table, pads, value)
        return self.tables[key]


def write_prefixes(graph: fx.Graph, overwritten: frozenset[str] = frozenset()) -> None:
    """Rewrites such cats in place, but for those of what lies in memory that is `overwritten`."""
    memory, tables, found = Memory(graph) if overwritten else None, dict[object, fx.Node](), False
    for node in [n for n in graph.nodes if n.target in (aten.cat.default, aten.add.Tensor)]:
        try:
            changed, last = _changed(node, *_beside(node))
            values = changed.with_tables(last, 1.0)
        except Unfit:
            continue
        places = {*map(memory.of, [changed.x, *(values or ())])} if memory else set[str]()
        if values and not overwritten & places and not seen(node, through_attention=True):
            total = node.meta["val"].shape[changed.dim]
            whole = Whole(Writing(graph, node), changed, values, total, tables)
            made = whole.made(last)
            made.meta[REPLACES] = (*made.meta.get(REPLACES, ()), node.name)
            node.replace_all_uses_with(made)
            found = True
    if found:
        graph.eliminate_dead_code()


def _beside(node: fx.Node) -> tuple[list[fx.Node], int]:
    """What a cat, or a sum of tensors that are 0 but for some rows each, puts beside each other, and along which
    dimension. Raises Unfit."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.cat.default:
        return [*args[0]], (args[1] if len(args) > 1 else 0) % rank(node)
    found, todo, met = list[tuple[int, int, fx.Node]](), [node], set[fx.Node]()
    while todo:
        x = todo.pop()
        if x in met or not _static(x):  # what is added twice stands beside nothing
            raise Unfit
        met.add(x)
        if is_sum(x):
            todo += x.all_input_nodes
        elif x.target is aten.slice_scatter.default and len(x.args) < 6 and is_zero(x.args[0]):
            _, part, dim, start = (*x.args, 0, 0)[:4]
            if not (isinstance(start, int | None) and _static(part)):  # type: ignore[arg-type]
                raise Unfit
            start = (start or 0) % x.meta["val"].shape[dim]
            found.append((dim % rank(x), start, part))  # type: ignore[arg-type,operator]
        else:
            raise Unfit
    if len({dim for dim, _, _ in found}) != 1 or {p.meta["val"].dtype for _, _, p in found} != {node.meta["val"].dtype}:
        raise Unfit
    found.sort(key=lambda x: x[1])
    end, dim = 0, found[0][0]
    for _, start, part in found:
        if start != end:
            raise Unfit
        end += part.meta["val"].shape[dim]
    if end != node.meta["val"].shape[dim]:
        raise Unfit
    return [part for _, _, part in found], dim


def _static(node: fx.Node) -> bool:
    """Is it a tensor, of sizes that are numbers? To compare symbols would add a guard."""
    value = g.tensor(node)
    return value is not None and all(isinstance(size, int) for size in value.shape)


def _changed(node: fx.Node, parts: list[fx.Node], dim: int) -> tuple[Changed, fx.Node]:
    """The rows of which something is made, if what stands beside it are all others of one tensor; and what is made.
    Raises Unfit."""
    value = node.meta["val"]
    if not _static(node):
        raise Unfit
    cuts = [slices.cut(part) for part in parts]
    others = [i for i, found in enumerate(cuts) if found is None]
    sources = {found[0] for found in cuts if found is not None}
    if len(others) != 1 or len(sources) != 1:
        raise Unfit
    (x,), (place,), start = sources, others, 0
    for part, found in zip(parts, cuts, strict=True):
        length = part.meta["val"].shape[dim]
        if found is not None and (found[1] % rank(node), *found[2:]) != (dim, start, length):
            raise Unfit
        if part is parts[place]:
            changed = Changed(x, dim, start, length)
        start += length
    if x.meta["val"].shape != value.shape or x.meta["val"].dtype != value.dtype or changed.length < 2:
        raise Unfit
    if not g.floating(x) or not multiplied(g.root(x, lambda n: g.is_view(n) or n.target in PARTS)):
        raise Unfit
    return changed, parts[place]


def multiplied(node: fx.Node) -> bool:
    """Is it a product, attention, or what sums products up? (Nothing that fills in infinite numbers.)"""
    made_of = g.reached([node], lambda n: n.all_input_nodes if is_sum(n) else ())
    return all(is_sum(n) or n.target in g.PRODUCTS or is_attention(n) for n in made_of)
