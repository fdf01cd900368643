"""float32 is not the reals: sums whose terms cancel give the rounding that they give in eager and under Inductor."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from cancelling_programs import CANCELLING
from evaluate import compiled, flat, strict_reference
from torch import Tensor

STRICT, DEFAULT = {"numerics": "strict"}, dict[str, Any]()


def inputs() -> tuple[Tensor, ...]:
    """x [300, 64], w and v [64, 64], g [64]."""
    torch.manual_seed(0)
    return tuple(torch.randn(*shape) for shape in ((300, 64), (64, 64), (64, 64), (64,)))


@cache
def wanted(name: str) -> list[Tensor]:
    """Eager's values."""
    return flat(CANCELLING[name][0](*inputs()))


def derived(name: str, **options: Any) -> tuple[list[Tensor], int]:
    """What the rewritten graph gives, and its Regions."""
    found, reports = compiled(CANCELLING[name][0], *inputs(), run=False, **options)
    return flat(found), sum(len(report.sites) for report in reports)


def agree(found: list[Tensor], theirs: list[Tensor]) -> None:
    for i, (mine, its) in enumerate(zip(found, theirs, strict=True)):
        least = 1e-6 * float(its.abs().max())
        assert torch.allclose(mine, its, rtol=1e-5, atol=least), f"output {i} is off by {(mine - its).abs().max():.1e}"


@pytest.mark.sampled
@pytest.mark.parametrize("options", [DEFAULT, STRICT], ids=["default", "strict"])
@pytest.mark.parametrize("name", CANCELLING)
def test_what_cancels_is_eagers(name: str, options: dict[str, Any]) -> None:
    found, regions = derived(name, **options)
    agree(found, wanted(name))
    _, default, strict, _ = CANCELLING[name]
    assert regions >= (strict if options else default)


def test_eagers_are_inductors() -> None:
    """All in one graph, because one compile takes as long as any."""

    def every(*args: Tensor) -> Any:
        return [f(*args) for f, *_ in CANCELLING.values()]

    with strict_reference(), torch.no_grad():
        stock = flat(torch.compile(every, backend="inductor")(*inputs()))
    agree(stock, [x for name in CANCELLING for x in wanted(name)])


@pytest.mark.parametrize("options", [DEFAULT, STRICT], ids=["default", "strict"])
def test_through_inductor(options: dict[str, Any]) -> None:
    """Its own compiler rounds as eager does what the Regions leave to it."""
    names = ("rounded", "kahan", "split", "residual_subtracted", "compensated_mean")

    def some(*args: Tensor) -> Any:
        return [CANCELLING[name][0](*args) for name in names]

    found, _ = compiled(some, *inputs(), **options)
    agree(flat(found), [x for name in names for x in wanted(name)])


@pytest.mark.parametrize("name", ["straight_through", "straight_through_signs", "rounded_in_a_norm"])
def test_gradients_are_eagers(name: str) -> None:
    function = CANCELLING[name][0]

    def gradients(run: Any) -> list[Tensor]:
        args = [x.requires_grad_() for x in inputs()]
        parts = [x.square().mean() for x in flat(run(*args)) if x.requires_grad]
        return list(torch.autograd.grad(torch.stack(parts).sum(), args, materialize_grads=True))

    theirs = gradients(function)
    with strict_reference(run=False):
        mine = gradients(partial(torch.compile, backend="coda")(function))
    for a, b in zip(mine, theirs, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())
