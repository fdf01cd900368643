"""What a compiled model returns has the strides that eager gives it, whatever stands between a Region and the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import compiled, error, flat
from torch import Tensor

torch.manual_seed(0)
IN, OUT, BACK = (torch.randn(s, dtype=torch.float64) for s in ((8, 8), (12, 8), (8, 12)))
GAIN = torch.randn(8, dtype=torch.float64)


def largest(h: Tensor) -> Tensor:
    """A norm that no epilogue can make."""
    return h / (h.abs().amax(-1, keepdim=True) + 1)


def rms(h: Tensor) -> Tensor:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * GAIN


def layer(h: Tensor) -> Tensor:
    return h + F.linear(F.relu(F.linear(rms(h), OUT)), BACK)


def first(x: Tensor, r: Tensor) -> Tensor:
    return layer(r + F.linear(torch.tanh(F.linear(x, IN)), IN))


FUNCTIONS: list[Callable[[Tensor, Tensor], Any]] = [
    first,
    lambda x, r: largest(first(x, r)),
    lambda x, r: layer(largest(first(x, r))),
    lambda x, r: rms(layer(largest(first(x, r)))),
    lambda x, r: (first(x, r).transpose(0, 1), first(x, r) * 2),
    lambda x, r: largest(first(x, r)).transpose(0, 1),
    lambda x, r: torch.where(r > 0, first(x, r).softmax(-1), 0.5),
    lambda x, r: (first(x, r).flip(-1), first(x, r).cumsum(0)),
    lambda x, r: largest(layer(first(x, r))).transpose(0, 1).reshape(-1, 8),
]
RESIDUALS: list[Callable[[Tensor], Tensor]] = [
    lambda r: r,
    lambda r: r.transpose(0, 1).contiguous().transpose(0, 1),
    lambda r: r.transpose(1, 2).contiguous().transpose(1, 2),
    lambda r: r[:, :1].expand_as(r),
]


@pytest.mark.sampled
@pytest.mark.parametrize("layouts", RESIDUALS)
@pytest.mark.parametrize("f", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_outputs_lie_as_they_do_in_eager(
    f: Callable[[Tensor, Tensor], Any], layouts: Callable[[Tensor], Tensor], dynamic: bool
) -> None:
    x, r = torch.randn(2, 5, 8, dtype=torch.float64), layouts(torch.randn(2, 5, 8, dtype=torch.float64))
    for t in (x, r) if dynamic else ():
        torch._dynamo.mark_dynamic(t, 1)
    found, reports = compiled(f, x, r, run=not dynamic and f is FUNCTIONS[0])
    assert any(report.sites for report in reports)
    for mine, theirs in zip(flat(found), flat(f(x, r)), strict=True):
        assert error(mine, theirs) < 1e-12
        assert mine.stride() == theirs.stride()
