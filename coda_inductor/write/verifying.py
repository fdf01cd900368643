"""One look at a graph after every rewriting: does it still do what it did besides computing values?

Values are the derivation's business; here it is order, memory and sharing. What is found is a bug of a pass, whichever,
and raised as BrokenInvariant: the graph goes to Inductor as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.patterns.effects import Effects, Memory, effects, ordered, written
from coda_inductor.write.aliases import Sharing, sharing
from coda_inductor.write.kept import stale


@dataclass(frozen=True, slots=True)
class Before:
    """A graph's effects, and which of its results share memory, before it is rewritten."""

    effects: Effects
    sharing: Sharing

    @classmethod
    def of(cls, graph: fx.Graph) -> Before:
        """Those of a graph."""
        return cls(effects(graph), sharing(graph))


def verify(graph: fx.Graph, before: Before, by: str) -> None:
    """Raises BrokenInvariant unless the rewriting `by` left the graph's effects as they were."""
    for rule in (chained, writes, sides, overwritten, shared):
        if wrong := rule(graph, before):
            raise BrokenInvariant(f"after {by}: {wrong}")


def verify_kept(graph: fx.Graph) -> None:
    """Raises BrokenInvariant if something would be read after it was overwritten, by the backward or because Inductor
    computes it late. Of the finished graph."""
    if wrong := stale(graph):
        raise BrokenInvariant(f"{wrong[0]} would read memory that is overwritten before")


def chained(graph: fx.Graph, before: Before) -> str:
    """Draws, prints, asserts and operations of other libraries are the same ones, in the same order."""
    found = tuple(n.name for n in graph.nodes if ordered(n))
    same = found == before.effects.chain
    return "" if same else f"{[*found]} run in another order than {[*before.effects.chain]}"


def writes(graph: fx.Graph, before: Before) -> str:
    """The same operations overwrite the same memory."""
    if not any(map(written, graph.nodes)):
        return f"nothing overwrites {[*before.effects.writes]}" if before.effects.writes else ""
    memory = Memory(graph)
    found = {n.name: over for n in graph.nodes if (over := memory.overwritten(n))}
    return "" if found == before.effects.writes else f"{found} is overwritten, not {before.effects.writes}"


def sides(graph: fx.Graph, before: Before) -> str:
    """Who reads memory does so on its side of each write to it; who did not before, ahead of all writes."""
    if not before.effects.writes:
        return ""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for reader, writer in before.effects.pairs(graph):
        behind = (reader.name, writer.name) in before.effects.behind
        if (place[writer] < place[reader]) != behind:
            return f"{reader} and {writer} have changed places"
    return ""


def overwritten(graph: fx.Graph, before: Before) -> str:
    """Nobody else reads memory that somebody reads after it was overwritten."""
    if not (unstable := before.effects.unstable):
        return ""
    memory = Memory(graph)
    for node in graph.nodes:
        if memory.read(node) & unstable - before.effects.reads.get(node.name, frozenset()):
            return f"{node} reads memory that is overwritten"
    return ""


def shared(graph: fx.Graph, before: Before) -> str:
    """Results share memory with what they shared it with, and with nothing else."""
    found = sharing(graph)
    return "" if found == before.sharing else f"results share memory as {found}, not as {before.sharing}"
