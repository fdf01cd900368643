"""Keys and values that several heads share are kept once for the backward.

Attention's backward needs them as attention read them: repeated for every head, a copy that Inductor's partitioner
keeps. What else the backward makes of such a tensor (a sum that the triangle law moved to it) reads one of the repeats,
so that the tensor itself is not kept beside its copy: of Llama-1B 16 MiB a layer at 8192 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from torch import fx

from coda_inductor.inductor.lowering import kind_of
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims

Call = Callable[..., fx.Node]
"""Emission.call: a new node, after another one's origin, with its target and arguments."""
Reshape = Callable[[fx.Node, fx.Node], fx.Node]
"""The first, in the shape of the second."""
Redirect = Callable[[fx.Node, fx.Node, list[fx.Node]], None]
"""Gives some readers of the first, also of its views, the second."""


def read_repeats(graph: fx.Graph, call: Call, reshape: Reshape, redirect: Redirect) -> None:
    """Lets loops of a joint graph's backward read a repeated tensor's copy, where an operation there needs that
    anyway."""
    late = backward(graph)
    for node in [n for n in graph.nodes if late and n.target is aten.expand.default and n not in late]:
        dim, wanted = repeated(node), next(kept(node, late), None)
        if dim is None or wanted is None:
            continue
        copy = list(views(wanted))[:-1]  # without the expand itself, that is
        path = list(views(node.args[0]))
        if loops := readers(path[-1], late):
            again = undone(wanted, copy, call, reshape)
            one = call(loops[0], aten.slice.Tensor, again, dim, 0, 1)
            redirect(path[-1], undone(one, path, call, reshape), loops)


def backward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on gradients of outputs, in whatever order they stand."""
    todo = [n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)]
    late = set[fx.Node]()
    while todo:
        late.add(node := todo.pop())
        todo += node.users.keys() - late
    return late


def repeated(node: fx.Node) -> int | None:
    """The one dimension, of size 1, that an expand repeats."""
    before, after = g.tensor(node.args[0]), g.tensor(node)
    if before is None or after is None or before.dim() != after.dim():
        return None
    found = [d for d, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if str(a) != str(b)]
    return found[0] if len(found) == 1 and before.shape[found[0]] == 1 else None


def kept(node: fx.Node, late: set[fx.Node]) -> Iterator[fx.Node]:
    """The copies of the value, as it is or viewed, that operations of the backward need that are no loops."""
    for user in node.users:
        if g.is_view(user) and user not in late:
            if any(u in late and kind_of(u) == "extern" for u in user.users if u.op == "call_function"):
                yield user
            yield from kept(user, late)


def views(node: fx.Node) -> Iterator[fx.Node]:
    """The node, what it is a view of, and so on: each has the elements of the last, in the order that its views give
    them."""
    yield node
    if g.is_view(node) and node.target is not aten.expand.default:
        yield from views(node.all_input_nodes[0])


def readers(node: fx.Node, late: set[fx.Node]) -> list[fx.Node]:
    """The loops of the backward that read the node, as it is or viewed, and casts for such loops."""
    found = list[fx.Node]()
    for user in (u for u in node.users if u.op == "call_function" and u.target is not aten.expand.default):
        if g.is_view(user):
            found += readers(user, late)
        elif kind_of(user) == "loop" and (user in late or cast_for(user, late)):
            found.append(user)
    return list(dict.fromkeys(found))


def cast_for(node: fx.Node, late: set[fx.Node]) -> bool:
    """Is it a cast that only the backward reads?"""
    return node.target is prims.convert_element_type.default and late.issuperset(node.users)


def undone(node: fx.Node, path: list[fx.Node], call: Call, reshape: Reshape) -> fx.Node:
    """The node, which has the elements of the first of the path, as the last of the path."""
    node = reshape(node, path[0])
    for view, source in itertools.pairwise(path):
        if view.target in (aten.permute.default, aten.transpose.int, aten.t.default):
            order = permuted(view)
            node = call(node, aten.permute.default, node, [order.index(d) for d in range(len(order))])
        else:
            node = reshape(node, source)
    return node


def permuted(view: fx.Node) -> list[int]:
    """The dimensions of its input, in the order of the view's."""
    value = g.tensor(view)
    assert value is not None
    order = list(range(value.dim()))
    if view.target is aten.permute.default:
        return [d % value.dim() for d in view.args[1]]  # type: ignore[union-attr, operator, misc]
    a, b = view.args[1:] if view.target is aten.transpose.int else (0, -1)
    order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return order
