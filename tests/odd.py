"""Graphs that look for trouble: sizes that coincide, values needed twice, layouts that do not fit, opaque operations.

ODD is the table, random_program its endless continuation. Whatever becomes of one, it computes what eager computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

S = 8
ODD: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {}


def case(inputs: Callable[[], tuple[Tensor, ...]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Puts a function into ODD, with a function that makes its inputs."""

    def keep(f: Callable[..., Any]) -> Callable[..., Any]:
        ODD[f.__name__] = f, inputs
        return f

    return keep


def R(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def X() -> Tensor:
    """[B, T, S] with S features, as many as W has."""
    return R(2, 6, S)


def W() -> Tensor:
    return R(S, S)


def rms(x: Tensor, dim: int = -1) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-5)


@case(lambda: (X(), W(), W()))
def xxt(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    n = rms(h)
    return n @ n.transpose(1, 2), n @ x.transpose(1, 2)


@case(lambda: (R(6, S), W()))
def xxt2(x: Tensor, w: Tensor) -> Any:
    h = rms(x @ w)
    return h @ h.t(), h.t() @ h


@case(lambda: (R(6, S),))
def gram(x: Tensor) -> Any:
    return torch.relu(x @ x.t()), torch.relu(x.t() @ x)


@case(lambda: (R(6, 6), R(6, 6)))
def square_twice(x: Tensor, w: Tensor) -> Any:
    return torch.relu(torch.relu(x @ w) @ w) @ w.t()


@case(lambda: (R(6, 6),))
def all_same(x: Tensor) -> Any:
    return torch.relu(x @ x) @ x + x


@case(lambda: (X(), W()))
def same_gate_up(x: Tensor, w: Tensor) -> Any:
    return F.silu(F.linear(x, w)) * F.linear(x, w)


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


@case(lambda: (X(), W(), W(), W()))
def halves_and_whole(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
    p = F.linear(x, torch.cat([w, v]))
    a, b = p.chunk(2, -1)
    return F.silu(a) * b, torch.relu(p)


@case(lambda: (X(), R(2 * S, S)))
def halves_and_whole2(x: Tensor, w: Tensor) -> Any:
    p = F.linear(x, w)
    a, b = p.chunk(2, -1)
    return F.silu(a) * b, torch.relu(p), F.linear(p, w.t())


@case(lambda: (X(), R(2 * S, S)))
def half_only(x: Tensor, w: Tensor) -> Any:
    a, _ = F.linear(x, w).chunk(2, -1)
    return F.silu(a)


@case(lambda: (X(), R(2 * S, S), W()))
def half_norm(x: Tensor, w: Tensor, v: Tensor) -> Any:
    p = F.linear(x, w)
    a, b = p.chunk(2, -1)
    return F.linear(rms(a), v), F.linear(rms(b), v), a + b


@case(lambda: (X(), R(2 * S, S), W()))
def half_swapped(x: Tensor, w: Tensor, v: Tensor) -> Any:
    p = F.linear(x, w)
    a, b = p.chunk(2, -1)
    return F.linear(rms(a * torch.relu(b)), v), torch.cat([b, a], -1)


@case(lambda: (X(), R(3 * S, S), W()))
def qkv(x: Tensor, w: Tensor, v: Tensor) -> Any:
    a, b, c = F.linear(x, w).chunk(3, -1)
    return F.linear(rms(a * b + c), v)


@case(lambda: (X(), R(2 * S, S), W()))
def interleaved(x: Tensor, w: Tensor, v: Tensor) -> Any:
    p = F.linear(x, w).view(2, 6, S, 2)
    return F.linear(torch.relu(p[..., 0]) * p[..., 1], v)


@case(lambda: (X(), R(16, S)))
def unequal(x: Tensor, w: Tensor) -> Any:
    a, b = F.linear(x, w).split([12, 4], -1)
    return torch.relu(a), torch.tanh(b)


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


@case(lambda: (R(6, S), W(), W()))
def weight_from_product(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return torch.relu(x @ (w @ v)), torch.relu(x @ (w + 0.5 * (w @ v)))


@case(lambda: (X(), W(), R(3, S), R(S, 3)))
def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    h = F.linear(x, w)
    n = rms(h)
    return F.linear(n, w) + 0.5 * F.linear(F.linear(n, a), b)


@case(lambda: (X(), W(), W(), R(2, S), R(2, S)))
def adaln(x: Tensor, w: Tensor, v: Tensor, s: Tensor, t: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h) * (1 + s[:, None]) + t[:, None], v)


@case(lambda: (X(), W(), W(), R(2, 1, 1)))
def drop_path(x: Tensor, w: Tensor, v: Tensor, s: Tensor) -> Any:
    h = x + s * F.linear(x, w)
    return h + s * F.linear(rms(h), v)


@case(lambda: (X(), W(), R(6, S)))
def positions(x: Tensor, w: Tensor, p: Tensor) -> Any:
    return torch.relu(F.linear(x, w) + p), torch.relu(F.linear(x, w)) * p


@case(lambda: (X(), W(), R(2, 6)))
def token_mask(x: Tensor, w: Tensor, m: Tensor) -> Any:
    return torch.relu(F.linear(x, w) * m[..., None])


@case(lambda: (X(), W(), torch.randint(2, (2, 6))))
def token_mask_int(x: Tensor, w: Tensor, m: Tensor) -> Any:
    return torch.relu(F.linear(x, w) * m[..., None]), torch.relu(F.linear(x, w)).masked_fill(
        m[..., None] == 0, float("-inf")
    )


@case(lambda: (X(), W(), R(4)))
def head_gain(x: Tensor, w: Tensor, g: Tensor) -> Any:
    return (F.linear(x, w).view(2, 6, 2, 4) * g).reshape(2, 6, 8).relu()


@case(lambda: (X(), W(), R(2)))
def head_scale(x: Tensor, w: Tensor, g: Tensor) -> Any:
    return (F.linear(x, w).view(2, 6, 2, 4) * g[:, None]).reshape(2, 6, 8).relu()


@case(lambda: (X(), W(), W(), R(S), R(S)))
def gain_made(x: Tensor, w: Tensor, v: Tensor, g: Tensor, k: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h) * (1 + g) * torch.exp(k), v), torch.relu(h * (g * k) + k.sum())


@case(lambda: (X(), W(), W()))
def row_slices(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h)[:, 1:], v), F.linear(rms(h[:, :3]), v), h[:, 0].relu(), F.linear(rms(h)[:, -1], v)


@case(lambda: (X(), W(), W(), R(1, 1, S)))
def cls(x: Tensor, w: Tensor, v: Tensor, c: Tensor) -> Any:
    h = torch.cat([c.expand(2, 1, S), torch.relu(F.linear(x, w))], 1)
    return F.linear(rms(h), v)


@case(lambda: (X(), W(), W()))
def cat_tokens(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.cat([F.linear(x, w), F.linear(x, v)], 1)
    return F.linear(rms(h), v)


@case(lambda: (X(), W(), W()))
def cat_features(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.cat([F.linear(x, w), F.linear(x, v)], -1).relu()
    return F.linear(rms(h), torch.cat([w, v], 1))


@case(lambda: (X(), W(), W()))
def stacked(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.stack([F.linear(x, w), F.linear(x, v)], 2).relu()
    return F.linear(rms(h), v)


@case(lambda: (X().transpose(0, 1), W().t(), W()))
def transposed_inputs(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v)


@case(lambda: (R(S, 6), W()))
def transposed_2d(x: Tensor, w: Tensor) -> Any:
    return F.linear(rms(F.linear(x.t(), w)), w).t()


@case(lambda: (R(0, 6, S), W(), W()))
def empty_batch(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v)


@case(lambda: (R(2, 0, S), W(), W()))
def empty_tokens(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v).relu()


@case(lambda: (R(2, 6, 0), R(S, 0), W()))
def empty_k(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v)


@case(lambda: (X(), R(0, S), R(S, 0)))
def empty_n(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v).relu()


@case(lambda: (R(1, 1, S), W(), W()))
def one_row(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v)


@case(lambda: (R(1, 1), R(1, 1), R(1, 1)))
def all_ones(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v).relu()


@case(lambda: (X(), R(1, S), R(S, 1)))
def width_one(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h), v).relu(), torch.relu(F.linear(x, v.t()))


@case(lambda: (R(S), W(), W()))
def vector_input(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v).relu(), torch.mv(w, x).relu(), torch.dot(x, x)


@case(lambda: (torch.randint(9, (4, S)), torch.randint(9, (S, S)), W()))
def int_products(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = x @ w
    return h.relu(), (h.double() @ v).relu(), (h % 7).double() @ v


@case(lambda: (X(), W(), W()))
def integer_parts(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    i = h.argmax(-1)
    return v[i].relu(), h.long(), (h > 0).sum(-1), F.linear(h.round(), v)


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


@case(lambda: (X(), W()))
def views(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    r = h.relu()
    return (
        r,
        r,
        r.view(12, 8),
        r.permute(2, 0, 1),
        h,
        x,
        r.view(2, 6, 2, 4).transpose(1, 2),
        r.flatten(),
        r.reshape(4, 3, 8),
    )


@case(lambda: (X(), W()))
def rearranged(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    return (
        h.view(2, 6, 2, 4).transpose(2, 3).reshape(2, 6, 8).relu(),
        h.transpose(0, 1).reshape(12, 8).relu(),
        h.transpose(1, 2).relu(),
        h.flip(0).relu(),
        h.roll(1, 1).relu(),
    )


@case(lambda: (X(), W(), W()))
def rearranged_feed(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return (
        F.linear(rms(h.view(2, 6, 2, 4).transpose(2, 3).reshape(2, 6, 8)), v),
        F.linear(rms(h.transpose(0, 1)), v),
        F.linear(rms(h.transpose(1, 2).reshape(2, 6, 8)), v),
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


@case(lambda: (R(12, S), W(), R(S)))
def addmm_ab(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return (
        torch.addmm(b, x, w, alpha=2, beta=0.5).relu(),
        torch.addmm(b, x, w).relu(),
        torch.addmm(x, x, w).relu(),
        torch.addmm(b[None], x, w, beta=0),
    )


@case(lambda: (R(12, S), W(), R(12, 1), R(1, 1)))
def addmm_odd(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.addmm(b, x, w).relu(), torch.addmm(c, x, w).relu(), torch.addmm(c[0], x, w)


@case(lambda: (R(8, 8), R(8, 8), R(8, 1), R(8)))
def addmm_sq(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Any:
    return (
        torch.addmm(b, x, w).relu(),
        torch.addmm(c, x, w).relu(),
        torch.addmm(x, x, w).relu(),
        torch.addmm(w.t(), x, w.t()),
    )


@case(lambda: (R(3, 4, S), R(3, S, S), W()))
def moe(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.bmm(x, w)
    return F.linear(rms(h), v), torch.bmm(rms(F.linear(x, v)), w)


@case(lambda: (X(), R(S, 2, 4), R(2, 4, S)))
def einsums(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.einsum("btd,dhe->bthe", x, w)
    return torch.einsum("bthe,hed->btd", rms(h), v), torch.einsum(
        "bthe,hed->btd", rms(h.flatten(2)).view(2, 6, 2, 4), v
    ).relu()


@case(lambda: (X(), W(), W()))
def consts(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return (
        F.linear(torch.ones_like(x), w).relu(),
        F.linear(torch.full_like(F.linear(x, w), 2.0), v).relu(),
        F.linear(x * 0, w).relu(),
    )


@case(lambda: (X(), W(), W()))
def broadcast_rows(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x[:, :1].expand(2, 6, S), w)
    return F.linear(rms(h), v), F.linear(h.mean(1, keepdim=True).expand(2, 6, S), v).relu()


@case(lambda: (R(2, 1, S), R(1, 6, S), W(), W()))
def outer_sum(x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w) + F.linear(y, w)
    return F.linear(rms(h), v), h.relu()


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


@case(lambda: (X(), R(S, 2 * S)[:, ::2], R(2 * S, S)[::2]))
def strided_weights(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v), (rms(x @ w) @ v).relu()


@case(lambda: (X(), R(S).expand(S, S), R(S, 1).expand(S, S)))
def expanded_weights(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v).relu(), (rms(x @ w) @ v).relu()


@case(lambda: (X(), W(), W()))
def weight_norm(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, rms(w))), rms(v, 0)).relu()


@case(lambda: (X(), W(), W()))
def detach_clone(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w).clone()
    n = rms(h).detach().contiguous()
    return F.linear(n, v), n.clone().relu()


@case(lambda: (R(2, 1, 6, S), W(), W()))
def ones_inside(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h).squeeze(1), v), F.linear(rms(h.squeeze(1)).unsqueeze(2), v).relu()


@case(lambda: (R(4, S), R(S, S), R(S, S)))
def same_sizes(x: Tensor, w: Tensor, v: Tensor) -> Any:
    a = x @ w
    b = x @ v
    return torch.relu(a) * torch.sigmoid(b) * torch.relu(x @ (w * v)), a @ b.t()


@case(lambda: (R(S, S), R(S, S), R(S, S)))
def same_sizes_sq(x: Tensor, w: Tensor, v: Tensor) -> Any:
    a = x @ w
    b = x @ v
    return (
        torch.relu(a) * torch.sigmoid(b.t()),
        a + a.t(),
        rms(a) @ v + rms(a.t()) @ v,
        torch.relu(w @ x) * torch.relu(x @ w),
    )


@case(lambda: (R(S, S), R(S, S), R(S)))
def square_bias(x: Tensor, w: Tensor, b: Tensor) -> Any:
    h = x @ w
    return (
        (h + b).relu(),
        (h + b[:, None]).relu(),
        (h.t() + b).relu(),
        (h * b[:, None] * b).relu(),
        (rms(h + b) @ w).relu(),
        (rms(h + b[:, None], 0) @ w).relu(),
    )


@case(lambda: (X(), W(), W(), W()))
def three_share(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
    a, b, c = F.linear(x, w), F.linear(x, v), F.linear(x, u)
    return F.silu(a) * b * torch.tanh(c), F.silu(a) * b, a * c


@case(lambda: (X(), W(), W(), W(), W()))
def chain_pairs(x: Tensor, w: Tensor, v: Tensor, u: Tensor, t: Tensor) -> Any:
    a, b, c, e = F.linear(x, w), F.linear(x, v), F.linear(x, u), F.linear(x, t)
    return a * b.relu(), b * c.relu(), c * e.relu(), e * a.relu()


@case(lambda: (X(), W(), W()))
def pair_norm(x: Tensor, w: Tensor, v: Tensor) -> Any:
    y = F.silu(F.linear(x, w)) * F.linear(x, v)
    return F.linear(rms(y), w), F.linear(rms(y), v)


@case(lambda: (X(), W(), W(), W()))
def pair_late(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
    h = F.linear(x, u)
    n = rms(h)
    y = F.silu(F.linear(n, w)) * F.linear(n, v)
    return F.linear(rms(y), u), n


@case(lambda: (X(), W(), W(), W()))
def pair_different_scalings(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
    h = F.linear(x, u)
    n = rms(h)
    m = h / (1 + h.abs().mean(-1, keepdim=True))
    return F.silu(F.linear(n, w)) * F.linear(m, v)


@case(lambda: (X(), W(), W(), W()))
def pair_gained(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
    h = F.linear(x, u)
    n = rms(h)
    return F.silu(F.linear(n, w)) * F.linear(n * 2, v), torch.relu(F.linear(n, w) * F.linear(n, v))


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
def index(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    n = rms(h)
    i = torch.tensor([1, 0])
    return (
        F.linear(n[i], v),
        n.index_select(1, torch.tensor([2, 3])),
        h.gather(-1, torch.zeros(2, 6, 1, dtype=torch.long)),
        F.linear(n.repeat(2, 1, 1), v).relu(),
    )


@case(lambda: (X(), W(), W()))
def conv_ish(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return (
        F.conv1d(h.transpose(1, 2), v[:, :, None]).relu(),
        F.pad(h, (0, 0, 1, 1)).relu(),
        F.linear(F.pad(rms(h), (0, 0, 1, 0)), v),
    )


@case(lambda: (X(), W(), torch.randint(8, (2, 6))))
def loss(x: Tensor, w: Tensor, y: Tensor) -> Any:
    z = F.linear(x, w)
    return (
        F.cross_entropy(z.flatten(0, 1), y.flatten()),
        F.cross_entropy(z[:, :-1].reshape(-1, 8), y[:, 1:].reshape(-1)),
        F.log_softmax(z, -1),
    )


@case(lambda: (X(), W(), W()))
def scalars(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    s = h.sum()
    return F.linear(h * s, v), h * s, h + s, F.linear(rms(h) * s, v), torch.relu(h) * v.sum()


@case(lambda: (X(), W(), W()))
def const_functions(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    c = torch.full((8,), 2.0, dtype=torch.float64)
    return (
        (h * c.exp()).relu(),
        torch.maximum(h, torch.zeros(8, dtype=torch.float64) + 1),
        h * torch.ones(8, dtype=torch.float64).tanh(),
    )


@case(lambda: (R(2, S, 6).transpose(1, 2), W(), W()))
def permuted_stream(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = x + F.linear(x.contiguous(), w.t() * 1)
    return h, F.linear(rms(h), v), (F.linear(x * 1, v) + x).relu()


@case(lambda: (R(2, S, 6).transpose(1, 2), R(2, 6, S), W(), R(S, S)[:, 0]))
def permuted_residual(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Any:
    return (F.linear(y, w) + x).relu(), F.linear(y, w) * b


@case(lambda: (R(2, S, 6), R(2, 6, 4), R(S, 4)))
def permuted_made(x: Tensor, y: Tensor, w: Tensor) -> Any:
    h = (x * 2).transpose(1, 2)
    return h + F.linear(y, w), (h + 1).relu() * F.linear(y, w)


@case(lambda: (R(S, 12), R(12, 4), R(S, 4)))
def permuted_made_2d(x: Tensor, y: Tensor, w: Tensor) -> Any:
    h = x.t() * 2
    return h + y @ w.t(), F.linear(torch.relu(h), w.t()).relu(), h.t() + 1


@case(lambda: (R(12, 4), R(4, 4, 2)[..., 0], R(S, 4)))
def expanded_lanes(y: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.relu(y @ w)
    p = torch.cat([h, h], -1)
    return torch.relu(p @ v), torch.relu(torch.cat([y, y], -1) @ v)


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
