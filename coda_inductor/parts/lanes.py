"""Loops over heads that are read in equal parts, as a rotary embedding reads halves, go over these parts.

    mean = (dy * y).sum(-1, keepdim=True) / 128     # the gradient of a norm of each head of 128 features
    dx = (dy - y * mean) * r
    a, b = dx[..., :64], dx[..., 64:]               # and of the rotary embedding before it
    dq = cat([a * cos - b * sin, b * cos + a * sin], -1)

For dq Inductor's loop goes over 64 features, and makes both halves. For the sum it goes over 128. So these are two
loops, and both read dy and y. As z.sum(-1) = (z[..., :64] + z[..., 64:]).sum(-1), one loop does all. (H200, a GPT as
nanochat trains it, 20 layers: 193.8 ms a step for 195.4, bench/results/sweeps.jsonl.)

A part that is sliced off has a gradient that is 0 elsewhere. Two of them are added up, in a pass of its own behind the
loop that makes them:

    zeros.slice_scatter(a, -1, 0, 64) + zeros.slice_scatter(b, -1, 64, 128) = cat([a, b], -1)

The parts of a `cat` are written where they belong. Where a loop reads the sum, the zeros are no pass of their own, and
stay. (The left side makes 0 of -0, so that `numerics="strict"` keeps it.)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from coda_inductor.passes.casts import BESIDE, BY_PARTS, Cast
from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.effects import ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import alike
from coda_inductor.write.writing import Writing

WIDEST = 256
"""Features of a head. Longer rows are summed as they are: Inductor holds them in registers, or goes over them twice."""
MOST = 4
"""Parts of a head. Each is a load of its own."""


def loop_by_parts(graph: fx.Graph, *, exact: bool) -> tuple[Cast, ...]:
    """Rewrites sums over heads and, unless `exact`, sums of gradients of parts, in place."""
    return sum_by_parts(graph) + (() if exact else join_gradients(graph))


def sum_by_parts(graph: fx.Graph) -> tuple[Cast, ...]:
    """Writes sums over heads as sums over their parts, in place, where all that is made of a sum is read in these."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        if (width := _width(node)) and (cuts := _read_in(node, width)):
            whole, writing = node.all_input_nodes[0], Writing(graph, node)
            first, *others = (writing.call(node, aten.slice.Tensor, whole, *cut) for cut in cuts)
            for other in others:
                first = writing.call(node, aten.add.Tensor, first, other)
            node.replace_input_with(whole, first)
            found.append(Cast.of(node, BY_PARTS, g.source_line(node)))
    return tuple(found)


def _width(node: fx.Node) -> int:
    """Of the heads, if the node is a sum over the last dimension alone, of numbers of 32 bits or more; else 0."""
    whole, dims = node.all_input_nodes[0], node.args[1]
    if not (rank := len(g.sizes(whole))):
        return 0
    width = g.sizes(whole)[-1].static or 0
    over = isinstance(dims, list | tuple) and [d % rank for d in dims if isinstance(d, int)] == [rank - 1]
    wide = g.floating(whole) and whole.meta["val"].dtype.itemsize >= 4
    kept = len(g.sizes(node)) == rank and not node.kwargs
    return width if over and wide and kept and width <= WIDEST else 0


def _read_in(node: fx.Node, width: int) -> list[tuple[Any, ...]]:
    """The slices that all that is made of a sum is read in: what is said of each part behind the tensor. None of them
    if some of it is read as a whole, in parts of two kinds, or in some of the parts."""
    found, todo, seen = dict[tuple[int, bool], dict[int, tuple[Any, ...]]](), [node], {node}
    while todo:
        for user in [u for u in todo.pop().users if u not in seen]:
            seen.add(user)
            if (part := slices.lane(user)) is not None and part[1] == len(g.sizes(part[0])) - 1:
                _, dim, count, index = part
                of_split = dim, index * (width // count), (index + 1) * (width // count)
                cut = (dim, *user.args[2:]) if user.target is aten.slice.Tensor else of_split
                found.setdefault((count, slices.step(user) > 1), {})[index] = cut
            elif user.target in slices.SPLITS or (_is_plain(user) and _last(user) in (1, width)):
                todo.append(user)
            else:
                return []
    if len(found) != 1:
        return []
    (((count, _), cuts),) = found.items()
    dim = len(g.sizes(node)) - 1
    return [(dim, *cuts[i][1:]) for i in range(count)] if len(cuts) == count <= MOST else []


def _last(node: fx.Node) -> int | None:
    return g.sizes(node)[-1].static if g.sizes(node) else None


def _is_plain(node: fx.Node) -> bool:
    return g.is_pointwise(node) or g.is_cast(node) or g.is_view(node)


def join_gradients(graph: fx.Graph) -> tuple[Cast, ...]:
    """Writes gradients of parts that are added up and then read as a whole as a cat, in place."""
    found = list[tuple[fx.Node, tuple[str, ...]]]()
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if any(g.is_pointwise(user) or g.is_cast(user) for user in node.users) or not node.users:
            continue  # it is no pass of its own
        if (parts := _parts(node)) is None:
            continue
        dim, values, spared = parts
        new = Writing(graph, node).instead(node, aten.cat.default, values, dim)
        if alike(new, node):
            node.replace_all_uses_with(new)
            found.append((new, spared))
    if found:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
    left = {n.name for n in graph.nodes}
    gone = [tuple(name for name in spared if name not in left) for _, spared in found]
    return tuple(Cast.of(n, BESIDE, g.source_line(n), names) for (n, _), names in zip(found, gone, strict=True))


def _parts(node: fx.Node) -> tuple[int, list[fx.Node], tuple[str, ...]] | None:
    """The dimension and the parts of a sum of tensors each of which is 0 but for one part, and the operations that pad
    and add them. None if they are not all parts of a whole, each once, in its dtype and shape."""
    names, values, todo = list[str](), dict[int, fx.Node](), [node]
    places, dtypes = set[tuple[int, int]](), {node.meta["val"].dtype}
    while todo:  # until the first that fits nothing: what is added to itself again and again has very many addends
        n = todo.pop()
        names.append(n.name)
        if n.target is aten.add.Tensor and not n.kwargs and all(isinstance(a, fx.Node) for a in n.args):
            todo += n.args  # type: ignore[arg-type]  # twice, if it is added to itself
            continue
        if (padded := slices.scattered(n)) is None or g.sizes(n) != g.sizes(node):
            return None
        value, dim, count, index = padded
        places.add((dim, count))
        dtypes |= {value.meta["val"].dtype, n.meta["val"].dtype}
        if index in values or len(places) > 1 or len(dtypes) > 1:
            return None
        values[index] = value
    return (dim, [values[i] for i in range(count)], tuple(names)) if len(values) == count else None
