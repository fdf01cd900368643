"""Rows of scores that nobody reads are not made: (x W)[r] = x[r] W.

    scores = head(hidden)[:, :-1];  loss of scores and targets[:, 1:]

The last scores of each sequence are left out. In the backward their gradients are zeros: the gradient of what is left
is written into a tensor of zeros, which two products read. A product of zeros and rows is one of the rows, put between
zeros, and one over all rows is one over those that are not zeros:

    pad(D) W = pad(D W),    pad(D)^T x = D^T x[r],    and the sum of all rows is that of D

So nothing as large as the scores is copied for the cut, and head and loss have the same rows, as a loss by rows needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from coda_inductor.loss.written import amplifies, is_wide
from coda_inductor.passes.dropped import is_zero
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import is_returned, ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.write.writing import Writing

RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows from `start` to `end` along one of the dimensions `lead` that the rows stand in."""

    lead: tuple[int, ...]
    dim: int
    start: int
    end: int

    def of(self, writing: Writing, like: fx.Node, matrix: fx.Node) -> fx.Node:
        """These rows of a matrix [rows, features]."""
        features = matrix.meta["val"].shape[-1]
        shaped = writing.call(like, aten.reshape.default, matrix, [*self.lead, features])
        some = writing.call(like, aten.slice.Tensor, shaped, self.dim, self.start, self.end)
        return writing.call(like, aten.reshape.default, some, [-1, features])

    def padded(self, writing: Writing, like: fx.Node, matrix: fx.Node) -> fx.Node:
        """A matrix of these rows, with zeros in the place of the others."""
        value, some = matrix.meta["val"], list(self.lead)
        some[self.dim] = self.end - self.start
        features = value.shape[-1]
        shaped = writing.call(like, aten.reshape.default, matrix, [*some, features])
        zeros = writing.call(
            like, aten.full.default, [*self.lead, features], 0.0, dtype=value.dtype, device=value.device
        )
        whole = writing.call(like, aten.slice_scatter.default, zeros, shaped, self.dim, self.start, self.end)
        return writing.call(like, aten.reshape.default, whole, [-1, features])


def read_rows(graph: fx.Graph, target: str) -> None:
    """Rewrites products that make scores, and what reads their gradients, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        _forward(graph, node, target)
    _drop(graph)
    for node in reversed(graph.find_nodes(op="call_function", target=aten.slice_scatter.default)):  # the outer first
        if is_zero(node.args[0]):
            _backward(graph, node, target)
            _drop(graph)


def _drop(graph: fx.Graph) -> None:
    """Drops what nobody reads any more."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or ordered(node))


def cut_of(node: fx.Node, whole: fx.Node, first: int) -> Cut | None:
    """The rows that a slice takes, or that are scattered, of the tensor `whole`; `first`: where its arguments begin."""
    sizes = [*whole.meta["val"].shape]
    given: tuple[Any, ...] = (*node.args[first:], *(0, None, None, 1)[len(node.args) - first :])
    dim, start, end, step = given
    if not all(isinstance(n, int) for n in sizes) or node.kwargs or step != 1 or not isinstance(dim, int):
        return None
    dim %= len(sizes)
    if not isinstance(start, int | None) or not isinstance(end, int | None) or dim == len(sizes) - 1:
        return None
    start, end, _ = slice(start, end).indices(sizes[dim])
    return Cut(tuple(sizes[:-1]), dim, start, end) if start < end and end - start < sizes[dim] else None


def _forward(graph: fx.Graph, node: fx.Node, target: str) -> None:
    """Makes those rows of a product that its only reader, the slice, takes."""
    whole = node.args[0]
    assert isinstance(whole, fx.Node)
    product = whole
    while product.target in RESHAPES and len(product.users) == 1:
        product = product.all_input_nodes[0]
    if (
        product.target not in (aten.mm.default, aten.addmm.default)
        or len(product.users) != 1
        or not is_wide(product, target)
    ):
        return
    if whole.meta["val"].shape[-1] != product.meta["val"].shape[-1] or len(whole.users) != 1:
        return
    cut, read = cut_of(node, whole, 1), g.operands(product)
    if cut is None or any(n.meta["val"].dim() != 1 for n in read.addends) or is_returned(node):
        return
    writing = Writing(graph, node)
    rows = cut.of(writing, product, read.left)
    made = writing.call(product, product.target, *read.addends, rows, read.right, **product.kwargs)
    node.replace_all_uses_with(writing.call(node, aten.reshape.default, made, [*node.meta["val"].shape]))


def _backward(graph: fx.Graph, node: fx.Node, target: str) -> None:
    """Has products read the gradients that are not zero, if nothing else reads the others."""
    cut, source = cut_of(node, node, 2), node.args[1]
    if cut is None or not isinstance(source, fx.Node):
        return
    columns = node.meta["val"].shape[-1]
    names = g.reached([node], lambda n: [u for u in n.users if u.target in (*RESHAPES, aten.permute.default)])
    turned = {n for n in names if n.target is aten.permute.default}
    if any(n.meta["val"].shape[-1] != columns for n in names - turned) or any(n.args[1] != [1, 0] for n in turned):
        return
    readers = {user for n in names for user in n.users} - names
    if not all(_reads(reader, names, turned) for reader in readers):
        return
    others = [n.args[1].meta["val"].shape[-1] for n in readers if n.target is aten.mm.default]  # type: ignore[union-attr]
    if not all(isinstance(k, int) and amplifies(columns, k, target) for k in others):
        return  # of a layer, which would lose what its epilogue makes of all rows
    for reader in readers:
        _read(graph, reader, cut, source, columns)


def _reads(reader: fx.Node, names: set[fx.Node], turned: set[fx.Node]) -> bool:
    """Is it a product whose left operand alone is one of these, or a sum over the rows of one that is not turned?"""
    of = g.reduction(reader)
    if of is not None:
        rows = (*range(of.source.meta["val"].dim() - 1),)
        return of.name == "sum" and of.dims == rows and of.source not in turned
    return reader.target is aten.mm.default and reader.args[0] in names and reader.args[1] not in names


def _read(graph: fx.Graph, reader: fx.Node, cut: Cut, source: fx.Node, columns: int) -> None:
    writing, value = Writing(graph, reader), reader.meta["val"]
    rows = writing.call(reader, aten.reshape.default, source, [-1, columns])
    if (of := g.reduction(reader)) is not None:
        made = writing.call(reader, aten.sum.dim_IntList, rows, [0], of.keepdim)
        made = writing.call(reader, aten.reshape.default, made, [*value.shape])
    elif reader.args[0].target is aten.permute.default:  # type: ignore[union-attr]
        turned = writing.call(reader, aten.permute.default, rows, [1, 0])
        made = writing.call(reader, aten.mm.default, turned, cut.of(writing, reader, reader.args[1]))  # type: ignore[arg-type]
    else:
        made = cut.padded(writing, reader, writing.call(reader, aten.mm.default, rows, reader.args[1]))
    reader.replace_all_uses_with(made)
    graph.erase_node(reader)
