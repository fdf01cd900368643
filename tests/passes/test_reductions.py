"""Of scores that no epilogue makes, a loss reads long rows once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from coda_inductor.passes.reductions import EXACT, LONG_GRADIENTS, LONG_ROWS, write_gradients, write_softmax_sums
from coda_inductor.patterns.effects import effects

aten = torch.ops.aten
ROWS, COLUMNS = 24, 40


def entropy(**options: object) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, -2), y.flatten(), **options)  # type: ignore[arg-type]

    return loss


def with_z(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), y.flatten()) + torch.logsumexp(z, -1).square().mean()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, int]] = {
    "mean": (entropy(), 1, 1),
    "ignored": (entropy(ignore_index=3), 1, 1),
    "sum": (entropy(reduction="sum"), 1, 1),
    "smoothed": (entropy(label_smoothing=0.1), 0, 0),
    "times a number": (lambda z, y: entropy()(z * 0.7, y), 1, 1),
    "of what a loop makes": (lambda z, y: entropy()(z.sin(), y), 0, 0),
    "two losses": (lambda z, y: entropy()(z, y) + entropy(ignore_index=2)(z, y) ** 2, 1, 0),
    "weighted classes": (lambda z, y: entropy(weight=torch.linspace(0.5, 1.5, COLUMNS).to(z.dtype))(z, y), 1, 0),
    "with z": (with_z, 0, 1),
    "probabilities": (lambda z, y: (torch.softmax(z, -1) * torch.log_softmax(z, -1)).sum() / y.numel(), 0, 0),
    "largest, too": (lambda z, y: entropy()(z, y) + z.argmax(-1).sum() * 0, 0, 1),
    "over two": (lambda z, y: entropy()(z, y) * z.sum((0, 1, 2)).sum(), 0, 1),
    "of the batch": (lambda z, y: torch.log_softmax(z, 0).square().mean() + y.sum() * 0, 0, 0),
}
"""Each with the passes over its scores, none where something else is taken over their rows, too; and with those that
make its gradient, none where that is not of one number in each row, or of several losses."""


def scores(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, ROWS // 2, COLUMNS).to(dtype), torch.randint(0, COLUMNS, (2, ROWS // 2))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_itself(name: str) -> None:
    """The loss and the gradient, nearly as near to float64 as eager's. Where nothing is taken, they are
    Inductor's, which adds rows up less well on some CPUs."""
    loss, passes, gradients = LOSSES[name]
    z, y = scores()
    mine, theirs, exact = (x.clone().requires_grad_() for x in (z, z, z.double()))
    ran = run(loss, mine, y, grad=True, options={"target": "reference"})
    ran.output.backward()
    for x in (theirs, exact):
        loss(x, y).backward()
    assert ran == [] and mine.grad is not None and theirs.grad is not None and exact.grad is not None
    near = relative(theirs.grad, exact.grad)
    if not passes + gradients:
        stock = z.clone().requires_grad_()
        torch.compile(loss)(stock, y).backward()
        near = max(near, relative(stock.grad, exact.grad))  # type: ignore[arg-type]
    assert relative(mine.grad, exact.grad) <= 1.1 * near + 1e-7
    records = [p.record for report in ran.reports for p in report.elementwise]
    taken = [{o.taken for o in r.outputs} for r in records if r.along_rows]
    assert taken == [{MAXIMUM, EXPONENTIALS}] * passes and len(records) == passes + gradients


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


def hot(index: Tensor, dim: int = 1, number: float = -3.0, base: float = 0.0) -> Tensor:
    return torch.full((ROWS, COLUMNS), base).scatter(dim, index, number)


def halves(x: Tensor) -> Tensor:
    return x.view(2, ROWS // 2, COLUMNS)


TURNED = torch.arange(COLUMNS)[:, None] % ROWS
EACH = torch.tensor([1.5, -2.0])[:, None, None]


class Given(torch.autograd.Function):
    """Of a number that does not depend on z, a gradient of z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(z, y)
        ctx.name = name
        return z.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return PLACES[ctx.name][0](*ctx.saved_tensors) * gradients[0], None, None


PLACES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "one number in each row": (lambda z, y: z.exp() * hot(y), 1),
    "another": (lambda z, y: z.exp() + hot(y, number=2.0), 1),
    "of ones": (lambda z, y: z.exp() * hot(y, base=1.0), 0),
    "in each column": (lambda z, y: z.exp() * hot(torch.zeros(1, COLUMNS).long(), 0), 0),
    "two numbers": (lambda z, y: z.exp() * hot(torch.cat((y, (y + 1) % COLUMNS), 1)), 0),
    "in some rows": (lambda z, y: z.exp() * hot(y[1:]), 0),
    "summed over the rows": (lambda z, y: z.exp() * (h := hot(y) * (z[:, :1] + 1)) - h.sum(-1, keepdim=True), 1),
    "summed over the columns": (lambda z, y: z.exp() * (h := hot(y) * z[:, :1].exp()) - h.sum(0, keepdim=True), 0),
    "summed with other weights": (lambda z, y: z.exp() * (h := hot(y)) - (h * z).sum(-1, keepdim=True), 0),
    "summed with a number more": (lambda z, y: z.exp() * (h := hot(y)) - (h + z[:, :1]).sum(-1, keepdim=True), 0),
    "summed to rows alone": (lambda z, y: z.exp() * (h := hot(y)) - (h * z[:, :1]).sum(-1)[:, None], 0),
    "in the first column": (lambda z, y: z.exp() * hot(y % ROWS, 0), 0),
    "other numbers for each sequence": (lambda z, y: (halves(z).exp() * halves(hot(y)) * EACH).view(ROWS, COLUMNS), 0),
    "of what a loop makes": (lambda z, y: z.sin().exp() * hot(y), 0),
    "of columns that are rows": (lambda z, y: z.exp() * torch.zeros(COLUMNS, ROWS).scatter(1, TURNED, 2.0).t(), 0),
    "of one row": (lambda z, y: z.exp() * torch.zeros(1, ROWS * COLUMNS).scatter(1, y[:1], 2.0).view_as(z), 0),
    "masked": (lambda z, y: z.exp() * hot(y) * (z > 0).float(), 0),
    "infinite": (lambda z, y: z.exp() + hot(y, number=float("inf")), 0),
    "an integer": (lambda z, y: z.exp() * torch.zeros(ROWS, COLUMNS, dtype=torch.long).scatter(1, y, 2.7).float(), 0),
    "summed with one number": (lambda z, y: z.exp() * (h := hot(y)) - (h * EACH[0, 0]).sum(-1, keepdim=True), 0),
    "a loop reads it": (lambda z, y: (z.exp() * hot(y)).sin(), 0),
    "a sum reads it": (lambda z, y: (z.exp() * hot(y)).sum(-1, keepdim=True).expand(ROWS, COLUMNS), 0),
    "read in another way, too": (lambda z, y: z.exp() * (h := hot(y)) + h.cumsum(-1), 0),
    "beside a product": (lambda z, y: z.exp() * hot(y) + (torch.ones(9, 9) @ torch.ones(9, 9)).sum(), 1),
    "capped": (lambda z, y: (1 - (t := (z / 15).tanh()) * t) / 15 * hot(y), 1),
    "divided by a number too small": (lambda z, y: (z / 1e-44).tanh() * hot(y), 0),
    "transposed": (lambda z, y: (z.view(COLUMNS, ROWS).t().exp() * hot(y)).t().reshape(ROWS, COLUMNS), 0),
}
"""Gradients, each with the passes that make it."""


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", PLACES)
def test_gradients_of_one_number_in_each_row(name: str) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(ROWS, COLUMNS), torch.randint(0, COLUMNS, (ROWS, 1))
    mine = z.clone().requires_grad_()

    def number(z: Tensor, y: Tensor) -> Any:
        return Given.apply(z, y, name)  # type: ignore[no-untyped-call]

    ran = run(number, mine, y, grad=True, options={"target": "reference", "strict": True})
    ran.output.backward()
    torch.testing.assert_close(mine.grad, PLACES[name][0](z, y))
    assert sum(len(report.elementwise) for report in ran.reports) == PLACES[name][1]


@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [
        (1 << 11, LONG_GRADIENTS, 1),
        (1 << 12, LONG_GRADIENTS // 2, 0),
        (1 << 11, LONG_GRADIENTS + 4, 0),
        (8, LONG_GRADIENTS, 0),
        (2, EXACT + 16, 0),
    ],
)
def test_only_gradients_of_long_rows_of_large_tensors(rows: int, columns: int, count: int) -> None:
    def gradient(z: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(rows, columns).scatter(1, y, -1.0) * z.float()

    graph = traced(gradient, torch.empty(rows, columns).bfloat16(), torch.empty(rows, 1, dtype=torch.long))
    for node in graph.nodes:
        node.meta["partitioner_tag"] = "is_backward" if node.op == "call_function" else "is_forward"
    nodes = [node.name for node in graph.nodes]
    with next(node.meta["val"] for node in graph.nodes).fake_mode:
        assert len(write_gradients(graph, "sm_90a", effects(graph))) == count
    assert count or nodes == [node.name for node in graph.nodes]


@pytest.mark.parametrize("writes", [False, True])
def test_scores_that_are_overwritten_in_between_are_left(writes: bool) -> None:
    """Of a graph that writes in its middle, as chained passes may leave."""

    def model(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = z.exp() * torch.zeros(ROWS, COLUMNS).scatter(1, y, 2.0)
        if writes:
            z.mul_(2)
        return out, z.cos()

    graph = traced(model, torch.empty(ROWS, COLUMNS), torch.empty(ROWS, 1, dtype=torch.long))
    with next(node.meta["val"] for node in graph.nodes).fake_mode:
        assert len(write_gradients(graph, "reference", effects(graph))) == (not writes)


Z = torch.randn(ROWS, 3, COLUMNS, generator=torch.Generator().manual_seed(0))
LYING: dict[str, tuple[Tensor, int]] = {
    "as it is": (Z.clone(), 1),
    "rows in another order": (Z.transpose(0, 1), 0),
    "rows as columns": (Z[:, 0].repeat(1, 2)[:, :ROWS].contiguous().t(), 0),
    "with gaps": (Z[..., :16], 0),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LYING)
def test_what_it_makes_lies_as_in_eager(name: str, dynamic: bool) -> None:
    z, passes = LYING[name]
    y = torch.arange(z[..., :1].numel()).view(z[..., :1].shape) * 7 % z.shape[-1]

    def model(z: Tensor, y: Tensor) -> Tensor:
        return z.exp() + torch.zeros(z.shape).scatter(-1, y, 2.0)

    if dynamic:
        for x in (z, y):
            torch._dynamo.mark_dynamic(x, 0)
    ran = run(model, z, y, options={"target": "reference", "strict": True})
    wanted = model(z, y)
    torch.testing.assert_close(ran.output, wanted)
    assert ran.output.stride() == wanted.stride() and ran == []
    known = passes and not dynamic  # that there is a place for each row
    assert sum(len(report.elementwise) for report in ran.reports) == known


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("number", [2.0, -2.0])
def test_zeros_have_no_sign(number: float) -> None:
    def model(z: Tensor, y: Tensor) -> Tensor:
        return z * hot(y, number=number)

    z, y = torch.rand(ROWS, COLUMNS), torch.zeros(ROWS, 1).long()
    ran = run(model, z, y, options={"target": "reference", "strict": True})
    assert torch.equal(ran.output.signbit(), model(z, y).signbit())


@pytest.mark.parametrize("shape", [(), (ROWS, 1)])
def test_a_number_is_no_row(shape: tuple[int, ...]) -> None:
    """Nor is one column."""

    def model(z: Tensor, y: Tensor) -> Tensor:
        return z.exp() * torch.zeros(shape).scatter(-1, y, 2.0)

    graph = traced(model, torch.empty(shape), torch.empty(shape, dtype=torch.long))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert write_gradients(graph, "reference", effects(graph)) == ()
