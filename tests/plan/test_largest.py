"""amax of a product's epilogue, over features and over tokens: taken in its Region, and as torch takes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiling import REFERENCE, run
from torch import Tensor

STRICT = REFERENCE | {"strict": True}
M, K, N = 300, 16, 24

pytestmark = pytest.mark.usefixtures("uncached")


def of(dim: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        return h.relu(), h.relu().amax(dim)

    return f


def given(odd: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(M, K, dtype=torch.float64), torch.randn(K, N, dtype=torch.float64)
    if odd:
        x[3, 0], x[5, 1], x[7, 2] = float("nan"), float("inf"), -float("inf")
        w[1:3, ::2] = w[1:3, ::2].abs()
    return x, w


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "odd"])
@pytest.mark.parametrize(("dim", "over"), [(-1, "N"), (0, "M")])
def test_the_largest_is_taken_in_the_region(dim: int, over: str, odd: bool) -> None:
    x, w = given(odd)
    ran = run(of(dim), x, w, options=STRICT)
    (report,) = ran.reports
    (site,) = report.sites
    region = site.region
    assert [(r.of, r.over) for r in region.reductions] == [("max", over)], region
    for found, wanted in zip(ran.output, of(dim)(x, w), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert not odd or bool(ran.output[1].isnan().any())


def test_its_gradient_finds_the_largest_among_the_stored() -> None:
    """In bfloat16 too, where none is as large as the largest before it was rounded."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        return h.relu().sum() + h.amax(-1).sum()

    x, w = (t.to(torch.bfloat16).requires_grad_() for t in given())
    ran = run(f, x, w, options=STRICT, grad=True)
    assert [r.of for report in ran.reports for site in report.sites for r in site.region.reductions] == ["max"]
    for found, wanted in zip(
        torch.autograd.grad(ran.output, (x, w)), torch.autograd.grad(f(x, w), (x, w)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-2)
