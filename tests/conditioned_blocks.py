"""Diffusion transformers whose blocks are told a condition for each image: of what shifts, scales and gates tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, T, HEADS = 16, 24, 2


class Block(nn.Module):
    """adaLN-Zero: shift, scale and gate of attention and of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(D, D) for _ in range(3))
        self.k = nn.Linear(D, D, bias=False)  # whose gradient would be 0
        self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        """Six of [batch, 1, D]."""
        raise NotImplementedError

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.parts(t)
        n = F.layer_norm(x, (D,)) * (1 + scale) + shift
        q, k, v = (f(n).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + gate * self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        n = F.layer_norm(x, (D,)) * (1 + scale2) + shift2
        out: Tensor = x + gate2 * self.down(F.gelu(self.up(n), approximate="tanh"))
        return out


class Chunks(Block):
    """As DiT, SD3 and Flux have them: chunks of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(D, 6 * D)

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        made: Tensor = self.condition(F.silu(t))[:, None]
        return made.chunk(6, dim=2)


class Table(Chunks):
    """As PixArt and Wan have them: a table of the block's is added to what all blocks share, and then divided."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 6, D))

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        made: Tensor = self.table + self.condition(F.silu(t)).unflatten(1, (6, D))
        return made.chunk(6, dim=1)


class Apart(Chunks):
    """Taken from the table and from the product, and then added."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 1, D))

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        made = self.condition(F.silu(t))[:, None].chunk(6, dim=2)
        return tuple(a + b for a, b in zip(self.table.unbind(0), made, strict=True))


class Model(nn.Module):
    """Two blocks, and a projection behind a last norm. `of_text`: the condition is the mean of a text's product."""

    def __init__(self, block: Callable[[], nn.Module], of_text: bool = False) -> None:
        super().__init__()
        self.blocks, self.of_text = nn.ModuleList([block(), block()]), of_text
        self.text, self.time, self.out = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Linear(D, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = self.time(F.silu(self.text(t)).mean(1) if self.of_text else F.silu(self.text(t[:, 0])))
        for block in self.blocks:
            x = block(x, t)
        out: Tensor = self.out(F.layer_norm(x, (D,)))
        return out


def model(block: Callable[[], nn.Module], of_text: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Model(block, of_text).double()


def inputs(batch: int = 1, tokens: int = T) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, tokens, D, dtype=torch.float64), torch.randn(batch, 5, D, dtype=torch.float64)
