"""Attention that is written out, by cuDNN's kernels: outputs and gradients are as near to float64 as eager's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from compiling import run
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.usefixtures("uncached"),
]
WORSE = 1.1
"""How much larger the error may be than eager's. On an H200 it was smaller."""
Scores = Callable[["Attention", Tensor], Tensor]


class Attention(nn.Module):
    """Eight heads of `size`, whose keys and values `groups` heads share; `hide` changes the scores."""

    def __init__(self, size: int, groups: int, tokens: int, hide: Scores) -> None:
        super().__init__()
        self.size, self.groups, self.hide = size, groups, hide
        self.sizes = [8 * size, groups * size, groups * size]
        self.qkv, self.o = nn.Linear(64, sum(self.sizes)), nn.Linear(8 * size, 64)
        self.register_buffer("past", torch.ones(tokens, tokens, dtype=torch.bool).tril())
        self.register_buffer("table", torch.randn(8, tokens, tokens))
        self.register_buffer("first", torch.arange(4)[:, None] * (tokens // 5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        k, v = (t.repeat_interleave(8 // self.groups, 1) for t in (k, v))
        weights = self.hide(self, q @ k.mT / math.sqrt(self.size)).softmax(-1)
        return self.o(torch.nn.functional.gelu((weights @ v).transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def nothing(_: Attention, scores: Tensor) -> Tensor:
    return scores


def by_buffer(a: Attention, scores: Tensor) -> Tensor:
    return scores.masked_fill(~a.past, -math.inf)  # type: ignore[operator]


def later(_: Attention, scores: Tensor) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -math.inf)


def distances(_: Attention, scores: Tensor) -> Tensor:
    """As ALiBi."""
    at = torch.arange(scores.shape[-1], device=scores.device)
    slopes = (0.5 ** torch.arange(1, 9, device=scores.device))[:, None, None]
    least = torch.finfo(scores.dtype).min
    return scores + (slopes * (at - at[:, None])).to(scores.dtype).masked_fill(at > at[:, None], least)


def table(a: Attention, scores: Tensor) -> Tensor:
    return scores + a.table  # type: ignore[operator]


def padded(a: Attention, scores: Tensor) -> Tensor:
    """The first tokens of a sample are hidden from all: of some rows every key is."""
    at = torch.arange(scores.shape[-1], device=scores.device)
    seen = (at >= a.first[:, None]) & a.past  # type: ignore[index, operator]
    least = torch.finfo(scores.dtype).min
    return scores + torch.zeros_like(seen, dtype=scores.dtype).masked_fill(~seen, least)[:, None]


def results(model: nn.Module, out: Tensor, leaf: Tensor, train: bool) -> list[Tensor]:
    if not train:
        return [out.double()]
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, device=out.device, dtype=torch.float64).to(out.dtype))
    return [x.double() for x in (out.detach(), leaf.grad, *(p.grad for p in model.parameters())) if x is not None]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("hide", "size", "groups", "tokens"),
    [
        (nothing, 64, 8, 197),
        (nothing, 80, 8, 1024),
        (nothing, 128, 2, 1000),
        (nothing, 256, 8, 513),
        (by_buffer, 64, 8, 1001),
        (by_buffer, 128, 8, 1024),
        (later, 64, 4, 1000),
        (distances, 128, 8, 777),
        (distances, 64, 8, 1024),
    ],
)
def test_its_error_is_eagers(hide: Scores, size: int, groups: int, tokens: int, train: bool) -> None:
    compared(hide, size, groups, tokens, train, torch.bfloat16)


@pytest.mark.parametrize(("hide", "size", "tokens"), [(table, 64, 200), (table, 80, 1001), (padded, 64, 1000)])
def test_masks_that_only_a_run_knows(hide: Scores, size: int, tokens: int) -> None:
    compared(hide, size, 8, tokens, False, torch.bfloat16)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("hide", [nothing, by_buffer, later])
def test_in_float16(hide: Scores, train: bool) -> None:
    compared(hide, 64, 8, 520, train, torch.float16)


def compared(hide: Scores, size: int, groups: int, tokens: int, train: bool, dtype: torch.dtype) -> None:
    """One operation, with errors that are at most eager's."""
    torch.manual_seed(0)
    exact = Attention(size, groups, tokens, hide).double().cuda()
    x = torch.randn(4 if tokens > 600 else 64, tokens, 64, device="cuda", dtype=torch.float64)
    found = list[list[Tensor]]()
    for compile_it, at in ((False, torch.float64), (False, dtype), (True, dtype)):
        model, leaf = copy.deepcopy(exact).to(at), x.to(at, copy=True).requires_grad_(train)
        if compile_it:
            ran = run(model, leaf, grad=train, options={"tune": "off"})
            assert ran == []
            assert sum("softmax" in a.what for report in ran.reports for a in report.grouped) == 1
            out = ran.output
        else:
            with torch.set_grad_enabled(train):
                out = model(leaf)
        found.append(results(model, out, leaf, train))
    for wanted, eager, mine in zip(*found, strict=True):
        assert bool(mine.isfinite().all())
        assert float((mine - wanted).norm()) <= WORSE * float((eager - wanted).norm())
