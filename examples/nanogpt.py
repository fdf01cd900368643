"""Trains a GPT written in plain PyTorch (LayerNorm, GELU, tied head; float32 weights under autocast, as nanoGPT has
them), by both backends side by side.

    python examples/nanogpt.py                 # GPT-2 XL's widths, 4 layers, on a GPU
    python examples/nanogpt.py --width 768 --heads 12 --layers 12
    python examples/nanogpt.py --small         # on a CPU
"""

from __future__ import annotations

from typing import Any

import side_by_side
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {
    "width": (1600, 64), "layers": (4, 1), "heads": (25, 2), "vocabulary": (50304, 256), "batch": (8, 2),
    "length": (1024, 128),
}  # fmt: skip


class Block(nn.Module):
    """Attention, then an MLP, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Tokens and the ones that follow them -> the loss."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def main() -> dict[str, Any]:
    chosen = side_by_side.arguments(__doc__, SIZES)

    def make(backend: str) -> side_by_side.Step:
        torch.manual_seed(0)
        model = GPT(chosen.width, chosen.layers, chosen.heads, chosen.vocabulary, chosen.length).to(chosen.device)
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        text = side_by_side.batches(chosen.batch, chosen.length, chosen.device)

        def step() -> Tensor:
            with torch.autocast(chosen.device, torch.bfloat16):
                loss: Tensor = compiled(*next(text))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    tokens = chosen.batch * chosen.length
    case = f"GPT, width {chosen.width}, {chosen.layers} layers, {tokens} tokens, autocast, AdamW"
    return side_by_side.compare(case, make, chosen, tokens)


if __name__ == "__main__":
    main()
