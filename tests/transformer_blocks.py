"""Transformer blocks of every kind of norm and MLP, and the gradients of steps that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS = 16, 2


class Block(nn.Module):
    """A transformer layer: pre-, post- or parallel-norm, with RMSNorm or LayerNorm, gated or not."""

    def __init__(self, kind: str, norm: str, gated: bool) -> None:
        super().__init__()
        self.kind, self.gated = kind, gated
        make = (lambda: nn.LayerNorm(D)) if norm == "layer" else (lambda: nn.RMSNorm(D, eps=1e-5))
        self.n1, self.n2 = make(), make()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.gate, self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]

    def mlp(self, x: Tensor) -> Tensor:
        gate = F.silu(self.gate(x)) if self.gated else F.gelu(self.gate(x))
        return self.down(gate * self.up(x) if self.gated else gate)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "parallel":
            return x + self.attention(self.n1(x)) + self.mlp(self.n2(x))
        if self.kind == "post":
            x = self.n1(x + self.attention(x))
            return self.n2(x + self.mlp(x))  # type: ignore[no-any-return]
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


KINDS = [
    (kind, norm, gated) for kind in ("pre", "post", "parallel") for norm in ("layer", "rms") for gated in (True, False)
]


def stack(*kind: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Block(*kind), Block(*kind))


def steps(run: Callable[[Tensor], Tensor], model: nn.Module, xs: list[Tensor], wants: bool) -> list[Tensor | None]:
    """Outputs and gradients of two steps."""
    model.zero_grad()
    out: list[Tensor | None] = []
    for x in xs:
        x = x.clone().requires_grad_(wants and x.is_floating_point())
        y = run(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        out += [y.detach(), x.grad]
    return out + [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
