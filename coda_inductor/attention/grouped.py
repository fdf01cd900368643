"""Keys and values that several heads share are read once by all of them.

transformers repeats them for every query head where there is a mask, and so does much code that is older than
`enable_gqa`. torch's kernels take fewer heads of keys than of queries: then nothing is copied, a copy is not kept for
the backward, and the gradients come as sums over the heads of a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch import fx

from coda_inductor.attention.calls import WINDOWS, Call, attention
from coda_inductor.attention.changes import Changed
from coda_inductor.attention.repeats import GRADIENTS, Repeated, Summed, chains, repeated, summed
from coda_inductor.attention.sources import Sources
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import draws, ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.sizes import ONE
from coda_inductor.write.strides import OutputStrides, restrided, unguarded
from coda_inductor.write.writing import Writing

TAKE_FEWER = frozenset(
    f"aten::_scaled_dot_product_{kernel}{half}"
    for kernel in ("cudnn_attention", "flash_attention", "flash_attention_for_cpu")
    for half in ("", "_backward")
) | {op._schema.name for op in WINDOWS}
"""The operations that take fewer heads of keys and values, as torch's sdp_utils.cpp allows them. The memory-efficient
one takes as many as of queries."""


def group_heads(graph: fx.Graph) -> tuple[Changed, ...]:
    """Has attention read keys and values before they are repeated, in place."""
    together = defaultdict[tuple[fx.Node, fx.Node], list[Call]](list)
    for call in attention(graph):
        together[call.given["key"], call.given["value"]].append(call)
    sources = {nodes: tuple(repeated(n, calls) for n in nodes) for nodes, calls in together.items()}
    if not any(map(all, sources.values())):
        return ()
    safe, found = Sources.of(graph).safe, list[Changed]()
    layouts = OutputStrides(graph)
    still = layouts.fixed()
    for nodes, calls in together.items():
        key, value = sources[nodes]
        if key is None or value is None or key.times != value.times:
            continue
        if not safe(key.read, calls) or not safe(value.read, calls):
            continue
        sums = [summed(call, key.times) for call in calls]
        if all(map(takes_fewer, calls)) and None not in sums:
            gone = [n.name for n in (*key.read[1:], *value.read[1:], *chains(sums))]
            for call, its in zip(calls, sums, strict=True):
                regroup(graph, call, (key, value), its or {}, still)
            what = f"keys and values that {key.times} heads share are read once"
            forwards = [call for call in calls if not call.is_backward]
            found += [Changed.of(c.node, c.given["query"], what, gone, heads=key.times) for c in forwards]
    if found:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
        layouts.restore(Writing(graph, graph.output_node()).call)
    return tuple(found)


def takes_fewer(call: Call) -> bool:
    """Does the operation take fewer heads of keys and values than of queries? What drops scores draws as it did."""
    return call.node.target._schema.name in TAKE_FEWER and not draws(call.node)  # type: ignore[union-attr]


# ---- writing


def regroup(
    graph: fx.Graph,
    call: Call,
    sources: Sequence[Repeated],
    gradients: dict[fx.Node, list[Summed]],
    still: AbstractSet[fx.Node],
) -> None:
    """The operation with fewer heads of keys and values, and what was made of their gradients; those of `still` lie in
    memory as they did."""
    writing = Writing(graph, call.node)
    new = dict[str, fx.Node]()
    for name, source in zip(GRADIENTS, sources, strict=True):
        batch, heads, tokens, size = call.given[name].meta["val"].shape
        shape = batch, heads // source.times, tokens, size
        new[name] = turned(writing, source.read[0], source.order, shape, like=source.read[-1])
    call.node.args, call.node.kwargs = call.arguments(**new)
    args, kwargs = fx.map_arg((call.node.args, call.node.kwargs), lambda n: n.meta["val"])
    with unguarded(call.node):
        call.node.meta["val"] = call.node.target(*args, **kwargs)  # type: ignore[operator]
    for gradient, its in gradients.items():
        gradient.meta["val"] = call.node.meta["val"][gradient.args[1]]
        for made in its:
            old, here = made.node.meta["val"], Writing(graph, made.node)
            new_sum = turned(here, gradient, made.order, old.shape, made.node)
            if made.node in still:
                new_sum = restrided(new_sum, old, here.call)
            made.node.replace_all_uses_with(new_sum)


def turned(writing: Writing, node: fx.Node, order: Sequence[int], shape: Sequence[int], like: fx.Node) -> fx.Node:
    """The node's dimensions in another order, and those of size 1 where the shape has them: a view."""
    long = [d for d in order if g.sizes(node)[d] != ONE]
    if long != sorted(long):
        node = writing.call(like, aten.permute.default, node, [*order])
    return writing.reshape(node, shape)
