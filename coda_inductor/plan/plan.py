"""Planning: which values leave which epilogue. Demand starts at the outputs and opaque operations and walks back.

A demanded node is supplied by the epilogue of a product where that can make it; otherwise it stays as the user's own
operation, and its inputs are demanded in turn. A stored value is demanded in one piece: what an epilogue can make
from a tile and vectors is made there again rather than stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import DTYPE_NAMES, DTYPES
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.pointwise import POINTWISE
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.again import Again
from coda_inductor.plan.built import Built
from coda_inductor.plan.draft import MAX_INLINE, Computed, Conflict, Draft, Loaded, Refusal, Stored, cycle
from coda_inductor.rewrite.beside import Pair, pair
from coda_inductor.rewrite.derive import Firing
from coda_inductor.rewrite.limits import Limits
from coda_inductor.rewrite.program import Program
from coda_inductor.rewrite.rotate_half import NOT_ROWS
from coda_inductor.rewrite.sources import leaves, sources, statistics
from coda_inductor.rewrite.space import Axes, Space


@dataclass(slots=True)
class Plan:
    """What was decided. `loads` says where an epilogue's inputs come from: a node, a store, a sum or a computation."""

    program: Program
    firings: list[Firing]
    drafts: dict[Term, Draft] = field(default_factory=dict)  # by accumulator
    kept: set[fx.Node] = field(default_factory=set)
    refused: list[Refusal] = field(default_factory=list)
    sums: set[Term] = field(default_factory=set)
    again: Again = field(default_factory=Again)
    combined: dict[Term, Axes] = field(default_factory=dict)
    """Sums of several per-token vectors that are computed outside epilogues, and their rows."""
    builts: list[Built] = field(default_factory=list)
    """The Regions of its drafts, in their order, once it has settled (search.py)."""
    _todo: list[tuple[fx.Node, fx.Node | None]] = field(default_factory=list)

    def unique(self) -> list[Draft]:
        """The drafts that do more than a plain product, in the order of the graph."""
        drafts = {id(d): d for d in self.drafts.values() if not self.plain(d)}
        return sorted(drafts.values(), key=lambda d: d.space.accs[-1].bit)

    def plain(self, draft: Draft) -> bool:
        """Does the draft only store what its product computes anyway?"""
        return not draft.sums and all(s.term in self.program.wholes for s in draft.stores)

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
        while self._todo or self.again.unsettled:
            while self._todo:
                node, by = self._todo.pop()
                if not self._supply(node):
                    for a in node.all_input_nodes:
                        self.need(self._base(a) if self.fusible(node) else a, by if g.is_view(node) else node)
            self.again.settle(self)
        self._settle()

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
        if (late := cycle(self.unique())) is not None:
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

    def operands(self, product: int) -> list[fx.Node]:
        """The nodes that hold the left operand of a product (a bit) as the user wrote it."""
        operand = self.program.lifted.term[self.program.lifted.products[product].x]
        return self.program.nodes.get(self.program.new[operand], [])

    def put_off(self) -> set[fx.Node]:
        """The operands that laws spare the forward."""
        return {n for f in self.firings if f.product >= 0 for n in self.operands(f.product) if not g.is_view(n)}

    def fusible(self, node: fx.Node) -> bool:
        """Does Inductor compute the node in a loop of its own, from whatever inputs are cheapest?"""
        return node.target in POINTWISE or node.target in g.LOOPS or g.reduction(node) is not None

    def _base(self, node: fx.Node) -> fx.Node:
        """The tile that a pointwise chain of one tile starts from: cheaper for a kept operation to read than its
        end."""
        while node.target in POINTWISE and not self._ends(node):
            tiles = [a for a in node.all_input_nodes if self._tile(a)]
            if len(tiles) != 1:
                break
            node = tiles[0]
        return node

    def _ends(self, node: fx.Node) -> bool:
        term = self.program.lifted.term.get(node)
        return term is None or not term.hosts

    def _tile(self, node: fx.Node) -> bool:
        term = self.program.lifted.term.get(node)
        return term is None or bool(term.hosts) or (term.kind == "leaf" and len(term.axes) > 2)

    def _supply(self, node: fx.Node) -> bool:
        """Lets an epilogue make the node, if one can. Products themselves are made by a Region only if it does more."""
        term = self.program.lifted.term.get(node)
        if term is None or g.is_view(node) or g.lane(node) is not None or g.widens(node):
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
        """Lets an epilogue sum over its tokens what the node is the sum of, or take the logsumexp of its columns."""
        number, red = (t.coefficient, t.args[0]) if t.kind == "mul" and t.powers == (Fraction(1),) else (Fraction(1), t)
        if red.kind != "red" or red.name not in ("sum", "logsumexp") or not red.args[0].hosts:
            return False
        try:
            space = self.program.space(red.args[0])
            self.program.check(red.args[0], space)
            late = g.is_backward(node) and not self.program.in_backward(space)
            gone, left = space.rows, space.columns
            if red.name == "logsumexp":
                gone, left = left, gone
            if late or set(red.over) != set(gone) or self.order(node) != left:
                return False
            draft = self._draft(space)
            self.program.check(red.args[0], draft.space)
        except Unsupported:
            return False
        draft.totals[node] = red, number
        self._take(draft, red)
        return True

    def _take(self, draft: Draft, red: Term) -> None:
        """Lets an epilogue take a sum."""
        if red not in draft.sums:
            draft.sums.append(red)
            self.sums.add(red)
            self.loads(draft, red.args[0])

    def order(self, node: fx.Node) -> tuple[int, ...]:
        """The node's axes as they lie, major to minor."""
        return self.program.layout(node)[0]

    def _draft(self, space: Space) -> Draft:
        """The draft of a space, united with those that already hold one of its accumulators."""
        old = {id(d): d for a in space.accs if (d := self.drafts.get(a))}
        accs = sorted({a for d in old.values() for a in d.space.accs} | set(space.accs), key=lambda a: (a.bit, a.lanes))
        if old and all(d.space.accs == tuple(accs) for d in old.values()):
            return next(iter(old.values()))
        if any(d.space.heads != space.heads for d in old.values()):
            raise Conflict(Limits(whole_heads={a.bit: "" for a in accs}))
        if len(accs) > 2:
            raise Unsupported("more than two products would share one epilogue")
        draft = Draft(replace(space, accs=tuple(accs)))
        for d in old.values():
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
        self.operand(acc)

    def operand(self, acc: Term) -> fx.Node | Stored:
        """Where the left operand comes from: a node of the graph, or a store that no node of the graph equals."""
        product = self.program.product(acc)
        x = acc.args[0]
        dtype = g.tensor(product.x).dtype  # type: ignore[union-attr]
        order = product.rows + self.program.lifted.reading.roots(product.x)[-1]
        for node in self.program.nodes.get(x, ()):  # the first, so that products of one operand read one tensor
            lies = g.dense(node) or node is product.x  # attention's result often lies with its heads before its tokens
            if lies and self.order(node) == order and g.tensor(node).dtype == dtype:  # type: ignore[union-attr]
                self.need(node, product.node)
                return node
        try:
            if (space := self.program.space(x)).order != order:
                raise Unsupported(NOT_ROWS)
            draft = self._draft(space)
        except Unsupported as why:
            raise Conflict(Limits(undeferred=acc.hosts)) from why
        stored = Stored(x, DTYPE_NAMES[dtype])
        self.store(draft, stored)
        return stored

    def store(self, draft: Draft, stored: Stored) -> None:
        """Lets an epilogue store a value."""
        if stored.dtype not in DTYPES:
            raise Conflict(Limits({a.bit: f"it would store {stored.dtype}" for a in draft.space.accs}))
        if stored not in draft.stores:
            draft.stores.append(stored)
            self.loads(draft, stored.term)

    def loads(self, draft: Draft, *values: Term) -> dict[Term, Loaded]:
        """The early terms that an epilogue reads rather than computes to make the values, and from where; asking is
        demanding."""
        found: dict[Term, Loaded] = {}
        seen, todo = set[Term](), [part for t in values for part in self.program.parts(t, draft.space)]
        while todo:
            x = todo.pop()
            if x in seen or x in draft.space.accs:
                continue
            seen.add(x)
            source = None if x.deps & draft.space.mask else self.source(x, draft.space)
            if source is None:
                todo += [a for a, _ in self.program.summands(x)]
            else:
                found[x] = source
        return found

    def source(self, x: Term, space: Space) -> Loaded | None:
        """Where an epilogue gets an early x: a node, a store, a sum (its reduction), a computation, half a node; None
        if it makes x itself from x's arguments."""
        extent = space.extent(x)
        if space.heads is not None and extent in ("feature", "table"):
            if (lane := self.program.lane(x, space)) is not None:
                self.need(lane.node)
            return lane
        if extent == "tile":
            if not self.program.has_tile(x, space) or self.program.composed(x, space):
                return None
            return self._tile_source(x, space)
        if x.kind == "red" and self._sum(x, space.rows):
            return x if self.rows(x) == space.rows else self._computed(x, space)
        if x.kind == "red" and self.pair(x):
            return self._computed(x, space)
        if not x.args:
            return self._vector(x, space) if x.kind == "leaf" else None
        summed = x.kind not in ("red", "con") and all(
            self._sum(s, space.rows) or self.pair(s) for s in statistics(x) if s.deps
        )
        if not summed and self.program.natural(x, self._axes(x, space)) is not None:
            return self._vector(x, space)
        crowded = bool(self.program.limits.crowded & space.mask) and x.kind in ("mul", "add")
        inline = 1 if crowded else MAX_INLINE if x.kind == "add" else len(sources(x))
        if (x.kind == "red" and not x.deps) or (summed and len(sources(x)) > inline):
            return self._computed(x, space)
        if x.kind == "red" and self.program.statistic(x, space.rows) is not None:
            return self._computed(x, space)
        return self._vector(x, space) if x.kind in ("red", "con") else None

    def _computed(self, x: Term, space: Space) -> Computed:
        """Demands what a small computation reads."""
        extent = space.extent(x)
        if extent == "scalar" and x.kind == "red" and not x.deps:
            extent = "feature"  # the same for all columns
        if extent == "scalar":
            raise Conflict(Limits({a.bit: "a number that it needs is not known before it runs" for a in space.accs}))
        for s in sources(x):
            if s.kind == "leaf":
                read = [self.program.lifted.node(s)]
                fits = extent == "feature" or not s.axes or (self.order(read[0]) == space.rows and g.dense(read[0]))
            elif extent == "feature":
                read, fits = [self.program.lifted.node(leaf) for leaf in leaves(s)], not s.deps
            elif not s.axes and not s.deps:  # a number, of a parameter
                read, fits = [self.program.lifted.node(leaf) for leaf in leaves(s)], True
            elif fits := self._sum(s, space.rows):
                read = []
            elif (found := self.pair(s)) is not None:
                read, fits = found.nodes(self.program.lifted), found.tokens(self.program) == space.rows
            else:
                held = self.program.statistic(s, space.rows)
                read, fits = [held[0]] if held else [], held is not None
            if not fits:
                raise Conflict(Limits({a.bit: f"no node holds {s}" for a in space.accs}))
            for node in read:
                self.need(node)
        if extent == "token" and x.kind == "add":
            self.combined.setdefault(x, space.rows)
        return Computed(x, extent, self._axes(x, space))

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
        self.need(node)
        return node

    def _tile_source(self, x: Term, space: Space) -> fx.Node | Stored:
        find = self.program.narrowest if x.hosts else self.program.natural
        node = find(x, space.order, space.mask)
        if node is not None:
            self.need(node)
            return node
        draft = self._draft(self.program.space(x))
        dtype = g.tensor(self.program.product(draft.space.accs[0]).x).dtype  # type: ignore[union-attr]
        stored = Stored(x, DTYPE_NAMES[dtype])
        self.store(draft, stored)
        return stored

    def _sum(self, x: Term, rows: Axes) -> bool:
        """Lets the epilogue that makes the summed values sum them, if one can whose rows are these in some order."""
        if x in self.sums:
            return self.taken(x, rows)
        if x.name != "sum" or not x.args[0].hosts:
            return False
        try:
            space = self.program.space(x.args[0])
            self.program.check(x.args[0], space)
            if set(x.over) != set(space.columns) or not x.axes <= set(space.rows):
                return False
            if not self.program.lifted.can_permute(space.rows, rows):
                return False
            draft = self._draft(space)
        except Unsupported:
            return False
        self._take(draft, x)
        return True
