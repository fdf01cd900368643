"""Keys and values that several heads share are read once by all of them.

transformers repeats them for every query head where there is a mask, and so does much code that is older than
`enable_gqa`. torch's kernels take fewer heads of keys than of queries: then nothing is copied, a copy is not kept for
the backward, and the gradients come as sums over the heads of a group.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import Tensor, fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.attention import Call, attention
from coda_inductor.patterns.axes import Axes, Ids, Misfit
from coda_inductor.patterns.constants import of_memory_that_is_written
from coda_inductor.patterns.effects import Memory, draws, ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import TRANSPOSES, major_to_minor, without_gaps
from coda_inductor.patterns.sizes import ONE, Size, size_of
from coda_inductor.write.aliases import returned
from coda_inductor.write.strides import OutputStrides, restrided, unguarded
from coda_inductor.write.writing import Writing

TAKE_FEWER = frozenset(
    f"aten::_scaled_dot_product_{kernel}{half}"
    for kernel in ("cudnn_attention", "flash_attention", "flash_attention_for_cpu")
    for half in ("", "_backward")
)
"""The operations that take fewer heads of keys and values, as torch's sdp_utils.cpp allows them. The memory-efficient
one takes as many as of queries."""
ALIGNED = 16
"""Bytes."""
GRADIENTS = {"key": 1, "value": 2}
"""Which result of the backward is whose gradient."""

Dims = tuple[Ids, ...]
"""The axes of every dimension of a tensor, major to minor."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Attention that read repeated keys: its node, the shape of its queries, how many of their heads share keys and
    values, the user's line, and the operations that nobody runs any more, of the backward, too."""

    node: str
    shape: str
    heads: int
    source: str
    absorbed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its own, among those who absorb operations."""
        return f"grouped {self.node}"

    @classmethod
    def of(cls, call: Call, heads: int, gone: Sequence[str]) -> Grouped:
        """The record of an operation."""
        shape = str([*call.given["query"].meta["val"].shape])
        return cls(call.node.name, shape, heads, g.source_line(call.node), tuple(gone))


@dataclass(frozen=True, slots=True)
class Repeated:
    """Keys or values: the `expand` that repeats them, what leads from it to the attention, and in which order of the
    expand's dimensions attention reads them once."""

    expand: fx.Node
    way: tuple[fx.Node, ...]
    order: tuple[int, ...]
    times: int

    @property
    def read(self) -> tuple[fx.Node, ...]:
        """What is repeated, and the copies: attention may read any."""
        return *self.expand.all_input_nodes[:1], self.expand, *self.way


@dataclass(frozen=True, slots=True)
class Summed:
    """A sum of a gradient over the heads of a group: in which order of the gradient's dimensions its elements lie."""

    node: fx.Node
    order: tuple[int, ...]


def group_heads(graph: fx.Graph) -> tuple[Grouped, ...]:
    """Has attention read keys and values before they are repeated, in place."""
    together = defaultdict[tuple[fx.Node, fx.Node], list[Call]](list)
    for call in attention(graph):
        together[call.given["key"], call.given["value"]].append(call)
    sources = {nodes: tuple(repeated(n, calls) for n in nodes) for nodes, calls in together.items()}
    if not any(map(all, sources.values())):
        return ()
    overwritten, seen, found = of_memory_that_is_written(graph), users_memory(graph), list[Grouped]()
    layouts = OutputStrides(graph)
    still = in_their_order(layouts)
    for nodes, calls in together.items():
        key, value = sources[nodes]
        if key is None or value is None or key.times != value.times:
            continue
        kept = {source.read[0] for source in (key, value)} if any(map(backward, calls)) else set[fx.Node]()
        if not seen.isdisjoint(kept) or not overwritten.isdisjoint(key.read + value.read):
            continue
        sums = [summed(call, key.times) for call in calls]
        if all(map(takes_fewer, calls)) and None not in sums:
            gone = [n.name for n in (*key.read[1:], *value.read[1:], *chains(sums))]
            for call, its in zip(calls, sums, strict=True):
                regroup(graph, call, (key, value), its or {}, still)
            found += [Grouped.of(call, key.times, gone) for call in calls if not backward(call)]
    if found:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
        layouts.restore(Writing(graph, graph.output_node()).call)
    return tuple(found)


def users_memory(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes in memory that the user has, as inputs and results. They may overwrite it before the backward reads it:
    a copy is safe from that."""
    memory = Memory(graph)
    theirs = {memory.of(n) for n in (*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes)}
    return frozenset(n for n in graph.nodes if memory.of(n) in theirs)


def in_their_order(layouts: OutputStrides) -> set[fx.Node]:
    """What results are made of that cannot be copied into another order: those that share memory, or have gaps."""
    found = list[fx.Node]()
    for node, val, where in zip(returned(layouts.graph), layouts.outputs, layouts.sharing, strict=True):
        if isinstance(node, fx.Node) and isinstance(val, Tensor):
            shared = isinstance(where, str) or layouts.sharing.count(where) > 1
            if shared or not without_gaps(val, major_to_minor(val)):
                found.append(node)
    return g.reached(found, lambda n: n.all_input_nodes)


def takes_fewer(call: Call) -> bool:
    """Does the operation take fewer heads of keys and values than of queries? What drops scores draws as it did."""
    return call.node.target._schema.name in TAKE_FEWER and not draws(call.node)  # type: ignore[union-attr]


def backward(call: Call) -> bool:
    """Does it give gradients?"""
    return "grad_out" in call.given


# ---- what is repeated


def repeated(node: fx.Node, calls: Sequence[Call]) -> Repeated | None:
    """Keys or values [batch, heads, tokens, size] whose every head is repeated several times in succession, for these
    calls alone."""
    way, readers = list[fx.Node](), {call.node for call in calls}
    while True:
        if not readers.issuperset(node.users):
            return None
        dim = repeats(node)
        if dim is not None:
            break
        if not g.is_view(node):
            return None
        way.insert(0, node)
        readers, node = {node}, node.all_input_nodes[0]
    axes, sizes = Axes(), g.sizes(node)
    own: Dims = tuple(() if size == ONE else (axes.new(size),) for size in sizes)
    try:
        dims = behind(axes, own, way)
    except Misfit:
        return None
    order, times = once(dims, own, own[dim]), sizes[dim]
    if order is None or times.powers or not side_by_side(node, [d for d in order if own[d] and d != dim]):
        return None
    return Repeated(node, tuple(way), order, times.coefficient)


def side_by_side(expand: fx.Node, order: Sequence[int]) -> bool:
    """Do the numbers of the last dimension lie side by side in memory, and what begins a row in steps of 16 bytes, as
    kernels read them? A copy's do."""
    value = expand.args[0].meta["val"]  # type: ignore[union-attr]
    step = Size(max(ALIGNED // value.element_size(), 1))
    rows, start = [size_of(value.stride(d)) for d in order[:-1]], size_of(value.storage_offset())
    if not order or any(row.coefficient == 0 for row in rows) or any(n.over(step) is None for n in (*rows, start)):
        return False
    return size_of(value.stride(order[-1])) == ONE


def repeats(node: fx.Node) -> int | None:
    """The one dimension, of size 1, that an expand repeats."""
    if node.target is not aten.expand.default:
        return None
    before, after = g.sizes(node.args[0]), g.sizes(node)  # type: ignore[arg-type]
    found = [d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    return found[0] if len(before) == len(after) and len(found) == 1 and before[found[0]] == ONE else None


def behind(axes: Axes, dims: Dims, way: Sequence[fx.Node]) -> Dims:
    """The axes of the last of some views, by those of what the first views. Raises Misfit where one cuts across."""
    for node in way:
        if node.target in TRANSPOSES:
            dims = tuple(dims[i] for i in permuted(node))
        else:
            dims = axes.regroup([i for dim in dims for i in dim], g.sizes(node))
    return tuple(map(axes.roots, dims))


def permuted(view: fx.Node) -> list[int]:
    """The dimensions of its input, in the order of the view's."""
    rank = len(g.sizes(view))
    if view.target is aten.permute.default:
        return [d % rank for d in view.args[1]]  # type: ignore[union-attr, operator, misc]
    order = list(range(rank))
    a, b = view.args[1:] if view.target is aten.transpose.int else (0, -1)
    order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return order


def once(dims: Dims, own: Dims, group: Ids) -> tuple[int, ...] | None:
    """The order of `own` dimensions in which they are [batch, heads, tokens, size] if `dims` are, with the group as the
    minor part of the heads; those of size 1 and the group's come last. None if `dims` are something else."""
    if len(dims) != 4 or dims[1][-1:] != group:
        return None
    wanted = dims[0], dims[1][:-1], dims[2], dims[3]
    if any(len(dim) > 1 or (dim and dim not in own) for dim in wanted):
        return None
    first = [own.index(dim) for dim in wanted if dim]
    return *first, *(d for d in range(len(own)) if d not in first)


# ---- the sums of gradients


def summed(call: Call, times: int) -> dict[fx.Node, list[Summed]] | None:
    """The sums over groups of `times` heads that the gradients of keys and values go to, by gradient. None if one goes
    elsewhere, too."""
    found = dict[fx.Node, list[Summed]]()
    for user in call.node.users if backward(call) else ():
        if user.target is operator.getitem and user.args[1] in GRADIENTS.values():
            axes = Axes()
            dims: list[Ids] = [() if size == ONE else (axes.new(size),) for size in g.sizes(user)]
            try:
                heads, group = axes.regroup(dims[1], [fewer(axes.total(dims[1]), times), Size(times)])
                whole: Dims = (dims[0], (*heads, *group), dims[2], dims[3])
                own: Dims = (dims[0], heads, dims[2], dims[3])
                found[user] = [*sums(axes, user, whole, own, group)]
            except Misfit:
                return None
    return found


def chains(sums: Sequence[dict[fx.Node, list[Summed]] | None]) -> Iterator[fx.Node]:
    """The sums, and what is between the gradients and them."""
    for gradient, its in ((gradient, its) for found in sums if found for gradient, its in found.items()):
        for made in its:
            node = made.node
            while node is not gradient:
                yield node
                node = node.all_input_nodes[0]


def fewer(heads: Size, times: int) -> Size:
    """How many groups of so many heads there are."""
    groups = heads.over(Size(times))
    if groups is None:
        raise Misfit("groups of unequal size")
    return groups


def sums(axes: Axes, node: fx.Node, dims: Dims, own: Dims, group: Ids) -> Iterator[Summed]:
    """All that is made of a gradient. Raises Misfit where that is no sum over the group alone."""
    for user in node.users:
        if g.is_view(user):
            yield from sums(axes, user, behind(axes, dims, [user]), own, group)
            continue
        _, summed_over, keep = (*user.args, None, False)[:3]
        if user.target is not aten.sum.dim_IntList or not summed_over:
            raise Misfit("a gradient that is not summed over the heads of a group")
        if user.meta["val"].dtype != node.meta["val"].dtype:
            raise Misfit("a sum in another dtype")
        over: list[int] = [d % len(dims) for d in summed_over]  # type: ignore[union-attr, operator, misc]
        left = [() if d in over else dim for d, dim in enumerate(dims) if keep or d not in over]
        if tuple(i for d in over for i in dims[d]) != group or any(len(dim) > 1 for dim in left):
            raise Misfit("another sum")
        first = [own.index(dim) for dim in left if dim]
        yield Summed(user, (*first, *(d for d in range(len(own)) if d not in first)))


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
