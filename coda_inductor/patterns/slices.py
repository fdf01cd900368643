"""Parts of a dimension: slices, selects and splits, the axes that they make, and the gradients of such parts."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from coda_inductor.patterns import graph as g

aten = torch.ops.aten

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)


def lane(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """(input, dimension, lanes, index) if the node is one of a few equal parts of a dimension of its input: of blocks
    that lie one behind the other or, of a slice with a step, of every n-th."""
    if step(node) > 1:
        return _comb(node)
    if (found := cut(node)) is None:
        return None
    source, dim, start, length = found
    value = g.tensor(source)
    if value is None or not isinstance(whole := value.shape[dim], int) or not isinstance(length, int):
        return None
    if length == 0 or length == whole or whole % length or start % length:
        return None
    return source, dim % value.dim(), whole // length, start // length


def _comb(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """What `lane` says of a slice with a step, if each of its values has as many behind it that are left out."""
    a: tuple[Any, ...] = node.args
    source, dim, start, stop, every = a[:5]
    value = g.tensor(source)
    if value is None or not isinstance(extent := value.shape[dim], int) or not isinstance(stop, int):
        return None
    start = 0 if start is None else start
    whole = isinstance(start, int) and 0 <= start < every and extent % every == 0 and stop >= extent
    return (source, dim % value.dim(), every, start) if whole else None


def step(node: fx.Node) -> int:
    """The step of a slice; of other nodes 1."""
    given = node.args[4] if node.target is aten.slice.Tensor and len(node.args) > 4 else 1
    return given if isinstance(given, int) else 1


def cut(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """(input, dimension, start, length) of a slice, a select or an item of a split."""
    a: tuple[Any, ...] = node.args
    if node.target is aten.slice.Tensor and len(a) < 5:
        source, dim = a[0], a[1] if len(a) > 1 else 0
        start = a[2] if len(a) > 2 and a[2] is not None else 0
        value = g.tensor(node)
        assert isinstance(source, fx.Node) and value is not None
        extent = g.tensor(source).shape[dim]  # type: ignore[union-attr]
        if not isinstance(start, int) or not isinstance(extent, int):
            return None
        return source, dim, min(max(start + extent if start < 0 else start, 0), extent), value.shape[dim]
    if node.target is aten.select.int and isinstance(a[2], int):
        extent = g.tensor(a[0]).shape[a[1]]  # type: ignore[union-attr]
        return (a[0], a[1], a[2] % extent, 1) if isinstance(extent, int) else None
    if node.target is operator.getitem and isinstance(a[0], fx.Node) and a[0].target in SPLITS:
        split, of = a[0], cast(tuple[Any, ...], a[0].args)
        if split.target is aten.unbind.int:
            return of[0], of[1] if len(of) > 1 else 0, a[1], 1
        dim = of[2] if len(of) > 2 else 0
        parts = [t.shape[dim] for t in split.meta["val"]]
        return of[0], dim, sum(parts[: a[1]]), parts[a[1]]
    return None


def scattered(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """(input, dimension, lanes, index) if the node is zero but for one of a few equal parts of a dimension, which is
    its input: the gradient of a part."""
    a: tuple[Any, ...] = node.args
    if node.target is not aten.slice_scatter.default or len(a) > 5:
        return None
    base, source = a[:2]
    dim, start = a[2] if len(a) > 2 else 0, a[3] if len(a) > 3 else None
    zero = isinstance(base, fx.Node) and base.target is aten.full.default and base.args[1] == 0
    if not zero or not isinstance(source, fx.Node) or not isinstance(start, int | None):
        return None
    whole, length = (t.shape[dim] for t in (node.meta["val"], source.meta["val"]))
    if not isinstance(whole, int) or not isinstance(length, int) or not 0 < length < whole:
        return None
    first = (start or 0) % whole
    rank = len(g.sizes(source))
    return None if whole % length or first % length else (source, dim % rank, whole // length, first // length)
