"""A planned draft written down as a Region, with the tensors that it reads.

Statements follow the terms as they are; nothing is simplified. Names count from zero in order of first use, so that
equal layers give equal Regions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from torch import fx

from coda_inductor.core.dtypes import DTYPE_NAMES
from coda_inductor.core.ops import OVER_HEAD
from coda_inductor.core.region import Operand, Product, Reduction, Region, Store
from coda_inductor.core.verify import verify
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.built import Built, Source, Table, Weight
from coda_inductor.plan.draft import Draft, Root, Stored
from coda_inductor.plan.plan import Plan
from coda_inductor.plan.statements import EXTENTS, Statements, Value
from coda_inductor.rewrite.laws import ROOT
from coda_inductor.rewrite.space import Computed, Half, Lane
from coda_inductor.rewrite.state import weight_of


@dataclass(slots=True)
class _Writer(Statements):
    plan: Plan
    draft: Draft
    added: Term | None
    operands: list[Operand] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    loaded: dict[Source, str] = field(default_factory=dict)
    tables: dict[Lane, tuple[Table, int]] = field(default_factory=dict)
    reached: dict[Term, frozenset[int]] = field(default_factory=dict)
    laws: set[str] = field(default_factory=set)

    def given(self, t: Term) -> Value | None:
        """A value that is loaded."""
        source = None if t.deps & self.draft.space.mask else self.plan.where(t, self.draft.space)
        return None if source is None else self._load(t, source)

    def extent(self, t: Term) -> str:
        """What it varies over."""
        return self.draft.space.extent(t)

    def summands(self, t: Term) -> Iterable[tuple[Term, Fraction]]:
        """Without the product that the accumulator holds: r a + r b, of which it holds a + b, is r a. (`addend` has
        seen that both have the same factors in each sum.)"""
        held = (a for a in t.args if t.kind == "add" and a.kind == "mul" and self.added in a.args)
        without = {self.added, *held}
        return [(a, w) for a, w in self.plan.program.summands(t) if a not in without]

    def _load(self, t: Term, source: Source) -> Value:
        if isinstance(source, Lane):
            whole, index = self.tables.get(source, (source.node, source.index))
            return self.let("second" if index else "first", self._load(t, whole))
        if isinstance(source, Half):
            return self.let("second" if source.index else "first", self._load(t, source.whole))
        if isinstance(source, Root):
            self.laws.add(ROOT.name)
            square = self._load(t, source.square)
            return self.let("sqrt", self.let("max", square, 0.0))  # tuning reads any numbers, also negative ones
        if source not in self.loaded:
            if isinstance(source, fx.Node):
                dtype = DTYPE_NAMES[g.tensor(source).dtype]  # type: ignore[union-attr]
            elif isinstance(source, Table):
                dtype = DTYPE_NAMES[source.dtype]
            elif isinstance(source, Term | Computed):
                dtype = "f64" if self._dtype() == "f64" else "f32"
            else:
                dtype = source[1]  # type: ignore[index]
            name = f"in{len(self.operands)}"
            extent = self.draft.space.extent(t)  # a scalar is read where the graph has it as a vector over the columns
            extent = "feature" if extent == "scalar" else extent
            tokens = self.plan.program.tokens(t, self.draft.space) if extent == "sample" else 0
            self.operands.append(Operand(name, extent, dtype, tokens))  # type: ignore[arg-type]
            self.sources.append(source)
            self.loaded[source] = name
        return self.loaded[source]

    def summed(self, t: Term) -> Value:
        """Of both halves, where the accumulators are halves of heads."""
        space, total = self.draft.space, self.plan.program.lifted.reading.axes.total
        parts = self.plan.program.over_head(t, space)
        columns = total(space.heads.minor if space.heads else t.over).static
        assert parts is not None and columns is not None
        x, *y = map(self.value, parts)
        return self.let(OVER_HEAD, x, *(y or [0.0]), float(columns))

    def _dtype(self) -> str:
        x = self.plan.program.product(self.draft.space.accs[0]).x
        return DTYPE_NAMES.get(g.tensor(x).dtype, "")  # type: ignore[union-attr]

    def matrices(self) -> tuple[str, str, bool]:
        """The dtypes of left and right matrices, the latter's empty if it is the same, and how they are added up."""
        node = self.plan.program.product(self.draft.space.accs[0]).node
        of = g.operands(node)
        left, right = (DTYPE_NAMES.get(g.tensor(x).dtype, "") for x in (of.left, of.right))  # type: ignore[union-attr]
        return left, "" if right == left else right, of.fast

    def rank(self, t: Term) -> tuple[int, bool, list[int]]:
        """An order of arguments that does not depend on where in the graph a layer stands."""
        late = bool(t.deps & self.draft.space.mask)
        return EXTENTS.index(self.draft.space.extent(t)), not late, sorted(self._made_of(t)) if late else []

    def _made_of(self, t: Term) -> frozenset[int]:
        """The accumulators, by index, that t is made of."""
        if t not in self.reached:
            accs = self.draft.space.accs
            below = (self._made_of(a) for a in t.args if a.deps & self.draft.space.mask)
            self.reached[t] = frozenset((accs.index(t),)) if t in accs else frozenset[int]().union(*below)
        return self.reached[t]

    def store(self, stored: Stored) -> Store:
        """Where the accumulators are halves of heads, both values."""
        value, *second = (str(self.value(part)) for part in self.plan.program.parts(stored.term, self.draft.space))
        return Store(value, stored.dtype, *second)


def build(plan: Plan, draft: Draft) -> Built:
    """Writes the Region of a draft and verifies it."""
    writer = _Writer(plan, draft, draft.added, terms=plan.program.lifted.terms)
    total = plan.program.lifted.reading.axes.total
    heads = draft.space.heads
    half = total(heads.minor).static if heads else 0
    assert half is not None
    writer.tables = _tables(plan, draft, half)
    matrices: list[Source] = []
    products, made = [], list[Term]()
    for i, acc in enumerate(draft.space.accs):
        placed = []
        for con in _in_order(plan, acc, draft.added):
            made.append(con)
            pair = plan.operand(con), _weight(plan, draft, con)
            matrices += [m for m in pair if m not in matrices]
            deep = total(con.over).static
            assert deep is not None
            placed.append((matrices.index(pair[0]), matrices.index(pair[1]), deep))
        (a, b, k), layout = placed[0], weight_of(plan.program.product(acc))[1]
        plus = [(*pair, deep) if deep != k else tuple(pair) for *pair, deep in placed[1:]]
        products.append(Product(f"acc{i}", a, b, k, layout, *plus))  # type: ignore[arg-type]
        writer.values[acc] = f"acc{i}"
    stores = tuple(writer.store(s) for s in draft.stores)
    sums = tuple(_reduction(plan, writer, s) for s in draft.sums)
    n = total(draft.space.columns).static
    assert n is not None
    left, right, fast = writer.matrices()
    epilogue = tuple(writer.operands), tuple(writer.lets), stores, sums
    region = Region(n, left, tuple(products), *epilogue, half, right, fast, bool(heads and heads.neighbours))
    inputs = [*matrices, *writer.sources]
    return Built(verify(region), inputs, draft, made, draft.added, frozenset(writer.laws))


def _in_order(plan: Plan, acc: Term, added: Term | None) -> list[Term]:
    """A product, and what is added to it, the one of the larger K first: only the second may end within a step of the
    mainloop, as an adapter's of K = 8."""
    if added is None:
        return [acc]
    total = plan.program.lifted.reading.axes.total
    mine, other = (total(con.over).static or 0 for con in (acc, added))
    return [added, acc] if other > mine else [acc, added]


def _reduction(plan: Plan, writer: _Writer, red: Term) -> Reduction:
    over, tokens, _ = plan.program.summed(red, writer.draft.space)
    return Reduction(str(writer.value(red.args[0])), over or "N", red.name, tokens)


def _tables(plan: Plan, draft: Draft, half: int) -> dict[Lane, tuple[Table, int]]:
    """The tables that an epilogue reads, and which of the pair each lane is: as few as may be, in the graph's order."""
    if (heads := draft.space.heads) is None:
        return {}
    loaded = plan.loads(draft, *draft.values).items()
    found = {s for x, s in loaded if isinstance(s, Lane) and draft.space.extent(x) == "table"}
    lanes = sorted(found, key=lambda lane: (plan.program.lifted.place[lane.node], lane.index or 0))
    tables: dict[Lane, tuple[Table, int]] = {}
    for i in range(0, len(lanes), 2):
        first, second = lanes[i], lanes[min(i + 1, len(lanes) - 1)]
        table = Table((first, second), draft.space.rows, half, heads.neighbours)
        tables |= {second: (table, 1), first: (table, 0)}  # a last one without a partner: its own first
    return tables


def _weight(plan: Plan, draft: Draft, acc: Term) -> Weight:
    """The weight of an accumulator: a block of the product's weight if the accumulator is a lane."""
    product, axes = plan.program.product(acc), plan.program.lifted.reading.axes
    node = weight_of(product)[0]
    if not acc.lanes or draft.space.heads:
        return Weight(node)
    index, fixed = 0, dict(acc.lanes)
    for axis in product.columns[: len(fixed)]:
        size = axes.size[axis].static
        assert size is not None
        index = index * size + fixed[axis]
    width = axes.total(plan.program.columns(acc)).static
    assert width is not None
    return Weight(node, index * width, (index + 1) * width)
