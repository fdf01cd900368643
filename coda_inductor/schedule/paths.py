"""In which order and how far loops read: the paths by which one buffer is read, and the order of a loop's dimensions.

A loop runs over what it writes (a reduction over what it reads) as that lies in memory, and a path begins with how the
buffer lies there: two loops read the same in the same order if their paths are equal, whatever the order of the
dimensions of the values that they work on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.layout import major_to_minor
from coda_inductor.patterns.sizes import assumed

Order = tuple[int, ...]
"""A permutation: the dimension, or the place in memory, that each dimension was before."""
Path = tuple[str | Order, ...]
"""How a buffer is read: the slices and permutations taken of it, outermost first; () is all of it, as it lies."""
Reads = dict[fx.Node, dict[Path, int]]
"""For every buffer that a value is made of, the parts read and their numbers of elements."""


def reordered(node: fx.Node) -> Order | None:
    """The permutation that a view applies to dimensions of more than one element; None if it keeps their order."""
    if g.name_of(node) not in ("permute", "transpose", "t"):
        return None
    source = node.all_input_nodes[0].meta["val"]
    dims, given = list(range(source.dim())), [int(d) for d in tree_leaves(node.args[1:]) if isinstance(d, int)]
    if g.name_of(node) == "permute":
        dims = [d % source.dim() for d in given]
    else:
        i, j = given or (0, 1)
        dims[i], dims[j] = dims[j], dims[i]
    return tuple(dims) if not _in_order(dims, source.shape) else None


def _in_order(dims: Sequence[int], shape: Sequence[Any]) -> bool:
    """Do the dimensions of more than one element keep their order?"""
    long = [d for d in dims if assumed(shape[d]) > 1]
    return long == sorted(long)


def memory_order(value: Tensor) -> Order | None:
    """The order in which a loop over the tensor runs, None if it is its dimensions'."""
    order = major_to_minor(value)
    return None if _in_order(order, value.shape) else tuple(order)


def buffer_order(buffer: fx.Node) -> list[int]:
    """The dimensions of a tensor in memory, major to minor. A reduction that keeps its dimensions writes in the order
    in which it reads, not as its strides say."""
    reduction = g.reduction(buffer)
    return major_to_minor((reduction.source if reduction and reduction.keepdim else buffer).meta["val"])


def whole(buffer: fx.Node) -> Path:
    """The path of all of a tensor in memory, in the order of its dimensions."""
    order = buffer_order(buffer)
    return () if _in_order(order, buffer.meta["val"].shape) else (tuple(map(order.index, range(len(order)))),)


def moved(reads: Reads, order: Order | None) -> Reads:
    """What is read, in another order."""
    if order is None:
        return reads
    return {b: {_permuted(p, order, b): n for p, n in r.items()} for b, r in reads.items()}


def _permuted(path: Path, order: Order, buffer: fx.Node) -> Path:
    """A path read in another order. Two orders of as many dimensions are one, and one that only moves dimensions of a
    single element is none."""
    shape, last = list(buffer.meta["val"].shape), path[-1] if path else ()
    if isinstance(last, tuple) and last and len(last) == len(order):
        path, order = path[:-1], tuple(last[d] for d in order)
        shape = [shape[d] for d in buffer_order(buffer)]
    shape = [1] * (len(order) - len(shape)) + shape  # what is repeated
    own = not path and len(shape) <= len(order)  # after slices or other views these are not the buffer's dimensions
    trivial = _in_order(order, shape) if own else list(order) == sorted(order)
    return path if trivial else (*path, order)


def part_of(node: fx.Node) -> str:
    """Names a slice, so that the same slice taken twice is read once."""
    return f"{node.target}{[a for a in node.args[1:] if not isinstance(a, fx.Node)]}{sorted(node.kwargs)}"


def repeated(buffer: fx.Node, path: Path, part: fx.Node) -> bool:
    """Does the part of features, of which the buffer has one that is repeated for all, read it as a whole?"""
    cut = slices.cut(part) if isinstance(buffer.meta["val"], Tensor) and not path else None
    shape = buffer.meta["val"].shape if cut else ()
    return cut is not None and cut[1] % len(g.sizes(cut[0])) == len(g.sizes(cut[0])) - 1 and shape[-1:] == (1,)


def reduced_dims(node: fx.Node) -> set[int]:
    """The dimensions that a reduction runs over."""
    rank, given = node.all_input_nodes[0].meta["val"].dim(), node.args[1] if len(node.args) > 1 else None
    dims: Any = [given] if isinstance(given, int) else given
    return {int(d) % rank for d in dims} if isinstance(dims, list | tuple) and dims else set(range(rank))


def is_inner(node: fx.Node) -> bool:
    """Does the reduction run over the last dimensions, as the tensor lies in memory?"""
    source, reduced = node.all_input_nodes[0].meta["val"], reduced_dims(node)
    kept = [assumed(source.stride(d)) for d in range(source.dim()) if d not in reduced and assumed(source.shape[d]) > 1]
    inside = [assumed(source.stride(d)) for d in reduced if assumed(source.shape[d]) > 1]
    return not kept or not inside or max(inside) < min(kept)
