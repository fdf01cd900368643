"""The program under derivation: the lifted graph with each term as the laws have left it.

Answers the one question on which everything turns: can this value be made in the epilogue of a product, and of which?
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import SAMPLE
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.layout import dense, in_rows
from coda_inductor.patterns.terms import Term
from coda_inductor.rewrite.rotate_half import MIXED, NOT_ROWS, heads, lanes
from coda_inductor.rewrite.sources import statistics
from coda_inductor.rewrite.space import Axes, Half, Heads, Lane, Space
from coda_inductor.rewrite.state import State, weight_of

MAX_LANES = 2
POINTWISE_KINDS = ("mul", "add", "fn")


@dataclass(slots=True)
class Program(State):
    """What an epilogue could make of a state's terms, and what it would read."""

    head_sums: set[int] = field(default_factory=set)
    """The products, by bit, of epilogues that were found to sum over the columns of each head."""
    _spaces: dict[Term, Space | str] = field(default_factory=dict)
    _bases: dict[tuple[Term, Axes, Axes, Heads | None], frozenset[Term]] = field(default_factory=dict)
    _tiles: dict[tuple[Term, Axes, Axes, Heads | None], bool] = field(default_factory=dict)
    _lanes: dict[tuple[Axes, Heads, int], dict[Term, Lane | Half]] = field(default_factory=dict)

    def in_backward(self, space: Space) -> bool:
        """Is the epilogue of `space` one of the backward?"""
        return g.is_backward(self.product(space.accs[-1]).node)

    def space(self, t: Term) -> Space:
        """The tile space whose epilogue could make t: that of the last product that t reaches. Raises Unsupported."""
        if t not in self._spaces:
            try:
                self._spaces[t] = self._space(t)
            except Unsupported as why:
                self._spaces[t] = why.what  # the error itself would keep every frame that called us alive
        found = self._spaces[t]
        if isinstance(found, str):
            raise Unsupported(found)
        return found

    def _space(self, t: Term) -> Space:
        accs = self.accumulators(t)
        if not accs:
            raise Unsupported("no product feeds it directly")
        last = accs[-1]
        if last.bit in self.limits.banned:
            raise Unsupported(self.limits.banned[last.bit])
        weight_of(self.product(last))
        if g.is_weight_gradient(self.product(last).node):
            raise Unsupported("a weight's gradient: its left operand lies column by column")
        sizes = self.lifted.reading.axes
        if sizes.total(self.product(last).columns).static is None or sizes.total(last.over).static is None:
            raise Unsupported("a width that is a symbol")
        shared = [a for a in accs if self._shares(a, last)]
        columns = {self.columns(a) for a in shared}
        mixed = any(a.bit == last.bit and a not in shared for a in accs)  # halves, and the whole
        if mixed or len(shared) > MAX_LANES or len(columns) > 1 or not all(map(self._halves, shared)):
            of, halves = heads(self, t, last)
            return Space(halves, self.product(last).rows, self.columns(last), of)
        return Space(tuple(shared), self.product(last).rows, columns.pop())

    def parts(self, t: Term, space: Space) -> list[Term]:
        """t as the epilogue of `space` makes it: where that has halves of heads, both halves of t."""
        if space.heads is None or space.heads.lane not in t.axes:
            return [t]
        return [self.lifted.terms.select(t, space.heads.lane, i) for i in (0, 1)]

    def lane(self, x: Term, space: Space) -> Lane | Half | None:
        """Where an epilogue of halves of heads reads an early vector over features, or a table."""
        assert space.heads is not None
        key = space.rows, space.heads, space.accs[-1].bit
        if key not in self._lanes:
            self._lanes[key] = lanes(self, space.rows, space.heads, self.product(space.accs[-1]))
        found = self._lanes[key].get(x)
        if found is None or isinstance(found, Half):
            return found
        return None if self.lifted.deps[found.node] & space.mask else found

    def makers(self, t: Term) -> int:
        """The products in whose epilogue t could first be known, as a bit set; 0 if none feeds it."""
        try:
            return self.space(t).mask
        except Unsupported:
            return 1 << (t.hosts.bit_length() - 1) if t.hosts else 0

    def _shares(self, acc: Term, last: Term) -> bool:
        """Can acc and last be lanes of one product: same operand, shape, and layout of the weight, at one time?"""
        if acc.args[0] is not last.args[0] or acc.over != last.over or acc.bit not in self.lifted.products:
            return False
        if acc.bit in self.limits.banned or last.args[1].deps & acc.hosts:  # the weight waits for acc
            return False
        mine, theirs = self.product(acc), self.product(last)
        sizes = self.lifted.reading.axes
        return (
            mine.rows == theirs.rows
            and sizes.total(self.columns(acc)) == sizes.total(self.columns(last))
            and weight_of(mine)[1] == weight_of(theirs)[1]
            and g.like(mine.node, theirs.node)
            and (acc.bit == last.bit or self._same_features(acc, last))
        )

    def _same_features(self, acc: Term, last: Term) -> bool:
        return self.columns(acc) == self.columns(last)

    def _halves(self, acc: Term) -> bool:
        """Are the lanes of acc whole blocks of the weight's rows, so that the block is a weight of its own?"""
        return {axis for axis, _ in acc.lanes} == set(self.product(acc).columns[: len(acc.lanes)])

    def check(self, t: Term, space: Space) -> None:
        """Can the epilogue of `space` make t? Raises Unsupported with the first condition that fails."""
        if space.heads is not None and space.heads.lane not in t.axes:
            raise Unsupported(MIXED)
        bit, added = space.accs[-1].bit, t.args if t.kind == "add" else (t,)
        if bit in self.limits.only_accumulated and any(a.kind != "con" for a in added):
            raise Unsupported(self.limits.only_accumulated[bit])
        seen, todo = set(space.accs), self.parts(t, space)
        while todo:
            if (x := todo.pop()) in seen:
                continue
            seen.add(x)
            if not x.deps & space.mask:
                todo += self._early(x, space)
            elif x.kind == "con":
                raise Unsupported(MIXED if x.hosts & space.mask else "it needs a product that runs later")
            elif x.kind == "red" and (summed := self.over_head(x, space)) is not None:
                todo += summed
            elif x.kind == "red":
                raise Unsupported("it needs a sum over the row that its own product is still making")
            elif x.kind == "leaf":
                raise Unsupported(f"it needs {x.name}, which runs later")
            elif x.kind == "lanes":
                raise Unsupported(MIXED)
            else:
                todo += [a for a, _ in self.summands(x)]

    def over_head(self, x: Term, space: Space) -> list[Term] | None:
        """What a sum over the columns of each head, which are made in `space`, adds up: of both halves if that has
        halves. None if x is no such sum, or is of what such sums are in, or the backward reads it too: it would sum
        once more itself, over what the forward then stores beside the result."""
        if x.kind != "red" or x.name != "sum" or not x.deps & space.mask or self.lifted.joint:
            return None
        of = space.heads
        if any(acc.bit in self.limits.unsummed_heads for acc in space.accs):
            return None
        inner = (of.inner, *of.minor) if of else space.columns[len(space.columns) - len(x.over) :]
        if set(x.over) != set(inner) or (of is None and len(inner) == len(space.columns)):
            return None
        if any(s.deps & space.mask for s in statistics(x.args[0])):
            return None
        self.head_sums |= {acc.bit for acc in space.accs}
        if of is None:
            return [x.args[0]]
        parts = [self.lifted.terms.select(x.args[0], of.inner, i) for i in (0, 1)]
        made_of = [{a for a in self.accumulators(part) if a.hosts & space.mask} for part in parts]
        apart = all(found == {acc} for found, acc in zip(made_of, space.accs, strict=True))
        return parts if apart else None  # a kernel sums before it knows which half a number is of

    def inside(self, x: Term, space: Space) -> list[Term]:
        """What an epilogue of `space` makes x of."""
        return self.over_head(x, space) or [a for a, _ in self.summands(x)]

    def _early(self, x: Term, space: Space) -> list[Term]:
        """What of an early x must be looked at further: nothing if it can be loaded as it is."""
        extent = space.extent(x)
        alone = space.heads is None  # where a number is read as a vector over the columns
        of_parameter = x.kind == "red" and not x.deps and alone
        if extent == "scalar" and (of_parameter or (alone and not statistics(x)) or (x.kind == "mul" and not x.args)):
            return []
        if extent in ("other", "scalar"):
            raise Unsupported(f"{x.name or 'a value'} varies over other axes than its product")
        if space.heads is not None and extent != "token":
            if self.lane(x, space) is not None:
                return []
            if x.kind not in POINTWISE_KINDS or not x.args:
                raise Unsupported(f"{x.name or 'a value'} is no vector or table beside halves of heads")
            return [a for a, _ in self.summands(x)]
        if extent == "sample":
            return self._of_sample(x, space)
        if extent != "tile":
            return []
        if not self.has_tile(x, space):
            return list(x.args)
        if self.composed(x, space):
            return [a for a, _ in self.summands(x)]
        if self.natural(x, space.order, space.mask) is None:
            self.require_storable(x, space)
        return []

    def _of_sample(self, x: Term, space: Space) -> list[Term]:
        """As `_early`, of a vector over features for each sample."""
        self.tokens(x, space)
        if self.by_sample(x, space) is not None:
            return []
        if x.kind not in POINTWISE_KINDS or not x.args:
            raise Unsupported(f"{x.name or 'a vector'} of each sample does not lie in rows")
        return [a for a, _ in self.summands(x)]

    def summed(self, red: Term, space: Space) -> tuple[Literal["N", "M", ""], int, Axes]:
        """Over what of `space` a reduction is ("": no epilogue takes it), of how many tokens if it is of each sample
        (else 0), and the axes that are left, as they leave."""
        over = set(red.over)
        if over == set(space.columns):
            return "N", 0, space.rows
        if over == set(space.rows):
            return "M", 0, space.columns
        samples = space.rows[: len(space.rows) - len(over)]
        tokens = self.lifted.reading.axes.total(red.over).static or 0
        fits = red.name == "sum" and space.heads is None and tokens > 0 and tokens % SAMPLE == 0
        if fits and over == set(space.rows[len(samples) :]):
            return "M", tokens, samples + space.columns
        return "", 0, ()

    def tokens(self, x: Term, space: Space) -> int:
        """Of each sample, of which x is a vector. Raises Unsupported if they are not known to fill tiles."""
        tokens = self.lifted.reading.axes.total(space.within(x)).static
        if not tokens or tokens % SAMPLE:
            many = f"{tokens}, which is not a multiple of {SAMPLE}" if tokens else "a symbol"
            raise Unsupported(f"{x.name or 'a vector'} is of each sample, and its tokens are {many}")
        return tokens

    def by_sample(self, x: Term, space: Space) -> fx.Node | None:
        """The first node that holds a vector for each sample, as rows that kernels read where they are."""
        rows = space.rows[: len(space.rows) - len(space.within(x))]
        width = self.lifted.reading.axes.total(space.columns)
        for node in self.nodes.get(x, ()):
            late = self.lifted.deps[node] & (~x.deps | space.mask)
            if self.layout(node)[0] == rows + space.columns and in_rows(node, width) and not late:
                return node
        return None

    def composed(self, x: Term, space: Space) -> bool:
        """Does an epilogue make an early tile x again, of the tiles and vectors that x is made of, rather than read it?
        In the forward if that reads one tile; the backward reads what the forward stored, products and streams, and of
        a stream of its own that lies nowhere what it adds up."""
        if x.kind not in POINTWISE_KINDS or x in self.wholes or x in self.gradients:
            return False
        bases = self.bases(x, space)
        if x in bases:
            lies = self.natural(x, space.order, space.mask) is not None or self.storable(x, space)
            return self.in_backward(space) and not lies
        one = len(bases) == 1 or sum(self.has_tile(a, space) for a in x.args) == 1
        return one or self.in_backward(space)

    def summands(self, x: Term) -> list[tuple[Term, Fraction]]:
        """x's arguments with their weights or powers; a gradient that x adds up is one with its number, as it lies."""
        pairs = list(zip(x.args, x.powers or (Fraction(1),) * len(x.args), strict=True))
        if x.kind != "add":
            return pairs
        terms = self.lifted.terms
        whole = [(terms.mul(terms.const(w), a), w, a) for a, w in pairs]
        return [(s, Fraction(1)) if s in self.gradients else (a, w) for s, w, a in whole]

    def read_plain(self, products: set[Term]) -> None:
        """A backward's sums read these products without their biases: they are stored so, and what the graph computes
        with a bias is made of that, or the forward would store both."""
        plain = {w for w in self.wholes if w.kind == "add" and not products.isdisjoint(w.args)}
        if plain:
            self.wholes -= plain
            self._bases.clear()

    def bases(self, x: Term, space: Space) -> frozenset[Term]:
        """The tiles that x is made of by pointwise operations; a sum of several is one, a stream."""
        key = x, space.rows, space.columns, space.heads
        if key not in self._bases:
            self._bases[key] = self._made_of(x, space)
        return self._bases[key]

    def _made_of(self, x: Term, space: Space) -> frozenset[Term]:
        if not self.has_tile(x, space):
            return frozenset()
        if x.kind not in POINTWISE_KINDS or x in self.wholes or x in self.gradients:
            return frozenset({x})
        found = [b for a, _ in self.summands(x) if (b := self.bases(a, space))]
        all_of = frozenset().union(*found)
        return frozenset({x}) if x.kind == "add" and len(found) > 1 and len(all_of) > 1 else all_of

    def has_tile(self, x: Term, space: Space) -> bool:
        """Is a tile in x, rather than only vectors whose product has a tile's axes?"""
        key = x, space.rows, space.columns, space.heads
        if key not in self._tiles:
            pointwise = x.kind in POINTWISE_KINDS
            held = not pointwise or any(self.has_tile(a, space) for a in x.args)
            self._tiles[key] = held and space.extent(x) == "tile"
        return self._tiles[key]

    def require_storable(self, t: Term, space: Space) -> None:
        """Raises Unsupported unless an earlier epilogue can store t in the memory order of `space`."""
        if t.hosts:
            self.check(t, own := self.space(t))
            if own.order == space.order:
                return
        raise Unsupported(NOT_ROWS)

    def storable(self, t: Term, space: Space) -> bool:
        """Can an earlier epilogue do so?"""
        try:
            self.require_storable(t, space)
        except Unsupported:
            return False
        return True

    def statistic(self, red: Term, rows: tuple[int, ...]) -> tuple[fx.Node, Fraction] | None:
        """(node, factor) such that the reduction is factor * node: the graph holds sums, but mostly means."""
        return next(self.statistics(red, rows), None)

    def statistics(self, red: Term, rows: tuple[int, ...]) -> Iterator[tuple[fx.Node, Fraction]]:
        """All of these, the sums first."""
        count = math.prod(self.lifted.extents(red.over).values())
        for factor in (Fraction(1), Fraction(count)):
            for node in self.holding(self.lifted.terms.mul(self.lifted.terms.const(1 / factor), red), rows):
                yield node, factor

    def natural(self, t: Term, order: Axes, mask: int | None = None) -> fx.Node | None:
        """The first node of the graph that holds t, contiguous in this order of axes. A law may have made t known
        before the user's node is: that waits for no more than t, or for none of the products `mask`."""
        return next(self.holding(t, order, mask), None)

    def narrowest(self, t: Term, order: Axes, mask: int | None = None) -> fx.Node | None:
        """As `natural`, but of the nodes that differ by a cast the one of the fewest bytes; no rounding of what the
        graph reads unrounded, as it does the gradients' stream under autocast."""
        nodes = [*self.holding(t, order, mask)]
        whole = [n for n in nodes if not g.widens(n) and not g.only_rounded(n)]
        return min(whole[:1] or nodes, key=lambda node: node.meta["val"].dtype.itemsize, default=None)

    def holding(self, t: Term, order: Axes, mask: int | None = None) -> Iterator[fx.Node]:
        """The nodes that hold t as `natural` asks for it."""
        for node in self.nodes.get(t, ()):
            deps = self.lifted.deps[node]
            late = deps & ~t.deps if mask is None else deps & mask
            if self.layout(node) == (order, True) and not late:
                yield node

    def turn(self, node: fx.Node, space: Space) -> list[int] | None:
        """The node's dimensions in the order in which `space` stores its axes, as attention has heads before tokens.
        None if they are other axes, or lie otherwise; of halves of heads attention alone is the reader, in any
        order."""
        dims, order = self.lifted.reading.roots(node), space.order
        if tuple(i for d in dims for i in d) == order:
            return list(range(len(dims)))
        place = {axis: i for i, axis in enumerate(order)}
        turned = sorted(range(len(dims)), key=lambda d: place.get(dims[d][0], -1) if dims[d] else -1)
        if tuple(i for d in turned for i in dims[d]) != order:
            return None
        return turned if space.heads or dense(node, turned) else None
