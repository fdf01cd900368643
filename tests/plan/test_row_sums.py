"""Sums over the columns that an epilogue takes, and who else reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiling import REFERENCE, run
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("interpreted")

M, K, N = 96, 32, 64


class Program(nn.Module):
    """A function of a product [M, N] and another's weight [N, K]."""

    def __init__(self, of: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.of = nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False), of

    def forward(self, x: Tensor) -> object:
        return self.of(self.first(x), self.second.weight)


def normalised(z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The second product's epilogue reads the sum, and so does a loop."""
    e = torch.exp(z)
    total = e.sum(-1, keepdim=True)
    return (e @ w.T) / (1 + total), torch.log1p(total).sum()


def sorted_sums(z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What is no loop reads the sum."""
    return torch.relu(z), torch.exp(z).sum(-1).sort().values


def in_a_loop(z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A loop alone reads the sum."""
    return torch.relu(z), torch.exp(z).sum(-1).sin()


PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], list[tuple[int, int]]]] = {
    "read by an epilogue and a loop": (normalised, [(1, 1), (1, 0)]),
    "read by what is no loop": (sorted_sums, [(1, 1)]),
    "read by a loop": (in_a_loop, [(2, 0)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_stores_and_sums(name: str) -> None:
    """How many each Region has: nothing is stored only so that a sum that is there is taken once more."""
    of, wanted = PROGRAMS[name]
    model, x = Program(of).double(), torch.randn(M, K, dtype=torch.float64)
    with torch.no_grad():
        eager = model(x)
    ran = run(model, x, options=REFERENCE | {"strict": True})
    assert ran == []
    assert [(len(s.region.stores), len(s.region.reductions)) for r in ran.reports for s in r.sites] == wanted
    for found, exact in zip(ran.output, eager, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
