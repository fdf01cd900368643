"""Two products in one sum: where an epilogue only adds another product's tile to its accumulator, and nothing else
reads that tile, one kernel computes both, A B + C D as [A C] [B; D], and the tile is never written.

So the gradients of what gate and up, or keys and values, both read meet in the accumulator, in float32, and not in a
tensor that is rounded, written and read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from fractions import Fraction

from torch import fx

from coda_inductor.core.dtypes import DTYPE_NAMES
from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.layout import dense, strides
from coda_inductor.patterns.terms import ONE, Term
from coda_inductor.plan.draft import Draft, Stored
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.state import weight_of

Uses = set[tuple[Term | None, Fraction]]
"""Where an epilogue uses a value: the term that it is an argument of, None where it leaves, and its weight there."""
Scaled = set[tuple[Term | None, Fraction, frozenset[tuple[Term, Fraction]]]]
"""The same, and what it is multiplied by there: factors and their powers."""


def reads(plan: Plan) -> Counter[object]:
    """How many drafts read each node and each store of another, as a product's operand or in the epilogue."""
    found = Counter[object]()
    for draft in plan.unique():
        found.update({*plan.loads(draft, *draft.values).values(), *map(plan.operand, draft.space.accs)})
    return found


def addend(plan: Plan, draft: Draft, read: Mapping[object, int]) -> Term | None:
    """The product that the mainloop of a draft's may go on into, so that its accumulator is the sum of both; None if
    there is none. `read`: how many drafts read each store."""
    acc, *others = draft.space.accs
    if others or draft.space.heads is not None or acc.bit in plan.program.limits.unaccumulated:
        return None
    if plan.program.lifted.terms.rounding:
        return None  # both products round before they are added up
    if plan.program.product(acc).node.target in g.SCALED:
        return None  # each has its own scales
    uses = _uses(plan, draft)
    mine = _scaled(uses, acc)
    if not all(reader is not None and reader.kind == "add" for reader, *_ in mine):
        return None
    alike = [x for x in uses if x.kind == "con" and x is not acc and _scaled(uses, x) == mine]
    total = plan.program.lifted.reading.axes.total
    alike.sort(key=lambda con: total(con.over) != total(acc.over))  # of one K first, which take less of a kernel
    return next((con for con in alike if _fits(plan, draft, con, read)), None)


def _uses(plan: Plan, draft: Draft) -> dict[Term, Uses]:
    """The uses of all that a draft's epilogue computes or reads."""
    found, space = defaultdict[Term, Uses](set), draft.space
    todo: list[tuple[Term | None, Term, Fraction]] = [(None, t, ONE) for t in draft.values]
    while todo:
        reader, x, weight = todo.pop()
        known = x in found
        found[x].add((reader, weight))
        if known or x in space.accs or not (x.deps & space.mask or plan.where(x, space) is None):
            continue
        todo += [(x, a, w) for a, w in plan.program.summands(x)]
    return found


def _scaled(uses: Mapping[Term, Uses], con: Term) -> Scaled:
    """The uses of a product, through what multiplies it: r a + r b are two uses of one sum, as a + b are."""
    found: Scaled = set()
    for reader, weight in uses[con]:
        if reader is None or reader.kind != "mul" or weight != ONE:  # of a mul it is the power: no a^2 + b^2
            found.add((reader, weight, frozenset()))
            continue
        rest = frozenset((x, p) for x, p in zip(reader.args, reader.powers, strict=True) if x is not con)
        found |= {(outer, w * reader.coefficient, rest) for outer, w in uses[reader]}
    return found


def _fits(plan: Plan, draft: Draft, con: Term, read: Mapping[object, int]) -> bool:
    """Is a product of the columns and layouts of the draft's, of other matrices, and read by its epilogue alone?"""
    program, acc = plan.program, draft.space.accs[0]
    if con.bit not in program.lifted.products or con.lanes or con.bit == acc.bit:
        return False
    mine, other = program.product(acc), program.product(con)
    if (other.rows, other.columns) != (mine.rows, mine.columns) or not _static(plan, con.over):
        return False
    if g.is_weight_gradient(other.node) or not _read_here(plan, draft, con, read):
        return False
    try:
        (b, layout), (d, other_layout) = weight_of(mine), weight_of(other)
    except Unsupported:
        return False
    a, c = plan.operand(acc), plan.operand(con)
    if len({a, b, c, d}) < 4 or layout != other_layout:
        return False
    if _starts(a) == _starts(c) or _starts(b) == _starts(d):
        return False  # no distance to encode
    in_rows = all(isinstance(x, Stored) or dense(x) for x in (a, c))
    return _dtype(a) == _dtype(c) and in_rows and _lie_alike(b, d) and _alone(plan, other.node)


def _read_here(plan: Plan, draft: Draft, con: Term, read: Mapping[object, int]) -> bool:
    """Is a product read by the draft's epilogue alone? Else it would be computed twice. It has a draft of its own where
    a law has changed its operand: that must store the product and nothing else."""
    made = plan.drafts.get(con)
    if sum(read[node] for node in plan.program.nodes.get(con, ())) > 1:
        return False
    if made is None or plan.plain(made):
        return True
    if made is draft or made.added is not None or made.sums or any(s.term is not con for s in made.stores):
        return False
    if sum(read[s] for s in made.stores) > 1:
        return False
    return all(_alone(plan, node) for node in made.supplies)


def _dtype(x: fx.Node | Stored) -> str:
    """Of a left operand."""
    return x.dtype if isinstance(x, Stored) else DTYPE_NAMES.get(g.tensor(x).dtype, "")  # type: ignore[union-attr]


def _static(plan: Plan, over: tuple[int, ...]) -> bool:
    """Is the number of what a product adds up no symbol?"""
    return plan.program.lifted.reading.axes.total(over).static is not None


def _lie_alike(b: fx.Node, d: fx.Node) -> bool:
    """Are two weights dense, or parts of matrices with the same distance from row to row?"""
    return (dense(b) and dense(d)) or strides(b.meta["val"]) == strides(d.meta["val"])


def _starts(node: fx.Node | Stored) -> tuple[fx.Node | Stored, str]:
    """Where a tensor starts: the node that owns its memory, and how far into it."""
    if isinstance(node, Stored):
        return node, "0"
    value = g.tensor(node)
    assert value is not None
    return g.root(node, _shares_memory), str(value.storage_offset())


def _shares_memory(node: fx.Node) -> bool:
    """Is the node a view of any kind, a slice, say, of its first argument?"""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _alone(plan: Plan, node: fx.Node) -> bool:
    """Does nothing read the node, when the epilogues have made what they supply? Loops compute what is not kept."""
    drafts = plan.unique()
    made = {n for d in drafts for n, s in d.supplies.items() if not s.again}.union(*(d.totals for d in drafts))
    todo = list(node.users)
    seen = set(todo)
    for reader in todo:  # which grows
        if reader in made:
            continue
        if reader in plan.kept and not g.is_view(reader):
            return False
        todo += reader.users.keys() - seen
        seen |= reader.users.keys()
    return True
