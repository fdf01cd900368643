"""Where an epilogue's inputs come from: questions to a plan, which change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import fx

from coda_inductor.core.dtypes import DTYPE_NAMES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.layout import dense
from coda_inductor.patterns.terms import Term, is_number
from coda_inductor.plan.draft import MAX_INLINE, Conflict, Draft, Loaded, Root, Stored
from coda_inductor.rewrite.beside import Pair, pair
from coda_inductor.rewrite.limits import Limits
from coda_inductor.rewrite.program import POINTWISE_KINDS, Program
from coda_inductor.rewrite.rotate_half import NOT_ROWS
from coda_inductor.rewrite.sources import given, leaves, sources, statistics
from coda_inductor.rewrite.space import Axes, Computed, Half, Space
from coda_inductor.rewrite.worth import dear, features_behind


@dataclass(slots=True)
class Inputs:
    """What is planned so far, as far as it says where inputs come from. An answer that excludes an earlier decision
    raises Conflict."""

    program: Program
    drafts: dict[Term, Draft] = field(default_factory=dict, kw_only=True)
    """By accumulator."""
    sums: set[Term] = field(default_factory=set, kw_only=True)
    """Those that epilogues take."""

    def loads(self, draft: Draft, *values: Term) -> dict[Term, Loaded]:
        """The early terms that an epilogue reads rather than computes to make the values, and from where."""
        found: dict[Term, Loaded] = {}
        seen, todo = set[Term](), [part for t in values for part in self.program.parts(t, draft.space)]
        while todo:
            x = todo.pop()
            if x in seen or x in draft.space.accs:
                continue
            seen.add(x)
            source = None if x.deps & draft.space.mask else self.where(x, draft.space)
            if source is None:
                todo += self.program.inside(x, draft.space)
            else:
                found[x] = source
        return found

    def where(self, x: Term, space: Space) -> Loaded | None:
        """Where an epilogue gets an early x: a node, a store, a sum (its reduction), a computation, half a node; None
        if it makes x itself from x's arguments."""
        extent = space.extent(x)
        if space.heads is not None and extent in ("feature", "table"):
            lane = self.program.lane(x, space)
            if isinstance(lane, Half):
                self._afford(lane.whole.term, space)
            return lane
        if extent == "tile":
            if (square := self._square(x, space)) is not None:
                return Root(self._tile_source(square, space))
            if not self.program.has_tile(x, space) or self.program.composed(x, space):
                return None
            return self._tile_source(x, space)
        if extent == "sample":
            return self._of_sample(x, space)
        if extent == "scalar" and not is_number(x) and not statistics(x):
            return self._computed(x, space)
        if x.kind == "red" and self.can_sum(x, space.rows):
            return x if self.rows(x) == space.rows else self._computed(x, space)
        if x.kind == "red" and self.pair(x):
            return self._computed(x, space)
        if extent == "feature" and not x.deps and x.axes < set(space.columns):
            return self._computed(x, space)  # of each head, or of all columns of one
        if extent == "feature" and (part := self._part(x, space)) is not None:
            return part
        if not x.args:
            return self._vector(x, space) if x.kind == "leaf" else None
        if extent != "scalar" and (inverse := self._inverse(x, space)) is not None:
            return inverse
        summed = x.kind not in ("red", "con") and all(
            self.can_sum(s, space.rows) or self.pair(s) for s in statistics(x) if s.deps
        )
        if not summed and self.program.natural(x, self._axes(x, space)) is not None:
            return self._vector(x, space)
        crowded = bool(self.program.limits.crowded & space.mask) and x.kind in ("mul", "add")
        inline = 1 if crowded else MAX_INLINE if x.kind == "add" else len(sources(x))
        early = not x.deps if extent == "token" else given(x)
        if (x.kind == "red" and early) or (summed and len(sources(x)) > inline):
            return self._computed(x, space)
        if x.kind == "red" and self.program.statistic(x, space.rows) is not None:
            return self._computed(x, space)
        return self._vector(x, space) if x.kind in ("red", "con") else None

    def _of_sample(self, x: Term, space: Space) -> fx.Node | None:
        """Where a vector over features for each sample is."""
        node = self.program.by_sample(x, space)
        if node is None and (x.kind not in POINTWISE_KINDS or not x.args):
            why = f"{x.name or 'a vector'} of each sample does not lie in rows"
            raise Conflict(Limits({a.bit: why for a in space.accs}))
        return node

    def _part(self, x: Term, space: Space) -> fx.Node | Computed | None:
        """Where a vector over features is, if it is or reads a part of a tensor that is no node, as of a table to which
        the user adds a condition before it takes parts of the sum: the sum's part, else a computation."""
        parts = (s for s in sources(x) if s.kind == "leaf" and s.lanes and s.axes == frozenset(space.columns))
        if x.kind not in (*POINTWISE_KINDS, "leaf") or statistics(x):
            return None
        if all(self.program.natural(part, space.columns, space.mask) for part in parts):
            return None
        return self.program.natural(x, space.columns, space.mask) or self._computed(x, space)

    def _inverse(self, x: Term, space: Space) -> fx.Node | None:
        """The node that holds x in float32, if x is 1 / a leaf and the node is made of that unrounded. Past the end of
        a vector stand zeros, of which an epilogue would make infinities that have to be masked (codegen/source.py)."""
        if x.kind != "mul" or x.powers != (Fraction(-1),) or x.coefficient != 1 or x.args[0].kind != "leaf":
            return None
        leaf = g.narrow(self.program.lifted.node(x.args[0]))
        for node in self.program.holding(x, self._axes(x, space)):
            made = g.narrow(node)
            if g.tensor(made).dtype == torch.float32 and leaf in map(g.narrow, made.all_input_nodes):  # type: ignore[union-attr]
                return node
        return None

    def _square(self, x: Term, space: Space) -> Term | None:
        """The square of which an epilogue of the backward takes the root to get x."""
        rooted = self.program.in_backward(space) and not self.program.limits.unrooted & space.mask
        return self.program.squares.get(x) if rooted else None

    def operand(self, acc: Term) -> fx.Node | Stored:
        """Where the left operand comes from: a node of the graph, or a store that no node of the graph equals."""
        product = self.program.product(acc)
        x = acc.args[0]
        dtype = g.tensor(product.x).dtype  # type: ignore[union-attr]
        order = product.rows + self.program.lifted.reading.roots(product.x)[-1]
        for node in self.program.nodes.get(x, ()):  # the first, so that products of one operand read one tensor
            fits = dense(node) or node is product.x  # attention's result often lies with its heads before its tokens
            if fits and self.order(node) == order and g.tensor(node).dtype == dtype:  # type: ignore[union-attr]
                return node
        try:
            if self.program.space(x).order != order:
                raise Unsupported(NOT_ROWS)
        except Unsupported as why:
            raise Conflict(Limits(undeferred=acc.hosts)) from why
        return Stored(x, DTYPE_NAMES[dtype])

    def _computed(self, x: Term, space: Space) -> Computed:
        extent = space.extent(x)
        if extent == "scalar" and not any(s.deps for s in statistics(x)):
            extent = "feature"  # the same for all columns
        if extent == "scalar":
            raise Conflict(Limits({a.bit: "a number that it needs is not known before it runs" for a in space.accs}))
        if extent == "feature":
            self._afford(x, space)
        return Computed(x, extent, self._axes(x, space))

    def _afford(self, x: Term, space: Space) -> None:
        """Raises Conflict for a vector over features that costs more than it is worth."""
        if dear := self._dear(x, space):
            raise Conflict(Limits(undeferred=dear))

    def _dear(self, x: Term, space: Space) -> int:
        """The products of the epilogue, as a bit set, if x sums over their weights, and reading all weights that the
        operand is multiplied with takes more than a norm's pass over it would: with many more features than there are
        tokens, as a head's. What is deferred to them then stays as written. 0 if it is worth it."""
        columns = set(space.heads.columns if space.heads else space.columns)
        sums = [s for s in statistics(x) if given(s) and s.axes and s.axes <= columns]
        lifted, product = self.program.lifted, self.program.product(space.accs[-1])
        inside = max((lifted.reading.axes.total(s.over).static or 0 for s in sums), default=0)
        costs = dear(features_behind(lifted, product), inside, product)
        return space.mask & ~self.program.limits.undeferred if costs else 0

    def reads(self, c: Computed) -> list[fx.Node | Term]:
        """What a small computation reads: nodes, and sums that epilogues take. Raises Unsupported if there is none."""
        lifted, found = self.program.lifted, list[fx.Node | Term]()
        for s in sources(c.term):
            read, fits = list[fx.Node | Term](), True
            if s.kind == "leaf":
                read = [node := lifted.node(s)]
                fits = c.extent == "feature" or not s.axes or (self.order(node) == c.order and dense(node))
            elif c.extent == "feature" or not (s.axes or s.deps):  # which is a number, of a parameter
                read, fits = [lifted.node(leaf) for leaf in leaves(s)], given(s)
            elif self.can_sum(s, c.order):
                read = [s]
            elif (beside := self.pair(s)) is not None:
                read, fits = [*beside.nodes(lifted)], beside.tokens(self.program) == c.order
            else:
                held = self.program.statistic(s, c.order)
                read, fits = [held[0]] if held else [], held is not None
            if not fits:
                raise Unsupported(f"no node holds {s}")
            found += read
        return found

    def pair(self, red: Term) -> Pair | None:
        """What is summed beside an operation that is left whole, if the reduction is such a sum."""
        return pair(self.program, red)

    def taken(self, red: Term, rows: Axes) -> bool:
        """Does some epilogue take this sum for each of its rows, and are they these rows in some order?"""
        mine = red in self.sums and bool(red.axes) and red.axes <= set(rows)
        return mine and self.program.lifted.can_permute(self.rows(red), rows)

    def rows(self, red: Term) -> Axes:
        """The axes of a sum over columns that an epilogue takes, in the order of its rows."""
        return self.program.space(red.args[0]).rows

    def _axes(self, x: Term, space: Space) -> tuple[int, ...]:
        return space.rows if space.extent(x) == "token" else space.columns

    def _vector(self, x: Term, space: Space) -> fx.Node:
        node = self.program.natural(x, self._axes(x, space))
        if node is None:
            raise Conflict(
                Limits({a.bit: f"{x.name or 'a vector'} is not laid out as its rows or columns" for a in space.accs})
            )
        return node

    def _tile_source(self, x: Term, space: Space) -> fx.Node | Stored:
        find = self.program.narrowest if x.hosts else self.program.natural
        node = find(x, space.order, space.mask)
        if node is not None and not (x.hosts and g.wider(node) and self.program.storable(x, space)):
            return node  # else it widens, and perhaps rearranges, what an epilogue can store as it is
        _, accs = self.united(self.program.space(x))
        return Stored(x, DTYPE_NAMES[self.program.product(accs[0]).stored])

    def can_sum(self, x: Term, rows: Axes) -> bool:
        """Can the epilogue that makes the summed values sum them, and are its rows these in some order?"""
        if x in self.sums:
            return self.taken(x, rows)
        if "N" not in REDUCTIONS[x.name].sinks or not x.args[0].hosts:
            return False
        try:
            space = self.program.space(x.args[0])
            self.program.check(x.args[0], space)
            self.united(space)
        except Unsupported:
            return False
        whole = set(x.over) == set(space.columns) and x.axes <= set(space.rows)
        return whole and self.program.lifted.can_permute(space.rows, rows)

    def order(self, node: fx.Node) -> tuple[int, ...]:
        """The node's axes as they lie, major to minor."""
        return self.program.layout(node)[0]

    def united(self, space: Space) -> tuple[list[Draft], tuple[Term, ...]]:
        """The drafts that already hold one of a space's accumulators, and all accumulators together."""
        old = {id(d): d for a in space.accs if (d := self.drafts.get(a))}
        accs = sorted({a for d in old.values() for a in d.space.accs} | set(space.accs), key=lambda a: (a.bit, a.lanes))
        if old and all(d.space.accs == tuple(accs) for d in old.values()):
            return [next(iter(old.values()))], tuple(accs)
        if any(d.space.heads != space.heads for d in old.values()):
            raise Conflict(Limits(whole_heads={a.bit: "" for a in accs}))
        if len(accs) > 2:
            raise Unsupported("more than two products would share one epilogue")
        return [*old.values()], tuple(accs)
