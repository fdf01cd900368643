"""Queries of which a rotary embedding turns a part of each head: put together by token, so that attention's result is
read where it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, close, run
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("uncached")
B, T, HEADS, SIZE, TURNED = 2, 24, 4, 16, 8
WIDTH = HEADS * SIZE


class Partial(nn.Module):
    """As transformers' GLM-4, Nemotron and Phi spell it. `how` says who else reads what."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        x, rest = x[..., :TURNED], x[..., TURNED:]
        a, b = x.chunk(2, -1)
        x = x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()
        return torch.cat((x, rest), 2 if self.how == "rows" else -1)

    def forward(self, x: Tensor, angles: Tensor) -> Any:
        q, k, v = (w(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for w in (self.q, self.k, self.v))
        if self.how == "few":
            q, k = q + 1, self.turned(k, angles)
        else:
            q, k = self.turned(q, angles), self.turned(k, angles)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        match self.how:
            case "returned":
                return made
            case "returned too":
                return self.o(made.transpose(1, 2).flatten(2)), made
            case "views":
                return self.o(made.transpose(1, 2).flatten(2)), made, made[:, 0]
            case "twice":
                return self.o((made + F.scaled_dot_product_attention(q, v, k)).transpose(1, 2).flatten(2)) + self.o(
                    made.transpose(1, 2).flatten(2)
                )
            case "read":
                return self.o(made.transpose(1, 2).flatten(2)) + q.cumsum(1).transpose(1, 2).flatten(2)
            case "by heads":
                return made.flatten(2).sin() @ made.flatten(2).transpose(1, 2)
            case "in memory":
                return torch.as_strided(made, (B * T, WIDTH), (WIDTH, 1)).cos() @ self.o.weight, self.o(
                    made.transpose(1, 2).flatten(2)
                )
        return self.o(F.gelu(made.transpose(1, 2).reshape(x.shape)))


def turned(how: str, *, grad: bool, **compile_with: Any) -> int:
    """How many results are read where they lie; results and gradients are eager's."""
    torch.manual_seed(0)
    model = Partial(how).double()
    x, angles = torch.randn(B, T, WIDTH, dtype=torch.float64), torch.randn(T, TURNED, dtype=torch.float64)
    found = list[list[Tensor]]()
    for compile_it in (False, True):
        model.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            ran = run(model, leaf, angles, grad=grad, options=REFERENCE, **compile_with) if compile_it else None
            made = model(leaf, angles) if ran is None else ran.output
        assert not ran
        out = [*made] if isinstance(made, tuple) else [made]
        if grad:
            sum((y * torch.linspace(-1, 1, y.shape[-1], dtype=torch.float64)).sum() for y in out).backward()
        found.append([*out, *(t.grad for t in (leaf, *model.parameters()) if t.grad is not None)])
    for mine, eager in zip(found[1], found[0], strict=True):
        close(mine, eager)
    assert ran is not None
    return sum(len(a.absorbed) for report in ran.reports for a in report.grouped if a.heads == 0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("how", "copies"),
    [
        ("", 1),
        ("returned too", 1),  # which then is a copy that lies as it did
        ("twice", 1),  # by two
        ("returned", 0),  # nobody reads it by token
        ("by heads", 0),
        ("views", 0),  # two results share memory
        ("read", 0),  # the queries, too
        ("few", 0),  # they lie by token already
    ],
)
def test_who_reads_the_result(how: str, copies: int, grad: bool) -> None:
    assert turned(how, grad=grad) == copies


def test_what_is_read_by_its_place_in_memory() -> None:
    assert turned("in memory", grad=False) == 1


def test_symbols() -> None:
    assert turned("", grad=False, dynamic=True) == 1 and turned("returned too", grad=True, dynamic=True) == 1


def test_it_can_be_switched_off() -> None:
    model = Partial().double()
    x, angles = torch.randn(B, T, WIDTH, dtype=torch.float64), torch.randn(T, TURNED, dtype=torch.float64)
    ran = run(model, x, angles, options=REFERENCE | {"disable": "grouped"})
    assert not any(report.grouped for report in ran.reports)
