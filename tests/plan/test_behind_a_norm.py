"""A rotary embedding behind a LayerNorm, which waits for its mean and scale: the vectors that this splits off the
product, W b and W 1, are read in halves of heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiling import REFERENCE, close, run
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain

TOKENS, HEADS, SIZE = 5, 3, 8
STRICT = REFERENCE | {"strict": True}

pytestmark = pytest.mark.usefixtures("interpreted")


def in_halves(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = q.chunk(2, -1)
    return q * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


def in_neighbours(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = q[..., ::2], q[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Layer(nn.Module):
    """A residual stream, its second LayerNorm with weight and `shift`, and queries and keys."""

    cos: Tensor
    sin: Tensor

    def __init__(self, turn: Callable[..., Tensor], shift: bool, bias: bool, size: int = SIZE) -> None:
        super().__init__()
        self.turn, self.size, width = turn, size, HEADS * size
        self.first, self.norm = nn.LayerNorm(width), nn.LayerNorm(width, bias=shift)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.q, self.k = (nn.Linear(width, width + size, bias=bias) for _ in "qk")
        angles = torch.rand(TOKENS, size // 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        nn.init.normal_(self.norm.weight)
        if shift:
            nn.init.normal_(self.norm.bias)

    def stream(self, x: Tensor) -> Tensor:
        """The residual stream behind an MLP."""
        made: Tensor = x + self.down(torch.relu(self.up(self.first(x))))
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self.stream(x)
        n = self.norm(x)
        q, k = (w(n).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.q, self.k))
        q, k = (self.turn(t, self.cos, self.sin) for t in (q, k))
        return torch.cat([(q.cumsum(-1) * k.cumsum(-1)).sum(1), x], -1)  # opaque, as attention is


@pytest.mark.sampled
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("turn", [in_halves, in_neighbours])
def test_outputs_and_gradients(turn: Callable[..., Tensor], bias: bool, shift: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layer(turn, shift, bias).double()
    x = (torch.randn(64, TOKENS, HEADS * SIZE, dtype=torch.float64) + 1).requires_grad_()
    ran = run(model, x, grad=True, options=STRICT)
    close(ran.output, model(x))
    inputs = [x, *model.parameters()]
    found, wanted = (torch.autograd.grad(y.square().sum(), inputs) for y in (ran.output, model(x)))
    for ours, eager in zip(found, wanted, strict=True):
        close(ours, eager)
    sites = [site for report in ran.reports for site in report.sites if site.region.half]
    assert len(sites) >= 1 + bias  # without a bias the norm's gradient may read one of them whole
    for site in sites:
        assert "bilinearity" in site.laws
        assert sum(o.extent == "feature" for o in site.region.operands) >= 1 + shift * (not bias)


def test_no_pass_is_left_between_the_products() -> None:
    model = Layer(in_halves, True, True, size=64).to(torch.bfloat16)
    x = torch.randn(512, TOKENS, HEADS * 64).to(torch.bfloat16)
    report = explain(model, (x,), {}, "infer", Settings(target="sm_90a"))
    (graph,) = report["graphs"]
    assert sum("of 64]" in p for r in graph["regions"] for p in r["products"]) == 4
    assert not any("neg" in p["what"] for p in graph["passes"])


def test_of_many_features_and_few_tokens_the_norm_stays() -> None:
    """W 1 reads the weight once more: of many features that is more than a pass over the tokens."""
    model, wide = Layer(in_halves, True, True, size=64), nn.Linear(HEADS * 64, 1 << 17, bias=False)

    def call(x: Tensor) -> Tensor:
        q = wide(model.norm(model.stream(x))).unflatten(-1, (-1, 64)).transpose(1, 2)
        return in_halves(q, model.cos, model.sin)

    model, wide = model.to(torch.bfloat16), wide.to(torch.bfloat16)
    found = {}
    for batch in (64, 1 << 14):
        x = torch.empty(batch, TOKENS, HEADS * 64, dtype=torch.bfloat16)
        report = explain(call, (x,), {}, "infer", Settings(target="sm_90a"))
        (turned,) = (r for r in report["graphs"][0]["regions"] if "of 64]" in r["products"][0])
        found[batch] = "bilinearity" in turned["laws"]
    assert found == {64: False, 1 << 14: True}
