"""random_program: a graph of up to sixteen operations on values of one shape, drawn by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from small_tensors import R, rms
from torch import Tensor

OPS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda p, q, w, u, g, r: F.linear(p, w) * 0.5,
    "norm, linear": lambda p, q, w, u, g, r: F.linear(rms(p) * g, w) * 0.5,
    "residual": lambda p, q, w, u, g, r: q + F.linear(p, w),
    "swiglu": lambda p, q, w, u, g, r: F.silu(F.linear(p, w)) * F.linear(p, u),
    "relu": lambda p, q, w, u, g, r: torch.relu(p),
    "mul": lambda p, q, w, u, g, r: p * torch.tanh(q),
    "add": lambda p, q, w, u, g, r: p + q,
    "sub": lambda p, q, w, u, g, r: p - 0.5 * q,
    "norm": lambda p, q, w, u, g, r: rms(p),
    "layer norm": lambda p, q, w, u, g, r: F.layer_norm(p, (p.shape[-1],), g, r.flatten()[0].expand(p.shape[-1])),
    "gain": lambda p, q, w, u, g, r: p * g,
    "token scale": lambda p, q, w, u, g, r: p * r,
    "scale by another's row": lambda p, q, w, u, g, r: p * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1),
    "scale by another's sum": lambda p, q, w, u, g, r: p / (1 + q.abs().sum(-1, keepdim=True)),
    "halves": lambda p, q, w, u, g, r: torch.cat(
        [p.chunk(2, -1)[0] * p.chunk(2, -1)[1].sigmoid(), p.chunk(2, -1)[1]], -1
    ),
    "rotate": lambda p, q, w, u, g, r: torch.cat([-p.chunk(2, -1)[1], p.chunk(2, -1)[0]], -1) * q + p,
    "mix rows": lambda p, q, w, u, g, r: torch.cat([p[:1], q[1:]], 0),
    "cumsum": lambda p, q, w, u, g, r: p.cumsum(-2) * 0.3,
    "mean over tokens": lambda p, q, w, u, g, r: p + q.mean(-2, keepdim=True),
    "two inputs": lambda p, q, w, u, g, r: F.linear(torch.cat([p, q], -1), torch.cat([w, u], 1)) * 0.5,
}


ON_SQUARE: dict[str, Callable[..., Tensor]] = {
    "p qT": lambda p, q, w, u, g, r: (p @ q.t()) * 0.2,
    "p q": lambda p, q, w, u, g, r: (p @ q) * 0.2,
    "transpose": lambda p, q, w, u, g, r: p.t(),
    "norm over tokens": lambda p, q, w, u, g, r: rms(p, 0),
}


ON_BATCH: dict[str, Callable[..., Tensor]] = {
    "mix tokens": lambda p, q, w, u, g, r: p.transpose(0, 1).reshape(p.shape),
    "scale of a sample": lambda p, q, w, u, g, r: p * torch.sigmoid(r[:, :1]),
    "scale by a sample's row": lambda p, q, w, u, g, r: (
        p * torch.rsqrt(F.linear(q.mean(1), w).pow(2).mean(-1) + 1)[:, None, None]
    ),
    "linear over samples": lambda p, q, w, u, g, r: F.linear(p.transpose(0, 1), w).transpose(0, 1) * 0.5,
}


def random_program(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Up to sixteen operations on values of one shape, each on a recent value and any other; a few are returned."""
    rng, square = random.Random(seed), seed % 2 == 0
    table = OPS | (ON_SQUARE if square else ON_BATCH)
    names = [*table, *["linear", "norm, linear", "residual", "swiglu"] * 2]
    steps = []
    for i in range(1, rng.randint(6, 16)):
        op, recent = rng.choice(names), max(rng.randrange(i) for _ in range(4))
        steps.append((op, recent, rng.randrange(i), rng.randrange(4), rng.randrange(4)))
    returned = [len(steps), *(rng.randrange(len(steps) + 1) for _ in range(rng.randint(0, 2)))]

    def run(x: Tensor, weights: list[Tensor], gain: Tensor, token: Tensor) -> list[Tensor]:
        values = [x]
        for op, p, q, w, u in steps:
            values.append(table[op](values[p], values[q], weights[w], weights[u], gain, token))
        return [values[i] for i in returned]

    torch.manual_seed(seed)
    shape = (6, 6) if square else (2, 3, 6)
    return run, (R(*shape), [R(6, 6) / 6**0.5 for _ in range(4)], R(6), R(*shape[:-1], 1))
