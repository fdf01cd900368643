"""Trace on any machine as torch's CUDA build would: the few operations whose decomposition asks for the device.

A CPU build gives other graphs for attention, F.rms_norm, dropout and LayerNorm. Three of them are composite operations,
so giving the overload a python kernel reaches every spelling of them (modules, functionals, names imported before); the
fourth is one entry of Inductor's decomposition table. Found by comparing traces; checked on torch 2.11 and 2.13.
And what torch traces otherwise of a model on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch._inductor import compile_fx, decomposition
from torch._ops import resolve_key

aten = torch.ops.aten
STEP = 8


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """[B, H, S, D] x3 -> [B, H, S, D], through the kernel that CUDA chooses on a Hopper (torch's sdp_utils.cpp; cuDNN
    has heads of up to 256 there since 9.10)."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    widths = query.shape[-1], value.shape[-1]
    wide = max(widths) > 256
    learned = attn_mask is not None and attn_mask.requires_grad  # only the memory-efficient kernel has its gradient
    even = not any(width % 8 for width in widths) and (16 * dropout_p).is_integer()
    cudnn = half and even and not wide and not learned
    fused = cudnn or attn_mask is None
    if query.dim() != 4 or query.dtype == torch.float64 or (enable_gqa and not (half and fused)):
        out: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    elif attn_mask is None and half and not wide and not cudnn:
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    else:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                hidden = -65504.0 if cudnn else -math.inf
                zero, never = (torch.full((), x, dtype=query.dtype, device=query.device) for x in (0.0, hidden))
                attn_mask = torch.where(attn_mask, zero, never)
            attn_mask = attn_mask if cudnn else aligned(attn_mask).expand(*query.shape[:3], key.shape[2])
        saved = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        kernel = aten._scaled_dot_product_cudnn_attention if cudnn else aten._scaled_dot_product_efficient_attention
        out = kernel(query, key, value, attn_mask, saved, dropout_p, is_causal, scale=scale)[0]
    return out


def aligned(mask: Tensor) -> Tensor:
    """The mask as the memory-efficient kernel reads it: its rows begin at multiples of 8 numbers (torch's
    attention.cpp, `pad_bias`)."""
    *apart, last = mask.stride()
    if last == 1 and not any(n % STEP for n in apart):
        return mask
    keys = mask.shape[-1]
    return F.pad(mask, (0, STEP - keys % STEP))[..., :keys]


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """CUDA has one fused kernel with its own backward; Inductor decomposes both."""
    out: Tensor = aten._fused_rms_norm(x, shape, weight, eps)[0]
    return out


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """CUDA fuses mask and scaling, which Inductor then decomposes into one comparison with random numbers."""
    out: Tensor = aten.native_dropout(x, p, True)[0] if train and p > 0 else x
    return out


def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As torch._refs, but mean and rstd stay float32: the CPU's decomposition rounds them to x's dtype."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    variance, mean = torch.var_mean(wide, dim=dims, unbiased=False, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    out = (wide - mean) * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype), mean, rstd


COMPOSITES: dict[Any, Callable[..., Tensor]] = {
    aten.scaled_dot_product_attention.default: attention,
    aten.rms_norm.default: rms_norm,
    aten.dropout.default: dropout,
}


@cache
def without_gradients_on_meta() -> tuple[Any, ...]:
    """The composite operations (nll_loss, relu6, var_mean, ...) that torch runs on the meta device by a kernel of their
    own, which has no gradient: autograd goes through the composite everywhere else. (torch 2.11: 130, 2.13: 85.)"""
    found, composite = [], DispatchKey.CompositeImplicitAutograd
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None) if namespace == "aten" else None
        keys = (DispatchKey.AutogradCPU, DispatchKey.AutogradMeta)
        if op is not None and [resolve_key(op, key) for key in keys] == [composite, DispatchKey.AutogradMeta]:
            found.append(op)
    return tuple(found)


@contextmanager
def python_kernel(
    op: Any, kernel: Callable[..., Any], key: DispatchKey = DispatchKey.CompositeImplicitAutograd
) -> Iterator[None]:
    """`op` means `kernel` wherever torch's python dispatcher decides, as it does under AOTAutograd."""
    before = op.py_kernels.get(key)
    op.py_kernels[key] = kernel
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        if before is None:
            del op.py_kernels[key]
        else:
            op.py_kernels[key] = before
        op._dispatch_cache.clear()


@contextmanager
def like_cuda() -> Iterator[None]:
    """Inside, compile_fx traces CPU tensors as if they were CUDA's."""
    original = decomposition.select_decomp_table

    def table() -> dict[Any, Callable[..., Any]]:
        return {**original(), aten.native_layer_norm.default: layer_norm}

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(compile_fx, "select_decomp_table", table))
        for op, kernel in COMPOSITES.items():
            stack.enter_context(python_kernel(op, kernel))
        for op in without_gradients_on_meta():
            kernel = partial(op._op_dk, DispatchKey.CompositeImplicitAutograd)
            stack.enter_context(python_kernel(op, kernel, DispatchKey.AutogradMeta))
        yield
