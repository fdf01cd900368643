"""Models whose attention has keys and values that several heads share, and how they are compared with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from evaluate import strict_reference
from torch import Tensor, nn

from coda_inductor.inductor.joint_pass import REPORTS

aten = torch.ops.aten
BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 128, 8, 2, 16
WIDTH = HEADS * SIZE


Repeat = Callable[[Tensor], Tensor]
"""Of keys or values [batch, length, groups, size], those of every head [batch, heads, length, size]."""
Made = Callable[[Tensor], Tensor]
"""What values are made by, of the same shape; they are then read in two places."""


def as_transformers(x: Tensor) -> Tensor:
    batch, length, groups, _ = x.shape
    return x.transpose(1, 2)[:, :, None].expand(-1, -1, HEADS // groups, -1, -1).reshape(batch, HEADS, length, SIZE)


def heads_last(x: Tensor) -> Tensor:
    batch, length, groups, _ = x.shape
    x = x[:, :, :, None].expand(-1, -1, -1, HEADS // groups, -1).reshape(batch, length, HEADS, SIZE)
    return x.transpose(1, 2)


def permuted(x: Tensor) -> Tensor:
    batch, length, groups, _ = x.shape
    x = x[:, :, :, None].expand(-1, -1, -1, HEADS // groups, -1).permute(0, 2, 3, 1, 4)
    return x.reshape(batch, HEADS, length, SIZE)


def interleaved(x: Tensor) -> Tensor:
    return x.transpose(1, 2).repeat_interleave(HEADS // x.shape[2], dim=1)


def expanded(x: Tensor) -> Tensor:
    """Of one head for all: without a copy."""
    batch, length, _, _ = x.shape
    return x.transpose(1, 2).expand(batch, HEADS, length, SIZE)


class Attention(nn.Module):
    """A norm, then attention whose keys and values serve several heads each."""

    def __init__(
        self, repeat: Repeat, groups: int = GROUPS, made: Made | None = None, eager: bool = False, masked: bool = False
    ) -> None:
        super().__init__()
        self.repeat, self.groups, self.made, self.eager, self.masked = repeat, groups, made, eager, masked
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qo")
        self.k, self.v = (nn.Linear(WIDTH, groups * SIZE, bias=False) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q = self.q(n).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k, v = (w(n).unflatten(-1, (self.groups, SIZE)) for w in (self.k, self.v))
        v = self.made(v) if self.made else v
        keys, values = self.repeat(k), self.repeat(v)
        if self.eager:
            y = torch.matmul(torch.softmax(q @ keys.transpose(2, 3) / 4, -1), values)
        else:
            seen = x.detach()[:, None, None, :, 0] < 1.5 if self.masked else None
            y = F.scaled_dot_product_attention(q, keys, values, seen, is_causal=seen is None)
        flat = v.flatten(2).square().cumsum(1).sum(-1, keepdim=True) if self.made else 0
        out: Tensor = x + self.o(y.transpose(1, 2).flatten(2)) + 1e-2 * flat
        return out


def model(*kind: Any, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(*kind, **more) for _ in range(3)), nn.Linear(WIDTH, WIDTH)).double()


def inputs(length: int = LENGTH) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, length, WIDTH, dtype=torch.float64, requires_grad=True)


def equals_eager(plain: nn.Module, x: Tensor, run: bool, **how: Any) -> int:
    """Output and all gradients, with Regions; how many attentions read keys once."""
    given = [x, *plain.parameters()]
    y = plain(x)
    wanted = [y, *torch.autograd.grad(y.sin().sum(), given)]
    with strict_reference(run=run):
        REPORTS.clear()
        y = torch.compile(plain, backend="coda", **how)(x)
        found = [y, *torch.autograd.grad(y.sin().sum(), given)]
    assert sum(len(r.sites) for r in REPORTS) >= 2
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < 1e-10
    return sum(len(r.grouped) for r in REPORTS)
