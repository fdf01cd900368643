"""Trains a Llama written in plain PyTorch in FP8, as torchao does, by both backends side by side.

    python examples/float8_llama.py                      # rowwise, 2 layers of width 2048, on a GPU
    python examples/float8_llama.py --recipe tensorwise  # or rowwise_with_gw_hp; bf16 needs no torchao
    python examples/float8_llama.py --small              # on a CPU

Weights are float32, products FP8 by autocast and torchao's recipe; the head stays in bfloat16.
"""

from __future__ import annotations

from typing import Any

import side_by_side
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD, BYTES = 64, 256
SIZES = {
    "width": (2048, 64),
    "inner": (8192, 128),
    "layers": (2, 1),
    "batch": (8, 2),
    "length": (2048, 64),
    "seed": (0, 0),
}


class Layer(nn.Module):
    """Attention with rotary embeddings, then SwiGLU, each behind an RMSNorm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = self.first(x)
        q, k, v = (w(n).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        n = self.second(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))  # type: ignore[no-any-return]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, tokens, head] with the two halves of each head turned by its position."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class Model(nn.Module):
    """Bytes [batch, tokens] -> the logits of the next ones."""

    def __init__(self, width: int, inner: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, BYTES, bias=False)
        angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.cos, self.sin = nn.Buffer(angles.cos()), nn.Buffer(angles.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def main() -> dict[str, Any]:
    chosen = side_by_side.arguments(__doc__, SIZES, recipe="rowwise")

    def make(backend: str) -> side_by_side.Step:
        torch.manual_seed(chosen.seed)
        with torch.device(chosen.device):
            model = Model(chosen.width, chosen.inner, chosen.layers, chosen.length)
        if chosen.recipe != "bf16":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(chosen.recipe)
            convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "head")
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
        text = side_by_side.batches(chosen.batch, chosen.length, chosen.device, chosen.seed)

        def step() -> Tensor:
            ids, following = next(text)
            with torch.autocast(chosen.device, torch.bfloat16):
                loss = F.cross_entropy(compiled(ids).flatten(0, 1).float(), following.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    tokens = chosen.batch * chosen.length
    case = f"Llama in {chosen.recipe}, width {chosen.width}, {chosen.layers} layers, {tokens} tokens, autocast, AdamW"
    case += f", seed {chosen.seed}" if chosen.seed else ""
    return side_by_side.compare(case, make, chosen, tokens)


if __name__ == "__main__":
    main()
