"""Casts where they cost least. They are autocast's, which casts what operations read, and of norms in float32.

A value that is copied or repeated in float32 and then rounded, as keys are for the heads that share them, is rounded
first: an epilogue can store that, and the numbers are the same. So are parts that are put beside each other and then
rounded, as the two features of a rotary embedding's pairs. (H200, [4, 4096, 16, 128] in bfloat16, alone: Inductor's
loop takes 51 us for 90, of a transposed tensor 59 for 87. bench/results/rotary.jsonl.)

A tensor that is widened to float32 and then copied, as a norm's backward does with what lies otherwise, is copied
first: an epilogue reads the copy as it is, and what is kept for the backward is half as large.

A product that is only read widened to float32, as the gradient of a float32 weight, leaves so: cuBLAS writes what it
has accumulated, where it would round it to 16 bits and a pass of its own would widen that again.

(H200, 16384 tokens, interleaved: of a gradient [11008, 4096] the product in float32 takes 2.15 ms, in bfloat16 2.13,
with the pass 2.27; of one [5504, 2048] 0.51, 0.51 and 0.54. bench/results/tiles.jsonl.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config

from coda_inductor.core.dtypes import NARROW
from coda_inductor.core.settings import Settings
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Memory, effects, viewed
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.layout import alike, strides
from coda_inductor.patterns.sizes import size_of
from coda_inductor.write.writing import ORIGIN, Writing

ALIGNED = 8  # what Inductor pads to: an odd product is better off padded
WIDE, EARLY, FAST = "written in float32", "rounded before being copied", "added up fast"
WHOLE = "written in parts, made as a whole"
BY_PARTS, BESIDE = "summed in the parts that are read", "gradients of parts put beside each other"
PACKED = "read and written as integers, one for two numbers"


@dataclass(frozen=True, slots=True)
class Cast:
    """What became of one cast: WIDE (a product leaves so, and the cast is gone) or EARLY; its node, its shape, and the
    user's line. Or of a number that multiplied scores (factors.py), a product that is added up FAST (scaled.py), pairs
    of numbers that are PACKED (complex.py), what was written in parts and is made WHOLE (parts/written.py), sums
    BY_PARTS and gradients that are put BESIDE each other (parts/lanes.py), or scores whose gradient is stored for them
    (loss/written.py)."""

    node: str
    shape: str
    source: str
    what: str
    gone: tuple[str, ...] = ()
    """Operations that a rewriting of more than a cast left out."""

    @property
    def name(self) -> str:
        """Its own, among those who absorb operations."""
        return f"cast {self.node}"

    @property
    def absorbed(self) -> tuple[str, ...]:
        """The operations that nobody runs any more."""
        return self.gone or (() if self.what in (EARLY, FAST, PACKED, WHOLE, BY_PARTS, BESIDE) else (self.node,))

    @classmethod
    def of(cls, node: fx.Node, what: str, source: str, gone: tuple[str, ...] = ()) -> Cast:
        """The record of a node."""
        return cls(node.name, f"[{', '.join(map(str, node.meta['val'].shape))}]", source, what, gone)


def round_first(graph: fx.Graph) -> tuple[Cast, ...]:
    """Moves casts to 16 bits before the copies that they follow, in place."""
    found, unstable = [], effects(graph).unstable
    memory = Memory(graph) if unstable else None
    for cast in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        if cast.args[1] in NARROW and (together := put_together(cast)):
            found.append(Cast.of(cast, EARLY, g.source_line(cast) or g.source_line(together[0])))
            round_parts(graph, cast, together)
            continue
        views = copied(cast) if cast.args[1] in NARROW else []
        value = rounded(views[0].args[0], cast.args[1]) if views else None  # type: ignore[arg-type]
        if value is None or (memory and memory.of(views[0]) in unstable):
            continue
        found.append(Cast.of(cast, EARLY, g.source_line(cast) or g.source_line(views[0])))
        source, dtype = views[0].args[0], cast.args[1]
        assert isinstance(source, fx.Node)
        cast.replace_all_uses_with(views[-1])
        if isinstance(value, fx.Node):
            views[0].replace_input_with(source, value)
            graph.erase_node(cast)
        else:
            cast.args, cast.meta["val"] = (source, dtype), value
            inputs = graph.find_nodes(op="placeholder")
            (inputs[-1] if source in inputs else source).append(cast)
            views[0].replace_input_with(source, cast)
        for node in views:
            (base,) = node.all_input_nodes
            if viewed(node) is base:
                args = fx.map_arg(node.args, lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **node.kwargs)  # type: ignore[operator]
            else:
                node.meta["val"] = laid_out_as(node, dtype)
    return tuple(found)


def put_together(cast: fx.Node) -> list[fx.Node]:
    """The cat of float32 parts that is rounded, and the views between it and its cast, if nobody else reads them."""
    cat, views = viewed_by(cast)
    if not isinstance(cat, fx.Node) or cat.target is not aten.cat.default or len(cat.users) != 1:
        return []
    if g.is_backward(cat) != g.is_backward(cast):
        return []
    found = [cat, *views]
    wide = all(n.meta["val"].dtype == torch.float32 for n in (cat, *cat.all_input_nodes))
    dense = wide and all(rounded(part, cast.args[1]) is not None for part in cat.all_input_nodes)  # type: ignore[arg-type]
    return found if dense and alike(found[-1], cast) else []


def round_parts(graph: fx.Graph, cast: fx.Node, together: list[fx.Node]) -> None:
    """Rounds the parts of a cat, instead of what it puts together, in place."""
    cat, writing = together[0], Writing(graph, together[0])
    for part in cat.all_input_nodes:
        narrow = writing.instead(cast, prims.convert_element_type.default, part, cast.args[1])
        cat.replace_input_with(part, narrow)
    cast.replace_all_uses_with(together[-1])
    graph.erase_node(cast)
    for node in together:
        args = fx.map_arg(node.args, lambda n: n.meta["val"])
        node.meta["val"] = node.target(*args, **node.kwargs)  # type: ignore[operator]


def widen_last(graph: fx.Graph) -> None:
    """Moves casts from 16 bits to float32 behind the copies that follow them, in place."""
    overwritten = effects(graph).memory
    memory = Memory(graph) if overwritten else None
    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        cast = copy.args[0]
        assert isinstance(cast, fx.Node)
        narrow = cast.args[0] if cast.target is prims.convert_element_type.default and g.widens(cast) else None
        if not isinstance(narrow, fx.Node) or narrow.meta["val"].dtype not in NARROW or cast.args[1] != torch.float32:
            continue
        if memory and memory.of(narrow) in overwritten:  # between the cast and the copy, perhaps
            continue
        with graph.inserting_after(copy):
            wide = made(graph, copy, prims.convert_element_type.default, (copy, torch.float32))
        copy.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)
        copy.replace_input_with(cast, narrow)
        copy.meta["val"] = laid_out_as(copy, narrow.meta["val"].dtype)
        if not cast.users:  # who counts finds the same names as before
            name, _ = cast.name, graph.erase_node(cast)
            wide.name = name


def copied(cast: fx.Node) -> list[fx.Node]:
    """The views between a cast and what it is a cast of, first to last, if they copy that, and nobody else reads them.
    (Where they do not, the cast itself is what makes another tensor: of an input that is returned, say.)"""
    node, found = viewed_by(cast)
    if all(n.target is not aten.clone.default for n in found) or not alike(found[-1], cast):
        return []
    return found if isinstance(node, fx.Node) and node.meta["val"].dtype == torch.float32 else []


def viewed_by(cast: fx.Node) -> tuple[Any, list[fx.Node]]:
    """What a cast reads through views that nobody else reads, and these views, first to last."""
    views, node = list[fx.Node](), cast.args[0]
    while isinstance(node, fx.Node) and g.is_view(node) and len(node.users) == 1:
        views.insert(0, node)
        node = node.args[0]
    return node, views


def rounded(source: fx.Node, dtype: torch.dtype) -> fx.Node | Tensor | None:
    """What lies as the source does, in `dtype`: the node that the source only widens, or the value of a cast. None if
    there is nothing, for a cast of a tensor with gaps has none."""
    narrow = source.args[0] if g.widens(source) else None
    if isinstance(narrow, fx.Node) and narrow.meta["val"].dtype == dtype:
        return narrow if alike(narrow, source) else None
    value = prims.convert_element_type.default(source.meta["val"], dtype)
    return value if strides(value) == strides(source.meta["val"]) else None


def write_wide(graph: fx.Graph, device: torch.device) -> tuple[Cast, ...]:
    """Lets products on this device leave in float32, in place, where the graph returns only that."""
    found = []
    for cast in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        product = widened(cast)
        if product is not None and product.meta["val"].device == device:
            found.append(Cast.of(cast, WIDE, g.source_line(cast) or g.source_line(product)))
            widen(graph, product, cast)
    return tuple(found)


def widened(cast: fx.Node) -> fx.Node | None:
    """The product whose result nobody reads but this cast, which the graph returns: in a loop that reads on, the cast
    costs nothing, and 16 bits are read faster than 32."""
    node = cast.args[0]
    if cast.args[1] is not torch.float32 or {user.op for user in cast.users} != {"output"}:
        return None
    while isinstance(node, fx.Node) and len(node.users) == 1 and g.is_view(node):
        node = node.args[0] if node.target is not aten.expand.default else None
    if not isinstance(node, fx.Node) or node.target is not aten.mm.default or len(node.users) != 1:
        return None
    sizes = [size_of(n).static for n in (*node.meta["val"].shape, node.args[0].meta["val"].shape[1])]  # type: ignore[union-attr]
    aligned = all(n is None or n % ALIGNED == 0 for n in sizes) and None not in sizes[:2]
    return node if aligned and node.meta["val"].dtype in NARROW else None


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
    for old in (cast, *between, product):
        graph.erase_node(old)


def made(graph: fx.Graph, like: fx.Node, target: Callable[..., Any], args: Any, kwargs: Any = None) -> fx.Node:
    """A node of `like`'s sizes and origin, in float32."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: like.meta[key] for key in ORIGIN if key in like.meta}
    node.meta["val"] = laid_out_as(like, torch.float32)
    return node


def laid_out_as(node: fx.Node, dtype: Any) -> Tensor:
    """The fake value of a node, in another dtype. (That of a product only CUDA could compute.)"""
    value: Tensor = node.meta["val"]
    return value.new_empty_strided(value.shape, value.stride(), dtype=dtype)


def may_widen(settings: Settings, target: str) -> bool:
    """May products leave in float32? None does on the CPU, and of cuBLAS's rivals under max_autotune none can."""
    tuned = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    return target != "reference" and settings.numerics != "strict" and not tuned
