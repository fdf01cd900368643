"""On the GPU: loops of Inductor's whose rows are held in registers, forward and backward, are as exact as eager's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.usefixtures("uncached"),
]


def norms(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h = x + y
    return F.layer_norm(h, h.shape[-1:], w) * F.rms_norm(h, h.shape[-1:], w)


def gradients(f: Any, *args: Tensor) -> list[Tensor]:
    out = f(*args)
    out.backward(args[0].detach())
    return [out, *(x.grad for x in args if x.grad is not None)]


@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (37, 2048), (4097, 2560), (300, 4096), (64, 8192)])
@pytest.mark.parametrize("disable", ["", "rows"])
def test_held_rows(rows: int, width: int, disable: str) -> None:
    def made(dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(rows)
        drawn = [torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)]
        return [x.cuda().bfloat16().to(dtype).requires_grad_() for x in drawn]

    compiled = torch.compile(norms, backend="coda", options={"disable": disable})
    args = made(torch.bfloat16)
    found, codes = run_and_get_code(lambda: gradients(compiled, *args))
    eager, exact = gradients(norms, *made(torch.bfloat16)), gradients(norms, *made(torch.float64))
    for mine, theirs, wanted in zip(found, eager, exact, strict=True):
        off, tolerated = ((x.double() - wanted).norm() / wanted.norm() for x in (mine, theirs))
        assert off < 1.5 * tolerated + 2e-3
    assert len(codes) == 2
    assert all(held(code, width) == (not disable) for code in codes if rows > 64)


def held(code: str, width: int) -> bool:
    """Does a loop hold rows of so many columns? (Sums over the tokens are finished by one that holds short ones.)"""
    found = re.findall(r"persistent_reduction\(\s*size_hints=\{[^}]*'r0_': (\d+)", code)
    return any(int(columns) >= width for columns in found)
