"""Attention by a mask that hides exactly the later tokens is causal attention.

Some models build that mask as a tensor [tokens, tokens], as transformers does whenever it is traced, and attention then
reads it, and multiplies what it hides. With `is_causal` the same kernel reads no mask and skips the tiles that are
hidden. A mask qualifies if no input enters it, and its value is that of the lower triangle: so it is computed.

What is added to a hidden score is minus infinity, or a number so low that its weight is 0. For cuDNN torch turns
booleans into -65504 (`convert_boolean_attn_mask_cudnn` of its attention.cpp), so there that number hides, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from coda_inductor.patterns import graph as g
from coda_inductor.patterns.attention import FLAG, Call, attention
from coda_inductor.patterns.constants import constant, made_of, of_memory_that_is_written, structure
from coda_inductor.patterns.effects import draws, ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.write.strides import unguarded

WIDE = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of masks whose least number no score outweighs."""
CUDNN = -65504.0
"""What torch adds to scores for cuDNN where a mask of booleans hides."""


@dataclass(frozen=True, slots=True)
class Causal:
    """A mask that attention reads no more: its node, its shape and the user's line."""

    node: str
    shape: str
    source: str


def skip_hidden(graph: fx.Graph) -> tuple[Causal, ...]:
    """Rewrites attention by causal masks, in place."""
    calls = [*masked(graph)]
    if not calls:
        return ()
    overwritten, found, looked = of_memory_that_is_written(graph), list[Causal](), dict[tuple[str, bool, float], bool]()
    for mask in dict.fromkeys(map(mask_of, calls)):
        its = [call for call in calls if mask_of(call) is mask]
        if not all(square(call) and same_results(call) for call in its):
            continue
        most = min(map(hiding, its))
        how = structure(mask), overwritten.isdisjoint(made_of(mask)), most
        if how not in looked:  # each layer makes its own of booleans, all in the same way
            looked[how] = is_causal(constant(mask, overwritten), most)
        if looked[how]:
            for call in its:
                call.node.args, call.node.kwargs = causal_arguments(call)
            found.append(Causal(mask.name, str([*mask.meta["val"].shape]), g.source_line(mask)))
    if found:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
    return tuple(found)


def masked(graph: fx.Graph) -> Iterator[Call]:
    """The operations of attention that read a mask, are not causal besides, and drop nothing."""
    for call in attention(graph):
        mask = call.given[call.masked_by] if call.masked_by else None
        if isinstance(mask, fx.Node) and call.given[FLAG] is False and not draws(call.node) and scaled(call.given):
            yield call


def mask_of(call: Call) -> fx.Node:
    """The mask that it reads, before it is expanded over heads and samples."""
    mask: fx.Node = call.given[call.masked_by or ""]
    return g.root(mask, lambda n: n.target is aten.expand.default)


def hiding(call: Call) -> float:
    """The greatest number that hides a score. The least of float16 does not by itself: kernels have scores in float32,
    where those of float16's queries and keys may lie further apart."""
    mask = g.tensor(mask_of(call))
    if mask is not None and "cudnn" in str(call.node.target):
        return CUDNN
    return torch.finfo(mask.dtype).min if mask is not None and mask.dtype in WIDE else -math.inf


def scaled(given: dict[str, Any]) -> bool:
    """Is minus infinity still that behind the scale? Causal attention hides before it scales."""
    scale = given.get("scale")
    return scale is None or (isinstance(scale, float) and scale > 0)


def square(call: Call) -> bool:
    """Are there as many queries as keys, and has the mask a number for each pair?"""
    query, key, mask = (g.tensor(n) for n in (call.given["query"], call.given["key"], mask_of(call)))
    if query is None or key is None or mask is None:
        return False
    sizes = query.shape[-2], key.shape[-2], *mask.shape[-2:]
    return mask.dim() > 1 and all(isinstance(s, int) for s in sizes) and len(set(sizes)) == 1


def causal_arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the same operation without the mask."""
    return call.arguments(**{call.masked_by or "": None, FLAG: True})


def same_results(call: Call) -> bool:
    """Would the operation without the mask give results of the same sizes, strides and dtypes? Not if one is the mask's
    gradient."""
    args, kwargs = fx.map_arg(causal_arguments(call), lambda n: n.meta["val"])
    with unguarded(call.node):
        made = call.node.target(*args, **kwargs)  # type: ignore[operator]
    return [*map(form, tree_leaves(made))] == [*map(form, tree_leaves(call.node.meta["val"]))]


def form(value: Any) -> Any:
    """How a result looks, without its numbers."""
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else type(value)


def is_causal(mask: Tensor | None, most: float) -> bool:
    """Does it hide the later tokens, and no other? It is added to scores, and numbers up to `most` hide; one of
    booleans says what stays."""
    if mask is None:
        return False
    with unset_fake_temporarily():
        return hides_later(mask, most)


def hides_later(mask: Tensor, most: float) -> bool:
    """The same, of a tensor that is there."""
    once = [slice(0, 1) if step == 0 else slice(None) for step in mask.stride()]  # what is expanded is looked at once
    one = mask[tuple(once)]
    if one.shape[-2:] != mask.shape[-2:]:
        return False
    stays = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((one == stays).all())
    return bool(((one == 0) == stays).all() and ((one <= most) == ~stays).all())
