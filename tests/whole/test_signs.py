"""Activations whose gradient asks for a sign, between a norm with a product and another product: what they choose is
chosen in the epilogues, in float64 as in eager, and nothing more is kept than eager's activations need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from evaluate import error, strict_reference
from small_tensors import rms
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.inductor.joint_pass import REPORTS

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, tuple[Activation, int, bool]] = {
    "relu": (F.relu, 4, True),
    "relu squared": (lambda x: F.relu(x).square(), 4, True),
    "squared relu": (lambda x: x * F.relu(x), 4, False),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.1), 4, False),
    "where": (lambda x: torch.where(x >= 0, x.tanh(), 2 * x), 4, False),
    "where not": (lambda x: torch.where(x < 0, x, torch.zeros_like(x)), 4, False),
    "elu": (F.elu, 3, False),
    "of two": (lambda x: F.relu(x) * torch.sigmoid(x), 4, False),
    "threshold": (lambda x: torch.where(x > 0.5, x, 0.0), 2, False),
}
"""With the least Regions in training, and whether the law `relu` is to be there. (expm1 is no row of ours, and only 0
is compared with: an epilogue has not rounded yet.)"""


class Mlp(nn.Module):
    """x + down(act(up(norm(x))))."""

    def __init__(self, act: Activation, d: int = 16, f: int = 48) -> None:
        super().__init__()
        self.gain, self.act = nn.Parameter(torch.rand(d) + 0.5), act
        self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.act(self.up(rms(x) * self.gain)))
        return x + made


class Biased(Mlp):
    """A LayerNorm, and biases, as OPT has them; those before the ReLU are as large as `bias`."""

    def __init__(self, bias: float, d: int = 16, f: int = 48) -> None:
        super().__init__(F.relu, d, f)
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, f), nn.Linear(f, d)
        with torch.no_grad():
            self.up.bias.mul_(bias * d**0.5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.act(self.up(self.norm(x * self.gain))))
        return x + made


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, weight: Tensor) -> list[Tensor]:
    """The output and all gradients of a weighted sum of it."""
    out = run(x)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *model.parameters()])]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("inductor", [False, True], ids=["interpreted", "inductor"])
def test_signs_are_chosen_in_epilogues(name: str, inductor: bool) -> None:
    act, regions, has_law = ACTIVATIONS[name]
    torch.manual_seed(0)
    model, x = Mlp(act).double(), torch.randn(24, 16, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        model.up.weight[:2] = 0.0  # at 0 itself
    weight = torch.randn_like(x)
    with strict_reference(run=inductor):
        REPORTS.clear()
        found = gradients(torch.compile(model, backend="coda"), model, x, weight)
    (report,) = REPORTS
    assert len(report.sites) >= regions
    assert any("relu" in site.laws for site in report.sites) == has_law
    for mine, theirs in zip(found, gradients(model, model, x, weight), strict=True):
        assert error(mine, theirs) < 1e-10


def test_nan_is_chosen_as_in_eager() -> None:
    """x > 0 and x <= 0 are both false of NaN."""
    torch.manual_seed(0)
    for act in (F.relu, lambda x: torch.where(x > 0, x, 3.0), lambda x: torch.where(x <= 0, x, 3.0)):
        model, x = Mlp(act).double(), torch.randn(24, 16, dtype=torch.float64, requires_grad=True)
        with torch.no_grad():
            x[3, 2] = torch.nan
        weight = torch.randn_like(x)
        with strict_reference(run=False):
            found = gradients(torch.compile(model, backend="coda"), model, x, weight)
        for mine, theirs in zip(found, gradients(model, model, x, weight), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(("name", "roots"), [("relu", 0), ("relu squared", 1)])
def test_what_stands_before_a_relu_is_not_kept(name: str, roots: int) -> None:
    """Only what the next product reads is, of which the gradient can be made; relu is what spares the rest, and root
    what spares the backward a square that it would store once more. [M, 8 d] of bfloat16."""
    kept, moved = [], []
    for off in ("", "relu", "root"):
        with torch.device("meta"):
            model = Mlp(ACTIVATIONS[name][0], 256, 2048).bfloat16()
            x = torch.empty(4096, 256, dtype=torch.bfloat16, requires_grad=True)
        settings = Settings(target="sm_90a", disable=frozenset({off} - {""}))
        totals = explain(model, (x,), {}, "train", settings)["totals"]
        assert totals["bytes_after"] < 0.75 * totals["bytes_before"]
        kept.append(totals["saved_bytes"])
        moved.append(totals["bytes_after"])
        if not off:
            assert totals["saved_bytes"] <= 1.02 * totals["saved_bytes_inductor"]
    tile = 2 * 4096 * 2048
    assert kept[1] - kept[0] == tile and kept[2] == kept[0] and tile <= kept[0] < 2 * tile
    assert moved[2] - moved[0] == 2 * roots * tile  # y is stored in the forward, the square in the backward


def test_what_stands_before_a_relu_with_a_bias_is_not_kept() -> None:
    """Nor the product without what a LayerNorm and a bias add to it."""
    kept = []
    for off in ("", "relu"):
        with torch.device("meta"):
            model = Biased(1.0, 256, 2048).bfloat16()
            x = torch.empty(4096, 256, dtype=torch.bfloat16, requires_grad=True)
        settings = Settings(target="sm_90a", disable=frozenset({off} - {""}))
        kept.append(explain(model, (x,), {}, "train", settings)["totals"]["saved_bytes"])
    assert kept[1] - kept[0] == 2 * 4096 * 2048


def test_no_root_is_taken_where_more_would_be_read() -> None:
    """A layer norm's backward reads what stands before the ReLU; the square beside it would be one tile more."""
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 4}
    moved = []
    for off in ((), ("root",)):
        with torch.device("meta"):
            config = hf.NemotronConfig(**sizes, num_hidden_layers=2, vocab_size=512, use_cache=False)
            model, ids = hf.NemotronModel(config).bfloat16(), torch.empty(2, 2048, dtype=torch.long)
        facts = explain(model, (ids,), {}, "train", Settings(target="sm_90a", disable=frozenset(off)))
        moved.append(facts["totals"]["bytes_after"])
    assert moved[0] <= moved[1]


@pytest.mark.parametrize("twice", (False, True), ids=("", "read itself, too"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64))
def test_small_squares_keep_their_roots(dtype: torch.dtype, twice: bool) -> None:
    """In float16 the square of 1e-4 is 0; and what a product reads itself is no root of what another reads."""

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
            self.other = nn.Linear(48, 16) if twice else None

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.up(F.rms_norm(x, (16,))))
            x = x + self.down(y.square())
            return x if self.other is None else x + self.other(y)

    model, x = Squared().double(), torch.randn(300, 16, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        model.up.weight.mul_(1e-170 if twice and dtype == torch.float64 else 3e-4)
        model.up.bias.zero_()
    weight = torch.randn_like(x)
    exact = gradients(model, model, x, weight)
    model, x, weight = model.to(dtype), x.detach().to(dtype).requires_grad_(), weight.to(dtype)
    eager = gradients(model, model, x, weight)
    with strict_reference(run=False):
        found = gradients(torch.compile(model, backend="coda"), model, x, weight)
    for mine, theirs, want in zip(found, eager, exact, strict=True):
        wrong, allowed = (float((t.double() - want).norm() / want.norm().clamp_min(1e-30)) for t in (mine, theirs))
        assert wrong <= 1.5 * allowed + 1e-10


def test_the_law_is_a_switch() -> None:
    torch.manual_seed(0)
    model, x = Mlp(F.relu).double(), torch.randn(24, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    with strict_reference(run=False):
        REPORTS.clear()
        found = gradients(torch.compile(model, backend="coda", options={"disable": "relu"}), model, x, weight)
    assert not any("relu" in site.laws for site in REPORTS[-1].sites)
    for mine, theirs in zip(found, gradients(model, model, x, weight), strict=True):
        assert error(mine, theirs) < 1e-10


@pytest.mark.parametrize(("bias", "most"), [(1.0, 1.5), (8.0, 1.5), (100.0, 10.0)])
def test_sums_without_a_bias_are_about_as_exact(bias: float, most: float) -> None:
    """They are those of what ReLU gave, less those of the bias: in float64 the same, in bfloat16 about eager's. A bias
    that is far larger than what it is added to hides a part of that in its rounding."""
    torch.manual_seed(0)
    model, x = Biased(bias).double(), torch.randn(512, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    exact = gradients(model, model, x, weight)
    for dtype, more in ((torch.float64, 1e-10), (torch.bfloat16, 2e-3)):
        model, x = model.to(dtype), x.detach().to(dtype).requires_grad_()
        eager = gradients(model, model, x, weight.to(dtype))
        with strict_reference(run=False):
            REPORTS.clear()
            found = gradients(torch.compile(model, backend="coda"), model, x, weight.to(dtype))
        assert any("relu" in site.laws for site in REPORTS[-1].sites)
        for mine, theirs, value in zip(found, eager, exact, strict=True):
            assert error(mine.double(), value) < most * error(theirs.double(), value) + more


@pytest.mark.parametrize("numerics", ["default", "strict"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", ["relu", "relu squared", "leaky relu", "where not"])
def test_in_sixteen_bits(name: str, dtype: torch.dtype, numerics: str) -> None:
    """About as exact as eager; a zero of 16 bits is a number in strict, too."""
    torch.manual_seed(0)
    model, x = Mlp(ACTIVATIONS[name][0]).double(), torch.randn(24, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    exact = gradients(model, model, x, weight)
    model, x = model.to(dtype), x.detach().to(dtype).requires_grad_()
    eager = gradients(model, model, x, weight.to(dtype))
    with strict_reference(run=False):
        REPORTS.clear()
        compiled = torch.compile(model, backend="coda", options={"numerics": numerics})
        found = gradients(compiled, model, x, weight.to(dtype))
    assert len(REPORTS[-1].sites) >= 3
    for mine, theirs, value in zip(found, eager, exact, strict=True):
        assert error(mine.double(), value) < 1.5 * error(theirs.double(), value) + 2e-3


def test_a_condition_of_another_precision_is_left() -> None:
    """It is 0 in float32."""

    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = x @ a
        return torch.where((h.double() * 1e-30) * 1e-30 > 0, h, 3 * h) @ b

    torch.manual_seed(0)
    x, a, b = (torch.randn(s, requires_grad=True) for s in ((24, 16), (16, 32), (32, 8)))
    with strict_reference(run=False):
        found = torch.compile(f, backend="coda")(x, a, b)
        mine = torch.autograd.grad(found.sum(), (x, a, b))
    wanted = f(x, a, b)
    theirs = torch.autograd.grad(wanted.sum(), (x, a, b))
    for one, other in zip((found, *mine), (wanted, *theirs), strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.parametrize("act", [F.relu, F.silu])
def test_strict_rounds_a_bias_once_under_autocast(act: Activation) -> None:
    """The sum of product and bias, as eager does, forward and backward: large biases show another rounding."""
    torch.manual_seed(0)
    up, down, x = nn.Linear(64, 256), nn.Linear(256, 64), torch.randn(512, 64)
    with torch.no_grad():
        up.bias.mul_(40)

    def model(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return down(act(up(x)))  # type: ignore[no-any-return]

    def made(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        out = f(x)
        return [out, *torch.autograd.grad(out.float().square().sum(), [*up.parameters(), *down.parameters()])]

    with strict_reference(run=False):
        REPORTS.clear()
        found = made(torch.compile(model, backend="coda", options={"numerics": "strict"}))
    assert len(REPORTS[-1].sites) >= 2
    for mine, theirs in zip(found, made(model), strict=True):
        assert error(mine, theirs) < 1e-5
