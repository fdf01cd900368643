"""One weight that multiplies a stream and its norm: both products are of one accumulator, and what an operation that is
not lifted makes of either must not be read by the epilogue that makes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from evaluate import error, strict_reference
from torch import Tensor

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.plan.draft import cycle

Form = Callable[[Tensor], Tensor]

OPAQUE: dict[str, Form] = {
    "floor": lambda a: a - a.floor(),
    "flip": lambda a: a * a.flip(-1),
    "roll": lambda a: a + a.roll(1, -1),
    "elu": F.elu,
    "mish": F.mish,
    "lerp": lambda a: torch.lerp(a, a.sign(), 0.3),
    "prod": lambda a: a * a.prod(-1, keepdim=True),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", OPAQUE)
def test_no_epilogue_waits_for_its_own_store(name: str, train: bool) -> None:
    torch.manual_seed(0)
    form = OPAQUE[name]

    def f(x: Tensor, r: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x + r @ v
        n = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return form(n @ w), y @ w

    sizes = (16, 16), (16, 32), (32, 16), (16, 32)
    args = [torch.randn(*size, dtype=torch.float64, requires_grad=train) for size in sizes]
    wanted = f(*args)
    with strict_reference(run=False):
        REPORTS.clear()
        found = torch.compile(f, backend="coda", options=REFERENCE | {"strict": True})(*args)
        assert all(error(a, b) < 1e-10 for a, b in zip(found, wanted, strict=True))
        assert any(report.sites for report in REPORTS)
        if train:
            mine, theirs = (torch.autograd.grad((a * a).sum() + b.sum(), args) for a, b in (found, wanted))
            assert all(error(a, b) < 1e-10 for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ([], []),
        ([0b10, 0], []),
        ([0b1], [0]),
        ([0, 0b100, 0b10, 0b10], [1, 2]),
        ([0b10, 0b100, 0b1000, 0b10], [1, 2, 3]),
    ],
)
def test_a_cycle_is_found_and_not_what_waits_for_it(waits: list[int], found: list[int]) -> None:
    assert sorted(cycle(waits, [1 << i for i in range(len(waits))])) == found
