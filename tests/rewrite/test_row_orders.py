"""Sums over rows that one epilogue takes and another reads whose rows are the same tokens in another order, or others:
windows of an image, as Swin's attention has them; a sequence's own statistic at each of its tokens. And tokens whose
number is known by a guard alone, or that lie in no order at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import error, flat, strict_reference
from small_tensors import R, rms
from torch import Tensor

from coda_inductor.core.versions import numbers
from coda_inductor.inductor.joint_pass import REPORTS

B, H, W, C, EXACT = 3, 4, 6, 8, 1e-10
ROWS: dict[str, tuple[Callable[..., Any], int, int]] = {}
"""Each a function of an image [B, H, W, C], three weights [C, C] and two vectors [C], and its Regions in training, with
the image's sizes as numbers and as symbols."""


def windows(x: Tensor) -> Tensor:
    """[B, H, W, C], the image in windows of 2 by 2, to [B * H * W / 4, 4, C]."""
    b = x.shape[0]
    return x.view(b, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, C)


def image(x: Tensor) -> Tensor:
    """The inverse of `windows`."""
    return x.view(-1, H // 2, W // 2, 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, H, W, C)


def case(static: int, dynamic: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(f: Callable[..., Any]) -> Callable[..., Any]:
        ROWS[f.__name__] = f, static, dynamic
        return f

    return keep


@case(2, 2)
def norm_behind_windows(x: Tensor, u: Tensor, v: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    h = x + F.layer_norm(image(F.linear(windows(x), u, b)), (C,), g, b)
    return h, F.linear(h, v)


@case(2, 2)
def norm_before_windows(x: Tensor, u: Tensor, v: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    h = x + F.linear(torch.tanh(x), u)
    return h + image(F.linear(torch.tanh(F.linear(windows(rms(h) * g), v)), w))


@case(2, 2)
def read_in_both_orders(x: Tensor, u: Tensor, v: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    h = x + F.linear(x, u)
    n = F.layer_norm(h, (C,), g, b)
    return F.gelu(F.linear(windows(n), v)), F.gelu(F.linear(n, w)), F.linear(n.transpose(1, 2), u)


@case(2, 2)
def rows_by_columns(x: Tensor, u: Tensor, v: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    h = F.linear(torch.tanh(x), u).transpose(1, 2)
    return torch.relu(F.linear(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1), v, b)), F.linear(h, w)


@case(2, 4)
def one_for_a_sequence(x: Tensor, u: Tensor, v: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    pooled = F.linear(x.mean((1, 2)), u, b)
    scale = torch.rsqrt(pooled.pow(2).mean(-1) + 1).view(-1, 1, 1, 1)
    return torch.relu(F.linear(x, v) * scale), torch.tanh(F.linear(x, w))


@case(4, 6)
def spread_over_a_sequence(x: Tensor, u: Tensor, v: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    """A node holds for each token what an epilogue takes for each sequence."""
    pooled = F.linear(torch.tanh(x.mean((1, 2))), u)
    spread = pooled.pow(2).mean(-1)[:, None, None].expand(x.shape[:3]).contiguous()
    return F.linear(rms(pooled), v), F.linear(rms(F.linear(x, u)) * spread[..., None], w), spread


@case(4, 4)
def held_in_the_readers_order(x: Tensor, u: Tensor, v: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    x = x[:, 0]
    h = F.linear(x, u)
    turned = h.pow(2).mean(-1).transpose(0, 1).contiguous()
    y = rms(F.linear(x.transpose(0, 1).contiguous(), w)) * turned[..., None]
    return F.linear(rms(h), v), F.linear(y, torch.diag(g)), turned


@case(2, 2)
def equal_by_a_guard(x: Tensor, u: Tensor, v: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    """With symbolic sizes the gradient comes back over a number of images that torch knows to be B by a guard alone."""
    h = F.linear(torch.tanh(F.linear(x, u)), v)
    return h, h.flatten(1, 2).transpose(0, 1).reshape(2, 4, -1, C)


@case(2, 2)
def frozen_and_batched(x: Tensor, u: Tensor, v: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    """Of tokens that lie in no order the product with a weight that needs no gradient is a batched one."""
    n = rms(x[:, 0].transpose(0, 1))
    gate = F.linear(n, u)
    return torch.cumsum(F.linear(n, w.detach()), 0) * gate


def given() -> list[Tensor]:
    return [R(B, H, W, C), R(C, C), R(C, C), R(C, C), R(C), R(C)]


def marked(args: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Copies that need gradients; `sizes` are dimensions of the image whose size may be a symbol."""
    args = [a.clone().requires_grad_() for a in args]
    for dim in sizes:
        torch._dynamo.maybe_mark_dynamic(args[0], dim)
    return args


def step(f: Callable[..., Any], args: list[Tensor]) -> list[Tensor]:
    """What f returns, and the gradients of all arguments that it reads."""
    outputs = flat(f(*args))
    sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outputs).backward()  # type: ignore[union-attr]
    return [*(o.detach() for o in outputs), *(a.grad for a in args if a.grad is not None)]


NEW = numbers(torch.__version__)[:2] >= (2, 14)
SINCE_2_14 = {"norm_behind_windows": 1, "norm_before_windows": 1}
"""Of symbolic sizes: torch 2.15 writes those of windows as quotients of quotients, of which we see no two as equal."""


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(), (0, 1, 2)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_in_another_order(name: str, sizes: tuple[int, ...]) -> None:
    function, *counts = ROWS[name]
    torch.manual_seed(0)
    args = given()
    wanted = step(function, marked(args, ()))
    with strict_reference(run=False):
        REPORTS.clear()
        found = step(torch.compile(function, backend="coda"), marked(args, sizes))
        wanted_regions = SINCE_2_14.get(name, counts[1]) if sizes and NEW else counts[bool(sizes)]
        assert [len(report.sites) for report in REPORTS] == [wanted_regions]
        with torch.no_grad():
            inferred = flat(torch.compile(function, backend="coda")(*marked(args, sizes)))
    for mine, eager in zip([*found, *inferred], [*wanted, *wanted[: len(inferred)]], strict=True):
        assert error(mine, eager) < EXACT
