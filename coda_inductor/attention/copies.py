"""Attention reads queries, keys and values where they lie, not copies that have the heads first.

Whisper of transformers writes `k.view(...).transpose(1, 2).contiguous()`, as much code does. torch's kernels read rows
that lie anywhere. Their result lies as the queries do: then by token, as the next product reads it. So its copy also
goes.

Queries of which a rotary embedding turns a part are put together with the rest by a `cat`, which lies with the heads
first. So would attention's result, of which the next product then reads a copy. The `cat` is written by token.
"""

from __future__ import annotations

import operator
from collections import defaultdict

from torch import fx

from coda_inductor.attention.calls import OPERANDS, Call, attention
from coda_inductor.attention.grouped import TAKE_FEWER, Grouped
from coda_inductor.attention.sources import Sources
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import base, ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import alike, dense, side_by_side
from coda_inductor.patterns.sizes import product
from coda_inductor.write.strides import OutputStrides
from coda_inductor.write.writing import Writing


def read_in_place(graph: fx.Graph) -> tuple[Grouped, ...]:
    """Has attention read what is copied for it alone, in place."""
    copies = copied(graph)
    if not copies:
        return ()
    safe, layouts = Sources.of(graph).safe, OutputStrides(graph)
    still, gone = layouts.fixed(), defaultdict[fx.Node, list[str]](list)
    for copy, calls in copies.items():
        source = copy.all_input_nodes[0]
        if not still.isdisjoint(call.node for call in calls) or not side_by_side(source.meta["val"], -1):
            continue
        if not safe([source], calls) or (any(call.is_backward for call in calls) and not whole(source)):
            continue
        for call in calls:
            call.node.replace_input_with(copy, source)
        forward = next((call.node for call in calls if not call.is_backward), calls[0].node)
        gone[forward].append(copy.name)
    if gone:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
        layouts.restore(Writing(graph, graph.output_node()).call)
    return tuple(Grouped.of(Call(node), 1, names) for node, names in gone.items())


def lie_by_token(graph: fx.Graph) -> tuple[Grouped, ...]:
    """Has queries that are put together for attention alone lie by token, if what it returns is copied so."""
    calls = readers(graph)
    found = [call for call in calls.values() if not call.is_backward and put_together(call.given["query"])]
    found = [call for call in found if alone(call.given["query"], calls) and copies_of(call)]
    if not found:
        return ()
    layouts, turned = OutputStrides(graph), list[Call]()
    fixed = layouts.fixed()
    for call in found:
        query = call.given["query"]
        if not put_together(query) or not fixed.isdisjoint([query, call.node]):
            continue  # another call's, which has turned it
        writing = Writing(graph, query)
        parts = [writing.call(part, aten.permute.default, part, BY_TOKEN) for part in query.args[0]]
        whole = writing.instead(query, aten.cat.default, parts, -1)
        query.replace_all_uses_with(writing.call(query, aten.permute.default, whole, BY_TOKEN))
        turned.append(call)
    if turned:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
        layouts.restore(Writing(graph, graph.output_node()).call)
    gone = {call: [c.name for c in copies_of(call) if alike(c, c.all_input_nodes[0])] for call in turned}
    return tuple(Grouped.of(call, 0, names) for call, names in gone.items() if names)


BY_TOKEN = [0, 2, 1, 3]
"""Dimensions of [samples, heads, tokens, features] in the order in which products make them."""


def put_together(query: fx.Node) -> bool:
    """Are parts of each head put beside each other, heads first in memory?"""
    value = query.meta["val"]
    last = query.target is aten.cat.default and len(query.args) > 1 and query.args[1] in (-1, value.dim() - 1)
    return last and value.dim() == len(BY_TOKEN) and dense(query) and not dense(query, BY_TOKEN)


def readers(graph: fx.Graph) -> dict[fx.Node, Call]:
    """Attention that takes fewer heads of keys than of queries, by node: such kernels' operands may lie anywhere."""
    return {call.node: call for call in attention(graph) if call.node.target._schema.name in TAKE_FEWER}  # type: ignore[union-attr]


def alone(node: fx.Node, calls: dict[fx.Node, Call]) -> bool:
    """Does attention alone read it, as an operand?"""
    return bool(node.users) and all(user in calls and as_operands(node, calls[user]) for user in node.users)


def copies_of(call: Call) -> list[fx.Node]:
    """What copies attention's result, through views."""
    results = [u for u in call.node.users if u.target is operator.getitem and u.args[1] == 0]
    return [n for n in g.reached(results, lambda n: filter(g.is_view, n.users)) if n.target in g.COPIES]


def copied(graph: fx.Graph) -> dict[fx.Node, list[Call]]:
    """The copies that attention alone reads, as queries, keys or values, and who reads each."""
    calls = readers(graph)
    copies = (n for n in graph.nodes if n.target in g.COPIES and alone(n, calls))
    return {copy: [calls[user] for user in copy.users] for copy in copies}


def as_operands(node: fx.Node, call: Call) -> bool:
    """Does the operation read the node as query, key or value alone, and not as the gradient, say?"""
    return sum(a is node for a in call.node.args) == sum(call.given[name] is node for name in OPERANDS)


def whole(node: fx.Node) -> bool:
    """Is the node all of its memory? Of a part of a larger tensor the backward would keep all."""
    return product(g.sizes(base(node))) == product(g.sizes(node))
