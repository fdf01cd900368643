"""The loops that take the sums which a Region needs beside it. Inductor fuses a sum over a tensor into the loop that
writes or reads that tensor, where it costs what it reads beside; so tuning runs that loop on both sides. (Alone the
sums over the gradients of q, k and v took 100 us in GPT-2 XL's backward, of Regions that take 200, H200.)"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import name_of
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.sources import statistics
from coda_inductor.schedule.kinds import HEAVY, base_of, elements
from coda_inductor.schedule.memory import in_loop, taken_whole
from coda_inductor.tuning.extract import waits
from coda_inductor.tuning.group import Group

MANY = 4  # times as many elements as in a table, at least, in what reads it


def loops_of(plan: Plan, group: Group) -> tuple[list[fx.Node], set[fx.Node]]:
    """(the tensors that such loops write, all that they compute)."""
    sums = dict.fromkeys((s, c.order) for b in group.builts for c in group.computed(b) for s in statistics(c.term))
    pairs = [pair for s, rows in sums if not plan.taken(s, rows) and (pair := plan.pair(s)) is not None]
    if not pairs:
        return [], set()
    tensors = [[base_of(t) for t in pair.tensors] for pair in pairs]
    place = plan.program.lifted.place
    first = min(max(place[t] for t in both) for both in tensors)  # before, a loop cannot read what is summed
    late = plan.program.in_backward(group.builts[0].draft.space)
    supplied = {node for draft in plan.unique() for node in draft.supplies}

    def in_memory(node: fx.Node) -> bool:
        """Is it a tensor in memory, that loops read? (A split is part of what reads it.)"""
        held = g.is_backward(node) != late and group.memory.holds(node, late)
        return isinstance(node.meta["val"], Tensor) and (held or taken_whole(node) or node in supplied)

    written, computed = list[fx.Node](), set[fx.Node]()
    summed = dict.fromkeys(t for both in tensors for t in both)
    seen, todo = {*summed}, [*summed]
    while todo:
        node = todo.pop()
        own = in_loop(node) and base_of(node) is node and taken_whole(node)
        apart = node in supplied or place[node] < first or waits(plan, group.mask, node)
        if own and g.is_backward(node) == late and not apart:
            written.append(node)
            computed |= _computed(node, in_memory)
        if not own or node in summed:
            todo += [n for n in node.users if n not in seen and in_loop(n)]
            seen |= {*todo}
    return written, computed


def _computed(node: fx.Node, in_memory: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """What the loop that writes a tensor computes, and views of it; but not the few values that many elements read, as
    sines: they lie in tables."""
    found, todo = {node}, [node]
    while todo:
        reader = todo.pop()
        few = 0 if name_of(reader) in HEAVY else elements(reader) // MANY  # which are parts that it puts together
        inputs = [n for n in reader.all_input_nodes if n not in found and in_loop(n) and not in_memory(n)]
        todo += [n for n in inputs if elements(n) > few or not isinstance(n.meta["val"], Tensor)]
        found |= {*todo}
    views = [*found]
    while views:
        views = [n for v in views for n in v.users if n not in found and base_of(n) in found]
        found |= {*views}
    return found
