"""What a plan really needs: demands that were only looked into are dropped, from the graph's outputs back."""

from __future__ import annotations

from torch import fx

from coda_inductor.patterns.terms import Term
from coda_inductor.plan.draft import Computed, Draft, Root, Stored
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.space import Lane


def trim(plan: Plan) -> Plan:
    """The plan without outputs of epilogues that were only looked into, and that nothing reads in the end."""
    drafts = plan.unique()
    made: dict[object, tuple[Draft, Term]] = {s: (d, s.term) for d in drafts for s in d.stores}
    made |= {node: made[s] for d in drafts for node, s in d.supplies.items() if not s.again}
    totals = {node: red for d in drafts for node, (red, _) in d.totals.items()}
    used, seen = set[object](), set[object]()
    todo: list[object] = [n for n in plan.program.lifted.graph.nodes if n.op == "output" or n.is_impure()]
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        if isinstance(item, Computed):
            todo += plan.reads(item)
        elif isinstance(item, Lane):
            todo.append(item.node)
        elif isinstance(item, Root):
            todo.append(item.square)
        elif isinstance(item, Term):  # a sum
            draft = next(d for d in drafts if item in d.sums)
            used.add((id(draft), item))
            todo += _reads(plan, draft, item.args[0])
        elif item in totals:
            todo.append(totals[item])
        elif item in made:
            draft, term = made[item]
            used.add((id(draft), item if isinstance(item, Stored) else draft.supplies[item]))  # type: ignore[index]
            todo += _reads(plan, draft, term)
        else:
            assert isinstance(item, fx.Node), item
            todo += [plan.again.read(item, a) for a in item.all_input_nodes]
    for d in drafts:
        d.stores = [s for s in d.stores if (id(d), s) in used]
        d.sums = [t for t in d.sums if (id(d), t) in used]
        d.supplies = {node: s for node, s in d.supplies.items() if s in d.stores}
        d.totals = {node: total for node, total in d.totals.items() if total[0] in d.sums}
    plan.sums = {t for d in drafts for t in d.sums}
    computed = (c for c in seen if isinstance(c, Computed) and c.extent == "token" and c.term.kind == "add")
    plan.combined = {c.term: c.order for c in computed}
    return plan


def _reads(plan: Plan, draft: Draft, t: Term) -> list[object]:
    """What an epilogue reads to make t, its matrices included."""
    out: list[object] = []
    for acc in draft.space.accs:
        product = plan.program.product(acc)
        out += [plan.operand(acc), *(a for a in product.node.all_input_nodes if a is not product.x)]
    return [*out, *plan.loads(draft, t).values()]
