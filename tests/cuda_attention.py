"""Graphs with CUDA's operations of attention, forward and backward, on tensors without memory."""

from __future__ import annotations

import math
import operator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

aten, prims = torch.ops.aten, torch.ops.prims
BATCH, TOKENS, HEADS, SIZE = 2, 128, 4, 16


def on_cuda(
    op: str,
    wanted: bool = False,
    dropout: float = 0.0,
    hidden: float = -math.inf,
    *,
    tokens: int = TOKENS,
    size: int = SIZE,
    dtype: torch.dtype = torch.bfloat16,
    left: int | None = None,
    returned: int = 0,
    scale: float = 0.5,
) -> fx.Graph:
    """Of `op`, "efficient" or "cudnn", by a mask of 0 and `hidden` for all later tokens, and for those more than `left`
    before; is its gradient `wanted`? The graph returns the forward's result of number `returned`, and the gradients."""
    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = (BATCH, HEADS, tokens, size)
        q, k, v, g = (graph.placeholder(name) for name in "qkvg")
        for node in (q, k, v, g):
            node.meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")

        def call(target: object, *args: object, **kwargs: object) -> fx.Node:
            node = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
            fakes = tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
            node.meta["val"] = target(*fakes[0], **fakes[1])  # type: ignore[operator]
            return node

        at = call(prims.iota.default, tokens, start=0, step=1, dtype=torch.int64, device="cuda", requires_grad=False)
        own = call(aten.unsqueeze.default, at, 1)
        stays = call(aten.le.Tensor, at, own)
        if left is not None:
            stays = call(aten.logical_and.default, stays, call(aten.ge.Tensor, at, call(aten.sub.Tensor, own, left)))
        zero, never = (
            call(aten.full.default, [], x, dtype=dtype, device="cuda", pin_memory=False) for x in (0.0, hidden)
        )
        mask = call(aten.expand.default, call(aten.where.self, stays, zero, never), [BATCH, HEADS, tokens, tokens])
        get = operator.getitem
        if op == "efficient":
            out = call(aten._scaled_dot_product_efficient_attention.default, q, k, v, mask, True, dropout, scale=scale)
            results = [call(get, out, i) for i in range(4)]
            o, lse, seed, offset = (call(aten.detach.default, x) for x in results)
            back = call(
                aten._scaled_dot_product_efficient_attention_backward.default,
                g, q, k, v, mask, o, lse, seed, offset, dropout, [True, True, True, wanted], scale=scale,
            )  # fmt: skip
        else:
            out = call(aten._scaled_dot_product_cudnn_attention.default, q, k, v, mask, True, dropout, scale=scale)
            results = [call(get, out, i) for i in range(9)]
            o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = results
            back = call(
                aten._scaled_dot_product_cudnn_attention_backward.default,
                g, q, k, v, o, lse, seed, offset, mask, cum_q, cum_k, max_q, max_k, dropout, False, scale=scale,
            )  # fmt: skip
        graph.output([results[returned], *(call(get, back, i) for i in range(4 if wanted else 3))])
    return graph
