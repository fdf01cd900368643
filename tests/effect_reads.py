"""What reads a memory and what then overwrites it: each kind of reader beside some writers, in both modes.

A reader computes a product and reads `m` for it; then `m` is written; what the product became goes on into another
product. The value is that of `m` before it was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from programs import Program
from small_tensors import rms
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reader:
    """`function(x, w, m)` is [T, D]; `m` has the shape that SIZES gives its letters. Where eager keeps `m` itself for
    the backward, a `copy` of it is read there. Regions: without gradients, with them. `inductor`: as a Program's."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    m: str
    infer: int
    train: int
    copy: bool = False
    inductor: bool = True


def left(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return torch.tanh(m @ w) + x


def weight(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return torch.tanh(x @ m) @ w


def turned_weight(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return torch.tanh(x @ m.t()) @ w


def tile(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return m + x @ w


def tile_through_views(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return m.view(2, -1, m.shape[1])[1] + x @ w


def tile_through_transposes(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return m.t().unsqueeze(0).transpose(1, 2).squeeze(0) + x @ w


def residual_norm(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return rms(m + x @ w)


def bias(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return torch.tanh(x @ w + m)


def gain(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return rms(x @ w) * m


def mean(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    h = x @ w - m
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def scale_of_rows(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return (x @ w) * m.unsqueeze(-1)


def statistic(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return (x @ w) * m.pow(2).mean(-1, keepdim=True)


def norm_before(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return rms(m) @ w + x


def distance(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    h = x @ w
    return h * (h - m).square().mean(-1, keepdim=True)


def rotary(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    half = m.shape[-1] // 2
    cos, sin = m[0, :, None, :half], m[1, :, None, :half]
    a, b = (x @ w.t()).unflatten(-1, (2, -1)).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).flatten(1)


READERS = {
    r.function.__name__: r
    for r in (
        Reader(left, "TD", 1, 3, copy=True, inductor=False),
        Reader(weight, "DD", 1, 4, copy=True, inductor=False),
        Reader(turned_weight, "DD", 1, 4, copy=True, inductor=False),
        Reader(tile, "TD", 1, 3),
        Reader(tile_through_views, "MD", 1, 3),
        Reader(tile_through_transposes, "TD", 1, 3),
        Reader(residual_norm, "TD", 2, 2),
        Reader(bias, "D", 1, 3),
        Reader(gain, "D", 2, 2, copy=True, inductor=False),
        Reader(mean, "D", 2, 2, inductor=False),
        Reader(scale_of_rows, "T", 1, 3, copy=True, inductor=False),
        Reader(statistic, "TD", 1, 3),
        Reader(norm_before, "TD", 1, 3),
        Reader(distance, "TD", 2, 2, inductor=False),
        Reader(rotary, "TTH", 1, 3, copy=True, inductor=False),
    )
}


@torch.library.custom_op("coda_effects::scale_", mutates_args={"x"})
def scale_(x: Tensor, k: float) -> None:
    x.mul_(k)


@torch.library.custom_op("coda_effects::exchange_", mutates_args={"x", "y"})
def exchange_(x: Tensor, y: Tensor) -> None:
    held = x.clone()
    x.copy_(y)
    y.copy_(held)


@torch.library.custom_op("coda_effects::bump_", mutates_args={"x"})
def bump_(x: Tensor) -> Tensor:
    """Adds one; returns what was there."""
    held = x.clone()
    x.add_(1)
    return held


@bump_.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def index(m: Tensor) -> Tensor:
    return torch.tensor([2, 0, 1], device=m.device)


def index_put(m: Tensor) -> None:
    m.index_put_((index(m),), m[:3].neg(), accumulate=True)


def scatter(m: Tensor) -> None:
    m.scatter_(0, torch.zeros_like(m[:1], dtype=torch.long) + 2, m[:1] + 5)


def slots(m: Tensor) -> None:
    m[:-1] = m[1:].clone()
    m[2] = 1.0


def chain_of_views(m: Tensor) -> None:
    m.unsqueeze(0).transpose(0, 1)[2:].squeeze(1).mul_(3)


def flat_slice(m: Tensor) -> None:
    m.view(-1)[1:7].zero_()


def turned_rows(m: Tensor) -> None:
    m.movedim(0, -1)[..., ::2].add_(1)


def operation_on_a_view(m: Tensor) -> None:
    scale_(m[1:], 3.0)


def operation_on_two(m: Tensor) -> None:
    other = torch.sin(m)
    exchange_(m, other)
    m.add_(other)


def operation_on_two_views(m: Tensor) -> None:
    exchange_(m[:2], m[2:4])


def operation_that_returns(m: Tensor) -> None:
    m.mul_(bump_(m))


def asserted(m: Tensor) -> None:
    torch._assert_async(m.sum() > -1e9, "small")
    m.add_(1)


WRITERS: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda m: m.copy_(m.flip(0)),
    "add_": lambda m: m.add_(1),
    "zero_": lambda m: m.zero_(),
    "lerp_": lambda m: m.lerp_(m.flip(0), 0.5),
    "relu_": lambda m: m.relu_(),
    "out=": lambda m: torch.mul(m, 2, out=m),
    "index_put_": index_put,
    "index_copy_": lambda m: m.index_copy_(0, index(m), m[3:6].clone()),
    "scatter_": scatter,
    "masked_fill_": lambda m: m.masked_fill_(m > 0, 0.5),
    "slots": slots,
    "chain of views": chain_of_views,
    "flat slice": flat_slice,
    "turned rows": turned_rows,
    "operation": lambda m: scale_(m, 3.0),
    "operation on a view": operation_on_a_view,
    "operation on two": operation_on_two,
    "operation on two views": operation_on_two_views,
    "operation that returns": operation_that_returns,
    "foreach": lambda m: torch._foreach_mul_([m[:2], m[3:]], 0.5),
    "normal_": lambda m: m.normal_(),
    "asserted": asserted,
}


def made(reader: Reader, write: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """A program of both, that returns something of the new `m` as well."""

    def read_and_written(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
        h = reader.function(x, w, m.clone() if reader.copy and torch.is_grad_enabled() else m)
        with torch.no_grad():
            write(m)
        return h + torch.relu(h @ v), torch.sin(m)

    return read_and_written


def matrix() -> dict[str, Program]:
    """Each writer after three readers, each reader before four or five writers."""
    table = {}
    for i, (writer, write) in enumerate(WRITERS.items()):
        for j, (name, r) in enumerate(READERS.items()):
            if (i + 4 * j) % 15 in (0, 5, 11):
                row = Program(made(r, write), f"x:TD w:DD v:DD | m:{r.m}", r.infer, r.train, inductor=r.inductor)
                table[f"{name}, {writer}"] = row
    return table


HEADS = (
    "F.cross_entropy({z}, torch.arange(12) % 24)",
    "F.cross_entropy(3 * torch.tanh({z} / 3), torch.arange(12) % 24, label_smoothing=0.1)",
    "(F.cross_entropy({z}, torch.arange(12) % 5 - 1, ignore_index=-1) + 0.01 * {z}.logsumexp(-1).square().mean())",
    "(F.cross_entropy({z}, torch.arange(12) % 24, reduction='none') * {x}.mean(-1)).sum()",
    "-(F.log_softmax(0.5 * {z}, -1) * torch.eye(24)[:12].double()).sum(-1).mean()",
)
"""Losses of scores z [12, 24], made of x, as Python."""
