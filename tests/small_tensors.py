"""Small random tensors in float64, and the norm that most programs put between two products."""

from __future__ import annotations

import torch
from torch import Tensor

S = 8


def R(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def X() -> Tensor:
    """[B, T, S] with S features, as many as W has."""
    return R(2, 6, S)


def W() -> Tensor:
    return R(S, S)


def rms(x: Tensor, dim: int = -1) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-5)
