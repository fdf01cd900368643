"""The programs that tuning times, cut out of the graph: what a group of Regions stands for in the user's graph, and
the small computations beside the Regions."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from coda_inductor.passes.joined import is_joined, rejoined
from coda_inductor.patterns.pointwise import POINTWISE
from coda_inductor.patterns.sizes import hint
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.built import Built, Source, Weight
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.softmax import written_out
from coda_inductor.rewrite.space import Axes, Computed
from coda_inductor.schedule.kinds import base_of, elements
from coda_inductor.schedule.memory import in_loop, operation
from coda_inductor.tuning.group import Group
from coda_inductor.write.vectors import Vectors

TILE = 8  # columns, at least
Program = tuple[fx.Graph, list[fx.Node]]
"""Some nodes of the user's graph as a graph, and the nodes whose tensors it reads."""


def described(*nodes: fx.Node) -> str:
    """A small graph as text, in which names play no part."""
    number = {node: f"%{i}" for i, node in enumerate(nodes)}

    def line(node: fx.Node) -> str:
        asked = "" if node.op == "placeholder" else fx.map_arg((node.args, node.kwargs), number.__getitem__)
        return f"{node.op if node.op in ('placeholder', 'output') else node.target}{asked}{laid_out(node)}"

    return "\n".join(map(line, nodes))


def laid_out(source: Source) -> str:
    """The type, sizes and strides of what is read or computed, at the sizes measured; "~" marks symbolic ones."""
    if isinstance(source, Weight):
        return f"{laid_out(source.node)}[{source.start}:{source.stop}]"
    if not isinstance(source, fx.Node):
        return type(source).__name__
    said, made = [], source.meta.get("val")
    for value in [made] if isinstance(made, Tensor) else tree_leaves(made):
        sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        numbers = [f"{hint(n)}{'~' * isinstance(n, torch.SymInt)}" for n in sizes if isinstance(n, int | torch.SymInt)]
        said.append(f"{getattr(value, 'dtype', '')}{numbers}")
    return str(said)


def small(plan: Plan, group: Group, built: Built, wanted: list[Computed]) -> tuple[fx.Graph, list[object]]:
    """The small computations that a Region needs, with the loops that take their sums, whose tensors follow; and the
    keys of what they read."""
    new, copies, keys = fx.Graph(), dict[object, Any](), list[object]()
    tokens, loops = group.tokens, group.loops  # what follows refers to itself, and would keep the group's tensors

    def given(key: object) -> Any:
        if key not in copies:
            like = key.meta["val"] if isinstance(key, fx.Node) else torch.empty(tokens, device="meta")
            if isinstance(like, torch.SymInt):
                return hint(like)
            if isinstance(key, fx.Node) and key in loops:
                copies[key] = new.call_function(key.target, *fx.map_arg((key.args, key.kwargs), given))  # type: ignore[arg-type]
            else:
                copies[key] = new.placeholder(f"given_{len(keys)}")
                keys.append(key)
            if isinstance(like, Tensor):  # and no split
                sizes = [hint(s) for s in like.shape], [hint(s) for s in like.stride()]
                copies[key].meta["val"] = torch.empty_strided(*sizes, dtype=like.dtype, device="meta")
        return copies[key]

    def call(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        mine = fx.map_arg(args, lambda n: n if n.graph is new else given(n))
        node = new.call_function(target, mine, kwargs)
        node.meta["val"] = target(*fx.map_arg(mine, lambda n: n.meta["val"]), **kwargs)
        return node

    def sum_of(s: Term, rows: Axes) -> tuple[fx.Node, Axes] | None:
        if plan.taken(s, rows):
            return given(s), plan.rows(s)
        return (given(s), rows) if plan.combined.get(s) == rows else None

    def statistic(s: Term, rows: Axes) -> tuple[fx.Node, Fraction]:
        held = plan.program.statistic(s, rows)
        assert held is not None
        return held

    compute, own = built.region.compute, {c.term for c in wanted}
    others = {s: rows for s, rows in plan.combined.items() if s not in own}
    vectors = Vectors(plan.program.lifted, call, sum_of, statistic, plan.pair, compute, others)
    new.output((*(vectors.write(c) for c in wanted), *map(given, group.taken)))
    return new, keys


def subgraph(group: Group, plan: Plan) -> Program:
    """What the group stands for in the user's graph."""
    return _program(plan, *_stood_for(group, plan))


def layouts(group: Group, plan: Plan) -> set[fx.Node]:
    """The tensors that are in memory before it runs, or lie there meanwhile."""
    needed, given, left = _stood_for(group, plan)
    return given | {n for n in needed if group.memory.holds(n)} | {*left}


def goes_on_with(group: Group, plan: Plan) -> list[fx.Node]:
    """The nodes that the user's graph has of what the group stands for when that has run."""
    return _stood_for(group, plan)[2]


def piece(group: Group, plan: Plan, wanted: Sequence[fx.Node], done: AbstractSet[fx.Node]) -> Program | None:
    """The part of what the group stands for that makes the `wanted` nodes where those `done` are there; None if they
    are only views of these. (A copy into another order is none.)"""
    needed, given = _wanted(group, plan, wanted, done)
    if all(base_of(n) is not n for n in needed - given):
        return None  # also if nothing is wanted
    return _program(plan, needed, given, list(wanted))


def on_the_way(group: Group, plan: Plan, wanted: Sequence[fx.Node], done: AbstractSet[fx.Node]) -> AbstractSet[fx.Node]:
    """All that such a piece makes."""
    needed, given = _wanted(group, plan, wanted, done)
    return needed - given


def _wanted(
    group: Group, plan: Plan, wanted: Sequence[fx.Node], done: AbstractSet[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """(what must run to make the wanted nodes, what of that is given)."""
    again = {node for b in group.builts for node, s in b.draft.supplies.items() if s.again}
    return _needed(plan, group, [(n, n in again) for n in wanted], done)


def read(built: Built, plan: Plan, group: Group, mask: int) -> list[fx.Node]:
    """The nodes that a Region of the group and its small computations read and that wait for products of the mask, or
    that a loop must write first, for the Region."""
    keys = [*built.inputs, *small(plan, group, built, group.computed(built))[1]]
    nodes = dict.fromkeys(key for key in keys if isinstance(key, fx.Node))
    first = unwritten(built, plan, group)
    return [n for n in nodes if n in first or waits(plan, mask, n)]


def unwritten(built: Built, plan: Plan, group: Group) -> list[fx.Node]:
    """The tiles that a Region reads, or views of them, that lie in no memory unless it does."""
    late = plan.program.in_backward(built.draft.space)
    there = group.rest.made | group.rest.early if late else group.rest.made

    def in_memory(node: fx.Node) -> bool:
        while node not in there and base_of(node) is not node:
            node = node.all_input_nodes[0]
        return node in there or not in_loop(node) or group.memory.holds(node) or group.memory.saves(node)

    nodes = [n for n in dict.fromkeys(built.inputs) if isinstance(n, fx.Node)]
    return [n for n in nodes if elements(n) >= TILE * group.tokens and not in_memory(n)]


def waits(plan: Plan, mask: int, node: fx.Node) -> bool:
    """Is the node made of products of the mask?"""
    return node.op != "placeholder" and plan.program.lifted.deps[node] & mask != 0


def _stood_for(group: Group, plan: Plan) -> tuple[set[fx.Node], set[fx.Node], list[fx.Node]]:
    """(what runs in the user's graph, what of that is given, what is left when it has run)."""
    drafts = [b.draft for b in group.builts]
    again = [node for d in drafts for node, s in d.supplies.items() if s.again]
    made = [node for d in drafts for node in (*d.supplies, *d.totals) if node not in again]
    ends = [n for n in group.after if n.users.keys() - group.after]
    asked = [(n, False) for n in (*made, *group.taken, *ends)] + [(n, True) for n in again]
    needed, given = _needed(plan, group, asked)
    # Not what our program stores, but what the user's goes on with: a stream that only a norm reads is never written.
    nodes = plan.program.lifted.in_order(needed)
    deps, mask = plan.program.lifted.deps, group.mask
    late = [n for n in nodes if deps[n] & mask and n not in given and isinstance(n.meta.get("val"), Tensor)]
    # (Two products that are added up: the sum is part of the loop that reads it, and of no time of its own.)
    sums = {n for b in group.builts if b.only_sums and not is_joined(plan, b) for n in b.draft.supplies}
    read = {a for n in late if n.users.keys() - needed for a in (n.all_input_nodes if n in sums else [n])}
    left = {held for n in read for held in group.memory.of(n)} | {n for n in late if group.memory.saves(n)}
    return needed, given, [*again, *(n for n in late if n in left), *group.taken]


def _program(plan: Plan, needed: set[fx.Node], given: set[fx.Node], wanted: list[fx.Node]) -> Program:
    """The needed nodes, of which some are given: these in the order in which they are read, so that equal layers are
    one program, wherever in the graph their inputs stand."""
    new, copies = fx.Graph(), dict[fx.Node, Any]()
    nodes = plan.program.lifted.in_order(needed)
    copies |= {n: hint(n.meta["val"]) for n in nodes if isinstance(n.meta.get("val"), torch.SymInt)}
    given = {n for n in given if isinstance(n.meta.get("val"), Tensor)}
    made = [n for n in nodes if n not in given and n not in copies]
    read = [a for n in made for a in n.all_input_nodes]
    tensors = list(dict.fromkeys(n for n in (*read, *wanted) if n in given))
    for node in tensors:
        copies[node] = new.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    alike, joint = dict[tuple[str, ...], fx.Node](), plan.program.lifted.joint
    for node in made:
        # Of equal operations, as autocast's roundings of what several products take, the partitioner leaves one.
        key = operation(node, copies)
        if not joint or key not in alike:
            alike[key] = new.node_copy(node, copies.__getitem__)
        copies[node] = alike[key]
    new.output(tuple(copies[n] for n in wanted))
    return rejoined(written_out(new)), tensors


def put_off(group: Group, plan: Plan) -> list[fx.Node]:
    """The tensors that the user's forward makes for products of the group, and that ours leaves to the backward."""
    remade = plan.again.later | plan.again.made.keys()
    bits = {f.product for f in plan.firings if f.product >= 0 and group.mask >> f.product & 1}
    return [n for n in dict.fromkeys(n for bit in sorted(bits) for n in plan.operands(bit)) if n in remade]


def _bases(plan: Plan, group: Group) -> set[fx.Node]:
    """The nodes that hold what is made again from."""
    program, found = plan.program, set[fx.Node]()
    for d in (b.draft for b in group.builts):
        for stored in d.stores:
            for base in program.bases(stored.term, d.space) if stored.again else ():
                found.update(program.nodes.get(base, ()))
    return found


def _needed(
    plan: Plan, group: Group, asked: Sequence[tuple[fx.Node, bool]], done: AbstractSet[fx.Node] = frozenset()
) -> tuple[set[fx.Node], set[fx.Node]]:
    """(what must run to make the nodes asked for, what of that is given): given is what is `done`, or waits for no
    product of the group and lies in memory. What is made again (True) is made of its bases and of sums and products."""
    needed, given, todo, bases = set[fx.Node](), set[fx.Node](), list(asked), _bases(plan, group)
    late = plan.program.in_backward(group.builts[0].draft.space)
    edges = {n for made in group.loops for n in made.all_input_nodes} - group.loops
    while todo:
        node, anew = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        anew = anew and node.target in POINTWISE and node not in bases
        again = anew or node in group.loops or not group.memory.holds(node, late)
        if node not in done and node not in edges and (waits(plan, group.mask, node) or again):
            todo += [(a, anew) for a in node.all_input_nodes]
        else:
            given.add(node)
    return needed, given
