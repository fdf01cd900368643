"""Rows of a loss on CUDA tensors, by a Triton kernel (what they are: ops/loss.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    jit: Any = triton.jit
except ImportError:  # on a machine whose torch has no Triton nothing launches this

    def jit(function: Any) -> Any:
        """The function as it is."""
        return function


ROWS, COLUMNS, FEATURES, WARPS = 32, 128, 64, 4
"""Of scores that are computed again, what a program holds at a time, and with how many warps. Where all of 4096 rows
are, of 32000 columns and a width of 2048, that takes 9.3 ms; where none is, 0.05 (H200)."""
OF_TARGETS = 256
"""Rows of a program that writes their targets."""


@jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    x,
    w,
    bias,
    m,
    n,
    inside,
    features,
    x_m,
    x_k,
    w_n,
    w_k,
    scale,
    BIAS: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """scale (x @ w.T + bias) of some rows and columns, in float32; `inside` says which rows are asked for."""
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, features, K):
        k = start + tl.arange(0, K)
        within = k < features
        left = tl.load(x + m[:, None] * x_m + k[None, :] * x_k, inside[:, None] & within[None, :], 0.0)
        right = tl.load(w + n[None, :] * w_n + k[:, None] * w_k, (n >= 0)[None, :] & within[:, None], 0.0)
        total = tl.dot(left, right, total)
    if BIAS:
        total += tl.load(bias + n, n >= 0, 0.0).to(tl.float32)[None, :]
    return total * scale


@jit  # type: ignore[untyped-decorator]
def rows_of(  # type: ignore[no-untyped-def]
    gradient, loss, factor, total, target, slope, x, w, bias,
    rows, columns, features, pitch, x_m, x_k, w_n, w_k, scale, limit,
    SLOPE: tl.constexpr, AGAIN: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    inside = m < rows
    others = tl.load(total + m, inside, 0.0)
    t = tl.load(target + m, inside, 0)
    mine = libdevice.log1p(others)
    scale_of_row = 1.0 / (1.0 + others)
    first = -others
    if SLOPE:
        first = first * tl.load(slope + m, inside, 0.0)
    if AGAIN:
        far = inside & ~(others < limit)
        if tl.max(far.to(tl.int32), 0) > 0:
            top = tl.full((M,), float("-inf"), tl.float32)
            whole = tl.zeros((M,), tl.float32)
            there = tl.zeros((M,), tl.float32)
            for start in range(0, columns, N):
                n = start + tl.arange(0, N)
                n = tl.where(n < columns, n, -1)
                s = _scores(x, w, bias, m, n, far, features, x_m, x_k, w_n, w_k, scale, BIAS, K, M, N)
                s = tl.where((n >= 0)[None, :], s, float("-inf"))
                higher = tl.maximum(top, tl.max(s, 1))
                relative = tl.where(higher == float("-inf"), 0.0, higher)  # of a bias, scores may be -inf
                whole = whole * tl.exp(top - relative) + tl.sum(tl.exp(s - relative[:, None]), 1)
                there += tl.sum(tl.where(n[None, :] == t[:, None], s, 0.0), 1)
                top = higher
            for start in range(0, columns, N):
                n = start + tl.arange(0, N)
                n = tl.where(n < columns, n, -1)
                s = _scores(x, w, bias, m, n, far, features, x_m, x_k, w_n, w_k, scale, BIAS, K, M, N)
                e = tl.exp(s - top[:, None]).to(gradient.dtype.element_ty)
                written = far[:, None] & (n >= 0)[None, :] & (n[None, :] != t[:, None])
                tl.store(gradient + m[:, None] * pitch + n[None, :], e, written)
            mine = tl.where(far, tl.log(whole) + top - there, mine)
            first = tl.where(far, tl.exp(there - top) - whole, first)
            scale_of_row = tl.where(far, 1.0 / whole, scale_of_row)
    stored = first.to(gradient.dtype.element_ty)
    rounded = stored.to(tl.float32)
    size = tl.abs(first)
    ratio = tl.where((size > 1e-30) & (size < 1e30), first / rounded, 1.0)  # as ops/loss.py has it
    tl.store(gradient + m * pitch + t, stored, inside)
    tl.store(loss + m, mine, inside)
    tl.store(factor + m, scale_of_row * ratio, inside)


def finish(
    gradient: Tensor, loss: Tensor, factor: Tensor, total: Tensor, target: Tensor, slope: Tensor | None,
    x: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: float, limit: float,
) -> None:  # fmt: skip
    """As ops/loss.py has it, on the tensors' device. Rows of `gradient` are contiguous."""
    rows, columns = gradient.shape
    if not rows:
        return
    again = x is not None and weight is not None
    left, right = (x, weight) if again else (gradient, gradient)
    assert left is not None and right is not None
    with torch.cuda.device(gradient.device):
        rows_of[-(-rows // ROWS),](
            gradient, loss, factor, total.contiguous(), target.contiguous(),
            total if slope is None else slope.contiguous(), left, right,
            total if bias is None else bias.contiguous(),
            rows, columns, left.shape[1] if again else 0, gradient.stride(0), *left.stride(), *right.stride(),
            scale, limit, SLOPE=slope is not None, AGAIN=again, BIAS=bias is not None,
            M=ROWS, N=COLUMNS, K=FEATURES, num_warps=WARPS,
        )  # fmt: skip


@jit  # type: ignore[untyped-decorator]
def targets_of(  # type: ignore[no-untyped-def]
    gradient, factor, loss, target, hot, rest, slope, rows, pitch, loss_m, target_m, hot_m, rest_m, slope_m,
    SLOPE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    inside = m < rows
    of_row = tl.load(factor + m, inside, 1.0)
    mine = tl.load(loss + m * loss_m, inside, 0.0)
    t = tl.load(target + m * target_m, inside, 0)
    of_hot, of_rest = tl.load(hot + m * hot_m, inside, 1.0), tl.load(rest + m * rest_m, inside, 0.0)
    less_one = libdevice.expm1(-mine)
    there = tl.where(of_hot < of_rest, tl.exp(-mine) - of_hot, of_rest + less_one)
    most = tl.abs(there) >= -0.25 * less_one
    if SLOPE:
        there = there * tl.load(slope + m * slope_m, inside, 0.0)
    value = there / of_row
    stored = value.to(gradient.dtype.element_ty)
    size = tl.abs(value)
    ratio = tl.where(most & (size > 1e-30) & (size < 1e30), value / stored.to(tl.float32), 1.0)  # as ops/loss.py has it
    tl.store(gradient + m * pitch + t, stored, inside)
    tl.store(factor + m, of_row * ratio, inside)


def finish_targets(
    gradient: Tensor, factor: Tensor, loss: Tensor, target: Tensor, hot: Tensor, rest: Tensor, slope: Tensor | None
) -> None:
    """As ops/loss.py has it, on the tensors' device, in one launch for some twenty. Rows of `gradient` are contiguous,
    and so is `factor`."""
    rows = gradient.shape[0]
    if not rows:
        return
    columns = [t.stride(0) for t in (loss, target, hot, rest, loss if slope is None else slope)]
    with torch.cuda.device(gradient.device):
        targets_of[-(-rows // OF_TARGETS),](
            gradient, factor, loss, target, hot, rest, loss if slope is None else slope, rows, gradient.stride(0),
            *columns, SLOPE=slope is not None, M=OF_TARGETS,
        )  # fmt: skip
