"""Norms and other statistics where they are odd: over tokens, heads or all, of another product, read by nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program_table import Table, into
from small_tensors import R, S, W, X, rms
from torch import Tensor

NORMS: Table = {}
case = into(NORMS)


@case(lambda: (X(), W(), W()))
def norm_over_tokens(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h, 1), v)


@case(lambda: (R(6, S), W(), W()))
def norm_over_tokens2(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h, 0), v)


@case(lambda: (R(S, S), W(), W()))
def norm_over_tokens_sq(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = x @ w
    return F.linear(rms(h, 0), v), F.linear(rms(h, 1), v)


@case(lambda: (X(), W(), W()))
def norm_over_heads(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h.view(2, 6, 2, 4)).reshape(2, 6, 8), v)


@case(lambda: (X(), W(), W()))
def norm_over_heads_major(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h.view(2, 6, 2, 4), 2).reshape(2, 6, 8), v)


@case(lambda: (X(), W(), W()))
def norm_of_half(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    a = h[..., :4]
    return F.linear(h * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-5), v)


@case(lambda: (X(), W(), W()))
def norm_batch_stat(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(h * torch.rsqrt(h.pow(2).mean((1, 2), keepdim=True) + 1e-5), v)


@case(lambda: (X(), W(), W()))
def norm_all(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(h / h.norm(), v)


@case(lambda: (X(), W(), W(), W()))
def cross_norm(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
    a = F.linear(x, w)
    b = F.linear(x, v)
    return a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1), b * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1)


@case(lambda: (X(), X(), W(), W()))
def cross_norm_two_inputs(x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> Any:
    a = F.linear(x, w)
    b = F.linear(y, v)
    return a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1), b * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1)


@case(lambda: (X(), X(), W(), W(), W(), W()))
def cross_norm_then(x: Tensor, y: Tensor, w: Tensor, v: Tensor, u: Tensor, t: Tensor) -> Any:
    a = F.linear(x, w)
    b = F.linear(y, v)
    return F.linear(a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1), u), F.linear(
        b * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1), t
    )


@case(lambda: (X(), X(), W(), W()))
def cross_opaque(x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> Any:
    a = F.linear(x, w)
    b = F.linear(y, v)
    return a * b.cumsum(1), b * a.cumsum(1)


@case(lambda: (X(), W(), W()))
def cross_opaque_same(x: Tensor, w: Tensor, v: Tensor) -> Any:
    a = F.linear(x, w)
    b = F.linear(x, v)
    return a * b.cumsum(1), b * a.cumsum(1)


@case(lambda: (X(), X(), W(), W(), R(S)))
def cross_opaque_vec(x: Tensor, y: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    a = F.linear(x, w) * g
    b = F.linear(y, v) * g
    return torch.relu(a) * b.cumsum(-1)[..., :1], torch.relu(b) * a.cumsum(-1)[..., -1:]


@case(lambda: (X(), X(), W(), W(), W()))
def cross_three(x: Tensor, y: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
    a = F.linear(x, w)
    b = F.linear(y, v)
    c = F.linear(x + y, u)
    return a * b.cumsum(1), b * c.cumsum(1), c * a.cumsum(1)


@case(lambda: (X(), W(), W()))
def softmax_feed(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(torch.softmax(F.linear(x, w), -1), v)


@case(lambda: (X(), W(), W()))
def exp_feed(x: Tensor, w: Tensor, v: Tensor) -> Any:
    e = torch.exp(F.linear(x, w))
    return F.linear(e / e.sum(-1, keepdim=True), v)


@case(lambda: (X(), W(), W()))
def max_feed(x: Tensor, w: Tensor, v: Tensor) -> Any:
    e = F.linear(x, w)
    return F.linear(e / e.abs().amax(-1, keepdim=True), v)


@case(lambda: (X(), W(), W()))
def normalize(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(F.normalize(F.linear(x, w), dim=-1), v)


@case(lambda: (X(), W(), W()))
def normnorm(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(rms(F.linear(x, w))), v)


@case(lambda: (X(), W(), W()))
def stat_returned(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
    return F.linear(h * r, v), r, h


@case(lambda: (X(), W(), W()))
def stat_returned2(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    s = h.pow(2).sum(-1)
    return F.linear(h * torch.rsqrt(s + 1e-5)[..., None], v), s.t(), h.transpose(0, 1)


@case(lambda: (X(), W(), W()))
def norm_and_transposed(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    n = rms(h)
    return F.linear(n, v), n.transpose(1, 2)


@case(lambda: (X(), W(), W(), W()))
def two_norms_one_stream(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h), v) + F.linear(h / (1 + h.abs().mean(-1, keepdim=True)), u)


@case(lambda: (X(), W(), W()))
def sum_other_products(x: Tensor, w: Tensor, v: Tensor) -> Any:
    a = F.linear(x, w)
    b = F.linear(torch.relu(a), v)
    r = torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1)
    return F.linear(a * r, w), a * r


@case(lambda: (X(), W(), W()))
def both_sides(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h), v * h.mean())


@case(lambda: (X(), W(), W(), R(2, S), R(2, S)))
def adaln(x: Tensor, w: Tensor, v: Tensor, s: Tensor, t: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h) * (1 + s[:, None]) + t[:, None], v)


@case(lambda: (X(), W(), W(), R(2, 1, 1)))
def drop_path(x: Tensor, w: Tensor, v: Tensor, s: Tensor) -> Any:
    h = x + s * F.linear(x, w)
    return h + s * F.linear(rms(h), v)


@case(lambda: (X(), W(), W(), R(S), R(S)))
def gain_made(x: Tensor, w: Tensor, v: Tensor, g: Tensor, k: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h) * (1 + g) * torch.exp(k), v), torch.relu(h * (g * k) + k.sum())


@case(lambda: (X(), W(), W()))
def mean_over_tokens(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return (
        h.mean(1).relu(),
        F.linear(h.mean(1), v).relu(),
        h.mean(0),
        h.sum(),
        h.sum((0, 1)),
        F.linear(h * h.sum((0, 1)), v),
    )


@case(lambda: (X(), W(), W()))
def variance(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(h / h.std(-1, keepdim=True), v), F.linear(
        (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt(), v
    )


@case(lambda: (X(), W(), W()))
def weight_norm(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, rms(w))), rms(v, 0)).relu()


@case(lambda: (X(), W(), W(), W()))
def deep_rank(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
    h = F.linear(x, u)
    n = rms(h)
    return F.linear(n * x, w) + F.linear(n + x, v), F.linear(rms(h + x) + 1, v)


@case(lambda: (X(), W(), W()))
def negative_scale(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    s = h.sum(-1, keepdim=True)
    return F.linear(h * s, v), F.linear(h / s, v) + F.linear(h / s, w), F.linear(h * s * s, v)


@case(lambda: (X(), W(), W()))
def nonlinear_scale(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    s = h.mean(-1, keepdim=True)
    return F.linear(h * torch.tanh(s), v), F.linear(h * (s > 0).double(), v), F.linear(h * torch.exp(s) + 1, v)


@case(lambda: (X(), W(), R(6, 6)))
def token_mixing(x: Tensor, w: Tensor, m: Tensor) -> Any:
    h = F.linear(x, w)
    return torch.einsum("btd,ts->bsd", rms(h), m), m @ rms(h), F.linear(rms(h).transpose(1, 2), m).transpose(1, 2)


@case(lambda: (R(8, 8), R(8, 8), R(8, 8)))
def token_mixing2(x: Tensor, w: Tensor, m: Tensor) -> Any:
    h = x @ w
    return m @ rms(h), rms(h) @ m, m @ rms(h, 0), rms(h).t() @ m, h.t() @ m


@case(lambda: (X(), W(), R(2, 6, 1)))
def opaque_rows(x: Tensor, w: Tensor, s: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(h * s.cumsum(1), w).relu(), F.linear(h * torch.sin(h.sum(-1, keepdim=True)), w)


@case(lambda: (X(), W(), W()))
def scalars(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    s = h.sum()
    return F.linear(h * s, v), h * s, h + s, F.linear(rms(h) * s, v), torch.relu(h) * v.sum()
