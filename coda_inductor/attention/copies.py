"""Attention reads queries, keys and values where they lie, not copies that have the heads first.

Whisper of transformers writes `k.view(...).transpose(1, 2).contiguous()`, as much code does. torch's kernels read rows
that lie anywhere. Their result lies as the queries do: then by token, as the next product reads it. So its copy also
goes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from coda_inductor.attention.calls import OPERANDS, Call, attention
from coda_inductor.attention.changes import Changed
from coda_inductor.attention.grouped import TAKE_FEWER
from coda_inductor.attention.sources import Sources
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import base, ordered
from coda_inductor.patterns.layout import side_by_side
from coda_inductor.patterns.sizes import product, size_of
from coda_inductor.write.strides import OutputStrides
from coda_inductor.write.writing import Writing

WHAT = "what was copied for it alone is read where it lies"


def read_in_place(graph: fx.Graph) -> tuple[Changed, ...]:
    """Has attention read what is copied for it alone, in place."""
    copies = copied(graph)
    if not copies:
        return ()
    safe, layouts = Sources.of(graph).safe, OutputStrides(graph)
    still, gone = layouts.fixed(), defaultdict[fx.Node, list[str]](list)
    sources = {copy: copy.all_input_nodes[0] for copy in copies}
    for copy, calls in copies.items():
        source = sources[copy]
        moved = not still.isdisjoint(call.node for call in calls)
        if moved or not side_by_side(source.meta["val"], -1) or not safe([source], calls):
            del sources[copy]
    parts = {source: all_of(base(source), sources.values()) for source in sources.values()}
    for copy, source in sources.items():
        calls = copies[copy]
        if any(call.is_backward for call in calls) and not parts[source]:
            continue
        for call in calls:
            call.node.replace_input_with(copy, source)
        forward = next((call.node for call in calls if not call.is_backward), calls[0].node)
        gone[forward].append(copy.name)
    if gone:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
        layouts.restore(Writing(graph, graph.output_node()).call)
    return tuple(Changed.of(node, Call(node).given["query"], WHAT, names) for node, names in gone.items())


def copied(graph: fx.Graph) -> dict[fx.Node, list[Call]]:
    """The copies that attention alone reads, as queries, keys or values, and who reads each. Kernels that take fewer
    heads of keys than of queries are also those whose operands may lie anywhere."""
    found, calls = dict[fx.Node, list[Call]](), list(attention(graph))
    readers = {call.node: call for call in calls if call.node.target._schema.name in TAKE_FEWER}  # type: ignore[union-attr]
    for node in graph.nodes:
        its = [readers[user] for user in node.users if user in readers]
        alone = node.target in g.COPIES and its and len(its) == len(node.users)
        if alone and all(as_operands(node, call) for call in its):
            found[node] = its
    return found


def as_operands(node: fx.Node, call: Call) -> bool:
    """Does the operation read the node as query, key or value alone, and not as the gradient, say?"""
    return sum(a is node for a in call.node.args) == sum(call.given[name] is node for name in OPERANDS)


def all_of(memory: fx.Node, sources: Iterable[fx.Node]) -> bool:
    """Are these together all of that memory, as queries, keys and values are all that one product makes? Of some of its
    parts the backward would keep all."""
    values = [n.meta["val"] for n in {*sources} if base(n) is memory]
    places = {(str(v.storage_offset()), str(v.shape), str(v.stride())): product(map(size_of, v.shape)) for v in values}
    whole = product(g.sizes(memory))
    return sum(part.coefficient for part in places.values() if part.powers == whole.powers) >= whole.coefficient
