"""Keys and values that several heads share are kept once for the backward.

Attention's backward needs them as attention read them: repeated for every head, a copy that Inductor's partitioner
keeps. What else the backward makes of such a tensor (a sum that the triangle law moved to it) reads one of the repeats,
so that the tensor itself is not kept beside its copy: of Llama-1B 16 MiB a layer at 8192 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from torch import fx

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import behind_tangents
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.schedule.kinds import kind_of

Call = Callable[..., fx.Node]
"""Emission.call: a new node, after another one's origin, with its target and arguments."""
Reshape = Callable[[fx.Node, fx.Node], fx.Node]
"""The first, dense, in the shape of the second."""
Redirect = Callable[[fx.Node, fx.Node, list[fx.Node]], None]
"""Gives some readers of the first, also of its views, the second."""
PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default)


def read_repeats(graph: fx.Graph, call: Call, reshape: Reshape, redirect: Redirect) -> None:
    """Lets loops of a joint graph's backward read a repeated tensor's copy, where an operation there needs that
    anyway."""
    late = behind_tangents(graph)
    for node in [n for n in graph.nodes if late and n.target is aten.expand.default and n not in late]:
        dim, copy = repeated(node), next(copies(node, late), None)
        if dim is None or copy is None:
            continue
        source = list(views(node.args[0]))
        if loops := readers(source[-1], late):
            # The origin of the first new node is that of all: the reader's side and checkpoint, not the copy's.
            read = call(loops[0], aten.alias.default, copy[0])
            one = call(read, aten.slice.Tensor, undone(read, [*copy, node], call, reshape), dim, 0, 1)
            redirect(source[-1], undone(one, source, call, reshape), loops)


def repeated(node: fx.Node) -> int | None:
    """The one dimension, of size 1, that an expand repeats."""
    before, after = g.tensor(node.args[0]), g.tensor(node)
    if before is None or after is None or before.dim() != after.dim():
        return None
    found = [d for d, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if str(a) != str(b)]
    return found[0] if len(found) == 1 and str(before.shape[found[0]]) == "1" else None


def copies(node: fx.Node, late: set[fx.Node], path: tuple[fx.Node, ...] = ()) -> Iterator[tuple[fx.Node, ...]]:
    """The ways from what operations of the backward need that are no loops, over views of which one is a copy, back to
    the node, which is not in them. (Where one head serves all, an expand may be viewed without a copy.)"""
    for user in node.users:
        if g.is_view(user) and user.target is not aten.expand.default and user not in late:
            way = (user, *path)
            needed = any(u in late and kind_of(u) == "extern" for u in user.users)
            if needed and any(n.target is aten.clone.default for n in way):
                yield way
            yield from copies(user, late, way)


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
    """The node, which is what the first of the path is, taken back over each of its views: what the last of it is,
    dense. Raises BrokenInvariant if the sizes say otherwise."""
    for view, source in itertools.pairwise(path):
        same(node, view)
        if view.target in PERMUTES:
            order = permuted(view)
            node = call(node, aten.permute.default, node, [order.index(d) for d in range(len(order))])
        else:
            node = reshape(node, source)
    same(node, path[-1])
    return reshape(node, path[-1])


def same(node: fx.Node, other: fx.Node) -> None:
    """Raises BrokenInvariant unless both have the same sizes."""
    if g.sizes(node) != g.sizes(other):
        raise BrokenInvariant(f"{node} is {[*map(str, g.sizes(node))]}, {other} {[*map(str, g.sizes(other))]}")


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
