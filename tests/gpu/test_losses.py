"""Losses on a GPU: the rows' kernel against its definition, and heads against float64 and eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.loss.written import WHAT
from coda_inductor.ops.loss import CAP, LIMIT, LOSS_ROWS, LOSS_ROWS_, LOSS_TARGETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.usefixtures("uncached"),
]

SIZES = [(1, 777, 64), (37, 1000, 200), (300, 50257, 136), (4097, 8192, 512)]


def scores_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    scores = x.double() @ weight.double().T
    return 0.5 * (scores if bias is None else scores + bias.double())


def stored(scores: Tensor, target: Tensor, pitch: int) -> tuple[Tensor, Tensor]:
    """What an epilogue leaves: E in rows of `pitch` numbers, and the totals."""
    e = torch.exp((scores - scores.gather(1, target)).clamp(max=CAP)).scatter(1, target, 0.0)
    rows = torch.full((e.shape[0], pitch), torch.nan, device="cuda", dtype=torch.bfloat16)
    rows[:, : e.shape[1]] = e
    return rows[:, : e.shape[1]], e.sum(1, keepdim=True).float()


@pytest.mark.parametrize("turned", (False, True), ids=("rows", "columns"))
@pytest.mark.parametrize("spread", (1.0, 25.0, 400.0))
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_kernel_is_the_definition(m: int, n: int, k: int, spread: float, turned: bool) -> None:
    """Some rows, or all, are far at the greatest spreads; a row of NaN stays in its row. Outputs are poisoned."""
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(m, k, device="cuda").bfloat16()
        weight = (torch.randn(n, k, device="cuda") * k**-0.5 * spread).bfloat16()
        weight = weight.t().contiguous().t() if turned else weight
        target = torch.randint(0, n, (m, 1), device="cuda")
        if m > 2:
            x[1, 3] = torch.nan
        bias = torch.randn(n, device="cuda").bfloat16() if turned else None
        scores = scores_of(x, weight, bias)
        e, total = stored(scores, target, -(-n // 8) * 8)
        loss, part = torch.full_like(total, torch.nan), torch.full_like(total, torch.nan)
        LOSS_ROWS_(e, loss, part, total, target, None, x, weight, bias, 0.5)
        exact = -torch.log_softmax(scores, 1).gather(1, target)
        difference = torch.softmax(scores, 1).scatter_add(1, target, -torch.ones_like(exact))
        found, rows = part.double() * e.double(), torch.arange(m, device="cuda") != 1 if m > 2 else slice(None)
        torch.testing.assert_close(loss[rows].double(), exact[rows], rtol=1e-5, atol=1e-5)
        assert float((found - difference)[rows].norm() / difference[rows].norm()) < 4e-3
        if m > 2:
            assert loss[1].isnan().all() and found[1].isnan().all()
        if spread == 25.0 and m > 100:
            assert bool((total < LIMIT).any()) and not bool((total[rows] < LIMIT).all())


def test_slopes_and_no_rows_again() -> None:
    torch.manual_seed(0)
    scores, target = torch.randn(37, 777, device="cuda").double(), torch.randint(0, 777, (37, 1), device="cuda")
    slopes = torch.rand_like(scores)
    e, total = stored(scores, target, 784)
    gradient, loss, part = LOSS_ROWS((e.double() * slopes).bfloat16(), total, target, slopes.gather(1, target).float(), None, None, None, 1.0)  # fmt: skip  # noqa: E501
    exact = -torch.log_softmax(scores, 1).gather(1, target)
    difference = slopes * torch.softmax(scores, 1).scatter_add(1, target, -torch.ones_like(exact))
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    assert float((part.double() * gradient.double() - difference).norm() / difference.norm()) < 4e-3


@pytest.mark.parametrize("sloped", (False, True))
@pytest.mark.parametrize("m", (1, 37, 4097))
def test_the_kernel_of_targets_is_the_definition(m: int, sloped: bool) -> None:
    """With a share for all rows or for each, of rows that are counted and that are not."""
    torch.manual_seed(0)
    scores, target = torch.randn(m, 777, device="cuda").double(), torch.randint(0, 777, (m, 1), device="cuda")
    gradient, loss, part = LOSS_ROWS(*stored(scores, target, 784), target, None, None, None, None, 1.0)
    slope = torch.rand(m, 1, device="cuda") if sloped else None
    for hot in (torch.tensor([[0.9]], device="cuda").expand(m, 1), torch.rand(m, 1, device="cuda").round(decimals=1)):
        given = target, hot, 1 - hot, slope
        e, factor = LOSS_TARGETS(gradient, part, loss, *given)
        on_cpu = [t if t is None else t.cpu() for t in (gradient, part, loss, *given)]
        for found, wanted in zip((e, factor), LOSS_TARGETS(*on_cpu), strict=True):  # to a unit in bfloat16's last place
            torch.testing.assert_close(found.cpu(), wanted, rtol=8e-3, atol=0)
        product = (e.double() * factor.double()).gather(1, target)
        there = torch.softmax(scores, 1).gather(1, target) - hot.double()
        great = there.abs() > 0.3
        exact = there if slope is None else there * slope
        torch.testing.assert_close(product, exact, rtol=5e-3, atol=1e-9)
        torch.testing.assert_close(product[great], exact[great], rtol=1e-5, atol=1e-9)


class Head(nn.Module):
    """A norm and a head whose loss is a function of scores."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], spread: float = 1.0, name: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head, self.loss = (
            nn.RMSNorm(128),
            nn.Linear(128, 8192 + 3 * (name == "odd"), bias=name == "biased"),
            loss,
        )
        with torch.no_grad():
            self.head.weight *= spread

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(self.norm(x)), y)


def wide(z: Tensor) -> Tensor:
    return z if z.dtype == torch.float64 else z.float()


def entropy(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(wide(z), y)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "plain": (entropy, 1.0),
    "ignored": (lambda z, y: entropy(z, y.where(y % 5 != 0, -100)), 1.0),
    "capped": (lambda z, y: entropy(15 * torch.tanh(z / 15), y), 40.0),
    "divided": (lambda z, y: entropy(z / 4, y), 1.0),
    "far": (entropy, 150.0),
    "z-loss": (lambda z, y: entropy(z, y) + 1e-2 * torch.logsumexp(wide(z), -1).square().mean(), 1.0),
    "far z-loss": (lambda z, y: entropy(z, y) + 1e-4 * torch.logsumexp(wide(z), -1).square().mean(), 150.0),
    "smoothed": (lambda z, y: F.cross_entropy(wide(z), y, label_smoothing=0.1), 1.0),
    "biased": (entropy, 1.0),
    "odd": (entropy, 1.0),
}


def gradients(call: Any, model: Head, x: Tensor, y: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    loss = call(x, y)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.parametrize("chunk", (100000, 128), ids=("whole", "blocks"))
@pytest.mark.parametrize("name", LOSSES)
def test_head(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 rows of a head, trained: the loss and all gradients beside float64's, and eager's error."""
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    torch._dynamo.reset()
    loss, spread = LOSSES[name]
    model = Head(loss, spread, name).cuda().bfloat16()
    exact = Head(loss, name=name).cuda().double()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    compiled = torch.compile(model, backend="coda", dynamic=False, options={"chunk": chunk})
    REPORTS.clear()
    for seed in range(2):
        torch.manual_seed(seed)
        x, y = torch.randn(1000, 128, device="cuda").bfloat16(), torch.randint(0, 8192, (1000,), device="cuda")
        wanted = gradients(exact, exact, x.double(), y)
        theirs, mine = gradients(model, model, x, y), gradients(compiled, model, x, y)
        for found, eagers, w in zip(mine, theirs, wanted, strict=True):
            error, allowed = (float((t.double() - w).norm() / w.norm()) for t in (found, eagers))
            assert error <= 1.5 * allowed + 1e-4
    assert [c.what for r in REPORTS for c in r.casts].count(WHAT) == 1
    assert all(bool(r.blocks) == (chunk < 1000) for r in REPORTS)
