"""Attention by masks that hide the later tokens, or nothing, or show a window, by repeated keys, and with positions
that are added to scores, on the GPU: torch's kernel is asked without them, and its error is no worse than eager's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from compiling import run
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.usefixtures("uncached"),
]
WORSE = 1.5  # times eager's error: another order of sums


class Attention(nn.Module):
    """Eight heads of `size` that share keys and values of `groups`, a mask of booleans, as transformers builds both:
    tokens see `left` before and `right` behind, or all."""

    def __init__(self, size: int, groups: int, left: int | None, right: int | None) -> None:
        super().__init__()
        self.size, self.groups, self.left, self.right = size, groups, left, right
        self.q, self.o = (nn.Linear(8 * size, 8 * size, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(8 * size, groups * size, bias=False) for _ in range(2))

    def repeated(self, x: Tensor) -> Tensor:
        """[batch, groups, tokens, size], as every head reads it."""
        more = x[:, :, None].expand(-1, -1, 8 // self.groups, -1, -1)
        return more.reshape(x.shape[0], 8, x.shape[2], self.size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.q, self.k, self.v))
        k, v = self.repeated(k), self.repeated(v)
        at = torch.arange(x.shape[1], device=x.device)
        ahead = at[None] - at[:, None]
        seen = ahead >= -x.shape[1]
        seen = seen if self.left is None else seen & (-ahead <= self.left)
        seen = seen if self.right is None else seen & (ahead <= self.right)
        mask = seen[None, None].expand(x.shape[0], 1, -1, -1)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(F.gelu(made.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def results(model: nn.Module, out: Tensor, x: Tensor) -> list[Tensor]:
    """The output and all gradients of a weighted sum of it, in float64."""
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    (out * weights).sum().backward()
    return [t.detach().double() for t in (out, x.grad, *(p.grad for p in model.parameters())) if t is not None]


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(
    ("tokens", "groups", "left", "right"),
    [
        (256, 8, None, 0),
        (1000, 8, None, 0),
        (2048, 8, None, 0),
        (1000, 2, None, 0),
        (2048, 1, None, 0),
        (1000, 8, None, None),
        (2048, 2, None, None),
        (2048, 8, 64, 64),
        (1100, 2, 63, 0),
        (1024, 4, 0, 200),
    ],
)
def test_its_error_is_eagers(size: int, tokens: int, groups: int, left: int | None, right: int | None) -> None:
    torch.manual_seed(0)
    exact = Attention(size, groups, left, right).double().cuda()
    x = torch.randn(2, tokens, 8 * size, device="cuda", dtype=torch.float64)
    found = list[list[Tensor]]()
    for compile_it, dtype in ((False, torch.float64), (False, torch.bfloat16), (True, torch.bfloat16)):
        model, leaf = copy.deepcopy(exact).to(dtype), x.to(dtype, copy=True).requires_grad_()
        if compile_it:
            ran = run(model, leaf, grad=True, options={"tune": "off"})
            assert ran == [] and [len(report.masks) for report in ran.reports] == [1]
            assert [len(report.grouped) for report in ran.reports] == [int(groups < 8)]
        found.append(results(model, ran.output if compile_it else model(leaf), leaf))
    for wanted, eager, mine in zip(*found, strict=True):
        assert float((mine - wanted).norm()) <= WORSE * float((eager - wanted).norm())


class Image(nn.Module):
    """Eight heads of `size` over an image of rows and columns, whose distances are added to scores as in SAM."""

    def __init__(self, size: int, rows: int, columns: int) -> None:
        super().__init__()
        self.shape = rows, columns
        self.qkv, self.o = nn.Linear(64, 24 * size), nn.Linear(8 * size, 64)
        self.down = nn.Parameter(torch.randn(rows, rows, size) / 4)
        self.across = nn.Parameter(torch.randn(columns, columns, size) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        image = q.unflatten(2, self.shape)
        down = torch.einsum("bnhwc,hkc->bnhwk", image, self.down)
        across = torch.einsum("bnhwc,wkc->bnhwk", image, self.across)
        mask = (down[..., None] + across[..., None, :]).flatten(-2).flatten(2, 3)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(F.gelu(made.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("size", "rows", "columns"), [(80, 48, 48), (64, 37, 40), (80, 64, 64), (32, 39, 39), (64, 38, 40)]
)
def test_added_positions_are_features(size: int, rows: int, columns: int, train: bool) -> None:
    torch.manual_seed(0)
    exact = Image(size, rows, columns).double().cuda()
    x = torch.randn(2, rows * columns, 64, device="cuda", dtype=torch.float64)
    found = list[list[Tensor]]()
    for compile_it, dtype in ((False, torch.float64), (False, torch.bfloat16), (True, torch.bfloat16)):
        model, leaf = copy.deepcopy(exact).to(dtype), x.to(dtype, copy=True).requires_grad_(train)
        if compile_it:
            ran = run(model, leaf, grad=train, options={"tune": "off"})
            assert ran == []
            assert [a.features for report in ran.reports for a in report.grouped if a.features] == [rows + columns]
            out = ran.output
        else:
            with torch.set_grad_enabled(train):
                out = model(leaf)
        found.append(results(model, out, leaf) if train else [out.double()])
    for wanted, eager, mine in zip(*found, strict=True):
        assert float((mine - wanted).norm()) <= WORSE * float((eager - wanted).norm())
