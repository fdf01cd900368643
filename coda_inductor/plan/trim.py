"""What a plan really needs: demands that were only looked into are dropped, from the graph's outputs back."""

from __future__ import annotations

from collections.abc import Container, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.pointwise import POINTWISE
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.draft import Draft, Root, Stored
from coda_inductor.plan.plan import Plan, itemsize
from coda_inductor.rewrite.space import Computed, Half, Lane


@dataclass(frozen=True, slots=True)
class Used:
    """What somebody reads in the end: `seen`, and of it the stores and sums of each draft, by its id."""

    seen: set[object]
    made: set[tuple[int, object]]


def trim(plan: Plan) -> Plan:
    """The plan without outputs of epilogues that were only looked into, and that nothing reads in the end; nor with
    what its readers make of another of them."""
    used, drafts = find_used(plan), plan.unique()
    read = {x for d in drafts for value in d.values for x in _reads(plan, d, value)}
    if spared := {node for d in drafts for node in find_spared(plan, d, used, read)}:
        for d in drafts:
            d.supplies = {node: s for node, s in d.supplies.items() if node not in spared}
        used = find_used(plan)
    for d in drafts:
        d.stores = [s for s in d.stores if (id(d), s) in used.made]
        d.sums = [t for t in d.sums if (id(d), t) in used.made]
        d.supplies = {node: s for node, s in d.supplies.items() if s in d.stores}
        d.totals = {node: total for node, total in d.totals.items() if total[0] in d.sums}
    plan.sums = {t for d in drafts for t in d.sums}
    computed = (c for c in used.seen if isinstance(c, Computed) and c.extent == "token" and c.term.kind == "add")
    plan.combined = {c.term: c.order for c in computed}
    return plan


def find_used(plan: Plan) -> Used:
    """What is read, from the graph's outputs back."""
    drafts = plan.unique()
    made: dict[object, tuple[Draft, Term]] = {s: (d, s.term) for d in drafts for s in d.stores}
    made |= {node: made[s] for d in drafts for node, s in d.supplies.items() if not s.again}
    totals = {node: red for d in drafts for red in d.sums for node, _ in plan.shared(d, red)}
    totals |= {node: red for d in drafts for node, (red, _) in d.totals.items()}
    used = Used(set(), set())
    todo: list[object] = [n for n in plan.program.lifted.graph.nodes if n.op == "output" or n.is_impure()]
    while todo:
        item = todo.pop()
        if item in used.seen:
            continue
        used.seen.add(item)
        if isinstance(item, Computed):
            todo += plan.reads(item)
        elif isinstance(item, Lane):
            todo.append(item.node)
        elif isinstance(item, Half):
            todo.append(item.whole)
        elif isinstance(item, Root):
            todo.append(item.square)
        elif isinstance(item, Term):  # a sum
            draft = next(d for d in drafts if item in d.sums)
            used.made.add((id(draft), item))
            todo += _reads(plan, draft, item.args[0])
        elif item in totals:
            todo.append(totals[item])
        elif item in made:
            draft, term = made[item]
            used.made.add((id(draft), item if isinstance(item, Stored) else draft.supplies[item]))  # type: ignore[index]
            todo += _reads(plan, draft, term)
        else:
            assert isinstance(item, fx.Node), item
            todo += [plan.again.read(item, a) for a in item.all_input_nodes]
    return used


def find_spared(plan: Plan, draft: Draft, used: Used, read: AbstractSet[object]) -> Iterator[fx.Node]:
    """The nodes that loops alone read, no epilogue (`read`), and that these can make of numbers and other stores of the
    same epilogue: of scores, and of scores / 16, whose loss is taken, the second need not lie in memory. Nor need
    silu(gate) * up beside both, if the backward reads it: it reads them anyway."""
    nodes = {n: s for n, s in draft.supplies.items() if n in used.seen and not s.again}
    for node, store in nodes.items():
        if {node, store} & read or not _in_loops(plan, node):
            continue
        sources, in_a_row = _made_of(node, nodes)
        wide = max((itemsize(source) for source in sources), default=0) > itemsize(node)
        if sources and not wide and (in_a_row or (len(sources) > 1 and _in_backward(node))):
            yield node


def _made_of(node: fx.Node, nodes: Container[fx.Node]) -> tuple[set[fx.Node], bool]:
    """The others among the nodes that it is made of element by element, if it is made of them alone, else none; and is
    it made of one by operations that read nothing else?"""

    def is_source(x: fx.Node) -> bool:
        return x is not node and x in nodes

    def is_step(x: fx.Node) -> bool:
        return g.is_view(x) or (x.target in POINTWISE and bool(x.all_input_nodes))

    made = g.reached([node], lambda x: x.all_input_nodes if is_step(x) and not is_source(x) else ())
    sources = {x for x in made if is_source(x)}
    between = made - sources
    if not all(map(is_step, between)):
        return set(), False
    return sources, all(len(x.all_input_nodes) == 1 for x in between)


def _in_backward(node: fx.Node) -> bool:
    """Does the backward read the node of the forward, as it is or what is made of it element by element?"""
    made = g.reached([node], lambda n: n.users if n is node or n.target in POINTWISE or g.is_view(n) else ())
    return not g.is_backward(node) and any(map(g.is_backward, made))


def _in_loops(plan: Plan, node: fx.Node) -> bool:
    """Is the node, be it under a view, read by loops alone?"""
    return all(_in_loops(plan, user) if g.is_view(user) else plan.fusible(user) for user in node.users)


def _reads(plan: Plan, draft: Draft, t: Term) -> list[object]:
    """What an epilogue reads to make t, its matrices included."""
    out: list[object] = []
    for acc in draft.space.accs:
        product = plan.program.product(acc)
        out += [plan.operand(acc), *(a for a in product.node.all_input_nodes if a is not product.x)]
    return [*out, *plan.loads(draft, t).values()]
