"""The loops around a group of Regions.

Inductor fuses loops, so what a Region takes out of one may have cost little there: a residual is added in the norm's
own kernel, which then still reads what the Region stored. And what no tensor holds, because each loop makes it again,
must be written before an epilogue can read it. So tuning runs, on both sides, the loops that read what the group
makes and, on ours, first those that write what its epilogues read. (Without them groups of ViT-L under autocast won by
up to 27 %, and the kernels of its step took 0.4 % longer: H200, torch 2.11, 8274 tokens, 07741af.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.plan.built import Built, Source, Table, Weight
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.space import Lane
from coda_inductor.schedule.kinds import base_of, kind_of
from coda_inductor.schedule.memory import MADE_AGAIN, TENSORS
from coda_inductor.tuning.extract import Program, goes_on_with, piece, unwritten, waits
from coda_inductor.tuning.group import Group, Rest

Piece = tuple[list[fx.Node], Program | None]
"""The tensors that one of Inductor's programs makes, and the program; None if they are only views of what is there."""
FUSED = MADE_AGAIN | {"reduction", "output"}
"""The kinds of operations that are a loop's, or one of its results."""


def rest(plan: Plan, builts: Iterable[Built]) -> Rest:
    """The rest of a plan's graph; `builts` are all of its Regions."""
    made, products, read = set[fx.Node](), set[fx.Node](), dict[fx.Node, bool]()
    for b in builts:
        made |= b.draft.nodes
        products |= {plan.program.product(acc).node for acc in b.products}
        late = plan.program.in_backward(b.draft.space)
        for node in (node for source in b.inputs for node in _nodes(source)):
            read[node] = read.get(node, True) and late
    early, output = frozenset(n for n, late in read.items() if not late), plan.program.lifted.graph.output_node()

    def reached(todo: list[fx.Node]) -> set[fx.Node]:
        found = set[fx.Node]()
        while todo:
            node = todo.pop()
            if node not in found and node not in made and node not in products:
                found.add(node)
                todo += node.all_input_nodes
        return found

    left = frozenset(reached([*read, output]))
    forward = reached([*early, *(n for n in output.all_input_nodes if not g.is_backward(n))])
    return Rest(frozenset(made), early, left, frozenset(forward))


def _nodes(source: Source) -> list[fx.Node]:
    """The graph's nodes that an input is read from."""
    if isinstance(source, Table):
        return [lane.node for lane in source.lanes]
    if isinstance(source, Weight | Lane):
        return [source.node]
    return [source] if isinstance(source, fx.Node) else []


def following(plan: Plan, group: Group) -> frozenset[fx.Node]:
    """What Inductor computes in loops of what the group makes, in the forward or the backward as the group, and of
    nothing else that waits for it: what it could fuse with what the group stands for."""
    late = plan.program.in_backward(group.builts[0].draft.space)
    made = {n for b in group.builts for n in b.draft.nodes}
    left, found = group.rest.left if late else group.rest.forward, set[fx.Node]()
    todo = [user for n in made for user in n.users]
    while todo:
        node = todo.pop()
        if node in found or node not in left or node.op != "call_function" or kind_of(node) not in FUSED:
            continue
        inputs = node.all_input_nodes
        ready = all(a in made or a in found or not waits(plan, group.mask, a) for a in inputs)
        sampled = all(isinstance(a.meta.get("val"), (*TENSORS, torch.SymInt)) for a in inputs)  # no number but a size
        if g.is_backward(node) == late and ready and sampled:
            found.add(node)
            todo += node.users
    computing = [n for n in found if not g.is_view(n) and base_of(n) is n]  # others move what lies there on both sides
    needed = set[fx.Node]()
    while computing:
        node = computing.pop()
        if node in found and node not in needed:
            needed.add(node)
            computing += node.all_input_nodes
    return frozenset(needed)


def before(plan: Plan, group: Group) -> Piece:
    """What writes the tensors that its Regions read and that no one else needs written."""
    found = dict.fromkeys(n for b in group.builts for n in unwritten(b, plan, group))
    nodes = [n for n in found if not waits(plan, group.mask, n)]
    return nodes, piece(group, plan, nodes, frozenset())


def after(plan: Plan, group: Group) -> Piece:
    """The loops that follow, which read what the Regions and those before them wrote."""
    if not group.after:
        return [], None
    there = {n for b in group.builts for n in b.draft.nodes}
    nodes = [n for n in goes_on_with(group, plan) if n in group.after]
    return nodes, piece(group, plan, nodes, there.union(before(plan, group)[0]))
