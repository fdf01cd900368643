"""Planning: which values leave which epilogue. Demand starts at the outputs and opaque operations and walks back.

A demanded node is supplied by the epilogue of a product where that can make it; otherwise it stays as the user's own
operation, and its inputs are demanded in turn. A stored value is demanded in one piece: what an epilogue can make
from a tile and vectors is made there again rather than stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import fx

from coda_inductor.core.dtypes import DTYPE_NAMES, DTYPES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.pointwise import POINTWISE
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.again import Again
from coda_inductor.plan.built import Built
from coda_inductor.plan.draft import Conflict, Draft, Loaded, Refusal, Root, Stored, cycle
from coda_inductor.plan.inputs import Inputs
from coda_inductor.rewrite.derive import Firing
from coda_inductor.rewrite.limits import Limits
from coda_inductor.rewrite.space import Axes, Computed, Half, Space


@dataclass(slots=True)
class Plan(Inputs):
    """What was decided. `need`, `store` and `demand` change it; questions (inputs.py) do not."""

    firings: list[Firing]
    kept: set[fx.Node] = field(default_factory=set)
    refused: list[Refusal] = field(default_factory=list)
    again: Again = field(default_factory=Again)
    combined: dict[Term, Axes] = field(default_factory=dict)
    """Sums of several per-token vectors that are computed outside epilogues, and their rows."""
    builts: list[Built] = field(default_factory=list)
    """The Regions of its drafts, in their order, once it has settled (search.py)."""
    taken_in: set[Term] = field(default_factory=set)
    """Products that another's accumulator takes in: nothing else computes them."""
    _todo: list[tuple[fx.Node, fx.Node | None]] = field(default_factory=list)

    def unique(self) -> list[Draft]:
        """The drafts that do more than a plain product and are in no other's accumulator, in the graph's order."""
        drafts = {id(d): d for d in self.drafts.values() if not self.plain(d) and d.space.accs[0] not in self.taken_in}
        return sorted(drafts.values(), key=lambda d: d.space.accs[-1].bit)

    def plain(self, draft: Draft) -> bool:
        """Does the draft only store what its product computes anyway?"""
        return not draft.sums and all(
            s.term in self.program.wholes and any(n.target in g.PRODUCTS for n in self.program.nodes[s.term])
            for s in draft.stores
        )

    def need(self, node: fx.Node, by: fx.Node | None = None) -> None:
        """The node's tensor must exist; `by` is the operation that reads it, None for an epilogue."""
        if self.again.asked(self, node, by):
            return
        if node not in self.kept:
            self.kept.add(node)
            self._todo.append((node, by))
        elif g.is_view(node) and by is not None:
            self.need(node.all_input_nodes[0], by)

    def leave(self, node: fx.Node, by: fx.Node) -> None:
        """The node is made by the loops that read it, from what lies there; `by` is one of them."""
        self.kept.add(node)
        for a in node.all_input_nodes:
            self.need(self._base(a), by)

    def run(self) -> None:
        """Works off all demands."""
        for node in self.program.lifted.graph.nodes:
            if node.op == "output" or node.is_impure():
                self.need(node)
            elif g.compares(node):  # which what loops or another epilogue make again may not equal, to the bit
                for a in node.all_input_nodes:
                    self.need(a)
        while self._todo or self.again.unsettled or self._more():
            while self._todo:
                node, by = self._todo.pop()
                if not self._supply(node):
                    for a in node.all_input_nodes:
                        self.need(self._base(a) if self.fusible(node) else a, by if g.is_view(node) else node)
            self.again.settle(self)
        self._settle()

    def _more(self) -> bool:
        """Demands what the epilogues read once more: those that were united since may read something else. Is anything
        of it new?"""
        before = len(self.sums), sum(len(d.stores) for d in self.unique())
        for draft in self.unique():
            self.demand(draft, *draft.values)
        for acc in [acc for acc, draft in self.drafts.items() if self.plain(draft)]:
            self.need(self.program.product(acc).x, self.program.product(acc).node)  # which stays, and reads it itself
        return bool(self._todo) or before != (len(self.sums), sum(len(d.stores) for d in self.unique()))

    def _settle(self) -> None:
        """Finds decisions that exclude each other."""
        by_product, both, whole_heads = dict[int, Draft](), dict[int, str](), dict[int, str]()
        for acc, draft in self.drafts.items():
            if (other := by_product.setdefault(acc.bit, draft)) is not draft:
                if draft.space.heads or other.space.heads:
                    whole_heads[acc.bit] = ""
                else:
                    both[acc.bit] = "its halves are needed as well as the whole"
        if both or whole_heads:
            raise Conflict(Limits(both, whole_heads=whole_heads))
        drafts = self.unique()
        if found := cycle([d.deps & ~d.space.mask for d in drafts], [d.space.mask for d in drafts]):
            late = drafts[found[0]]
            raise Conflict(
                Limits({a.bit: "it and another epilogue would wait for each other" for a in late.space.accs})
            )
        self.again.check(self)
        supplied = {node for d in self.drafts.values() for node, s in d.supplies.items() if not s.again}
        undeferred, made = 0, supplied | self.again.later
        for firing in (f for f in self.firings if f.product >= 0):
            if any(n in self.kept and n not in made and not g.is_view(n) for n in self.operands(firing.product)):
                undeferred |= 1 << firing.product
        if undeferred:
            raise Conflict(Limits(undeferred=undeferred))

    def shared(self, draft: Draft, red: Term) -> Iterator[tuple[fx.Node, Fraction]]:
        """The nodes that are a sum over columns which the epilogue takes, times a factor: loops read it, too."""
        double = g.tensor(self.program.product(draft.space.accs[0]).x).dtype == torch.float64  # type: ignore[union-attr]
        for node, factor in self.program.statistics(red, self.rows(red)):
            kind, dtype = g.reduction(node), node.meta["val"].dtype
            if kind is not None and kind.name != "var" and dtype == (torch.float64 if double else torch.float32):
                yield node, factor

    def operands(self, product: int) -> list[fx.Node]:
        """The nodes that hold the left operand of a product (a bit) as the user wrote it."""
        operand = self.program.lifted.term[self.program.lifted.products[product].x]
        return self.program.nodes.get(self.program.new[operand], [])

    def spared(self, draft: Draft) -> list[fx.Node]:
        """What the forward stores, and does not keep, because this draft makes it again."""
        return [node for node, stored in draft.supplies.items() if stored.again and node in self.kept]

    def put_off(self) -> set[fx.Node]:
        """The operands that laws spare the forward."""
        return {n for f in self.firings if f.product >= 0 for n in self.operands(f.product) if not g.is_view(n)}

    def fusible(self, node: fx.Node) -> bool:
        """Does Inductor compute the node in a loop of its own, from whatever inputs are cheapest?"""
        return node.target in POINTWISE or node.target in g.LOOPS or g.reduction(node) is not None

    def _base(self, node: fx.Node) -> fx.Node:
        """The tile that a pointwise chain of one tile starts from, views between: cheaper for a kept operation to read
        than its end. Scores that alone are made of that tile, and are as small, are read in its place: an epilogue
        makes them as well, and the backward would keep them beside the tile. (Cohere2-7B: a pass of 8.4 GB.)"""
        start, steps, viewed = node, [node], False
        while g.is_view(node) or (node.target in POINTWISE and not self._ends(node)):
            tiles = [a for a in node.all_input_nodes if self._tile(a)]
            if len(tiles) != 1:
                break
            for vector in (a for a in node.all_input_nodes if viewed and a is not tiles[0]):
                self.need(vector, node)
            viewed |= g.is_view(node)
            start, node = start if g.is_view(node) else tiles[0], tiles[0]
            steps.append(node)
        while steps.pop() is not start:
            pass
        scores = not self.program.lifted.computed.isdisjoint(steps)
        while scores and steps and len(start.users) == 1 and itemsize(steps[-1]) <= itemsize(start):
            start = steps.pop()
        return start

    def _ends(self, node: fx.Node) -> bool:
        term = self.program.lifted.term.get(node)
        return term is None or not term.hosts

    def _tile(self, node: fx.Node) -> bool:
        term = self.program.lifted.term.get(node)
        return term is None or bool(term.hosts) or (term.kind == "leaf" and len(term.axes) > 2)

    def _supply(self, node: fx.Node) -> bool:
        """Lets an epilogue make the node, if one can. Products themselves are made by a Region only if it does more."""
        term = self.program.lifted.term.get(node)
        if term is None or g.is_view(node) or slices.lane(node) is not None or g.widens(node):
            return False
        if not (t := self.program.new[term]).hosts:
            return self._total(node, t)
        try:
            space = self.program.space(t)
            self.program.check(t, space)
            if g.is_backward(node) and not self.program.in_backward(space):
                return False  # the backward makes it again from what the forward stores anyway
            if self.program.turn(node, space) is None:
                raise Unsupported("its memory order is not rows of tokens")
            draft = self._draft(space)
            self.program.check(t, draft.space)
        except Unsupported as why:
            if node.target in POINTWISE or (node.target in g.PRODUCTS and not g.is_weight_gradient(node)):
                self.refused.append(Refusal(node, why.what))
            return False
        value = g.tensor(node)
        assert value is not None
        draft.supplies[node] = Stored(t, DTYPE_NAMES.get(value.dtype, str(value.dtype)))
        self.store(draft, draft.supplies[node])
        return True

    def _total(self, node: fx.Node, t: Term) -> bool:
        """Lets an epilogue take the reduction that the node is, over its tokens or its columns."""
        number, red = (t.coefficient, t.args[0]) if t.kind == "mul" and t.powers == (Fraction(1),) else (Fraction(1), t)
        if red.kind != "red" or not REDUCTIONS[red.name].sinks or not red.args[0].hosts:
            return False
        try:
            space = self.program.space(red.args[0])
            self.program.check(red.args[0], space)
            late = g.is_backward(node) and not self.program.in_backward(space)
            late &= not REDUCTIONS[red.name].stored  # of what the forward stores anyway the backward may ask a vector
            over, _, left = self.program.summed(red, space)
            if over == "N" and REDUCTIONS[red.name].linear and not self._by_itself(node):
                return False  # a statistic, which is taken where an epilogue reads it
            if late or over not in REDUCTIONS[red.name].sinks or self.program.layout(node) != (left, True):
                return False
            draft = self._draft(space)
            self.program.check(red.args[0], draft.space)
        except Unsupported:
            return False
        draft.totals[node] = red, number
        self._take(draft, red)
        return True

    def _by_itself(self, node: fx.Node) -> bool:
        """Does an operation that is no loop read a sum? A loop would hold what it is taken of."""
        loops = (self.fusible(u) or g.is_pointwise(u) or g.is_view(u) or u.op == "output" for u in node.users)
        return not all(loops)

    def _take(self, draft: Draft, red: Term) -> None:
        """Lets an epilogue take a sum."""
        if red not in draft.sums:
            draft.sums.append(red)
            self.sums.add(red)
            self.demand(draft, red.args[0])

    def _draft(self, space: Space) -> Draft:
        """The draft of a space, united with those that already hold one of its accumulators."""
        old, accs = self.united(space)
        if len(old) == 1 and old[0].space.accs == accs:
            return old[0]
        draft = Draft(replace(space, accs=accs))
        for d in old:
            draft.stores += [s for s in d.stores if s not in draft.stores]
            draft.sums += [s for s in d.sums if s not in draft.sums]
            draft.supplies |= d.supplies
            draft.totals |= d.totals
        for t in draft.values:
            try:
                self.program.check(t, draft.space)
            except Unsupported as why:
                raise Conflict(Limits({a.bit: why.what for a in draft.space.accs})) from why
        for a in accs:
            self.drafts[a] = draft
            self._operands(a)
        return draft

    def _operands(self, acc: Term) -> None:
        """Demands the matrices of a product: the weight, and the operand as the laws left it."""
        product = self.program.product(acc)
        for a in product.node.all_input_nodes:
            if a is not product.x:
                self.need(a, product.node)
        held = self.operand(acc)
        if isinstance(held, fx.Node):
            self.need(held, product.node)
            return
        try:
            draft = self._draft(self.program.space(held.term))
        except Unsupported as why:
            raise Conflict(Limits(undeferred=acc.hosts)) from why
        self.store(draft, held)

    def store(self, draft: Draft, stored: Stored) -> None:
        """Lets an epilogue store a value."""
        if stored.dtype not in DTYPES:
            raise Conflict(Limits({a.bit: f"it would store {stored.dtype}" for a in draft.space.accs}))
        if stored not in draft.stores:
            draft.stores.append(stored)
            self.demand(draft, stored.term)

    def demand(self, draft: Draft, *values: Term) -> None:
        """What an epilogue reads to make the values must exist."""
        for source in self.loads(draft, *values).values():
            self._demand(source, draft.space)

    def _demand(self, source: Loaded, space: Space) -> None:
        match source:
            case fx.Node():
                self.need(source)
            case Stored(term):
                self.store(self._draft(self.program.space(term)), source)
            case Computed():
                try:
                    read = self.reads(source)
                except Unsupported as why:
                    raise Conflict(Limits({a.bit: why.what for a in space.accs})) from why
                for each in read:
                    self._demand(each, space)
            case Root(square):
                self._demand(square, space)
            case Term():
                self._take(self._draft(self.program.space(source.args[0])), source)
            case Half(whole):
                self._demand(whole, space)
            case _:
                self.need(source.node)  # half of it


def itemsize(node: fx.Node) -> int:
    """The bytes of a number of its."""
    return node.meta["val"].dtype.itemsize  # type: ignore[no-any-return]
