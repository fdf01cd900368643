"""LayerNorm of a stream whose mean is far from zero: the shift keeps what is stored near zero."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from evaluate import compiled
from torch import Tensor, nn
from transformer_blocks import Block, D

from coda_inductor.inductor.records import Report
from coda_inductor.rewrite import derive


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, Frobenius."""
    return float((found.double() - wanted).norm() / wanted.norm())


def measure(kind: str, sigmas: float) -> tuple[float, float, Report]:
    """The error of ours and of eager in bfloat16 against float64, of what three blocks add to a stream of mean +-sigmas
    standard deviations."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind, "layer", False) for _ in range(3))).eval()
    for name, p in model.named_parameters():
        gain = name.endswith(("n1.weight", "n2.weight"))
        nn.init.normal_(p, 1.0 if gain else 0.0, 0.1 if p.dim() == 1 else D**-0.5)
    model = model.to(torch.bfloat16)
    x = (torch.randn(16, 16, D) + sigmas * torch.randn(16, 16, 1).sign()).to(torch.bfloat16)
    with torch.no_grad():
        eager = model(x) - x
        exact = model.double()(x.double()) - x.double()
    found, (report,) = compiled(model.to(torch.bfloat16), x, run=False)
    return error(found - x, exact), error(eager, exact), report


@pytest.mark.sampled
@pytest.mark.parametrize("sigmas", [0, 3, 30, 100])
@pytest.mark.parametrize("kind", ["pre", "parallel"])
def test_bf16_error_is_no_larger_than_eagers(kind: str, sigmas: float) -> None:
    ours, eagers, report = measure(kind, sigmas)
    assert sum("shift" in s.laws for s in report.sites) == (5 if kind == "pre" else 2)
    assert ours <= 1.5 * eagers


def test_without_the_shift_the_error_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a shift of zero the stream is stored mean and all. Most of the error is the bfloat16 stream's own, so it
    grows by a third only."""
    ours, _, _ = measure("pre", 30)
    monkeypatch.setattr(derive, "_near_mean", lambda program, *_: program.lifted.terms.const(Fraction(0)))
    unshifted, _, _ = measure("pre", 30)
    assert unshifted > 1.2 * ours


class Biased(nn.Module):
    """Two LayerNorms, between which a bias adds to the mean of the stream."""

    def __init__(self, mean: float, width: int = 64) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.v, self.o, self.up = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 2 * width)
        for name, p in self.named_parameters():
            gain = name in ("n1.weight", "n2.weight")
            nn.init.normal_(p, 1.0 if gain else 0.0, 0.1 if p.dim() == 1 else width**-0.5)
        with torch.no_grad():
            self.o.bias.add_(mean)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.o(torch.tanh(self.v(self.n1(x))))
        return nn.functional.gelu(self.up(self.n2(h)))


@pytest.mark.parametrize("mean", [0, 60, 100, 120])
@pytest.mark.parametrize("cast", [True, False])
def test_a_mean_that_a_layer_adds(mean: float, cast: bool) -> None:
    """In standard deviations. Eager rounds what it adds to it; by autocast not the stream, and we store that."""
    torch.manual_seed(0)
    model, x = Biased(mean).eval(), torch.randn(256, 64)
    dtype = torch.float32 if cast else torch.bfloat16
    model, x = model.to(dtype), x.to(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        eager = model(x)
        found, (report,) = compiled(model, x, run=False)
        assert {"moments", "shift", "bilinearity"} <= {law for s in report.sites for law in s.laws}
    with torch.no_grad():
        exact = model.double()(x.double())
    assert error(found, exact) <= 1.1 * error(eager, exact)
    assert not cast or error(found, exact) < 5e-3


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_by_autocast_a_mean_that_weights_make_costs_twice_eagers_error(weight: float) -> None:
    """32 and 127 standard deviations: eager keeps the stream in float32, and we store it in bfloat16."""
    torch.manual_seed(0)
    model, x = Biased(0).eval(), torch.randn(256, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.v.bias.add_(3.0)  # tanh of it is nearly one, for every feature
        model.o.weight.add_(weight)
        eager, found = model(x), compiled(model, x, run=False)[0]
    with torch.no_grad():
        exact = model.double()(x.double())
    assert 1.2 * error(eager, exact) < error(found, exact) <= 2.1 * error(eager, exact)
