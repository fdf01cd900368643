"""Draws images with a DiT of random weights: its denoising loop, with guidance, by both backends side by side.

    python examples/diffusion.py                 # DiT-XL/2: 28 blocks of width 1152, 16 images of 256 x 256, 10 steps
    python examples/diffusion.py --small         # on a CPU

Each block is compiled by itself, which takes the time of one; the loop around them stays Python.
"""

from __future__ import annotations

from typing import Any

import side_by_side
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {
    "width": (1152, 64), "layers": (28, 2), "heads": (16, 2), "images": (16, 2), "side": (32, 16), "steps": (10, 2),
}  # fmt: skip
CLASSES, CHANNELS, PATCH, GUIDANCE = 1000, 4, 2, 4.0


def waves(t: Tensor, width: int = 256) -> Tensor:
    """Times [images] as sines and cosines [images, width]."""
    angles = t[:, None] * torch.exp(-torch.arange(width // 2, device=t.device) * (9.21 / (width // 2)))
    return torch.cat((angles.cos(), angles.sin()), -1)


class Block(nn.Module):
    """Attention, then an MLP; each image's condition shifts, scales and gates both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(F.silu(c))[:, None].chunk(6, -1)
        n = self.first(x) * (1 + scale) + shift
        q, k, v = (w(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + gate * self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        n = self.second(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(n), approximate="tanh"))  # type: ignore[no-any-return]


class DiT(nn.Module):
    """Noisy latents [images, channels, side, side], times and classes -> the noise."""

    def __init__(self, width: int, layers: int, heads: int, side: int) -> None:
        super().__init__()
        self.patches = nn.Linear(CHANNELS * PATCH**2, width)
        self.places = nn.Parameter(torch.randn((side // PATCH) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(CLASSES + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.head = nn.Linear(width, CHANNELS * PATCH**2)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        side = x.shape[-1]
        h = self.patches(F.pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2)) + self.places
        c = self.time(waves(t).to(x.dtype)) + self.label(label)
        for block in self.blocks:
            h = block(h, c)
        h = self.head(self.norm(h)).transpose(1, 2)
        return F.pixel_shuffle(h.unflatten(2, (side // PATCH, side // PATCH)), PATCH)


def main() -> dict[str, Any]:
    chosen = side_by_side.arguments(__doc__, SIZES)

    def make(backend: str) -> side_by_side.Step:
        torch.manual_seed(0)
        with torch.device(chosen.device):
            model = DiT(chosen.width, chosen.layers, chosen.heads, chosen.side).bfloat16().eval()
            noise = torch.randn(chosen.images, CHANNELS, chosen.side, chosen.side, dtype=torch.bfloat16)
            labels = torch.randint(CLASSES, (chosen.images,))
            both = torch.cat((labels, torch.full_like(labels, CLASSES)))  # with its class, and without one
        for block in model.blocks:
            block.compile(backend=backend)

        @torch.no_grad()
        def draw() -> Tensor:
            """Euler steps from noise at time 1 to images at time 0; returns their mean square."""
            x = noise
            for i in range(chosen.steps):
                t = torch.full((2 * chosen.images,), 1000 * (1 - i / chosen.steps), device=chosen.device)
                known, unknown = model(torch.cat((x, x)), t, both).chunk(2)
                x = x - (unknown + GUIDANCE * (known - unknown)) / chosen.steps
            return x.float().square().mean()

        return draw

    case = f"DiT, width {chosen.width}, {chosen.layers} blocks, {chosen.steps} steps with guidance"
    return side_by_side.compare(case, make, chosen, chosen.images, unit="images")


if __name__ == "__main__":
    main()
