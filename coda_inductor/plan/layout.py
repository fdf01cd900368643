"""How tensors lie in memory, as axes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.lift import Lifted
from coda_inductor.patterns.sizes import ONE, size_of

Ids = tuple[int, ...]


def in_order(node: fx.Node) -> list[int]:
    """The node's dimensions as they lie in memory, major to minor; those of one element come first. Raises Unsupported
    if there are gaps between them."""
    value, sizes = g.tensor(node), g.sizes(node)
    assert value is not None
    order, expected, left = list[int](), ONE, [d for d, size in enumerate(sizes) if size != ONE]
    while left:
        following = [d for d in left if size_of(value.stride(d)) == expected]
        if len(following) != 1:
            raise Unsupported(f"{node} does not lie in memory without gaps")
        order[:0] = following
        left.remove(following[0])
        expected *= sizes[following[0]]
    return [d for d, size in enumerate(sizes) if size == ONE] + order


def lies(lifted: Lifted, node: fx.Node) -> Ids:
    """The axes of more than one element of a node's dimensions, in this order."""
    dims = lifted.reading.roots(node)
    return long_axes(lifted, (i for d in in_order(node) for i in dims[d]))


def long_axes(lifted: Lifted, axes: Iterable[int]) -> Ids:
    """Those of more than one element."""
    return tuple(i for i in axes if lifted.reading.axes.size[i] != ONE)
