"""How the tensors of a graph lie in memory: whoever asks reads no strides but here.

Strides are compared as expressions (sizes.py), so that no symbol is asked anything. Only `major_to_minor`
and `is_strided`, which foresee Inductor's loops, go by the sizes that torch traced with.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from coda_inductor.patterns.graph import aten, sizes, tensor
from coda_inductor.patterns.sizes import ONE, Size, assumed, size_of

Strides = tuple[Size | None, ...]
"""The stride of each dimension; None for one of a single element, whose stride says nothing."""

TRANSPOSES = frozenset({aten.permute.default, aten.t.default, aten.transpose.int})
"""What may turn a matrix into its transpose, without a copy."""


ALIGNED = 16
"""Bytes."""


def strides(value: Tensor) -> Strides:
    """The tensor's strides."""
    return tuple(None if size_of(n) == ONE else size_of(s) for s, n in zip(value.stride(), value.shape, strict=True))


def alike(a: fx.Node, b: fx.Node) -> bool:
    """Do two tensors of one shape lie alike?"""
    return strides(a.meta["val"]) == strides(b.meta["val"])


def dense(node: fx.Node, order: Sequence[int] | None = None) -> bool:
    """Does the node's tensor lie in the order of its dimensions, or in this one, without gaps?"""
    value = tensor(node)
    assert value is not None
    return without_gaps(value, range(value.dim()) if order is None else order)


def without_gaps(value: Tensor, order: Sequence[int]) -> bool:
    """Does the tensor lie in this order of its dimensions without gaps?"""
    shape, found, expected = [*map(size_of, value.shape)], strides(value), ONE
    for d in reversed(order):
        if found[d] is not None:
            if found[d] != expected:
                return False
            expected = expected * shape[d]
    return True


def in_steps(value: Tensor, along: int = -1) -> bool:
    """Do its rows along a dimension begin in steps of 16 bytes, as kernels read them?"""
    step, apart = size_of(max(ALIGNED // value.element_size(), 1)), list(strides(value))
    del apart[along]
    return all(n is None or n.over(step) is not None for n in (*apart, size_of(value.storage_offset())))


def side_by_side(value: Tensor, along: int) -> bool:
    """Do the numbers of rows along a dimension lie side by side, each row in a place of its own, and do rows begin in
    steps of 16 bytes, as kernels read them? A copy's do."""
    found = strides(value)
    apart = all(n is None or n.coefficient != 0 for n in found)
    return apart and found[along] == ONE and in_steps(value, along)


def in_rows(node: fx.Node, width: Size) -> bool:
    """Is the node's tensor rows of `width` elements, those of a row side by side, and rows evenly apart by multiples of
    8? Of a part of a dense matrix's columns they are."""
    value = tensor(node)
    assert value is not None
    found, inside, expected = strides(value), ONE, ONE
    for stride, size in zip(reversed(found), reversed(sizes(node)), strict=True):
        if stride is None:
            continue
        if inside == width and expected == ONE * width and stride.over(Size(8)) is not None:
            expected = stride  # from one row to the next
        if stride != expected:
            return False
        inside, expected = inside * size, expected * size
    return True


def major_to_minor(value: Tensor) -> list[int]:
    """The tensor's dimensions, the one with the longest stride first."""
    return sorted(range(value.dim()), key=lambda d: -assumed(value.stride(d)))


def contiguous_rows(node: fx.Node) -> fx.Node | None:
    """The matrix in which the elements of a row are neighbours: the node itself, or what it is the transpose of; None
    if neither is."""
    value = tensor(node)
    if value is None or value.dim() != 2:
        return None
    if size_of(value.stride(1)) == ONE:
        return node
    source = node.args[0] if node.target in TRANSPOSES else None
    under = tensor(source)
    if not isinstance(source, fx.Node) or under is None or size_of(value.stride(0)) != ONE:
        return None
    is_turned = [*map(size_of, under.stride())] == [*map(size_of, reversed(value.stride()))]  # no permute(0, 1)
    return source if is_turned else None


def is_strided(node: fx.Node) -> bool:
    """Is it a tensor of at least two dimensions, in none of which neighbours are adjacent in memory?"""
    value = tensor(node)
    return value is not None and value.dim() > 1 and all(assumed(s) != 1 for s in value.stride())
