"""A bias of -inf hides a feature: what reads it gives 0 for it, with a gradient of 0. Eager's gradients are finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from evaluate import error, strict_reference
from torch import Tensor, nn

from coda_inductor.inductor.joint_pass import REPORTS

WIDTH = 16


class Gated(nn.Module):
    """A norm behind a product, and a biased product that something reads."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.read = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH), read
        self.gate, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.gate.bias[0] = -torch.inf

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.read(self.gate(self.norm(x + self.first(x)))))  # type: ignore[no-any-return]


def top(s: Tensor) -> Tensor:
    """The softmax of the four largest."""
    values, places = s.topk(4, -1)
    return torch.zeros_like(s).scatter(-1, places, values.softmax(-1))


def halves(s: Tensor) -> Tensor:
    """What is infinite lies in one half, and is multiplied with the other."""
    made = torch.sigmoid(s[..., :WIDTH]) * s[..., WIDTH:]
    return torch.cat([made, made], -1)


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda s: s.softmax(-1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exponential": torch.exp,
    "relu": torch.relu,
    "squared relu": lambda s: torch.relu(s).square(),
    "clamped": lambda s: s.clamp(min=-1),
    "largest": top,
    "halves": halves,
    "others": lambda s: torch.cat([s[..., 1:], s[..., 1:2]], -1),
}


@pytest.mark.parametrize("name", READ)
def test_gradients_are_eagers(name: str) -> None:
    model, x = Gated(READ[name]).double(), torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    given = [x, *model.parameters()]
    wanted = [y := model(x), *torch.autograd.grad(y.sin().sum(), given)]
    with strict_reference(run=False):
        REPORTS.clear()
        found = [y := torch.compile(model, backend="coda")(x), *torch.autograd.grad(y.sin().sum(), given)]
    assert REPORTS[-1].sites and all(t.isfinite().all() for t in wanted)
    assert all(error(mine, theirs) < 1e-10 for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("read", [F.silu, F.gelu], ids=["silu", "gelu"])
def test_a_factor_of_itself_is_no_number(read: Callable[[Tensor], Tensor]) -> None:
    """So in eager, too: infinity times 0. The sum over the row is taken as ever."""
    model, x = Gated(read).double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    with strict_reference(run=False):
        assert torch.compile(model, backend="coda")(x).isnan().all() and model(x).isnan().all()
