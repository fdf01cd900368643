"""Values that lie oddly: slices, views, permutations, sizes of 0 and 1, weights with strides."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program_table import Table, into
from small_tensors import R, S, W, X, rms
from torch import Tensor

LAYOUTS: Table = {}
case = into(LAYOUTS)


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


@case(lambda: (X(), R(S, 2 * S)[:, ::2], R(2 * S, S)[::2]))
def strided_weights(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v), (rms(x @ w) @ v).relu()


@case(lambda: (X(), R(S).expand(S, S), R(S, 1).expand(S, S)))
def expanded_weights(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return F.linear(rms(F.linear(x, w)), v).relu(), (rms(x @ w) @ v).relu()


@case(lambda: (R(2, 1, 6, S), W(), W()))
def ones_inside(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = F.linear(x, w)
    return F.linear(rms(h).squeeze(1), v), F.linear(rms(h.squeeze(1)).unsqueeze(2), v).relu()


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
