"""The order of a rewritten graph: what is read comes before its readers, and otherwise all stays where it was.

Collectives keep theirs under all circumstances. Each rank measures on its own GPU and may compile another program of a
model; but a collective waits for the same one of all other ranks, and in another order they would wait for ever. They
come in many forms: torch's own, those of other libraries, and within operations that hold a graph.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from torch import fx

from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.inductor.ops import REGION
from coda_inductor.patterns.graph import source_line

ALONE = frozenset({"aten", "prims", REGION.namespace})
"""The namespaces of operations in which no other rank takes part."""


def collectives(graph: fx.Graph) -> list[fx.Node]:
    """The operations in which other ranks may take part, or that wait for such, in order."""
    return [node for node in graph.nodes if _collective(node.target)]


def _collective(op: object) -> bool:
    if isinstance(op, torch._ops.OpOverload):
        return op.namespace not in ALONE
    return isinstance(op, torch._ops.HigherOrderOperator)


def sort(graph: fx.Graph, ordered: list[fx.Node]) -> None:
    """Sorts the graph by dependence and drops what nobody reads; the `ordered` nodes, its collectives as they were
    before the rewriting, keep their order. Raises Unsupported if they cannot."""
    nodes = by_dependence(graph, {node: before for before, node in itertools.pairwise(ordered)})
    if len(nodes) < len(graph.nodes):
        if len(by_dependence(graph, {})) < len(graph.nodes):
            raise BrokenInvariant("operations that wait for each other")
        stuck = next(node for node in ordered if node not in nodes)
        raise Unsupported(
            "its collectives, or operations of other libraries, would run in another order", where=source_line(stuck)
        )
    for before, node in itertools.pairwise(nodes):
        if before.next is not node:
            before.append(node)
    graph.eliminate_dead_code()
    if collectives(graph) != ordered:
        raise Unsupported(
            "a collective, or an operation of another library, would be dropped", where=source_line(ordered[0])
        )


def by_dependence(graph: fx.Graph, after: dict[fx.Node, fx.Node]) -> dict[fx.Node, None]:
    """The nodes in an order in which each comes after what it reads, and after one more where `after` says so; without
    those that wait for themselves."""
    done, pending = dict[fx.Node, None](), list(reversed(graph.nodes))
    waiting = defaultdict[fx.Node, list[fx.Node]](list)
    while pending:
        node = pending.pop()
        needs = [*node.all_input_nodes, *([after[node]] if node in after else [])]
        missing = [n for n in needs if n not in done]
        if missing:
            waiting[missing[-1]].append(node)  # the last one, so that what is sorted already is looked at once
        else:
            done[node] = None
            pending.extend(reversed(waiting.pop(node, [])))
    return done
