"""What a graph does besides computing values: what it overwrites, draws and prints, and in which order.

AOTAutograd's graphs are functional but for their ends: `copy_` writes what an input shall hold afterwards. Chained
passes of users may leave other writers, anywhere. `Effects` says of a graph, before it is rewritten, what has to hold
of it afterwards: who reads which memory before and after each write, and the one order of draws, prints, asserts and
operations in which others take part.

Memory is named by the node that allocates it: an input, or an operation that makes a new tensor.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._library.utils import is_impure
from torch.utils._pytree import tree_leaves

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten

OURS, ALONE = "coda", frozenset({"aten", "prims"})
"""The namespaces of our operations, and of others that take part in nothing outside the graph but by draws, asserts."""
PERHAPS = frozenset({aten.reshape.default, aten.contiguous.default, aten._reshape_alias.default})
"""Operations that return a view of their input where they can, and a copy elsewhere."""
SIZES = frozenset({
    aten.sym_size.int, aten.sym_size.default, aten.sym_stride.int, aten.sym_stride.default, aten.sym_numel.default,
    aten.sym_storage_offset.default,
})  # fmt: skip
"""Operations that read no element of their input."""
FUNCTIONAL = frozenset({"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"})
TRITON = "triton_kernel_wrapper_mutation"
"""Operators of higher order, by name: not all exist before Inductor is imported. FUNCTIONAL are AOTAutograd's forms of
operations of users that overwrite their inputs. Inductor lets them do so where nobody reads the inputs any more."""
IN_PLACE = frozenset({
    "index_put", "_unsafe_index_put", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter",
    "all_reduce", "all_reduce_coalesced",
})  # fmt: skip
"""Operations, by name, that Inductor lets overwrite their first input where nobody reads that any more; and all of
lists of tensors, whose names begin with _foreach_."""
VIEWED = frozenset({aten._unsafe_view.default})
"""Views whose schema does not say so."""


def storage(node: fx.Node) -> int | None:
    """The storage of the node's fake tensor, if it has one."""
    value = g.tensor(node)
    return value.untyped_storage()._cdata if value is not None and torch._C._has_storage(value) else None


def viewed(node: fx.Node) -> fx.Node | None:
    """The input in whose memory the node's result lies; None if the result has memory of its own."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return None
    if not isinstance(node.target, torch._ops.OpOverload):  # an item of several views
        views = isinstance(source.target, torch._ops.OpOverload) and aliases(source.target)
        return viewed(source) if views else None
    if node.target in PERHAPS:
        return source if storage(node) == storage(source) is not None else None
    return source if node.target in VIEWED or aliases(node.target) else None


def base(node: fx.Node) -> fx.Node:
    """The node in whose memory the node's result lies: what it is a view of, through any chain of views."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def may_view(node: fx.Node) -> bool:
    """May the result lie in an input's memory?"""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function"
    return node.target in PERHAPS or node.target in VIEWED or aliases(node.target)


@cache
def aliases(op: torch._ops.OpOverload) -> bool:
    """Do the results of an operation lie in the memory of its first argument?"""
    schema = op._schema
    return bool(schema.arguments) and any(r.alias_info is not None for r in schema.returns)


def higher_order(node: fx.Node) -> str:
    """The name of a node's operator of higher order."""
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else ""


def written(node: fx.Node) -> list[fx.Node]:
    """The inputs that an operation overwrites."""
    if node.op != "call_function":
        return []
    if higher_order(node) == TRITON:
        return [n for n in tree_leaves([node.kwargs["kwargs"]]) if isinstance(n, fx.Node)]
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    found = list[fx.Node]()
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [n for n in tree_leaves(given) if isinstance(n, fx.Node)]
    return found


def overwritten_after(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that AOTAutograd overwrites once the forward has run, with what the graph returns for it: those that
    need a gradient."""
    inputs = {n.meta["desc"]: n for n in graph.find_nodes(op="placeholder") if "desc" in n.meta}
    returned = graph.output_node().meta.get("desc", ())
    return [inputs[d.mutated_input] for d in returned if isinstance(d, InputMutationAOTOutput)]


def mutating(node: fx.Node) -> list[fx.Node]:
    """The inputs that an operation of a user's overwrites, or may once Inductor has made it one that does."""
    if higher_order(node) in FUNCTIONAL:
        return node.all_input_nodes
    torchs = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ALONE
    return [] if torchs else written(node)


def reinplaced(node: fx.Node) -> list[fx.Node]:
    """The inputs in whose memory the node may lie once Inductor lets operations overwrite what nobody reads any more:
    those of a FUNCTIONAL form, the first of what is IN_PLACE."""
    made = node.args[0] if node.target is operator.getitem else node
    if not isinstance(made, fx.Node):
        return []
    if higher_order(made) in FUNCTIONAL:
        return _overwritten_by(made)
    name = g.name_of(made)
    if name in IN_PLACE or name.startswith("_foreach_"):
        return [n for n in tree_leaves(made.args[0]) if isinstance(n, fx.Node)]
    return []


def _overwritten_by(made: fx.Node) -> list[fx.Node]:
    """The inputs that an operation overwrites whose FUNCTIONAL form the node is."""
    given, name = dict(made.kwargs), higher_order(made)
    if name == "auto_functionalized_v2":
        found = given["_all_bases"]
    elif name == "auto_functionalized":
        arguments = made.args[0]._schema.arguments  # type: ignore[union-attr]
        found = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    else:
        found = [given["kwargs"][n] for n in given["tensors_to_clone"]]  # type: ignore[index,union-attr]
    return [n for n in tree_leaves(found) if isinstance(n, fx.Node)]


def draws(node: fx.Node) -> bool:
    """Does an operation draw random numbers? Attention without dropout draws none."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    names = [a.name for a in op._schema.arguments]
    if "dropout_p" not in names:
        return True
    i = names.index("dropout_p")
    return bool((node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", 0.0)) != 0.0)


def ordered(node: fx.Node) -> bool:
    """Must the operation keep its place among all of its kind? Draws, prints and asserts, what belongs to other
    libraries, in which other ranks may take part, and what holds a graph. What only writes to memory may not."""
    if node.op != "call_function":
        return False
    space = node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""
    if space == OURS or (space in ALONE and _pure(node.target)):
        return False
    if space in ALONE:
        return draws(node) or (node.is_impure(impure_random=False) and not written(node))
    other = isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)
    return other or node.is_impure(impure_random=False)


def computes(node: fx.Node) -> bool:
    """Is the node an operation of torch's own that does nothing but compute, the same each time?"""
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and op.namespace in ALONE and _pure(op)


@cache
def _pure(op: torch._ops.OpOverload) -> bool:
    """Does an operation of torch's own nothing but compute, whatever its arguments?"""
    return torch.Tag.nondeterministic_seeded not in op.tags and not is_impure(op)


def is_returned(node: fx.Node) -> bool:
    """Does the graph return the node, or a view of it?"""
    onward = g.reached([node], lambda n: n.users if n is node or viewed(n) is not None else ())
    return any(n.op == "output" for n in onward)


class Memory:
    """Where the values of a graph lie, as it is now."""

    def __init__(self, graph: fx.Graph) -> None:
        self._name: dict[fx.Node, str] = {}
        inputs = dict[int, str]()
        for node in graph.nodes:
            source = viewed(node)
            if source is not None:
                self._name[node] = self._name.get(source, source.name)
            elif node.op in ("placeholder", "get_attr") and (key := storage(node)) is not None:
                self._name[node] = inputs.setdefault(key, node.name)
            else:
                self._name[node] = node.name

    def of(self, node: fx.Node) -> str:
        """The name of the memory that a node's value lies in."""
        return self._name.get(node, node.name)

    def read(self, node: fx.Node) -> frozenset[str]:
        """The memory that an operation reads. A view reads none, nor does what only asks how a tensor lies."""
        if node.op != "call_function" or (viewed(node) is not None and not written(node)):
            return frozenset()
        if node.target in SIZES:
            return frozenset()
        return frozenset(self.of(a) for a in node.all_input_nodes)

    def overwritten(self, node: fx.Node) -> frozenset[str]:
        """The memory that an operation overwrites."""
        return frozenset(self.of(a) for a in written(node))


@dataclass(frozen=True)
class Effects:
    """Of a graph before it is rewritten, by the names of its nodes. All that reads what is overwritten elsewhere is
    kept: the rest of the graph is free."""

    chain: tuple[str, ...] = ()
    """What is `ordered`."""
    writes: dict[str, frozenset[str]] = field(default_factory=dict)
    """What each writer overwrites, in order."""
    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    """Who reads memory that some writer overwrites."""
    behind: frozenset[tuple[str, str]] = frozenset()
    """(reader, writer) where the writer stands first."""
    unstable: frozenset[str] = frozenset()
    """Memory that somebody reads, or may read, after it was overwritten: only who reads it now may read it."""

    @property
    def memory(self) -> frozenset[str]:
        """All that is overwritten."""
        return frozenset().union(*self.writes.values())

    def waits(self, graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
        """For each node of the graph, rewritten or not, what must have run although the node reads nothing of it."""
        found, nodes = defaultdict[fx.Node, list[fx.Node]](list), {n.name: n for n in graph.nodes}
        chain = [nodes[name] for name in self.chain if name in nodes]
        for before, node in itertools.pairwise(chain):
            found[node].append(before)
        for reader, writer in self.pairs(graph) if self.writes else ():
            first, second = (writer, reader) if (reader.name, writer.name) in self.behind else (reader, writer)
            found[second].append(first)
        return found

    def pairs(self, graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Every (reader, writer) of one piece of memory; of two writers the second counts as a reader."""
        memory = Memory(graph)
        writers = [n for n in graph.nodes if n.name in self.writes]
        names = self.memory
        for node in graph.nodes:
            if touched := (memory.read(node) | memory.overwritten(node)) & names:
                for writer in writers:
                    if writer is not node and touched & memory.overwritten(writer):
                        yield node, writer


def effects(graph: fx.Graph) -> Effects:
    """The effects of a graph."""
    nodes = list(graph.nodes)
    chain = tuple(n.name for n in nodes if ordered(n))
    if not any(map(written, nodes)):
        return Effects(chain)
    memory, place = Memory(graph), {node: i for i, node in enumerate(nodes)}
    writes = {n: over for n in nodes if (over := memory.overwritten(n))}
    names = frozenset[str]().union(*writes.values())
    reads = {n: some for n in nodes if (some := (memory.read(n) | memory.overwritten(n)) & names)}
    behind = {(n, w) for n, some in reads.items() for w, over in writes.items() if place[w] < place[n] and some & over}
    unstable = {m for n, w in behind for m in reads[n] & writes[w] if m in memory.read(n) - memory.overwritten(n)}
    for w, over in writes.items():  # what is ordered behind a writer of another library may be read before it
        if ordered(w) and chain and chain[-1] != w.name:
            unstable |= over
    return Effects(
        chain,
        {w.name: over for w, over in writes.items()},
        {n.name: some for n, some in reads.items()},
        frozenset((n.name, w.name) for n, w in behind),
        frozenset(unstable),
    )


def behind_tangents(graph: fx.Graph) -> set[fx.Node]:
    """What waits for the gradient of an output, in whatever order the graph stands."""
    return g.reached(
        filter(g.is_tangent, graph.nodes), lambda node: [user for user in node.users if user.op != "output"]
    )
