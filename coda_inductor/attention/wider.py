"""Attention with features beside queries and keys, in place of attention with a mask (features.py says which)."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from coda_inductor.attention.calls import CUDNN, CUDNN_BACKWARD, SAVED, Call, padded
from coda_inductor.attention.positions import OF_MASK, Addend, Features, in_order, static
from coda_inductor.attention.windows import erase, index
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.layout import major_to_minor
from coda_inductor.write.strides import restrided
from coda_inductor.write.writing import Writing

FEATURES = 3
"""Their dimension of [batch, heads, tokens, features], which is the last in memory, too."""


def write(graph: fx.Graph, made: Features) -> None:
    """The step without the mask, by cuDNN, in place of what it was."""
    forward = made.step.forward
    by = forward.scale
    writing = Writing(graph, forward.node)
    order = [*(d for d in major_to_minor(forward.node.meta["val"][0]) if d != FEATURES), FEATURES]
    asked = [features_of_queries(writing, made, a, by) for a in made.mask.addends]
    has = [features_of_keys(writing, made, a) for a in made.mask.addends]
    query = beside(writing, forward, "query", asked, order)
    key = beside(writing, forward, "key", has, order)
    value, saved = (forward.given[name] for name in ("value", "compute_log_sumexp"))
    node = writing.instead(forward.node, CUDNN, query, key, value, None, saved, 0.0, False, False, scale=by)
    own = {i: writing.call(forward.node, operator.getitem, node, i) for i in SAVED}
    for call in made.step.backwards:
        there = Writing(graph, call.node)
        sizes = [x.meta["val"].shape[2] for x in (query, key)]
        read = call.gradient, query, key, value, *own.values(), None, None, None, *sizes, 0.0, False
        back = there.instead(call.node, CUDNN_BACKWARD, *read, scale=by)
        gradients(there, made, call, [there.call(call.node, operator.getitem, back, i) for i in range(3)], by)
        erase(call.node)
    for old in [r for r in forward.node.users if index(r) == 0]:
        old.replace_all_uses_with(restrided(own[0], old.meta["val"], writing.call))
    erase(forward.node)


def beside(writing: Writing, call: Call, name: str, features: Sequence[fx.Node], order: Sequence[int]) -> fx.Node:
    """Queries or keys with features beside them, and zeros up to a width that cuDNN takes, in this order in memory."""
    like, operand = call.node, call.given[name]
    value = operand.meta["val"]
    outer = value.shape[:-1]
    found = [
        operand,
        *(writing.call(like, aten.expand.default, x, [*outer, x.meta["val"].shape[-1]]) for x in features),
    ]
    width = sum(x.meta["val"].shape[-1] for x in found)
    if (more := padded(width) - width) > 0:
        how = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        found.append(writing.call(like, aten.full.default, [*outer, more], 0.0, **how))
    turned = [writing.call(like, aten.permute.default, x, [*order]) for x in found]
    joined = writing.call(like, aten.cat.default, turned, FEATURES)
    return writing.call(like, aten.permute.default, joined, [order.index(d) for d in range(value.dim())])


def features_of_queries(writing: Writing, made: Features, addend: Addend, by: float) -> fx.Node:
    """[batch or 1, heads or 1, queries or 1, features]: the addend, over what scores are multiplied by."""
    size, like = made.mask.axes.size, made.step.forward.node
    outside = [list(dim) for dim in made.mask.dims[:-1]]
    own = [i for dim in addend.dims for i in dim]
    wanted = [i for dim in outside for i in dim]
    flat = writing.call(like, aten.reshape.default, addend.node, [static(size[i]) for i in own])
    order = in_order(addend.dims, [*wanted, *addend.keys])
    node = writing.call(like, aten.permute.default, flat, order)
    ones = [static(size[i]) if i in own else 1 for i in [*wanted, *addend.keys]]
    node = writing.call(like, aten.reshape.default, node, ones)
    full = [static(size[i]) for i in [*wanted, *addend.keys]]
    node = writing.call(like, aten.expand.default, node, full)
    sizes = [static(made.mask.axes.total(dim)) for dim in outside]
    node = writing.call(like, aten.reshape.default, node, [*sizes, made.of(addend)])
    divided = writing.call(like, aten.mul.Tensor, node, 1 / by)
    most = torch.finfo(divided.meta["val"].dtype).max  # infinity times 0 would be no number
    return writing.call(like, aten.clamp_max.default, writing.call(like, aten.clamp_min.default, divided, -most), most)


def features_of_keys(writing: Writing, made: Features, addend: Addend) -> fx.Node:
    """[keys, features]: 1 for the feature of the key's place along the addend's axes, else 0."""
    size, like, number = made.mask.axes.size, made.step.forward.node, made.of(addend)
    value = made.step.forward.given["key"].meta["val"]
    how = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
    every = writing.call(like, prims.iota.default, number, start=0, step=1, **how)
    axes = made.mask.dims[-1]
    at = writing.call(like, aten.view.default, every, [static(size[i]) if i in addend.keys else 1 for i in axes])
    at = writing.call(like, aten.expand.default, at, [static(size[i]) for i in axes])
    at = writing.call(like, aten.reshape.default, at, [value.shape[-2], 1])
    there = writing.call(like, aten.eq.Tensor, at, every)
    return writing.call(like, prims.convert_element_type.default, there, value.dtype)


def gradients(writing: Writing, made: Features, call: Call, new: Sequence[fx.Node], by: float) -> None:
    """What was made of the gradients, of those with features."""
    mask, size = made.mask, made.mask.axes.size
    width = call.given["query"].meta["val"].shape[-1]
    for old in call.node.users:
        if index(old) != OF_MASK:
            own = writing.call(old, aten.slice.Tensor, new[index(old)], FEATURES, 0, old.meta["val"].shape[-1])
            old.replace_all_uses_with(restrided(own, old.meta["val"], writing.call))
    for part in made.parts:
        first, keys = width + made.of_part(part), mask.known(part.dims)
        last, like, value = first + static(mask.axes.total(keys)), part.node, part.node.meta["val"]
        node = writing.call(like, aten.slice.Tensor, new[0], FEATURES, first, last)
        node = writing.call(like, aten.mul.Tensor, node, 1 / by)
        split = [*(i for dim in mask.dims[:-1] for i in dim), *keys]
        node = writing.call(like, aten.reshape.default, node, [static(size[i]) for i in split])
        node = writing.call(like, aten.permute.default, node, [split.index(i) for dim in part.dims for i in dim])
        node = writing.call(like, aten.reshape.default, node, [*value.shape])
        like.replace_all_uses_with(restrided(node, value, writing.call))
