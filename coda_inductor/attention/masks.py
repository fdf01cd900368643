"""Attention by a mask that hides exactly the later tokens is causal attention; by one that hides nothing, attention;
and by one that shows a window of tokens, attention that looks no further.

Some models build such masks as tensors [tokens, tokens], as transformers does whenever it is traced: of decoders the
first, of encoders the second. Attention then reads the mask, and multiplies what it hides. With `is_causal` the same
kernel reads no mask and skips the tiles that are hidden; for windows there is another kernel (windows.py). A mask
qualifies if no input enters it: then it is computed.

What is added to a hidden score is minus infinity, or a number so low that its weight is 0. For cuDNN torch turns
booleans into -65504 (`convert_boolean_attn_mask_cudnn` of its attention.cpp), so there that number hides, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from coda_inductor.attention.calls import FLAG, Call, attention
from coda_inductor.attention.windows import LATER, NOTHING, Window, by_window, steps, write
from coda_inductor.ops.attention import seen as visible
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.constants import constant, made_of, of_memory_that_is_written, structure
from coda_inductor.patterns.effects import draws, ordered
from coda_inductor.patterns.graph import aten
from coda_inductor.write.strides import unguarded

WIDE = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of masks whose least number no score outweighs."""
CUDNN = -65504.0
"""What torch adds to scores for cuDNN where a mask of booleans hides."""


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask that attention reads no more: its node, its shape, what it hides, the user's line, and the operations that
    nobody runs any more."""

    node: str
    shape: str
    hides: str
    source: str
    absorbed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its own, among those who absorb operations."""
        return f"mask {self.node}"

    @classmethod
    def of(cls, node: fx.Node, window: Window, made: list[fx.Node]) -> Mask:
        """The record of a mask and of what was made for it, once what nobody reads is gone."""
        gone = tuple(n.name for n in dict.fromkeys(made) if not n.users)
        return cls(node.name, str([*node.meta["val"].shape]), window.hides, g.source_line(node), gone)


def skip_masks(graph: fx.Graph, windows: bool = False) -> tuple[Mask, ...]:
    """Rewrites attention by such masks, in place; by another kernel only if `windows` may be used."""
    calls = defaultdict[fx.Node, list[Call]](list)
    for call in masked(graph):
        calls[mask_of(call)].append(call)
    if not calls:
        return ()
    overwritten, found = of_memory_that_is_written(graph), dict[fx.Node, tuple[Window, list[fx.Node]]]()
    looked = dict[tuple[str, bool, float], Window | None]()
    for mask, its in calls.items():
        most = min(map(hiding, its))
        how = structure(mask), overwritten.isdisjoint(made_of(mask)), most
        if how not in looked:  # each layer makes its own of booleans, all in the same way
            looked[how] = shows(constant(mask, overwritten), most)
        made = made_of(mask) + [call.mask for call in its]
        if (window := looked[how]) and rewritten(graph, its, window, windows):
            found[mask] = window, made
    if found:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
    return tuple(Mask.of(mask, *how) for mask, how in found.items())


def rewritten(graph: fx.Graph, calls: list[Call], window: Window, windows: bool) -> bool:
    """Has the operations give the same without their mask, if they can."""
    if windows and all(map(hides_alike, calls)) and by_window(calls, window) and (both := steps(calls)):
        for step in both:
            write(graph, step, window)
        return True
    if window in (LATER, NOTHING) and all(skips(call, window) for call in calls):
        for call in calls:
            call.node.args, call.node.kwargs = without_mask(call, window)
        return True
    return False


def masked(graph: fx.Graph) -> Iterator[Call]:
    """The operations of attention that read a mask, and are not causal besides."""
    for call in attention(graph):
        if g.tensor(call.mask) is not None and call.given[FLAG] is False:
            yield call


def mask_of(call: Call) -> fx.Node:
    """The mask that it reads, before it is expanded over heads and samples."""
    return g.root(call.mask, lambda n: n.target is aten.expand.default)


def hiding(call: Call) -> float:
    """The greatest number that hides a score. The least of float16 does not by itself: kernels have scores in float32,
    where those of float16's queries and keys may lie further apart."""
    mask = g.tensor(mask_of(call))
    if mask is not None and "cudnn" in str(call.node.target):
        return CUDNN
    return torch.finfo(mask.dtype).min if mask is not None and mask.dtype in WIDE else -math.inf


def skips(call: Call, window: Window) -> bool:
    """Does the operation without the mask give the same?"""
    return (window == NOTHING or hides_alike(call)) and same_results(call, window)


def hides_alike(call: Call) -> bool:
    """Does a kernel that hides tokens by their places hide as the mask does? What drops scores draws for each by its
    place, whatever the mask; it stays where more than the mask would change."""
    return square(call) and scaled(call.given) and not draws(call.node)


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


def without_mask(call: Call, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the same operation without the mask."""
    assert call.masked_by is not None
    return call.arguments(**{call.masked_by: None, FLAG: window == LATER})


def same_results(call: Call, window: Window) -> bool:
    """Would the operation without the mask give results of the same sizes, strides and dtypes? Not if one is the mask's
    gradient."""
    args, kwargs = fx.map_arg(without_mask(call, window), lambda n: n.meta["val"])
    with unguarded(call.node):
        made = call.node.target(*args, **kwargs)  # type: ignore[operator]
    return [*map(form, tree_leaves(made))] == [*map(form, tree_leaves(call.node.meta["val"]))]


def form(value: Any) -> Any:
    """How a result looks, without its numbers."""
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else type(value)


def shows(mask: Tensor | None, most: float) -> Window | None:
    """The window that it shows; None for anything else. It is added to scores, and numbers up to `most` hide; one of
    booleans says what stays."""
    if mask is None:
        return None
    with unset_fake_temporarily():
        return shown_by(mask, most)


def shown_by(mask: Tensor, most: float) -> Window | None:
    """The same, of a tensor that is there."""
    once = [slice(0, 1) if step == 0 else slice(None) for step in mask.stride()]  # what is expanded is looked at once
    one = mask[tuple(once)]
    seen, hidden = (one, ~one) if mask.dtype == torch.bool else (one == 0, one <= most)
    if bool(seen.all()):
        return NOTHING
    if mask.dim() < 2 or one.shape[-2:] != mask.shape[-2:] or mask.shape[-2] != mask.shape[-1]:
        return None
    first, tokens = seen.flatten(0, -3)[0] if seen.dim() > 2 else seen, mask.shape[-1]
    left, right = int(first[:, 0].sum()) - 1, int(first[0].sum()) - 1
    if min(left, right) < 0:
        return None
    window = Window(*(n if n < tokens - 1 else None for n in (left, right)))
    stays = visible(tokens, window.left, window.right, mask.device)
    return window if bool((seen == stays).all() and (hidden == ~stays).all()) else None
