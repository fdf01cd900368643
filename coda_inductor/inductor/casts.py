"""Casts where they cost least. Both passes are for autocast, which casts what operations read.

A value that is copied or repeated in float32 and then rounded, as keys are for the heads that share them, is rounded
first: an epilogue can store that, and the numbers are the same.

A product that is only read widened to float32, as the gradient of a float32 weight, leaves so: cuBLAS writes what it
has accumulated, where it would round it to 16 bits and a pass of its own would widen that again.

(H200, 16384 tokens, by turns: of a gradient [11008, 4096] the product in float32 takes 2.15 ms, in bfloat16 2.13, with
the pass 2.27; of one [5504, 2048] 0.51, 0.51 and 0.54. bench/results/tiles.jsonl.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coda_inductor.inductor.emit import ORIGIN
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.sizes import size_of

HALF = (torch.bfloat16, torch.float16)
ALIGNED = 8  # what Inductor pads to: an odd product is better off padded


@dataclass(frozen=True, slots=True)
class Cast:
    """One product that leaves in float32: the cast that is gone, its shape, and the user's line."""

    node: str
    shape: str
    source: str

    @property
    def name(self) -> str:
        """Its own, among those who absorb operations."""
        return f"cast {self.node}"

    @property
    def absorbed(self) -> tuple[str, ...]:
        """The operations that nobody runs any more."""
        return (self.node,)


def round_first(graph: fx.Graph) -> None:
    """Moves casts to 16 bits before the copies and repetitions that they follow, in place."""
    for cast in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        views = copied(cast) if cast.args[1] in HALF else []
        if not views:
            continue
        source = views[0].args[0]
        assert isinstance(source, fx.Node)
        dtype = cast.args[1]
        cast.replace_all_uses_with(views[-1])
        if g.widens(source) and source.args[0].meta["val"].dtype == dtype:  # type: ignore[union-attr]
            views[0].replace_input_with(source, source.args[0])  # type: ignore[arg-type]
            graph.erase_node(cast)
        else:
            cast.args = (source, dtype)
            source.append(cast)
            views[0].replace_input_with(source, cast)
        for node in (*views, cast):
            like = source.meta["val"] if node is cast else node.meta["val"]
            node.meta["val"] = like.new_empty_strided(like.shape, like.stride(), dtype=dtype)


def copied(cast: fx.Node) -> list[fx.Node]:
    """The views between a cast and what it is a cast of, first to last, if they copy or repeat that, and if nobody else
    reads them."""
    found, node = list[fx.Node](), cast.args[0]
    while isinstance(node, fx.Node) and g.is_view(node) and len(node.users) == 1:
        found.insert(0, node)
        node = node.args[0]
    if all(n.target not in (aten.clone.default, aten.expand.default) for n in found):
        return []
    strides = [[size_of(s) for s in n.meta["val"].stride()] for n in (cast, found[-1])]
    wide = isinstance(node, fx.Node) and node.meta["val"].dtype == torch.float32
    return found if wide and strides[0] == strides[1] else []  # a cast of what is repeated makes a copy


def write_wide(graph: fx.Graph) -> tuple[Cast, ...]:
    """Lets products leave in float32, in place, where the graph returns only that."""
    found = []
    for cast in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        product = widened(cast)
        if product is not None:
            value = cast.meta["val"]
            shape = f"[{', '.join(map(str, value.shape))}]"
            found.append(Cast(cast.name, shape, g.source_line(cast) or g.source_line(product)))
            widen(graph, product, cast)
    graph.eliminate_dead_code()
    return tuple(found)


def widened(cast: fx.Node) -> fx.Node | None:
    """The product whose result nobody reads but this cast, which the graph returns: in a loop that reads on, the cast
    costs nothing, and 16 bits are read faster than 32."""
    node = cast.args[0]
    if cast.args[1] is not torch.float32 or any(user.op != "output" for user in cast.users):
        return None
    while isinstance(node, fx.Node) and len(node.users) == 1 and g.is_view(node):
        node = node.args[0] if node.target is not aten.expand.default else None
    if not isinstance(node, fx.Node) or node.target is not aten.mm.default or len(node.users) != 1:
        return None
    sizes = [size_of(n).static for n in (*node.meta["val"].shape, node.args[0].meta["val"].shape[1])]  # type: ignore[union-attr]
    aligned = all(n is None or n % ALIGNED == 0 for n in sizes) and None not in sizes[:2]
    return node if aligned and node.meta["val"].dtype in HALF else None


def widen(graph: fx.Graph, product: fx.Node, cast: fx.Node) -> None:
    """Puts the product in float32, seen through the same views, in the cast's place."""
    between, node = list[fx.Node](), cast.args[0]
    while node is not product:
        assert isinstance(node, fx.Node)
        between.append(node)
        node = node.args[0]
    with graph.inserting_before(product):
        new = made(graph, product, aten.mm.dtype, (*product.args, torch.float32))
    for view in reversed(between):
        with graph.inserting_before(view):
            new = made(graph, view, view.target, (new, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
    cast.replace_all_uses_with(new)


def made(graph: fx.Graph, like: fx.Node, target: Callable[..., Any], args: Any, kwargs: Any = None) -> fx.Node:
    """A node of `like`'s sizes and origin, in float32. (No device but CUDA's could compute its fake value.)"""
    node = graph.call_function(target, args, kwargs)
    value = like.meta["val"]
    wide = value.new_empty_strided(value.shape, value.stride(), dtype=torch.float32)
    node.meta = {key: like.meta[key] for key in ORIGIN if key in like.meta} | {"val": wide}
    return node
