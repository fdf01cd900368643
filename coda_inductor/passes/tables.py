"""Tables that many elements read, as the cosines of rotary embeddings or the scales of rows: computed once, where
Inductor would compute them for every element that reads them.

f(x) repeated along new dimensions is f(x repeated), rounded where the original rounds it. Inductor puts a pointwise
value into memory only when it reads much or is long; sin and cos are one operation each, however long they take.
(H200, Llama-1B's RoPE of 8192 tokens by torch 2.11: 60 and 91 us for q, forward and backward, which read and write
67 MB; 18 and 20 with tables, bench/results/profile.jsonl.) A scale of torchao's is a division in float64, a logarithm
and a power. (H100: 173 us for the sum of two scaled products of 16384 x 2048, which moves 200 MB.) A table of the
forward is kept for the backward.

So are 8-bit tensors that several products read, and what products and passes read beside others. The user's graph and
the programs that tuning measures get the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from coda_inductor.core.dtypes import EIGHT_BITS, NARROW
from coda_inductor.core.settings import Settings
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.passes.switches import NAMES, TABLES, allowed
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.schedule.kinds import elements, is_tensor, kind_of
from coda_inductor.write.writing import stored

LONG = frozenset({aten.cos.default, aten.sin.default, aten.tan.default, aten.log2.default})
"""Operations that take longer than memory does. (Arguments of the first three may be large, and are reduced in many
steps.)"""
REPEATED = 8
"""How often each element of a table is read, at least: writing and reading it is little beside its readers' bytes."""
WORTH = 1 << 22
"""Elements that read a table, at least, so that another kernel is worth its launch: a sine and a cosine of so many took
11 us (H200, from the same passes)."""


READERS = g.PRODUCTS | {ELEMENTWISE}


@dataclass(frozen=True, slots=True)
class Table:
    """One table: the node that computes it, its shape, and the user's line."""

    node: str
    shape: str
    source: str


def put_into_memory(graph: fx.Graph, settings: Settings) -> tuple[Table, ...]:
    """8-bit tensors that several products read, what passes and products read beside others, and tables, in place; the
    tables, for a report."""
    store_shared(graph)
    store_sources(graph)
    return store_tables(graph) if allowed(TABLES, NAMES, settings) else ()


def store_shared(graph: fx.Graph) -> None:
    """Puts 8-bit tensors into memory that several products read, in place: Inductor would compute a view of a value
    again for each of them."""
    for cast in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        if cast.args[1] in EIGHT_BITS and len(set(readers(cast))) > 1:
            stored(graph, cast)


def store_sources(graph: fx.Graph) -> None:
    """Puts into memory what passes and products read and Inductor computes, in place, where more reads it: it would
    compute that again for each reduction that stands before. (H100, a rotated gradient of 16384 x 2048, its amax and
    cast: one kernel of 112 us for two of 165 and 88.) And what is made of several tensors in 16 bits and widened for
    several loops: Inductor would store it in 32."""
    if not any((value := g.tensor(n)) is not None and value.dtype in EIGHT_BITS for n in graph.nodes):
        return
    found = {g.root(x, g.is_view) for n in graph.nodes if n.target in READERS for x in n.all_input_nodes}
    for node in list(graph.nodes):
        if not is_loop(node) or node.meta["val"].dtype not in NARROW:
            continue
        read = {n for n in readers(node) if n.op != "output"}
        apart = any(g.is_backward(n) != g.is_backward(node) for n in read)
        if not apart and (is_widened(node, read) or (node in found and len(read) > 1)):
            stored(graph, node)


def is_widened(node: fx.Node, read: set[fx.Node]) -> bool:
    """Is it made of several tensors of its size, and widened for several loops?"""
    several = sum(elements(a) >= elements(node) for a in node.all_input_nodes) > 1
    return several and len({r for n in read if g.widens(n) for r in readers(n)}) > 1


def store_tables(graph: fx.Graph) -> tuple[Table, ...]:
    """Puts the tables of a joint or inference graph into memory, in place; of equal ones the first for all."""
    ends = {last(n) for n in graph.nodes if is_long(n) and elements(n) > 1}
    roots = [n for n in graph.nodes if n in ends]
    found = dict[str, tuple[fx.Node, Table]]()
    numbers = numbered(graph)
    for node in filter(is_worth, roots):
        if (first := found.get(key := numbers[node])) is not None:
            node.replace_all_uses_with(first[0])
            graph.erase_node(node)
        else:
            found[key] = store(graph, node)
    return tuple(table for _, table in found.values())


def is_long(node: fx.Node) -> bool:
    """Does it take longer than memory does? So does a division in float64."""
    return node.target in LONG or (node.target is aten.reciprocal.default and node.meta["val"].dtype == torch.float64)


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a value, as it is or through views."""
    found = list[fx.Node]()
    for user in node.users:
        viewed = user.op == "call_function" and kind_of(user) in ("view", "part")
        found += readers(user) if viewed else [user]
    return list(dict.fromkeys(found))


def last(node: fx.Node) -> fx.Node:
    """The end of the small computation that `node` begins: a factor, a cast, two halves put together."""
    match readers(node):
        case [reader] if is_step(reader, node):
            return last(reader)
    return node


def is_step(reader: fx.Node, node: fx.Node) -> bool:
    """Is it a loop over little more than `node`, and reads nothing larger?"""
    small = elements(reader) < REPEATED * elements(node)
    return is_loop(reader) and small and all(elements(a) <= elements(node) for a in reader.all_input_nodes)


def is_loop(node: fx.Node) -> bool:
    """Is it computed element by element?"""
    return node.op == "call_function" and is_tensor(node) and kind_of(node) == "loop"


def is_worth(node: fx.Node) -> bool:
    """Is it read often enough, by enough elements? Each reader may cast it first."""
    return sum(map(elements, set(wide(node, elements(node))))) >= WORTH


def wide(node: fx.Node, size: int) -> Iterator[fx.Node]:
    """The loops over many more elements than `size` that read the node, or small steps from it."""
    for reader in readers(node):
        if is_loop(reader) and elements(reader) >= REPEATED * size:
            yield reader
        elif is_step(reader, node):
            yield from wide(reader, size)


def numbered(graph: fx.Graph) -> dict[fx.Node, str]:
    """Equal numbers for nodes that compute the same on the same side of a checkpoint, and only for those."""
    known, found = dict[object, str](), dict[fx.Node, str]()
    for node in graph.nodes:
        key: object = node
        if node.op == "call_function" and not node.is_impure() and kind_of(node) != "random":
            args = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            key = (node.target, repr(args), repr([node.meta.get(tag) for tag in ("recompute", "ac_graph_id")]))
        found[node] = known.setdefault(key, f"<{len(known)}>")
    return found


def store(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, Table]:
    """Lets all read the stored value in place of the formula."""
    shape = ", ".join(map(str, node.meta["val"].shape))
    return stored(graph, node), Table(node.name, f"[{shape}]", g.source_line(node))
