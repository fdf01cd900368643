"""Programs in which memory is read by what is no Region: Sweeps beside attention, tables of rotary embeddings, and keys
that several heads share. All have a layer of 32 features and are trained.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from odd import rms
from programs import Program, program
from test_sweeps import HEADS, OPS, D, heads, joined
from torch import Tensor, nn

SWEPT: dict[str, Program] = {}
TABLES: dict[str, Program] = {}
OTHER_SIZES = {"B": 2, "T": 24, "D": D, "P": 3 * D, "H": D // HEADS, "K": 2 * (D // HEADS)}


@program(SWEPT, "x:BTD r:BTD'", train=3)
class NormMoved(nn.Module):
    """A layer whose LayerNorm reads a stream less a running mean, which is then updated; the residual is zeroed."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.qkv, self.out = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("mean", torch.randn(D))

    def forward(self, x: Tensor, r: Tensor) -> Any:
        x = r + self.up(x) - self.mean
        r.zero_()
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.5)
        q, k, v = self.qkv(self.norm(x)).split(D, -1)
        return x + self.out(joined(OPS.mix(heads(q), heads(k), heads(v))))


@program(SWEPT, "x:BTD w:DP o:DD | bias:P last:BTD", train=3)
def queries_kept(x: Tensor, w: Tensor, o: Tensor, bias: Tensor, last: Tensor) -> Any:
    """Attention's inputs are written over a state that the same layer reads, and the bias moves."""
    n = rms(x + last)
    q, k, v = (n @ w + bias).split(D, -1)
    with torch.no_grad():
        last.copy_(q)
        bias.mul_(0.5)
    return x + joined(OPS.mix(heads(q), heads(k), heads(v))) @ o


@program(SWEPT, "x:BTD w:DP o:DD g:D | scale:TD", train=2, inductor=False)
def gradients_scaled(x: Tensor, w: Tensor, o: Tensor, g: Tensor, scale: Tensor) -> Any:
    """What scales queries, and their gradients beside attention's, is a function of what is written."""
    q, k, v = (F.layer_norm(x, (D,), g) @ w).split(D, -1)
    q = q * torch.sigmoid(scale)
    with torch.no_grad():
        scale.add_(1)
    return x + joined(OPS.mix(heads(q), heads(k), heads(v))) @ o


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@program(TABLES, "x:BTD q:DD k:DD | at:TH", infer=1, train=3, inductor=False)
def angles_moved(x: Tensor, q: Tensor, k: Tensor, at: Tensor) -> Any:
    """Streaming: the positions go on after they were read."""
    cos, sin = at.cos() * 1.0, at.sin() * 1.0
    y = rotated(heads(x @ q), cos, sin) * rotated(heads(x @ k), cos, sin)
    with torch.no_grad():
        at.add_(1)
    return y.sum((1, 3)), torch.tanh(x @ q)


@program(TABLES, "x:BTD q:DD k:DK v:DK | at:TH seen:BTK", infer=1, train=5, inductor=False)
def shared_keys_kept(x: Tensor, q: Tensor, k: Tensor, v: Tensor, at: Tensor, seen: Tensor) -> Any:
    """Keys and values of two heads for four; the keys go into a state, and are read from it."""
    cos, sin = at.cos(), at.sin()
    keys, values = x @ k + seen, x @ v
    with torch.no_grad():
        seen.copy_(keys)
        at.mul_(0.5)
    y = OPS.mix(rotated(heads(x @ q), cos, sin), rotated(heads(keys), cos, sin), heads(values))
    return rms(x + joined(y)) @ q
