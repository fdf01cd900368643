"""What attention may read in place of copies: memory that nobody overwrites before it is read, nor the caller between
forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from coda_inductor.attention.calls import Call
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.constants import of_memory_that_is_written
from coda_inductor.patterns.effects import Memory
from coda_inductor.patterns.sizes import product


@dataclass(frozen=True, slots=True)
class Sources:
    """Of a graph, the nodes in memory that it overwrites, and those in memory that the user has."""

    overwritten: frozenset[fx.Node]
    theirs: frozenset[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph) -> Sources:
        """As the graph is now."""
        return cls(of_memory_that_is_written(graph), users_memory(graph))

    def safe(self, read: Sequence[fx.Node], calls: Sequence[Call]) -> bool:
        """Do these, views and copies of the first, still hold their values when the calls read them?"""
        kept = any(call.is_backward for call in calls)
        if kept and not self.theirs.isdisjoint(same_once_compiled(read[0])):
            return False
        return self.overwritten.isdisjoint(read)


def users_memory(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes in memory that the user has, as inputs and results. They may overwrite it before the backward reads it:
    a copy for every head is safe from that."""
    memory = Memory(graph)
    theirs = {memory.of(n) for n in (*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes)}
    return frozenset(n for n in graph.nodes if memory.of(n) in theirs)


def same_once_compiled(source: fx.Node) -> set[fx.Node]:
    """What may be the source's memory in the end: all that is as long, and made of each other. Inductor drops copies
    that change nothing, as `clone`, or `cat` of one; and what is made of an input may be made again of that."""
    size, dtype = product(g.sizes(source)), source.meta["val"].dtype

    def alike(node: fx.Node) -> bool:
        value = g.tensor(node)
        return value is not None and value.dtype == dtype and product(g.sizes(node)) == size

    def beside(node: fx.Node) -> Iterator[fx.Node]:
        return filter(alike, (*node.users, *(() if node.target in g.PRODUCTS else node.all_input_nodes)))

    return g.reached([source], beside)
