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
from coda_inductor.patterns.effects import Memory, effects, is_returned, ordered
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.layout import alike
from coda_inductor.write.kept import copied, is_plain_copy
from coda_inductor.write.writing import Writing

MOST = 8  # parts of one tensor: what a loop writes token by token stays
WRITES = frozenset({aten.slice_scatter.default, aten.select_scatter.default})
READS = frozenset({aten.slice.Tensor, aten.select.int})
Window = tuple[int, range]
"""A dimension, and which of its indices."""


def join_written(graph: fx.Graph) -> tuple[Cast, ...]:
    """Writes tensors that are written in parts as a cat of these, and reads of parts as reads of what was written, in
    place."""
    wholes, others, overwritten = list[fx.Node](), list[fx.Node](), _of_overwritten(graph)
    for node in reversed([n for n in graph.nodes if n.target in WRITES | READS]):
        if node in overwritten or (node.target in READS and is_returned(node)):
            continue
        writing = Writing(graph, node)
        new = _whole(writing, node) if node.target in WRITES else _part(writing, node)
        if new is not None and (alike(new, node) or all(map(_lies_anew, node.users))):
            node.replace_all_uses_with(new)  # a returned whole, too: it has memory of its own before and after
            (wholes if node.target in WRITES else others).append(node)
        elif node.target in WRITES and (copy := _node(node.args[1])) is not (value := _copied(copy)):
            node.replace_input_with(copy, value)  # else each write would read what the writes before it made
            others.append(node)
    if not wholes + others:
        return ()
    before = [n for n in graph.nodes if n.op == "call_function" and not g.is_view(n)]
    graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
    left = set(graph.nodes)
    gone = tuple(n.name for n in before if n not in left)
    first, *rest = wholes or others[:1]
    return Cast.of(first, WHOLE, g.source_line(first), gone), *(Cast.of(n, WHOLE, g.source_line(n)) for n in rest)


def _of_overwritten(graph: fx.Graph) -> set[fx.Node]:
    """The writes and reads of parts that are made of memory which the graph overwrites: they read it when they run."""
    names, memory, found = effects(graph).memory, Memory(graph), set[fx.Node]()
    for node in graph.nodes if names else ():
        passes_on = node.target in {*WRITES, *READS, aten.copy.default}
        if memory.of(node) in names or (passes_on and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _whole(writing: Writing, last: fx.Node) -> fx.Node | None:
    """The cat of the parts that a chain of writes fills a dimension with. None if it leaves any of it as it was, or if
    two parts overlap."""
    if (window := _window(last)) is None:
        return None
    (dim, _), node, writes = window, last, dict[range, fx.Node]()
    missing = last.meta["val"].shape[dim]
    while missing:
        if node.target not in WRITES or (window := _window(node)) is None or window[0] != dim or len(writes) == MOST:
            return None
        if window[1] and window[1] not in writes:  # else it is written once more later
            if any(_meet(window[1], other) for other in writes):
                return None
            missing -= len(window[1])
            writes[window[1]] = node
        node = _node(node.args[0])
    order = sorted(writes, key=lambda w: w.start)
    interleaved = any(w.step != 1 for w in order)  # as even and odd ones
    if len(order) < 2 or (interleaved and any(w.step != len(order) or len(w) != len(order[0]) for w in order)):
        return None
    values = [value for w in order if (value := _value(writing, writes[w])) is not None]
    if len(values) < len(order):
        return None
    if not interleaved:
        return writing.instead(last, aten.cat.default, values, dim)
    apart = [writing.call(last, aten.unsqueeze.default, v, dim + 1) for v in values]
    beside = writing.call(last, aten.cat.default, apart, dim + 1)
    return writing.reshape(beside, list(last.meta["val"].shape), aten.reshape.default)


def _value(writing: Writing, write: fx.Node) -> fx.Node | None:
    """What is written, in the dtype and the size of where it is put: what its own copy converts and repeats is
    converted and repeated. None for what comes from another device, or for complex numbers put among real ones."""
    value, whole = _node(write.args[1]), _node(write.args[0]).meta["val"]
    if value.target is aten.copy.default:
        place, value = value, _copied(copied(value))
        given = value.meta["val"]
        if given.device != whole.device or given.is_complex() != whole.is_complex():
            return None
        if g.sizes(value) != g.sizes(place):
            value = writing.call(write, aten.expand.default, value, list(place.meta["val"].shape))
        if given.dtype != whole.dtype:
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
            return value if g.sizes(value) == g.sizes(part) else None  # an index that is read as a slice has one less
        if put[0] != window[0] or _meet(put[1], window[1]):
            break
        node = _copied(_node(node.args[0]))
    return None if node is source or window is None else writing.instead(part, part.target, node, *part.args[1:])


def _copied(node: fx.Node) -> fx.Node:
    """What a copy gives to a tensor of its dtype, size and device, else the node."""
    while node.target is aten.copy.default and is_plain_copy(node):
        node = copied(node)
    return node


def _meet(a: range, b: range) -> bool:
    """Have they an index in common, perhaps?"""
    if not a or not b or (a.step == b.step and (a.start - b.start) % a.step):
        return False
    return max(a.start, b.start) <= min(a[-1], b[-1])


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


def _lies_anew(user: fx.Node) -> bool:
    """Does the user make a tensor that lies the same, however what it reads lies?"""
    return user.target is aten.clone.default and user.kwargs.get("memory_format") == torch.contiguous_format
