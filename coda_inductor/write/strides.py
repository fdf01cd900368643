"""What a graph returns lies in memory as it did before: the Regions store row by row, and what the graph makes of
their stores inherits that order, however its own inputs lay."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_leaves

from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import draws, may_view, storage
from coda_inductor.patterns.graph import aten, source_line
from coda_inductor.patterns.layout import Strides, major_to_minor, strides, without_gaps
from coda_inductor.patterns.sizes import ONE, size_of
from coda_inductor.write.aliases import give_back, returned, sharing
from coda_inductor.write.writing import Writing

Layout = tuple[Strides, ...]
"""Of every tensor that a node computes."""


def layout(node: fx.Node) -> Layout:
    """How the node's tensors lie in memory."""
    return tuple(strides(v) for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor))


def read_by(node: fx.Node) -> list[Layout]:
    """How the node's inputs lie in memory."""
    return [layout(n) for n in node.all_input_nodes]


def read_from(node: fx.Node) -> list[int | None]:
    """The storages of the node's inputs. Inductor, too, knows by these which tensors share memory."""
    return [storage(n) for n in node.all_input_nodes]


class OutputStrides:
    """Made before a graph is rewritten; `restore` afterwards gives its outputs the order they had."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.inputs = {node: read_by(node) for node in graph.nodes if node.op == "call_function"}
        self.memory = {node: read_from(node) for node in self.inputs}
        self.seen = {node: [n.meta.get("val") for n in node.all_input_nodes] for node in graph.nodes if sees(node)}
        self.held = [node.meta.get("val") for node in graph.nodes]  # or another tensor might be taken for one of them
        self.sharing = sharing(graph)
        self.outputs = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in returned(graph)]

    def restore(self, call: Callable[..., fx.Node]) -> None:
        """Adds the copies; `call` makes a node before the output."""
        self.propagate()
        give_back(self.graph, [self._restored(i, call) for i in range(len(self.outputs))])

    def fixed(self) -> set[fx.Node]:
        """What cannot be copied into another order, and what that is made of: results that share memory or have gaps,
        and what is read by the place in memory and is not dense. Back to what lies in one order, whatever it reads."""
        found = list[fx.Node]()
        for node, val, where in zip(returned(self.graph), self.outputs, self.sharing, strict=True):
            if isinstance(node, fx.Node) and isinstance(val, Tensor):
                shared = isinstance(where, str) or self.sharing.count(where) > 1
                if shared or not without_gaps(val, major_to_minor(val)):
                    found.append(node)
        for node, values in self.seen.items():
            read = zip(node.all_input_nodes, values, strict=True)
            found += [n for n, val in read if isinstance(val, Tensor) and not dense_from_start(val)]
        return g.reached(found, lambda n: () if lies_row_by_row(n) or sees(n) else n.all_input_nodes)

    def _restored(self, i: int, call: Callable[..., fx.Node]) -> Any:
        """The i-th result in the order in memory that it had. Raises Unsupported where its memory is another's, too."""
        node, val = returned(self.graph)[i], self.outputs[i]
        if not isinstance(val, Tensor):
            return node
        new = restrided(node, val, call)
        alike = self.sharing.count(self.sharing[i]) > 1 or isinstance(self.sharing[i], str)
        if new is not node and alike:
            raise Unsupported("results that share memory would lie in another order", where=source_line(node))
        return new

    def _as_they_lay(self, node: fx.Node) -> None:
        """Has an operation that sees how its inputs lie read them as they lay. Raises Unsupported where it may see more
        than them."""
        for source, old in zip(node.all_input_nodes, self.seen.get(node, ()), strict=False):
            if not isinstance(old, Tensor) or layout(source) == (strides(old),):
                continue
            copy = restrided(source, old, Writing(self.graph, node).call)
            if strides(copy.meta["val"]) != strides(old) or not dense_from_start(old):
                raise Unsupported("it reads by the place in memory what would lie otherwise", where=source_line(node))
            node.replace_input_with(source, copy)

    def propagate(self) -> None:
        """Computes the fake values of kept nodes anew, where what they read has another order now."""
        changed, made = set[fx.Node](), set[fx.Node]()
        for node in self.graph.nodes:
            if sees(node):
                self._as_they_lay(node)
            if node.op != "call_function" or not isinstance(
                node.target, torch._ops.OpOverload | type(operator.getitem)
            ):
                continue
            moved = not changed.isdisjoint(node.all_input_nodes) or self.inputs.get(node) not in (None, read_by(node))
            apart = not made.isdisjoint(node.all_input_nodes) or self.memory.get(node) != read_from(node)
            if not moved and not (apart and may_view(node)):
                continue
            before = layout(node)
            target: Any = aten.reshape.default if node.target in RESHAPES else node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with unguarded(node):
                node.meta["val"] = target(*args, **kwargs)
            made.add(node)
            if target is not node.target and storage(node) != storage(node.all_input_nodes[0]):
                node.target = target  # it copies now
            if layout(node) != before:
                changed.add(node)


RESHAPES = (aten.view.default, aten._unsafe_view.default)
BY_PLACE = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
START = size_of(0)
"""The offset of what begins where its memory does."""


def dense_from_start(value: Tensor) -> bool:
    """Does the tensor lie without gaps, from where its memory begins?"""
    return size_of(value.storage_offset()) == START and without_gaps(value, major_to_minor(value))


def lies_row_by_row(node: fx.Node) -> bool:
    """Is what it computes contiguous, however its inputs lie?"""
    to_rows = node.target in g.COPIES and node.kwargs.get("memory_format") is torch.contiguous_format
    return to_rows or node.target in g.PRODUCTS


def sees(node: fx.Node) -> bool:
    """Does the operation read by the place in memory? So do draws of torch's own, which are made in that order, and
    operators of higher order: what they hold was traced with such inputs, views by their strides among it."""
    holds = isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.target in BY_PLACE or holds or (inductor_config.fallback_random and draws(node))


def unguarded(node: fx.Node) -> Any:
    """Inductor propagates once more, and guards then: what is learnt here only decides on copies."""
    for value in tree_leaves([n.meta.get("val") for n in node.all_input_nodes]):
        for size in (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env.suppress_guards()
    return nullcontext()


def restrided(node: fx.Node, like: Tensor, call: Callable[..., fx.Node]) -> fx.Node:
    """node in the memory order of `like`, and without gaps if that has none."""
    value = node.meta["val"]
    if strides(value) == strides(like):
        return node
    long = {i for i, n in enumerate(value.shape) if size_of(n) != ONE}
    order = major_to_minor(like)
    gaps = without_gaps(like, order) and not without_gaps(value, order)  # as beside rows of no multiple of 8
    if not gaps and [i for i in order if i in long] == [i for i in major_to_minor(value) if i in long]:
        return node
    turned = call(node, aten.permute.default, node, order)
    dense = call(node, aten.clone.default, turned, memory_format=torch.contiguous_format)
    return call(node, aten.permute.default, dense, [order.index(i) for i in range(like.dim())])
