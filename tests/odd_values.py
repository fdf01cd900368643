"""Values that are odd: infinities, NaNs, integers, constants, other dtypes, and what is changed in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program_table import Table, into
from small_tensors import S, W, X, rms
from torch import Tensor

VALUES: Table = {}
case = into(VALUES)


@case(lambda: (X(), W(), W()))
def integer_parts(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    i = h.argmax(-1)
    return v[i].relu(), h.long(), (h > 0).sum(-1), F.linear(h.round(), v)


@case(lambda: (X(), W()))
def divided_by_zero(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    z = torch.zeros_like(h)
    return h / z, h * (z / z), torch.cat([h.cos(), h / z], 1), h.exp() / 0


@case(lambda: (X(), W()))
def domains(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    return (
        h.sqrt() ** 2,
        (h**2) ** 0.5,
        h**3 * h**-1,
        h / h,
        (h - h) / (h - h),
        h**1.5,
        h.sqrt() * h.sqrt(),
        (h * h).sqrt(),
        (h**2).pow(1.5),
        h.pow(-2),
        (h**3) ** (1 / 3),
    )


@case(lambda: (X() * 1e3, W()))
def extremes(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    return (
        F.silu(h),
        h / (1 + torch.exp(-h)),
        torch.sigmoid(h) ** 2,
        1 / (1 + torch.exp(h)),
        torch.exp(h) / (1 + torch.exp(h)),
        h * torch.exp(-h),
        torch.exp(h) * torch.exp(-h),
    )


@case(lambda: (X().masked_fill(torch.rand(2, 6, S) < 0.05, float("inf")), W(), W()))
def infs(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return h.relu(), h - h, F.linear(rms(h), v), F.silu(h)


@case(lambda: (torch.zeros(2, 6, S, dtype=torch.float64), W(), W()))
def zeros(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h), v), h / h, F.linear(h / h.norm(dim=-1, keepdim=True), v), F.normalize(h)


@case(lambda: (X(), W()))
def literals_inf(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    return (
        h * float("inf"),
        h + float("-inf"),
        torch.clamp(h, min=float("-inf"), max=0.5),
        h.clamp(-1, 1),
        h * float("nan"),
    )


@case(lambda: (X(), W(), W()))
def in_place(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    h += 1
    h.mul_(2)
    n = rms(h)
    n[..., 0] = 0
    n.relu_()
    return F.linear(n, v), h


@case(lambda: (X(), W(), W()))
def consts(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return (
        F.linear(torch.ones_like(x), w).relu(),
        F.linear(torch.full_like(F.linear(x, w), 2.0), v).relu(),
        F.linear(x * 0, w).relu(),
    )


@case(lambda: (X(), W(), W()))
def detach_clone(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w).clone()
    n = rms(h).detach().contiguous()
    return F.linear(n, v), n.clone().relu()


@case(lambda: (X(), W(), torch.randint(8, (2, 6))))
def loss(x: Tensor, w: Tensor, y: Tensor) -> Any:
    z = F.linear(x, w)
    return (
        F.cross_entropy(z.flatten(0, 1), y.flatten()),
        F.cross_entropy(z[:, :-1].reshape(-1, 8), y[:, 1:].reshape(-1)),
        F.log_softmax(z, -1),
    )


@case(lambda: (X(), W(), W()))
def const_functions(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    c = torch.full((8,), 2.0, dtype=torch.float64)
    return (
        (h * c.exp()).relu(),
        torch.maximum(h, torch.zeros(8, dtype=torch.float64) + 1),
        h * torch.ones(8, dtype=torch.float64).tanh(),
    )


@case(lambda: (X().masked_fill(torch.rand(2, 6, S) < 0.1, float("nan")), W(), W()))
def nans(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return h.relu(), h.clamp_min(0), F.linear(rms(h), v), torch.maximum(h, -h), h - h


@case(lambda: (X(), W()))
def literals(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    return (
        h * 1,
        h + 0,
        h * -1,
        h**0,
        h**1,
        h * 1e-300 * 1e300,
        h * (1 / 3),
        0.1 * h + 0.2 * h,
        h - h * 1,
    )


@case(lambda: (X(), W(), W()))
def kept_types(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return h.float(), h.relu().half(), (h > 0), h.relu().to(torch.int32), F.linear(rms(h), v).bfloat16()


@case(lambda: (X(), W()))
def overflows(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    return (h * 1e308 * 1e308).relu(), h * torch.ones(8, dtype=torch.float64).tanh() * 1e308 * 1e308
