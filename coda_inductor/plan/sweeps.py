"""What stays beside an operation that is no product of ours, read as Sweeps.

Sums over tokens and over features of what attention's backward leaves, and the gradients that products take, turned
back through a rotary embedding or put side by side: all that reads the same tensors, and that nothing else reads as
loops, is one Sweep. It is looked for in the graph in which the Regions stand, whose outputs are tensors like others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.ops import OPS
from coda_inductor.core.region import DTYPE_NAMES
from coda_inductor.core.sweep import Extent, Output, Part, Read, Sweep, Write, verify_sweep
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.lift import Lifted, lift
from coda_inductor.patterns.terms import Term, Terms, is_number
from coda_inductor.plan.layout import Ids, in_order, lies, long_axes
from coda_inductor.plan.statements import EXTENTS, Statements, Value
from coda_inductor.rewrite.sources import leaves


class InMemory(NamedTuple):
    """How an input lies: has it rows, how many columns (0: it is a vector over the rows), and of columns that lie head
    by head, how many lie together."""

    rows: bool
    width: int
    inner: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A node that a Sweep may supply: `term` is the tile that it is, or that it sums over the axes `over`; `rows` are
    the axes of its tokens."""

    node: fx.Node
    term: Term
    rows: frozenset[int]
    over: frozenset[int] | None = None


@dataclass(slots=True)
class Swept:
    """A Sweep, the tensors that it reads, and the nodes that its outputs are."""

    sweep: Sweep
    inputs: list[fx.Node]
    outputs: list[fx.Node]

    def inner(self, i: int) -> int:
        """Of an input that lies head by head how many columns lie together, else 0."""
        return next(r.inner for part in self.sweep.parts for r in part.reads if r.input == i)


def read_through(graph: fx.Graph, matrices: Collection[fx.Node], *, rounding: bool) -> Lifted:
    """The graph's pointwise operations as terms; sums and products are tensors like others. `matrices` are what Regions
    take and give."""
    return lift(graph, rounding, lambda node: node.target in g.PRODUCTS or g.reduction(node) is not None, matrices)


def swept(lifted: Lifted, wanted: Sequence[Wanted], there: Callable[[fx.Node], bool]) -> Swept:
    """One Sweep that supplies all that is wanted, of tensors that are `there` in memory. Rows may be of several axes,
    as those of queries and of keys are; they are as many. Raises Unsupported with the first condition that fails."""
    inputs, parts, outputs = dict[fx.Node, InMemory](), list[Part](), list[Output]()
    if len({lifted.reading.axes.total(sorted(w.rows)) for w in wanted}) > 1:
        raise Unsupported("it is of different numbers of tokens")
    for rows in dict.fromkeys(w.rows for w in wanted):
        finder, mine = _Finder(lifted, rows, there, inputs), [w for w in wanted if w.rows == rows]
        parts += finder.find(mine, len(outputs))
        outputs += map(finder.output, mine)
    parts = _read_alike(parts, [*inputs])
    read = tuple((DTYPE_NAMES[g.tensor(n).dtype], layouts.width) for n, layouts in inputs.items())  # type: ignore[union-attr]
    if any(dtype == "f64" for dtype, _ in read):
        outputs = [o if o.extent == "tile" else Output(o.extent, o.width, "f64") for o in outputs]
    if not any(r.input == 0 and r.extent in ("tile", "heads") for part in parts for r in part.reads):
        raise Unsupported(f"{next(iter(inputs))} has fewer columns than what is made of it")
    ordered = [w.node for rows in dict.fromkeys(w.rows for w in wanted) for w in wanted if w.rows == rows]
    return Swept(verify_sweep(Sweep(read, tuple(parts), tuple(outputs))), [*inputs], ordered)


def _read_alike(parts: Sequence[Part], inputs: Sequence[fx.Node]) -> list[Part]:
    """The parts, of which each reads an input as every other does: what is a tile of one and a table of a wider one is
    a table of both, of as many rows as there are."""
    forms = dict[int, set[tuple[Extent, int]]]()
    for r in (r for part in parts for r in part.reads):
        forms.setdefault(r.input, set()).add((r.extent, r.inner))

    def alike(r: Read) -> Read:
        if len(forms[r.input]) == 1:
            return r
        if forms[r.input] != {("tile", 0), ("table", 0)} or r.start:
            raise Unsupported(f"{inputs[r.input]} is read in two ways")
        return replace(r, extent="table")

    return [replace(part, reads=tuple(map(alike, part.reads))) for part in parts]


@dataclass(slots=True)
class _Finder:
    """Of what has the same rows."""

    lifted: Lifted
    rows: frozenset[int]
    there: Callable[[fx.Node], bool]
    inputs: dict[fx.Node, InMemory]
    order: Ids = ()
    """The rows, as all tiles have them in memory."""

    def find(self, wanted: Sequence[Wanted], first: int) -> list[Part]:
        """The parts that make what is wanted, whose outputs are numbered from `first` on."""
        tiles = [n for w in wanted for n in self.tiles(w.term)]
        if not tiles or any(not self.rows <= w.term.axes for w in wanted):
            raise Unsupported("it does not vary over all tokens")
        widths = {n: self.total(tuple(self.axes(n) - self.rows)) for n in tiles}
        wide = [n for n in tiles if widths[n] == max(widths.values())]  # a table of one sequence has all rows, too
        in_rows = [n for n in wide if {*lies(self.lifted, n)[: len(self.rows)]} == self.rows]
        if not in_rows and self.lifted.reading.axes.total(sorted(self.rows)).static is None:
            raise Unsupported(f"{wide[0]} does not lie in memory in rows, whose number is not static")
        leader = (in_rows or wide)[0]
        self.order = tuple(i for i in lies(self.lifted, leader) if i in self.rows)
        self.input(leader)
        outputs, parts = list(enumerate(wanted, first)), list[Part]()
        for columns in self.classes(wanted):
            mine = [(i, w) for i, w in outputs if set(self.columns(w)) == set(columns)]
            for some in self.apart(mine):
                parts += self.parts(columns, some)
        return parts

    def apart(self, mine: list[tuple[int, Wanted]]) -> list[list[tuple[int, Wanted]]]:
        """Those together that read a tile in common: others would only need registers of one another. A sum over the
        features of several tiles is several, added up."""
        terms, found = self.lifted.terms, list[tuple[set[fx.Node], dict[int, list[Term]]]]()
        for i, w in mine:
            for t in self.addends(w):
                read, some = {*self.tiles(t)}, {i: [t]}
                for others, members in [each for each in found if each[0] & read]:
                    read, some = read | others, {j: members.get(j, []) + some.get(j, []) for j in members | some}
                    found.remove((others, members))
                found.append((read, some))
        wanted = dict(mine)
        return [[(i, replace(wanted[i], term=terms.add(*some[i]))) for i in sorted(some)] for _, some in found]

    def addends(self, w: Wanted) -> list[Term]:
        """What may be summed apart."""
        if w.over is None or w.over == w.rows:
            return [w.term]
        terms, found, todo = self.lifted.terms, list[Term](), [w.term]
        while todo:
            t = todo.pop()
            whole = t.kind != "add" or t.coefficient or any(a.axes != t.axes for a in t.args)
            parts = [] if whole else [terms.mul(terms.const(p), a) for a, p in zip(t.args, t.powers, strict=True)]
            found += [t] if whole else []
            todo += reversed(parts)
        return found

    def axes(self, node: fx.Node) -> set[int]:
        """Those of a node's dimensions."""
        return {i for d in self.lifted.reading.roots(node) for i in long_axes(self.lifted, d)}

    def tiles(self, t: Term) -> list[fx.Node]:
        """The tensors over all rows, and columns, that a term is made of."""
        nodes = (self.lifted.node(leaf) for leaf in leaves(t))
        return [n for n in nodes if self.axes(n) > self.rows]

    def columns(self, w: Wanted) -> Ids:
        """The axes of its columns, as they lie in a tile, or else as the graph has them."""
        if w.over is None:
            axes = lies(self.lifted, w.node)
            if axes[: len(self.order)] != self.order:
                raise Unsupported(f"{w.node} lies in memory in another order of its rows")
            return axes[len(self.order) :]
        reduction = g.reduction(w.node)
        assert reduction is not None
        dims = self.lifted.reading.roots(reduction.source)
        left = long_axes(self.lifted, (i for d in self.lifted.reading.roots(w.node) for i in d))
        if w.over.isdisjoint(self.rows) and left != self.order:
            raise Unsupported(f"{w.node} has its rows in another order")
        return long_axes(self.lifted, (i for d in dims for i in d if i not in self.rows))

    def classes(self, wanted: Sequence[Wanted]) -> list[Ids]:
        """The columns of the parts, or of several that lie side by side."""
        found = dict[frozenset[int], Ids]()
        for w in wanted:
            columns = self.columns(w)
            if found.setdefault(frozenset(columns), columns) != columns:
                raise Unsupported(f"{w.node} has its columns in another order")
        return [*found.values()]

    def output(self, w: Wanted) -> Output:
        """What it leaves as."""
        if w.over is None:
            return Output("tile", self.total(self.columns(w)), DTYPE_NAMES[g.tensor(w.node).dtype])  # type: ignore[union-attr]
        if w.over == w.rows:
            return Output("feature", self.total(self.columns(w)), "f32")
        return Output("token", 0, "f32")

    def total(self, axes: Ids) -> int:
        """How many columns these are."""
        size = self.lifted.reading.axes.total(axes).static
        if size is None:
            raise Unsupported("its number of columns is not static")
        return size

    def parts(self, columns: Ids, mine: list[tuple[int, Wanted]]) -> Iterator[Part]:
        """Those of one class of columns: lanes that lie one behind the other are parts, and the two lanes within heads
        halves."""
        terms, lanes = self.lifted.terms, [i for i in columns if any(i in _lanes(w.term) for _, w in mine)]
        split = next((k for k, i in enumerate(columns) if i not in lanes), len(columns))
        inner = [i for i in columns[split:] if i in lanes]
        if not inner and split and any(_mixes(terms, w.term, columns[split - 1]) for _, w in mine):
            split -= 1
            inner = [columns[split]]
        if len(inner) > 1 or any(self.total((i,)) != 2 for i in inner) or columns[-1] in lanes:
            raise Unsupported("its lanes are neither parts that lie side by side nor halves of heads")
        rest = columns[split:]
        half = self.total(rest[rest.index(inner[0]) + 1 :]) if inner else 0
        width = self.total(rest)
        for place, at in enumerate(itertools.product(*(range(self.total((i,))) for i in columns[:split]))):
            fixed = dict(zip(columns, at, strict=False))
            writer = _Writer(self, rest, fixed, inner[0] if inner else None, terms=terms)
            writes = list[Write]()
            for output, w in mine:
                start = 0 if self.output(w).extent == "token" else place * width
                for lane in (0, 1) if inner else (None,):
                    value = writer.value(_at(terms, w.term, fixed | ({} if lane is None else {inner[0]: lane})))
                    writes.append(Write(str(value), output, start, lane))
            part = Part(width // 2 if inner else width, half, tuple(writer.reads), tuple(writer.lets), tuple(writes))
            if any(write.value not in part.tiles for write in writes):
                raise Unsupported("a part of it is made of vectors alone")
            yield part

    def input(self, node: fx.Node) -> int:
        """Which input the node is."""
        rows, columns, inner = self.split(node)
        where = InMemory(bool(rows), self.total(columns) if columns else 0, inner)
        if self.inputs.setdefault(node, where) != where:
            raise Unsupported(f"{node} has rows that are others' columns")
        if not self.there(node):
            raise Unsupported(f"{node} does not lie in memory")
        if g.tensor(node).dtype not in DTYPE_NAMES:  # type: ignore[union-attr]
            raise Unsupported(f"{node} is of {g.tensor(node).dtype}")  # type: ignore[union-attr]
        return [*self.inputs].index(node)

    def split(self, node: fx.Node) -> tuple[Ids, Ids, int]:
        """The axes of a tensor's rows and of its columns, as they lie; and of columns that lie head by head, how many
        lie together."""
        axes = lies(self.lifted, node)
        rows, columns = (tuple(i for i in axes if (i in self.rows) == inside) for inside in (True, False))
        if rows != self.order[len(self.order) - len(rows) :]:
            raise Unsupported(f"{node} lies in memory in another order of its rows")
        if axes == rows + columns:
            return rows, columns, 0
        *_, length, inner = [long_axes(self.lifted, self.lifted.reading.roots(node)[d]) for d in in_order(node)]
        turns = sum((i in self.rows) != (j in self.rows) for i, j in itertools.pairwise(axes))
        apart = (
            self.rows.isdisjoint(inner) and {*length} <= self.rows and axes[-len(inner) - len(length) - 1] in columns
        )
        if turns != (3 if axes[0] in self.rows else 2) or not apart or len(rows) < len(self.order):
            raise Unsupported(f"{node} does not lie in memory in rows")
        if self.lifted.reading.axes.total(length).static is None:
            raise Unsupported(f"{node} lies head by head, and its sequences' length is not static")
        return rows, columns, self.total(inner)


@dataclass(slots=True)
class _Writer(Statements):
    """Of one part, whose columns are `rest`, at the `fixed` lanes of what lies side by side."""

    finder: _Finder
    rest: Ids
    fixed: dict[int, int]
    half: int | None
    reads: list[Read] = field(default_factory=list)

    def extent(self, t: Term) -> str:
        rows, columns = bool(t.axes & self.finder.rows), bool(t.axes - self.finder.rows)
        return "tile" if rows and columns else "token" if rows else "feature" if columns else "scalar"

    def rank(self, t: Term) -> tuple[object, ...]:
        return (EXTENTS.index(self.extent(t)),)

    def given(self, t: Term) -> Value | None:
        if t.kind != "leaf":
            if t.kind not in ("mul", "add", "fn") or (t.kind == "fn" and t.name not in OPS):
                raise Unsupported(f"{t.name or t.kind} is no operation of an epilogue")
            if not t.axes and not is_number(t):
                raise Unsupported("it computes with a number")
            return float(t.coefficient) if is_number(t) else None
        node, lanes = self.finder.lifted.node(t), dict(t.lanes)
        rows, columns, inner = self.finder.split(node)
        outer = [i for i in columns if i in lanes and i != self.half]
        if outer != [*columns[: len(outer)]] or any(self.fixed.get(i) != lanes[i] for i in outer):
            raise Unsupported(f"a part of {node} is read beside another")
        start = 0
        for i in outer:
            start = start * self.finder.total((i,)) + lanes[i]
        columns, lane = columns[len(outer) :], lanes.get(self.half) if self.half is not None else None
        whole = tuple(i for i in self.rest if i != self.half or i in columns)
        extent: Extent = "heads" if inner else "tile" if rows else "feature"
        if not columns:
            if rows != self.finder.order:
                raise Unsupported(f"{node} is no vector over the rows")
            extent = "token"
        elif columns != whole or (rows and rows != self.finder.order):
            if columns != whole[len(whole) - len(columns) :] or outer or inner:
                raise Unsupported(f"{node} has other columns")
            extent = "table"
        start = 0 if extent in ("token", "table") else start * self.finder.total(columns)
        read = Read(f"x{len(self.reads)}", self.finder.input(node), extent, start, lane, inner)
        self.reads.append(read)
        return read.name


def _at(terms: Terms, t: Term, fixed: dict[int, int]) -> Term:
    for axis, index in fixed.items():
        t = terms.select(t, axis, index)
    return t


def _lanes(t: Term) -> set[int]:
    """The axes that are taken apart in t, or put together."""
    found, seen, todo = set[int](), set[Term](), [t]
    while todo:
        x = todo.pop()
        if x not in seen:
            seen.add(x)
            found |= {axis for axis, _ in x.lanes} | (set(x.over) if x.kind == "lanes" else set())
            todo += x.args
    return found


def _mixes(terms: Terms, t: Term, axis: int) -> bool:
    """Is one lane of t made of another of a tensor?"""
    return any((axis, 1) in leaf.lanes for leaf in leaves(_at(terms, t, {axis: 0})))
