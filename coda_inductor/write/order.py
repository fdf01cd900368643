"""The order of a rewritten graph: what is read comes before its readers, and otherwise all stays where it was.

What reads memory stays on its side of each write to it, and draws, prints, asserts and collectives keep their order
(patterns/effects.py). Collectives keep theirs under all circumstances. Each rank measures on its own GPU and may
compile another program of a model; but a collective waits for the same one of all other ranks, and in another order
they would wait for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.patterns.effects import Effects, ordered
from coda_inductor.patterns.graph import source_line

Waits = Mapping[fx.Node, Sequence[fx.Node]]


def sort(graph: fx.Graph, before: Effects) -> None:
    """Sorts the graph by dependence and effects and drops what nobody reads. `before` are its effects before it was
    rewritten. Raises Unsupported if their order cannot be kept."""
    waits = before.waits(graph)
    nodes = by_dependence(graph, waits)
    if len(nodes) < len(graph.nodes):
        if len(by_dependence(graph, {})) < len(graph.nodes):
            raise BrokenInvariant("operations that wait for each other")
        stuck = next(node for node in waits if node not in nodes)
        raise Unsupported(
            f"{stuck} would run in another order among writes, draws or collectives", where=source_line(stuck)
        )
    for first, node in zip(nodes, [*nodes][1:], strict=False):
        if first.next is not node:
            first.append(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or ordered(node))


def by_dependence(graph: fx.Graph, waits: Waits) -> dict[fx.Node, None]:
    """The nodes in an order in which each comes after what it reads and what it waits for; without those that wait for
    themselves."""
    done, pending = dict[fx.Node, None](), list(reversed(graph.nodes))
    blocked = defaultdict[fx.Node, list[fx.Node]](list)
    while pending:
        node = pending.pop()
        missing = [n for n in (*node.all_input_nodes, *waits.get(node, ())) if n not in done]
        if missing:
            blocked[missing[-1]].append(node)  # the last one, so that what is sorted already is looked at once
        else:
            done[node] = None
            pending.extend(reversed(blocked.pop(node, [])))
    return done
