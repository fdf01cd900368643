"""Two products in one sum: where an epilogue only adds another product's tile to its accumulator, and nothing else
reads that tile, one kernel computes both, A B + C D as [A C] [B; D], and the tile is never written.

So the gradients of what gate and up, or keys and values, both read meet in the accumulator, in float32, and not in a
tensor that is rounded, written and read.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.layout import dense, strides
from coda_inductor.patterns.terms import ONE, Term
from coda_inductor.plan.draft import Draft
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.state import weight_of

Uses = set[tuple[Term | None, Fraction]]
"""Where an epilogue uses a value: the term that it is an argument of, None where it leaves, and its weight there."""


def addend(plan: Plan, draft: Draft) -> Term | None:
    """The product that the mainloop of a draft's may go on into, so that its accumulator is the sum of both; None if
    there is none."""
    acc, *others = draft.space.accs
    if others or draft.space.heads is not None or acc.bit in plan.program.limits.unaccumulated:
        return None
    if plan.program.lifted.terms.rounding:
        return None  # both products round before they are added up
    if plan.program.product(acc).node.target in g.SCALED:
        return None  # each has its own scales
    uses = _uses(plan, draft)
    if not all(reader is not None and reader.kind == "add" for reader, _ in uses[acc]):
        return None
    alike = [x for x in uses if x.kind == "con" and x is not acc and uses[x] == uses[acc]]
    total = plan.program.lifted.reading.axes.total
    alike.sort(key=lambda con: total(con.over) != total(acc.over))  # of one K first, which take less of a kernel
    return next((con for con in alike if _fits(plan, draft, con)), None)


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


def _fits(plan: Plan, draft: Draft, con: Term) -> bool:
    """Is a product of the columns and layouts of the draft's, of other matrices, and read by its epilogue alone?"""
    program, acc = plan.program, draft.space.accs[0]
    if con.bit not in program.lifted.products or con.lanes or con.bit == acc.bit:
        return False
    mine, other = program.product(acc), program.product(con)
    made = plan.drafts.get(con)
    if (other.rows, other.columns) != (mine.rows, mine.columns) or not _static(plan, con.over):
        return False
    if g.is_weight_gradient(other.node) or (made is not None and not plan.plain(made)):
        return False
    try:
        (b, layout), (d, other_layout) = weight_of(mine), weight_of(other)
    except Unsupported:
        return False
    a, c = plan.operand(acc), plan.operand(con)
    if not isinstance(a, fx.Node) or not isinstance(c, fx.Node) or len({a, b, c, d}) < 4 or layout != other_layout:
        return False
    if _starts(a) == _starts(c) or _starts(b) == _starts(d):
        return False  # no distance to encode
    alike = g.tensor(a).dtype == g.tensor(c).dtype  # type: ignore[union-attr]
    return alike and dense(a) and dense(c) and _lie_alike(b, d) and _alone(plan, other.node)


def _static(plan: Plan, over: tuple[int, ...]) -> bool:
    """Is the number of what a product adds up no symbol?"""
    return plan.program.lifted.reading.axes.total(over).static is not None


def _lie_alike(b: fx.Node, d: fx.Node) -> bool:
    """Are two weights dense, or parts of matrices with the same distance from row to row?"""
    return (dense(b) and dense(d)) or strides(b.meta["val"]) == strides(d.meta["val"])


def _starts(node: fx.Node) -> tuple[fx.Node, str]:
    """Where a tensor starts: the node that owns its memory, and how far into it."""
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
