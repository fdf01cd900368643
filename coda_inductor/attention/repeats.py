"""Keys and values that are repeated for several query heads, and the sums of their gradients over these: how the graph
says it.

Whichever way a model repeats them, an `expand` does it, and views lead from there to attention. The axes of these views
(patterns/axes.py) say whether every head is repeated several times in succession, and the sums likewise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from coda_inductor.attention.calls import Call
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.axes import Axes, Ids, Misfit
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import TRANSPOSES, side_by_side
from coda_inductor.patterns.sizes import ONE, Size

GRADIENTS = {"key": 1, "value": 2}
"""Which result of the backward is whose gradient."""

Dims = tuple[Ids, ...]
"""The axes of every dimension of a tensor, major to minor."""


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
    if order is None or times.powers:
        return None
    rows = [d for d in order if own[d] and d != dim]
    if not rows or not side_by_side(node.args[0].meta["val"], rows[-1]):  # type: ignore[union-attr]
        return None
    return Repeated(node, tuple(way), order, times.coefficient)


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
    for user in call.node.users if call.is_backward else ():
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
        over, left = summed_over(user, dims, node)
        if tuple(i for d in over for i in dims[d]) != group or any(len(dim) > 1 for dim in left):
            raise Misfit("another sum")
        first = [own.index(dim) for dim in left if dim]
        yield Summed(user, (*first, *(d for d in range(len(own)) if d not in first)))


def summed_over(user: fx.Node, dims: Dims, of: fx.Node) -> tuple[list[int], Dims]:
    """The dimensions that a sum of a tensor goes over, and the axes of its own. Raises Misfit where the user is no sum,
    or one in another dtype."""
    if user.target is not aten.sum.dim_IntList or not user.args[1]:
        raise Misfit("a gradient that is not summed")
    if user.meta["val"].dtype != of.meta["val"].dtype:
        raise Misfit("a sum in another dtype")
    over: list[int] = [d % len(dims) for d in user.args[1]]  # type: ignore[union-attr, operator, misc]
    keep = user.args[2] if len(user.args) > 2 else user.kwargs.get("keepdim", False)
    return over, tuple(() if d in over else dim for d, dim in enumerate(dims) if keep or d not in over)
