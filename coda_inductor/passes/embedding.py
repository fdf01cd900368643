"""The gradient of an embedding, in the rows that occur.

AOTAutograd adds the gradients of all tokens up in float32 zeros as large as the embedding, and casts these: three
passes over a tensor of which few rows are read. Here the tokens of one row are added up in a float32 tensor as large as
the tokens' gradients, at the place of one of them, and only rows that occur are written: to zeros of the embedding's
dtype or, where the embedding is also the head, to the head's gradient, that the cast was added to. The same numbers are
added in float32, and rounded as before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.layout import dense
from coda_inductor.write.writing import Writing

LARGE, RARE = 1 << 24, 4
"""Smaller embeddings are left as they are, and those that have not so many times as many rows as there are tokens:
estimates of where the launches, and what is written for each token, cost what is spared."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Rows `values` [tokens, features] added up by `index` [tokens] in zeros, those that `mask` leaves out apart (None:
    all count), and what only rounds that sum: `cast`."""

    total: fx.Node
    index: fx.Node
    values: fx.Node
    mask: fx.Node | None
    cast: fx.Node

    @property
    def rows(self) -> int:
        """Of the embedding."""
        return int(self.cast.meta["val"].shape[0])


def write_rows(graph: fx.Graph) -> int:
    """Rewrites the gradients of embeddings, in place. Returns how many."""
    joint = g.is_joint(graph)  # of which each side may compute a node once more, in another order
    nodes = [node for node in graph.nodes if not joint or g.is_backward(node)]
    found = [made for node in nodes if (made := _gradient(node)) is not None]
    for gradient in found:
        _write(graph, gradient)
    if found:
        graph.eliminate_dead_code()
    return len(found)


def _gradient(node: fx.Node) -> Gradient | None:
    """What the node adds up, if it is a large embedding's gradient that is only rounded."""
    if (found := _added_up(node)) is None:
        return None
    zeros, index, values, mask = found
    total, tokens, rows, users = g.tensor(node), g.tensor(values), g.tensor(index), list(node.users)
    if total is None or tokens is None or total.dim() != 2 or len(users) != 1 or not g.is_cast(users[0]):
        return None
    if rows is None or rows.dtype not in (torch.int64, torch.int32) or rows.shape != tokens.shape[:-1]:
        return None  # a mask, or values that are broadcast
    if mask is not None and g.tensor(mask).numel() != rows.numel():  # type: ignore[union-attr]
        return None
    static = all(isinstance(size, int) for size in (*total.shape, *tokens.shape))
    blank = zeros.target is aten.full.default and zeros.args[1] == 0
    if not static or not blank or not g.only_rounded(node) or tokens.shape[-1] != total.shape[1]:
        return None
    rare = total.shape[0] >= RARE * math.prod(tokens.shape[:-1])
    return Gradient(node, index, values, mask, users[0]) if rare and total.numel() >= LARGE else None


def _added_up(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node | None] | None:
    """(what is added to, the one index, the values, the mask) of a node that adds values up by an index of its rows."""
    args: tuple[Any, ...] = node.args
    if node.target is aten._unsafe_masked_index_put_accumulate.default:
        into, mask, indices, values = args
    elif node.target is aten.index_put.default and len(args) > 3 and args[3] is True:
        (into, indices, values), mask = args[:3], None
    else:
        return None
    return (into, indices[0], values, mask) if len(indices) == 1 and isinstance(indices[0], fx.Node) else None


def _write(graph: fx.Graph, gradient: Gradient) -> None:
    """Replaces the cast, or the sum of the cast and another tensor of its dtype and shape, which nothing else reads."""
    readers = list(gradient.cast.users)
    other = _added(gradient.cast, readers[0]) if len(readers) == 1 else None
    anchor = gradient.cast if other is None else readers[0]
    writing, like = Writing(graph, anchor), gradient.total
    value = gradient.cast.meta["val"]
    base = other or writing.call(like, aten.full.default, list(value.shape), 0, dtype=value.dtype, device=value.device)
    index, sums = _sums(writing, gradient)
    rows = writing.call(like, prims.convert_element_type.default, sums, value.dtype)
    if other is not None:
        mine = writing.call(like, aten.index.Tensor, other, [index])
        rows = writing.call(anchor, aten.add.Tensor, mine, rows)
    new = writing.call(anchor, aten.index_put.default, base, [index], rows)
    anchor.replace_all_uses_with(new)


def _added(cast: fx.Node, reader: fx.Node) -> fx.Node | None:
    """What else a plain sum adds to the cast, if the sum alone reads it, and it lies as the sum does: Inductor writes
    the rows into its memory, and an expanded tensor has one row for all."""
    if reader.target is not aten.add.Tensor or reader.kwargs or len(reader.all_input_nodes) != 2:
        return None
    (other,) = (a for a in reader.all_input_nodes if a is not cast)
    mine, theirs = cast.meta["val"], g.tensor(other)
    alike = theirs is not None and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    alone = alike and len(other.users) == 1 and not g.is_weight(other)
    return other if alone and dense(other) and dense(cast) and dense(reader) else None


def _sums(writing: Writing, gradient: Gradient) -> tuple[fx.Node, fx.Node]:
    """(each token's row [tokens], the sum of all tokens of that row [tokens, features] in float32). The sum is made at
    the place of one of these tokens, whichever wrote its number last. What the mask leaves out adds 0 to row 0."""
    call, like = writing.call, gradient.total
    value, dtype = g.tensor(gradient.values), gradient.total.meta["val"].dtype
    assert value is not None
    tokens, device = math.prod(value.shape[:-1]), value.device
    index = call(like, aten.reshape.default, gradient.index, [tokens])
    values = call(like, aten.reshape.default, gradient.values, [tokens, value.shape[-1]])
    if gradient.mask is not None:
        mask = call(like, aten.reshape.default, gradient.mask, [tokens])
        none = call(like, aten.full.default, [], 0, dtype=index.meta["val"].dtype, device=device)
        zero = call(like, aten.full.default, [], 0, dtype=value.dtype, device=device)
        index = call(like, aten.where.self, mask, index, none)
        values = call(like, aten.where.self, call(like, aten.unsqueeze.default, mask, 1), values, zero)
    numbered = call(
        like, prims.iota.default, tokens, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
    )
    blank = call(like, aten.full.default, [gradient.rows], 0, dtype=torch.int64, device=device)
    place = call(like, aten.index.Tensor, call(like, aten.index_put.default, blank, [index], numbered), [index])
    zeros = call(like, aten.full.default, [tokens, value.shape[-1]], 0, dtype=dtype, device=device)
    sums = call(like, aten.index_put.default, zeros, [place], values, True)
    return index, call(like, aten.index.Tensor, sums, [place])
