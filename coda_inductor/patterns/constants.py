"""Values of a graph that no input enters: they are computed while it is compiled, to learn what they hold.

A mask that a model builds of token positions is such a value: comparisons of `arange`s.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Memory, computes

FEW = 1 << 10
"""Numbers that the graph holds itself and that are copied to be looked at, at most."""
MOST = 1 << 30
"""Bytes that are computed for one value, at most. The mask of transformers for 8192 by 8192 tokens takes half of it."""


def constant(node: fx.Node, overwritten: AbstractSet[fx.Node], most: int = MOST) -> Tensor | None:
    """The node's value on the CPU. None if it depends on an input, on random numbers, on a size that is a symbol or on
    what is overwritten, if more than `most` bytes would be computed, or if an operation raises on the CPU."""
    nodes = made_of(node)
    values: dict[fx.Node, Any] = {n: there for n in nodes if (there := held(n)) is not None}
    rest = [n for n in nodes if n not in values]
    if not all(computes(n) and written(n) and known(n) for n in rest) or not overwritten.isdisjoint(nodes):
        return None
    if sum(map(size, nodes)) > most:
        return None
    with torch.no_grad(), unset_fake_temporarily():
        for n in rest:
            args, kwargs = fx.map_arg((n.args, n.kwargs), values.__getitem__)
            args = tree_map_only(torch.device, lambda _: torch.device("cpu"), args)
            here = dict.fromkeys(kwargs.keys() & {"device"}, "cpu")
            try:
                values[n] = n.target(*args, **kwargs | here)  # type: ignore[operator]
            except RuntimeError:  # it has no kernel on the CPU, or raises there as it would for the user
                return None
    found: Tensor = values[node]
    return found


def held(node: fx.Node) -> Tensor | None:
    """The few numbers that the graph holds itself, on the CPU, as `torch.tensor(0.0)` within a model; None if the node
    is nothing of the kind."""
    if node.op != "get_attr" or "." in str(node.target):
        return None
    there = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(there, Tensor) or isinstance(there, FakeTensor) or there.numel() > FEW:
        return None
    with unset_fake_temporarily():
        return there.detach().cpu()


def made_of(node: fx.Node) -> list[fx.Node]:
    """The node and all that it is computed of, in the order of the graph."""
    found, todo = set[fx.Node](), [node]
    while todo:
        if (n := todo.pop()) not in found:
            found.add(n)
            todo += n.all_input_nodes
    return sorted(found)


def structure(node: fx.Node) -> str:
    """How the node is computed, by operations and numbers: of equal ones, one need be looked at."""
    nodes = made_of(node)
    at = {n: i for i, n in enumerate(nodes)}
    return "\n".join(f"{n.target} {fx.map_arg((n.args, n.kwargs), lambda a: f'%{at[a]}')}" for n in nodes)


def written(node: fx.Node) -> bool:
    """Does the operation write all of its result? Memory that is only allocated holds what was there."""
    return isinstance(node.target, torch._ops.OpOverload) and "empty" not in node.target._schema.name


def known(node: fx.Node) -> bool:
    """Is it one tensor, of sizes that are numbers?"""
    value = g.tensor(node)
    return value is not None and all(isinstance(s, int) for s in (*value.shape, *value.stride()))


def size(node: fx.Node) -> int:
    """The bytes that it takes: none if it only views what is there."""
    value = g.tensor(node)
    return 0 if value is None or g.is_view(node) else value.numel() * value.element_size()


def of_memory_that_is_written(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes whose memory an operation of the graph overwrites."""
    memory = Memory(graph)
    names = {name for n in graph.nodes for name in memory.overwritten(n)}
    return frozenset(n for n in graph.nodes if memory.of(n) in names)
