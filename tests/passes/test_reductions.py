"""Of scores that no epilogue makes, a loss reads long rows once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import run
from programs import relative
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.core.elementwise import EXPONENTIALS, MAXIMUM
from coda_inductor.inductor import joint
from coda_inductor.passes.reductions import LONG_ROWS, write_softmax_sums
from coda_inductor.patterns.effects import effects

aten = torch.ops.aten
ROWS, COLUMNS = 24, 40


def entropy(**options: object) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, -2), y.flatten(), **options)  # type: ignore[arg-type]

    return loss


def with_z(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), y.flatten()) + torch.logsumexp(z, -1).square().mean()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "mean": (entropy(), 1),
    "ignored": (entropy(ignore_index=3), 1),
    "sum": (entropy(reduction="sum"), 1),
    "smoothed": (entropy(label_smoothing=0.1), 0),
    "times a number": (lambda z, y: entropy()(z * 0.7, y), 1),
    "of what a loop makes": (lambda z, y: entropy()(z.sin(), y), 0),
    "two losses": (lambda z, y: entropy()(z, y) + entropy(ignore_index=2)(z, y) ** 2, 1),
    "weighted classes": (lambda z, y: entropy(weight=torch.linspace(0.5, 1.5, COLUMNS).to(z.dtype))(z, y), 1),
    "with z": (with_z, 0),
    "probabilities": (lambda z, y: (torch.softmax(z, -1) * torch.log_softmax(z, -1)).sum() / y.numel(), 0),
    "largest, too": (lambda z, y: entropy()(z, y) + z.argmax(-1).sum() * 0, 0),
    "over two": (lambda z, y: entropy()(z, y) * z.sum((0, 1, 2)).sum(), 0),
    "of the batch": (lambda z, y: torch.log_softmax(z, 0).square().mean() + y.sum() * 0, 0),
}
"""Each with the passes over its scores: none where something else is taken over their rows, too."""


def scores(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, ROWS // 2, COLUMNS).to(dtype), torch.randint(0, COLUMNS, (2, ROWS // 2))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_itself(name: str) -> None:
    """The loss and the gradient, nearly as near to float64 as eager's."""
    loss, passes = LOSSES[name]
    z, y = scores()
    mine, theirs, exact = (x.clone().requires_grad_() for x in (z, z, z.double()))
    ran = run(loss, mine, y, grad=True, options={"target": "reference"})
    ran.output.backward()
    for x in (theirs, exact):
        loss(x, y).backward()
    assert ran == [] and mine.grad is not None and theirs.grad is not None and exact.grad is not None
    assert relative(mine.grad, exact.grad) <= 1.1 * relative(theirs.grad, exact.grad) + 1e-7
    records = [p.record for report in ran.reports for p in report.elementwise]
    assert [{o.taken for o in r.outputs} for r in records] == [{MAXIMUM, EXPONENTIALS}] * passes


def less(z: Tensor, maximum: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
    return maximum.sum() + (z - maximum).exp().sum(dims).log().sum()


OTHER = torch.linspace(-1, 2, ROWS * COLUMNS).view(2, ROWS // 2, COLUMNS)
SQUARE = OTHER.flatten()[: ROWS * ROWS].clone().view(ROWS, ROWS)
SUMS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "its own maximum": (lambda z: less(z, z.amax(-1, keepdim=True)), 1),
    "another's": (lambda z: less(z, OTHER.amax(-1, keepdim=True)), 0),
    "of columns": (lambda z: less(z, z.amax(1, keepdim=True)), 0),
    "of the wrong rows": (lambda z: less(SQUARE, SQUARE.amax(-1)), 0),
    "twice": (lambda z: torch.sub(z, (m := z.amax(-1, keepdim=True)), alpha=2).exp().sum(-1).log().sum() + m.sum(), 0),
    "of two dimensions": (lambda z: less(z, z.amax((1, 2), keepdim=True), (1, 2)), 0),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", SUMS)
def test_sums_relative_to_a_maximum(name: str) -> None:
    """Only those relative to the maximum of the same rows are taken with it."""
    model, passes = SUMS[name]
    z, _ = scores()
    ran = run(model, z, options={"target": "reference"})
    assert ran == [] and torch.allclose(ran.output, model(z))
    assert sum(len(report.elementwise) for report in ran.reports) == passes


ODD = {
    "infinite": float("inf"),
    "minus infinity": -float("inf"),
    "NaN": float("nan"),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("places", [1, COLUMNS])
def test_scores_that_are_no_numbers(name: str, places: int) -> None:
    """As in eager, element by element."""
    z, y = scores(torch.bfloat16)
    z[0, 3, :places], y[0, 3] = ODD[name], 7
    mine, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    each = entropy(reduction="none")
    ran = run(each, mine, y, grad=True, options={"target": "reference"})
    wanted = each(theirs, y)
    assert torch.allclose(ran.output, wanted, rtol=2e-2, atol=1e-3, equal_nan=True)
    for out in (ran.output, wanted):
        out.nan_to_num(0, 0, 0).sum().backward()
    assert mine.grad is not None and theirs.grad is not None
    assert torch.allclose(mine.grad.float(), theirs.grad.float(), rtol=2e-2, atol=1e-3, equal_nan=True)


def traced(f: Callable[..., object], *args: Tensor) -> fx.Graph:
    with FakeTensorMode() as mode:
        return make_fx(f, select_decomp_table())(*(mode.from_tensor(a) for a in args)).graph


@pytest.mark.parametrize(
    ("rows", "columns", "count"), [(1 << 11, LONG_ROWS, 1), (1 << 12, LONG_ROWS // 2, 0), (8, LONG_ROWS, 0)]
)
def test_only_long_rows_of_large_tensors(rows: int, columns: int, count: int) -> None:
    graph = traced(lambda z: torch.log_softmax(z.float(), -1)[:, 0].sum(), torch.empty(rows, columns).bfloat16())
    assert len(write_softmax_sums(graph, "sm_90a", effects(graph))) == count


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("product", [False, True])
def test_what_has_no_dimension_may_be_summed_over_one(product: bool) -> None:
    """As torch allows, in graphs with and without a product."""
    z, y = scores()
    w = torch.eye(8)

    def model(z: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten()).mean(0)
        return loss + (w @ w).sum().sin().sum(-1) if product else loss

    wanted = model(z, y)
    ran = run(model, z, y, options={"target": "reference"})
    assert ran == [] and torch.allclose(ran.output, wanted)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("how", ["enabled", "disable", "cpp_wrapper"])
def test_switched_off(how: str) -> None:
    more: dict[str, dict[str, object]] = {"enabled": {"enabled": False}, "disable": {"disable": "elementwise"}}
    with inductor_config.patch(cpp_wrapper=how == "cpp_wrapper"):
        ran = run(entropy(), *scores(), options={"target": "reference", **more.get(how, {})})
    assert [r for r in ran.reports if r.elementwise] == []


@pytest.mark.usefixtures("interpreted")
def test_after_an_error_the_backward_still_reads_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph without a product: what its backward reads is kept from what overwrites it."""

    def broken(*_: object) -> None:
        raise ValueError("broken")

    def model(x: Tensor) -> Tensor:
        y = x.sin() * 2
        out = y.exp()
        y.mul_(3)
        return out.sum() + y.sum()

    kept = list[object]()
    monkeypatch.setattr(joint, "write_softmax_sums", broken)
    monkeypatch.setattr(joint, "keep", lambda graph, lent: kept.append(graph))
    ran = run(model, torch.randn(6), options={"target": "reference"})
    assert len(ran) == 1 and "left to Inductor" in ran[0] and "broken" in ran[0] and len(kept) == 1
