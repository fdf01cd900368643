"""The gradient of a residual stream: the residual's, a product's and what a norm's statistic adds, in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, close, run
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain

TOKENS, WIDTH = 320, 64
STRICT = REFERENCE | {"strict": True}


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True) + 1e-6


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gain (x / rms)": lambda x, gain: gain * (x / mean_square(x).sqrt()),
    "gain x / rms": lambda x, gain: gain * x / mean_square(x).sqrt(),
    "gain (x rsqrt)": lambda x, gain: gain * (x * mean_square(x).rsqrt()),
    "rsqrt x gain": lambda x, gain: mean_square(x).rsqrt() * x * gain,
}
"""Autograd adds up the gradients of x in another order for each. Of "gain x / rms" the product's comes last."""

pytestmark = pytest.mark.usefixtures("interpreted")


class Block(nn.Module):
    def __init__(self, spelling: str, width: int) -> None:
        super().__init__()
        self.normed = SPELLINGS[spelling]
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gate, self.back = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.write(F.gelu(self.read(x)))
        n = self.normed(x, self.gain)
        made: Tensor = x + self.back(self.gate(n).sigmoid())
        return made


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_gradients_are_eagers(spelling: str) -> None:
    model = Block(spelling, WIDTH).double()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()])
    compiled = torch.compile(model, backend="coda", options=STRICT)
    for found, right in zip(
        torch.autograd.grad(compiled(x).square().mean(), [x, *model.parameters()]), wanted, strict=True
    ):
        close(found, right)


def passes(spelling: str) -> list[dict[str, Any]]:
    """What is left to loops over tiles."""
    with torch.device("meta"):
        model = Block(spelling, 1024).bfloat16()
        x = torch.empty(4096, 1024, dtype=torch.bfloat16)
    facts = explain(model, (x,), {}, "train", Settings(target="sm_90a"))
    return [
        p for p in facts["graphs"][0]["passes"] if "rsqrt" in p["what"] or "sqrt" in p["what"] or "add" in p["what"]
    ]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_loop_adds_them_up(spelling: str) -> None:
    assert passes(spelling) == []


def test_a_forward_reads_no_two_tiles_in_place_of_one() -> None:
    """Which loops write anyway, for another reader."""

    def call(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        s = a.transpose(0, 1).contiguous() + b.transpose(0, 1).contiguous()
        return F.silu(x @ w) * s.transpose(0, 1), s.cos()

    x, w = torch.randn(4, 128, 64, dtype=torch.float64), torch.randn(64, 96, dtype=torch.float64)
    a, b = (torch.randn(4, 128, 96, dtype=torch.float64) for _ in "ab")
    ran = run(call, x, w, a, b, options=STRICT)
    for found, wanted in zip(ran.output, call(x, w, a, b), strict=True):
        close(found, wanted)
    refused = [r.reason for report in ran.reports for r in report.refused]
    assert any("laid out" in reason for reason in refused), refused
