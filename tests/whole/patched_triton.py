"""A norm as a Triton kernel of the user's, for test_patched.py. Never launched; its import needs triton and no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def rms_kernel(x, weight, y, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * width + at)
    r = tl.rsqrt(tl.sum(value * value, 0) / width + 1e-6)
    tl.store(y + row * width + at, value * r * tl.load(weight + at))


class TritonNorm(torch.autograd.Function):
    """As Liger-Kernel writes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = torch.empty_like(x)
        rms_kernel[(x.shape[0],)](x, weight, y, x.shape[1], BLOCK=64)
        return y


triton_norm: Callable[..., Tensor] = TritonNorm.apply
