"""The worked examples of architecture.md: half a Llama layer, and squared ReLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Half(nn.Module):
    """From attention's result to the end of the MLP: [M, width] bfloat16 twice to [M, width]."""

    def __init__(self, width: int = 1024, inner: int = 2816) -> None:
        super().__init__()
        self.o = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, attended: Tensor, stream: Tensor) -> Tensor:
        h = stream + self.o(attended)
        n = self.norm(h)
        out: Tensor = h + self.down(F.silu(self.gate(n)) * self.up(n))
        return out


def build(tokens: int = 4096, device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """(model, args) for `coda-inductor graph docs.norm:build`."""
    torch.manual_seed(0)
    x = torch.randn(2, tokens, 1024, dtype=torch.bfloat16, device=device)
    return Half().to(device, torch.bfloat16), (x[0], x[1])


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """(model, args) for `coda-inductor diff docs.norm:small`, which runs both backends: seconds on a CPU."""
    torch.manual_seed(0)
    x = torch.randn(2, 512, 64, dtype=torch.bfloat16)
    return Half(64, 192).bfloat16(), (x[0], x[1])


class Squared(nn.Module):
    """[M, 512] bfloat16 to the same, with squared ReLU between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*widths, bias=False) for widths in ((512, 1024), (1024, 512)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out


def squared() -> tuple[nn.Module, tuple[Tensor]]:
    """(model, args) for `coda-inductor graph docs.norm:squared --mode train`."""
    return Squared().bfloat16(), (torch.randn(4096, 512, dtype=torch.bfloat16),)
