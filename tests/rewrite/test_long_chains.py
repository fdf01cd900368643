"""Chains in which each step reads the two before it, or one before it twice: all walks visit a value once. A walk along
all ways takes twice as long for each step or two; of LONG steps none would end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from evaluate import error, strict_reference
from torch import Tensor

from coda_inductor.patterns.terms import ONE, Terms
from coda_inductor.rewrite.separate import MOST, separate

LONG, D = 40, 8
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

STEPS: dict[str, Step] = {
    "norms": lambda a, b: (b, b * torch.rsqrt((b * b).mean(-1, keepdim=True) + 1)),
    "layer norms": lambda a, b: (b, F.layer_norm(a, (D,)) + 0.1 * b),
    "sums": lambda a, b: (b, (a + b) * 0.6),
    "gates": lambda a, b: (b, torch.sigmoid(a) * b),
}


@pytest.mark.sampled
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_chains_end(name: str, train: bool) -> None:
    torch.manual_seed(0)

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        a = torch.tanh(x @ w)
        b = x + a @ v
        for _ in range(LONG):
            a, b = STEPS[name](a, b)
        return torch.relu(b) @ w

    args = [torch.randn(D, D, dtype=torch.float64, requires_grad=train) for _ in range(3)]
    wanted = f(*args)
    with strict_reference(run=False):
        found = torch.compile(f, backend="coda", options=REFERENCE | {"strict": True})(*args)
        assert error(found, wanted) < 1e-9
        if train:
            mine, theirs = (torch.autograd.grad(out.sum(), args) for out in (found, wanted))
            assert all(error(a, b) < 1e-9 for a, b in zip(mine, theirs, strict=True))


def test_sums_of_parts_end() -> None:
    """What is 0 but for some rows, added up again and again."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        zeros = torch.zeros_like(x)
        a, b = (zeros.slice_scatter(torch.tanh(x[i:j] @ w), 0, i, j) for i, j in ((0, 3), (3, D)))
        for _ in range(LONG):
            a, b = b, 0.5 * a + b
            a, b = b, a + b
        return torch.relu(b) @ w

    args = [torch.randn(D, D, dtype=torch.float64) for _ in range(2)]
    with strict_reference(run=False), torch.no_grad():
        found = torch.compile(f, backend="coda", options=REFERENCE | {"strict": True})(*args)
    assert error(found, f(*args)) < 1e-10


@pytest.mark.parametrize("steps", [4, 60])
def test_a_value_of_too_many_summands_stays_whole(steps: int) -> None:
    terms = Terms()
    product = terms.con(terms.leaf("x", (0, 2)), terms.leaf("w", (1, 2)), (2,), 0)
    late = terms.red("sum", product, (1,), {1: D})
    x = product
    for i in range(steps):
        x = terms.mul(terms.add(x, terms.mul(late, terms.leaf(f"v{i}", (1,)))), terms.add(late, terms.fn("exp", x)))
    parts = separate(terms, x, product.hosts, (1,))
    assert len(parts) <= MOST
    assert (len(parts) == 1 and parts[0].late is terms.const(ONE) and parts[0].rest is x) == (steps == 60)
