"""What is computed of a part of each head is computed of all parts, and chosen.

    q = cat([rotated(q[..., :64]), q[..., 64:]], -1)                 # a rotary embedding of a part of each head of 128
    q = where(first, rotated(q.view(..., 2, 64)), q.view(..., 2, 64)).flatten(-2)

An epilogue makes the second: each part is a head of its own, all of which read the same tables, and `first` is a vector
over all features. It holds where the part's length divides the head's and its start, and for whatever is computed of
each head alone. No number differs: the other parts are computed too, and not chosen.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from coda_inductor.ops.custom import STORED
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import ordered
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.sizes import ONE, size_of
from coda_inductor.patterns.slices import SPLITS, cut
from coda_inductor.write.strides import OutputStrides
from coda_inductor.write.writing import Writing

RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
DIMENSION: dict[object, tuple[int, int]] = {
    aten.slice.Tensor: (1, 0), aten.select.int: (1, 0), aten.unsqueeze.default: (1, 0), aten.cat.default: (1, 0),
    aten.split.Tensor: (2, 0), aten.split_with_sizes.default: (2, 0), aten.unbind.int: (1, 0),
}  # fmt: skip
"""Operations along one dimension: which argument it is, and what it is if that is not given."""


@dataclass(frozen=True, slots=True)
class Partial:
    """`whole` [.., heads, .., width] holds `value` in the features that `part` [.., heads, .., length] is of `source`,
    from `start` on, and is source in all others. The value is computed of the part, by `steps` in the graph's order.
    `at` is the dimension of the heads."""

    whole: fx.Node
    source: fx.Node
    part: fx.Node
    value: fx.Node
    start: int
    length: int
    width: int
    heads: int
    at: int
    steps: tuple[fx.Node, ...]

    @property
    def count(self) -> int:
        """Of how many parts a head is."""
        return self.width // self.length


def compute_all_parts(graph: fx.Graph, halves: Collection[int] = ()) -> int:
    """Rewrites the graph in place. Returns how often. `halves`: what half of a part is, if anything is named."""
    cats = graph.find_nodes(op="call_function", target=aten.cat.default)
    cats = [node for node in cats if partial_of(node) is not None]
    if not cats:
        return 0
    layouts, count, vectors = OutputStrides(graph), 0, dict[tuple[Any, ...], fx.Node]()
    fixed = layouts.fixed()
    for node in cats:
        partial, writing = partial_of(node), Writing(graph, node)  # one within another is none once that is rewritten
        if partial is None or node in fixed or not writing.can_reshape(node.meta["val"].shape):
            continue
        if not halves or partial.length in {2 * half for half in halves}:
            _Written(writing, partial, vectors).write()
            count += 1
    layouts.restore(Writing(graph, graph.output_node()).call)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
    return count


def partial_of(whole: fx.Node) -> Partial | None:
    """What a `cat` over the features is, if it puts one computed part of each head beside the others as they were."""
    pieces: Any = whole.args[0]
    kind, last = (whole.meta["val"].dtype, whole.meta["val"].dim()), len(g.sizes(whole)) - 1
    alike = all((n.meta["val"].dtype, n.meta["val"].dim()) == kind for n in pieces)  # a `cat` widens, and drops (0,)
    if g.is_backward(whole) or along(whole) != last or not alike or not g.floating(whole):
        return None
    places, start = list[tuple[int, int]](), 0
    for piece in pieces:
        if (length := g.sizes(piece)[last].static) is None:
            return None
        places.append((start, length))
        start += length
    found = [features(piece) for piece in pieces]
    for source in dict.fromkeys(f[0] for f in found if f is not None and g.sizes(f[0]) == g.sizes(whole)):
        others = [i for i, place in enumerate(places) if found[i] != (source, *place)]
        if len(others) == 1:
            return computed(whole, source, pieces[others[0]], places[others[0]][0])
    return None


def features(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """(source, start, length) of some features that lie beside each other in the last dimension of a source."""
    if (found := cut(node)) is None:
        return None
    source, dim, start, length = found
    rank = len(g.sizes(source))
    behind = dim % rank == rank - 1 and len(g.sizes(node)) == rank  # and no feature that is selected
    return (source, start, length) if behind and isinstance(length, int) else None


def computed(whole: fx.Node, source: fx.Node, value: fx.Node, start: int) -> Partial | None:
    """A part that is computed of the same features of the source, of each head alone."""
    length, width = g.sizes(value)[-1].static, g.sizes(source)[-1].static
    if not length or not width or width % length or start % length or (at := heads(source)) is None:
        return None
    parts, steps, todo, of_source = set[fx.Node](), set[fx.Node](), [value], g.reached([source], lambda n: n.users)
    while todo:
        n = todo.pop()
        if n in of_source and features(n) == (source, start, length):
            parts.add(n)
        elif n in of_source and n not in steps:
            steps.add(n)
            todo += n.all_input_nodes
    mine, count = steps | parts, g.sizes(source)[at].static
    if len(parts) != 1 or not steps or source in steps or count is None:
        return None
    if not all(of_each_head(n, source, at, mine) for n in steps):
        return None
    in_order = tuple(n for n in whole.graph.nodes if n in steps)
    return Partial(whole, source, parts.pop(), value, start, length, width, count, at, in_order)


def heads(source: fx.Node) -> int | None:
    """The dimension of the heads, which lie one behind the other and are all columns of what source is a view of."""
    strides, sizes = [size_of(n) for n in source.meta["val"].stride()], g.sizes(source)
    columns = g.sizes(g.root(source, g.is_view))[-1]
    if strides[-1] != ONE:
        return None
    fitting = (d for d, n in enumerate(sizes[:-1]) if strides[d] == sizes[-1] and n * sizes[-1] == columns)
    return next(fitting, None)


def along(node: fx.Node) -> int | None:
    """The dimension along which an operation is one, of its result or of what it splits."""
    place, otherwise = DIMENSION[node.target]
    dim = node.args[place] if len(node.args) > place else otherwise
    of = node if node.target in (aten.cat.default, aten.unsqueeze.default) else node.all_input_nodes[0]
    return dim % len(g.sizes(of)) if isinstance(dim, int) and not node.kwargs else None


def of_each_head(node: fx.Node, source: fx.Node, at: int, mine: Collection[fx.Node]) -> bool:
    """Is the node computed of each head alone, all heads alike, so that it may be computed of more of them?"""
    lead = g.sizes(source)[:-1]
    if node.target is operator.getitem or node.target in SPLITS:
        return node.target is operator.getitem or (along(node) or 0) >= len(lead)
    if g.tensor(node) is None or g.sizes(node)[: len(lead)] != lead or len(g.sizes(node)) == len(lead):
        return False
    if node.target in RESHAPES:
        return True
    if node.target in DIMENSION:
        return (along(node) or 0) >= len(lead) and set(node.all_input_nodes) <= set(mine)
    if not (g.is_pointwise(node) or g.is_cast(node)):
        return False
    if any(len(g.sizes(n)) != len(g.sizes(node)) for n in node.all_input_nodes if n in mine):
        return False  # its heads would stand at another place beside what has more dimensions
    behind = len(g.sizes(node)) - at
    others = (g.sizes(n) for n in node.all_input_nodes if n not in mine and g.tensor(n) is not None)
    return all(len(sizes) < behind or sizes[-behind] == ONE for sizes in others)


@dataclass(slots=True)
class _Written:
    """One rewriting. `vectors`: those that choose, by what they choose; for all that is rewritten."""

    writing: Writing
    partial: Partial
    vectors: dict[tuple[Any, ...], fx.Node]
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def write(self) -> None:
        """Puts what is chosen among all parts in the place of the whole."""
        p = self.partial
        parts = self.made[p.part] = self.apart(p.source)
        for node in p.steps:
            self.made[node] = self.of_all(node)
        self.writing.anchor = p.whole
        first = self.writing.call(p.whole, aten.gt.Scalar, self.vector(parts.meta["val"]), 0)
        out = self.writing.instead(p.whole, aten.where.self, first, self.made[p.value], parts)
        p.whole.replace_all_uses_with(self.together(out))

    def of_all(self, node: fx.Node) -> fx.Node:
        """The same of all parts, where the node stands: what it reads may be overwritten behind."""
        p = self.partial
        args: Any = fx.map_arg(node.args, lambda n: self.made.get(n, n))
        if node.target in RESHAPES:
            sizes = [*args[1]]
            sizes[p.at] = p.heads * p.count
            args = args[0], sizes
        self.writing.anchor = node
        return self.writing.instead(node, node.target, *args, **node.kwargs)

    def vector(self, parts: torch.Tensor) -> fx.Node:
        """One number for each feature, 1 in the part that is computed and 0 elsewhere, as wide as `parts`."""
        p = self.partial
        key = p.heads, p.width, p.start, p.length, parts.dtype, parts.device
        if key not in self.vectors:
            self.vectors[key] = self.chosen(parts)
        shape = [1] * parts.dim()
        shape[p.at], shape[-1] = p.heads * p.count, p.length
        return self.writing.reshape(self.vectors[key], shape)

    def chosen(self, parts: torch.Tensor) -> fx.Node:
        """The vector [features] in memory, where all that follows can read it."""
        p, graph = self.partial, self.writing.graph
        new = Writing(graph, next(n for n in graph.nodes if n.op != "placeholder")).call
        of: dict[str, Any] = {"start": 0, "step": 1, "dtype": torch.int64, "device": parts.device}
        place = new(p.whole, prims.iota.default, p.heads * p.width, **of, requires_grad=False)
        place = new(p.whole, aten.remainder.Scalar, place, p.width)
        begun = new(p.whole, aten.ge.Scalar, place, p.start)
        not_over = new(p.whole, aten.lt.Scalar, place, p.start + p.length)
        inside = new(p.whole, aten.bitwise_and.Tensor, begun, not_over)
        return new(p.whole, STORED, new(p.whole, prims.convert_element_type.default, inside, parts.dtype))

    def apart(self, whole: fx.Node) -> fx.Node:
        """[.., heads, .., width] as [.., heads * count, .., length], where the part is cut out."""
        p, shape = self.partial, [*whole.meta["val"].shape]
        self.writing.anchor = p.part
        split = self.writing.reshape(whole, [*shape[:-1], p.count, p.length])
        order = moved(len(shape) + 1, len(shape) - 1, p.at + 1)
        turned = self.writing.call(p.whole, aten.permute.default, split, order)
        return self.writing.reshape(turned, [*shape[: p.at], p.heads * p.count, *shape[p.at + 1 : -1], p.length])

    def together(self, parts: fx.Node) -> fx.Node:
        """The reverse."""
        p, shape = self.partial, [*self.partial.source.meta["val"].shape]
        apart = [*shape[: p.at], p.heads, p.count, *shape[p.at + 1 : -1], p.length]
        split = self.writing.reshape(parts, apart, aten.reshape.default)
        order = moved(len(shape) + 1, p.at + 1, len(shape) - 1)
        turned = self.writing.call(p.whole, aten.permute.default, split, order)
        return self.writing.reshape(turned, shape, aten.reshape.default)


def moved(rank: int, source: int, to: int) -> list[int]:
    """The order of dimensions in which one of them stands at another place."""
    order = [i for i in range(rank) if i != source]
    order.insert(to, source)
    return order
