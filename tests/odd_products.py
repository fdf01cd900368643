"""Products where they are odd: sizes that coincide, one operand twice, halves of a product, two of them in a circle."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program_table import Table, into
from small_tensors import R, S, W, X, rms
from torch import Tensor

PRODUCTS: Table = {}
case = into(PRODUCTS)


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


@case(lambda: (R(6, S), W(), W()))
def weight_from_product(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return torch.relu(x @ (w @ v)), torch.relu(x @ (w + 0.5 * (w @ v)))


@case(lambda: (X(), W(), R(3, S), R(S, 3)))
def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    h = F.linear(x, w)
    n = rms(h)
    return F.linear(n, w) + 0.5 * F.linear(F.linear(n, a), b)


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


@case(lambda: (R(S), W(), W()))
def vector_input(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v).relu(), torch.mv(w, x).relu(), torch.dot(x, x)


@case(lambda: (torch.randint(9, (4, S)), torch.randint(9, (S, S)), W()))
def int_products(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = x @ w
    return h.relu(), (h.double() @ v).relu(), (h % 7).double() @ v


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
def broadcast_rows(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x[:, :1].expand(2, 6, S), w)
    return F.linear(rms(h), v), F.linear(h.mean(1, keepdim=True).expand(2, 6, S), v).relu()


@case(lambda: (R(2, 1, S), R(1, 6, S), W(), W()))
def outer_sum(x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w) + F.linear(y, w)
    return F.linear(rms(h), v), h.relu()


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
