"""What a graph returns shares memory with what it shared it with before, and with nothing else.

`return h, h[:]` is two views of one tensor. Two results that one Region stores once are two tensors all the same. Which
of them share is read off the graph before it is rewritten, and restored afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from coda_inductor.patterns.effects import Memory, base, viewed
from coda_inductor.patterns.graph import aten

Call = Callable[..., fx.Node]
"""Writing.call: a new node, after another one's origin, with its target and arguments."""
Sharing = tuple[int | str | None, ...]
"""For each result of a graph: the input in whose memory it lies by its name, else the place of the first result in the
same memory; None for what is no tensor."""


def returned(graph: fx.Graph) -> list[Any]:
    """What the graph returns."""
    (values,) = graph.output_node().args
    return list(values) if isinstance(values, tuple | list) else [values]


def give_back(graph: fx.Graph, values: list[Any]) -> None:
    """Lets the graph return these."""
    output = graph.output_node()
    output.args = (type(output.args[0])(values),) if isinstance(output.args[0], tuple | list) else tuple(values)


def sharing(graph: fx.Graph) -> Sharing:
    """Which results of the graph share memory."""
    memory, first, found = Memory(graph), dict[str, int | str](), list[int | str | None]()
    inputs = {memory.of(n): n.name for n in reversed(graph.find_nodes(op="placeholder"))}
    for i, node in enumerate(returned(graph)):
        if not isinstance(node, fx.Node):
            found.append(None)
            continue
        where = memory.of(node)
        found.append(inputs.get(where, first.setdefault(where, i)))
    return tuple(found)


def part(graph: fx.Graph, before: Sharing, call: Call) -> None:
    """Gives results that share memory, but did not before, memory of their own: copies of what they view."""
    now, memory, values = sharing(graph), Memory(graph), returned(graph)
    owner = dict[str, int | str]()
    copies = dict[tuple[str, int | str], fx.Node]()
    for i, (node, wanted, found) in enumerate(zip(values, before, now, strict=True)):
        if wanted is None or found is None:
            continue
        where = memory.of(node)
        if isinstance(found, str):
            owner[where] = found
        if owner.setdefault(where, wanted) == wanted:
            continue
        whole = base(node)
        if (where, wanted) not in copies:
            copies[where, wanted] = call(whole, aten.clone.default, whole)
        values[i] = again(node, whole, copies[where, wanted], call)
    give_back(graph, values)


def again(node: fx.Node, whole: fx.Node, new: fx.Node, call: Call) -> fx.Node:
    """The node's views of `whole`, of `new` in its place."""
    if node is whole:
        return new
    source = viewed(node)
    assert source is not None
    if node.target is operator.getitem:  # of several views at once
        several, item = node.args
        assert isinstance(several, fx.Node)
        args = fx.map_arg(several.args, lambda a: again(source, whole, new, call) if a is source else a)
        return call(node, operator.getitem, call(several, several.target, *args, **several.kwargs), item)
    args = fx.map_arg(node.args, lambda a: again(source, whole, new, call) if a is source else a)
    return call(node, node.target, *args, **node.kwargs)
