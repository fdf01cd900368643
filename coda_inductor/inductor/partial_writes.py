"""Tensors that the user writes part by part are made as a whole, and read as their parts.

    out = torch.empty_like(x)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos

Rotary embeddings are written so. Traced, each line becomes a `copy` and a `slice_scatter`, which makes the whole tensor
anew. So does the backward: it takes the gradient of each part out of a copy of the whole, and puts zeros in its place.
Here what writes all parts of a dimension is one `cat`. A part that is read is what was put there, or a part of what lay
there before. Nothing is computed: the values are the same to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from coda_inductor.passes.casts import WHOLE, Cast
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Memory, effects, ordered, viewed
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.layout import alike
from coda_inductor.patterns.sizes import size_of
from coda_inductor.write.writing import Writing

MOST = 8  # parts of one tensor: what a loop writes token by token stays
WRITES = frozenset({aten.slice_scatter.default, aten.select_scatter.default})
READS = frozenset({aten.slice.Tensor, aten.select.int})
Window = tuple[int, range]
"""A dimension, and which of its indices."""


def join_written(graph: fx.Graph) -> tuple[Cast, ...]:
    """Writes tensors that are written in parts as a cat of these, and reads of parts as reads of what was written, in
    place."""
    overwritten, memory = effects(graph).memory, Memory(graph)
    changed = dict[fx.Node, set[fx.Node]]()
    for node in reversed([n for n in graph.nodes if n.target in WRITES | READS]):
        chain = g.reached([_node(node.args[0])], _onward) if node.target in READS else g.reached([node], _onward)
        if len(chain) < 2 or any(memory.of(n) in overwritten for n in chain):
            continue
        if node.target in READS and _is_returned(node):
            continue
        writing = Writing(graph, node)
        new = _whole(writing, node) if node.target in WRITES else _part(writing, node)
        if new is not None and (alike(new, node) or all(map(_lies_anew, node.users))):
            node.replace_all_uses_with(new)
            changed[node] = {n for n in chain | {node} if not g.is_view(n)}
    graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
    left = set(graph.nodes)
    gone = {node: tuple(n.name for n in chain - left) for node, chain in changed.items()}
    return tuple(Cast.of(node, WHOLE, g.source_line(node), names) for node, names in gone.items() if names)


def _whole(writing: Writing, last: fx.Node) -> fx.Node | None:
    """The cat of the parts that a chain of writes fills a dimension with; None if it leaves any of it as it was."""
    if (window := _window(last)) is None:
        return None
    (dim, _), node, writes = window, last, dict[range, fx.Node]()
    missing = set(range(last.meta["val"].shape[dim]))
    while missing:
        if node.target not in WRITES or (window := _window(node)) is None or window[0] != dim or len(writes) == MOST:
            return None
        if not missing.issuperset(window[1]):
            return None
        missing -= set(window[1])
        writes[window[1]] = node
        node = _node(node.args[0])
    order = sorted(writes, key=lambda w: w.start)
    pairs = any(w.step != 1 for w in order)  # as even and odd ones
    if len(order) < 2 or (pairs and any(w.step != len(order) or len(w) != len(order[0]) for w in order)):
        return None
    values = [_value(writing, writes[w]) for w in order]
    if not pairs:
        return writing.instead(last, aten.cat.default, values, dim)
    beside = writing.call(
        last, aten.cat.default, [writing.call(last, aten.unsqueeze.default, v, dim + 1) for v in values], dim + 1
    )
    return writing.reshape(beside, list(last.meta["val"].shape), aten.reshape.default)


def _value(writing: Writing, write: fx.Node) -> fx.Node:
    """What is written, in the dtype and the size of where it is put."""
    value, whole = _node(write.args[1]), _node(write.args[0]).meta["val"]
    shape = list(value.meta["val"].shape)
    while value.target is aten.copy.default:
        value = _node(value.args[1])
    if [*map(size_of, value.meta["val"].shape)] != [*map(size_of, shape)]:
        value = writing.call(write, aten.expand.default, value, shape)
    if value.meta["val"].dtype != whole.dtype:
        value = writing.call(write, prims.convert_element_type.default, value, whole.dtype)
    if write.target is aten.select_scatter.default:
        value = writing.call(write, aten.unsqueeze.default, value, write.args[2])
    return value


def _part(writing: Writing, part: fx.Node) -> fx.Node | None:
    """What is read of a tensor written in parts: one of them, or a part of what was there before."""
    source, window = _node(part.args[0]), _window(part)
    node = _copied(source)
    while window is not None and node.target in WRITES and (put := _window(node)) is not None:
        if put == window:
            value = _copied(_node(node.args[1]))
            return value if _same(value, part) else None
        if put[0] != window[0] or set(put[1]) & set(window[1]):
            break
        node = _copied(_node(node.args[0]))
    return None if node is source or window is None else writing.instead(part, part.target, node, *part.args[1:])


def _onward(node: fx.Node) -> list[fx.Node]:
    """What a chain of writes is made of."""
    return node.all_input_nodes if node.target in WRITES or node.target is aten.copy.default else []


def _copied(node: fx.Node) -> fx.Node:
    """What a copy gives to a tensor of its dtype and size, else the node."""
    while node.target is aten.copy.default and _same(node, _node(node.args[1])):
        node = _node(node.args[1])
    return node


def _same(a: fx.Node, b: fx.Node) -> bool:
    """Are two tensors of one dtype and size?"""
    mine, theirs = a.meta["val"], b.meta["val"]
    return bool(mine.dtype == theirs.dtype and [*map(size_of, mine.shape)] == [*map(size_of, theirs.shape)])


def _window(node: fx.Node) -> Window | None:
    """What a part is read of, or written to; None where a size is a symbol."""
    args: list[Any] = [*node.args[2 if node.target in WRITES else 1 :]]
    extent = _node(node.args[0]).meta["val"].shape
    dim = (args[0] if args else 0) % len(extent)
    if not all(isinstance(n, int) for n in (extent[dim], *args) if n is not None):
        return None
    if node.target in (aten.select.int, aten.select_scatter.default):
        return dim, range(extent[dim])[args[1] :][:1]
    start, end, step = (args[1:] + [None, None, 1][len(args[1:]) :])[:3]
    return dim, range(extent[dim])[start:end:step]


def _node(arg: object) -> fx.Node:
    assert isinstance(arg, fx.Node)
    return arg


def _is_returned(node: fx.Node) -> bool:
    """Does the graph return it or a view of it, in whose memory the caller may look for others?"""
    return any(user.op == "output" or (viewed(user) is not None and _is_returned(user)) for user in node.users)


def _lies_anew(user: fx.Node) -> bool:
    """Does the user make a tensor that lies the same, however what it reads lies?"""
    return user.target is aten.clone.default and user.kwargs.get("memory_format") == torch.contiguous_format
