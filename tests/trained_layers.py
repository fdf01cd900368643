"""Small layers of decoders and encoders, a training step of them, and how far its gradients are from the true ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import torch
from compiling import Ran, run
from evaluate import error, strict_reference
from torch import Tensor, nn
from zoo import Attention, Mlp, Norm

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report
from coda_inductor.kernels import launch

WIDTH = 64


class Layer(nn.Module):
    """A decoder's layer, pre-norm or (`after`) post-norm."""

    def __init__(self, norm: str, mlp: str, activation: str, rope: bool, bias: bool, after: bool = False) -> None:
        super().__init__()
        self.after, self.n1, self.n2 = after, Norm(norm, WIDTH), Norm(norm, WIDTH)
        self.attention, self.mlp = Attention(WIDTH, 4, 2, bias, rope), Mlp(mlp, activation, WIDTH, 128, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.after:
            x = self.n1(x + self.attention(x))
            return self.n2(x + self.mlp(x))  # type: ignore[no-any-return]
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: nn.Sequential(*(Layer("hf", "separate", "F.silu", True, False) for _ in range(2))),
    "gpt": lambda: nn.Sequential(*(Layer("LayerNorm", "plain", "gelu, tanh", False, True) for _ in range(2))),
    "bert": lambda: nn.Sequential(*(Layer("LayerNorm", "plain", "gelu", False, True, after=True) for _ in range(2))),
}


def gradients(out: Tensor, model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of all parameters and of the input, as float64."""
    for p in (x, *model.parameters()):
        p.grad = None
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)).sum().backward()
    found = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    return [t.detach().double() for t in (out, *found)]


ZERO = 1e-12
"""Of the largest gradient: what is less is zero in exact arithmetic, as that of a key's bias before a softmax."""


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Each relative to the true value. What is zero but for rounding has none, and the noise of 32 numbers is, by the
    seed, 0.6 to 1.2 times as large as eager's: these have one error together, the last, relative to the largest."""
    largest = max(b.norm() for b in wanted)
    pairs = list(zip(found, wanted, strict=True))
    noise = [(a - b).norm() / largest for a, b in pairs if b.norm() < ZERO * largest]
    known = [float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() >= ZERO * largest]
    return known + [math.hypot(*noise)] * bool(noise)


def as_good_as_eager(model: nn.Module, x: Tensor, directory: Path, tune: str) -> Report:
    """Trains on the GPU, where all that is kept must run: what was done, if every gradient's error against float64 is
    less than 1.5 times eager's (another order of sums, and other places to round). The last step's launches count."""
    exact, x64 = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    wanted = gradients(exact(x64), exact, x64)
    eager = errors(gradients(model(x), model, x), wanted)
    REPORTS.clear()
    compiled = torch.compile(model, backend="coda", options={"cache_dir": str(directory), "tune": tune, "strict": True})
    compiled(x)
    launch.LAUNCHES.clear()
    mine = errors(gradients(compiled(x), model, x), wanted)
    assert all(a < 1.5 * b for a, b in zip(mine, eager, strict=True)), list(zip(mine, eager, strict=True))
    (report,) = REPORTS
    assert not launch.FALLBACKS
    return report


def trained(name: str) -> Ran:
    """One step; asserts that all gradients are as good as eager's."""
    torch.manual_seed(0)
    model = MODELS[name]().bfloat16()
    x = torch.randn(4, 80, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    exact, x64 = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    wanted = gradients(exact(x64), exact, x64)
    eager = errors(gradients(model(x), model, x), wanted)
    ran = run(model, x, grad=True)
    mine = errors(gradients(ran.output, model, x), wanted)
    assert all(a < 1.5 * b for a, b in zip(mine, eager, strict=True)), list(zip(mine, eager, strict=True))
    assert ran == [] and len(ran.reports) == 1
    return ran


def as_eager(made: nn.Module, *args: Tensor) -> list[Report]:
    """One call in float64: its output and all gradients against eager's, to 1e-10; the reports."""
    given = [a.requires_grad_() for a in args]
    leaves = [*given, *(p for p in made.parameters() if p.requires_grad)]
    wanted = made(*given)
    weight = torch.randn_like(wanted)
    with strict_reference(run=False):
        REPORTS.clear()
        found = torch.compile(made, backend="coda")(*given)
        gradients = torch.autograd.grad((found * weight).sum(), leaves)
    assert error(found, wanted) < 1e-10
    for mine, theirs in zip(gradients, torch.autograd.grad((wanted * weight).sum(), leaves), strict=True):
        assert mine.shape == theirs.shape and error(mine, theirs) < 1e-10
    return list(REPORTS)
