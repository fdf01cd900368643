"""Diffusion transformers of one image: what a product of one row makes of the condition scales, shifts and gates all
tokens, so epilogues read it as vectors over features. In float64, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from evaluate import compiled, error, strict_reference
from torch import Tensor, nn

from coda_inductor.inductor.joint_pass import REPORTS

D, T, HEADS = 16, 24, 2


class Block(nn.Module):
    """adaLN-Zero: shift, scale and gate of attention and of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(D, D) for _ in range(3))
        self.k = nn.Linear(D, D, bias=False)  # whose gradient would be 0
        self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        """Six of [batch, 1, D]."""
        raise NotImplementedError

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.parts(t)
        n = F.layer_norm(x, (D,)) * (1 + scale) + shift
        q, k, v = (f(n).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + gate * self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        n = F.layer_norm(x, (D,)) * (1 + scale2) + shift2
        out: Tensor = x + gate2 * self.down(F.gelu(self.up(n), approximate="tanh"))
        return out


class Chunks(Block):
    """As DiT, SD3 and Flux have them: chunks of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(D, 6 * D)

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        made: Tensor = self.condition(F.silu(t))[:, None]
        return made.chunk(6, dim=2)


class Table(Chunks):
    """As PixArt and Wan have them: a table of the block's is added to what all blocks share, and then divided."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 6, D))

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        made: Tensor = self.table + self.condition(F.silu(t)).unflatten(1, (6, D))
        return made.chunk(6, dim=1)


class Apart(Chunks):
    """Taken from the table and from the product, and then added."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 1, D))

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        made = self.condition(F.silu(t))[:, None].chunk(6, dim=2)
        return tuple(a + b for a, b in zip(self.table.unbind(0), made, strict=True))


class Model(nn.Module):
    """Two blocks, and a projection behind a last norm. `of_text`: the condition is the mean of a text's product."""

    def __init__(self, block: Callable[[], nn.Module], of_text: bool = False) -> None:
        super().__init__()
        self.blocks, self.of_text = nn.ModuleList([block(), block()]), of_text
        self.text, self.time, self.out = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Linear(D, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = self.time(F.silu(self.text(t)).mean(1) if self.of_text else F.silu(self.text(t[:, 0])))
        for block in self.blocks:
            x = block(x, t)
        out: Tensor = self.out(F.layer_norm(x, (D,)))
        return out


def model(block: Callable[[], nn.Module], of_text: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Model(block, of_text).double()


def inputs(batch: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, T, D, dtype=torch.float64), torch.randn(batch, 5, D, dtype=torch.float64)


@pytest.mark.parametrize("of_text", [False, True])
@pytest.mark.parametrize("block", [Chunks, Table, Apart])
def test_one_image_is_eagers(block: Callable[[], nn.Module], of_text: bool) -> None:
    """A Region for each of the products but the first block's q, k and v, whose norm's input no product made."""
    made, args = model(block, of_text), inputs()
    found, (report,) = compiled(made, *args, run=False)
    assert error(found, made(*args)) < 1e-10
    laws = [law for site in report.sites for law in site.laws]
    assert len(report.sites) == 10 + of_text and laws.count("bilinearity") == 6, report.sites


def test_a_part_of_a_sum_is_one_vector() -> None:
    """Read where the graph has it, not made again of its summands."""
    found = [compiled(model(block), *inputs(), run=False)[1][0] for block in (Chunks, Table)]
    read = [[len(site.region.operands) for site in report.sites] for report in found]
    assert read[0] == read[1]


@pytest.mark.parametrize("block", [Chunks, Table])
def test_several_images_are_eagers(block: Callable[[], nn.Module]) -> None:
    """Whose vectors are none over features."""
    made, args = model(block), inputs(2)
    found, (report,) = compiled(made, *args, run=False)
    assert error(found, made(*args)) < 1e-10
    assert not any("bilinearity" in site.laws for site in report.sites)


@pytest.mark.parametrize("of_text", [False, True])
@pytest.mark.parametrize("block", [Chunks, Table, Apart])
def test_its_gradients_are_eagers(block: Callable[[], nn.Module], of_text: bool) -> None:
    """The vectors' are sums over tokens, as a bias's gradient is, and go through products of one row."""
    made, args = model(block, of_text), [a.requires_grad_() for a in inputs()]
    leaves = [*args, *made.parameters()]
    wanted = made(*args)
    weight = torch.randn_like(wanted)
    with strict_reference(run=block is Table):
        REPORTS.clear()
        found = torch.compile(made, backend="coda")(*args)
        gradients = torch.autograd.grad((found * weight).sum(), leaves)
    (report,) = REPORTS
    laws = {law for site in report.sites for law in site.laws}
    assert {"bilinearity", "triangle"} <= laws and error(found, wanted) < 1e-10
    for mine, theirs in zip(gradients, torch.autograd.grad((wanted * weight).sum(), leaves), strict=True):
        assert error(mine, theirs) < 1e-10


class Squeezed(nn.Module):
    """A gate that is made of the mean of the tokens that it scales: squeeze and excitation."""

    def __init__(self, modulated: bool) -> None:
        super().__init__()
        self.first, self.gate, self.second = nn.Linear(D, 2 * D), nn.Linear(2 * D, 2 * D), nn.Linear(2 * D, D)
        self.modulated = modulated

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        gate = torch.sigmoid(self.gate(h.mean(1)))[:, None]
        h = F.layer_norm(h, (2 * D,)) * (1 + gate) + gate if self.modulated else h * gate
        out: Tensor = self.second(h)
        return out


@pytest.mark.parametrize("modulated", [False, True])
def test_a_gate_that_waits_for_what_it_scales_is_in_no_epilogue_of_it(modulated: bool) -> None:
    torch.manual_seed(0)
    made, x = Squeezed(modulated).double(), inputs()[0]
    found, (report,) = compiled(made, x, run=False)
    assert error(found, made(x)) < 1e-10
    (site,) = report.sites  # which takes the mean
    assert "mul" not in site.absorbed and not site.laws
    x.requires_grad_()
    with strict_reference(run=False):
        mine = torch.autograd.grad(torch.compile(made, backend="coda")(x).square().sum(), [x, *made.parameters()])
    for a, b in zip(mine, torch.autograd.grad(made(x).square().sum(), [x, *made.parameters()]), strict=True):
        assert error(a, b) < 1e-10


def test_one_row_is_no_region() -> None:
    """As where a decoder generates one token: nothing is left of its tokens to write an epilogue for."""
    torch.manual_seed(0)
    made, x = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.LayerNorm(D), nn.Linear(D, D)).double(), inputs()[0][:, :1]
    found, reports = compiled(made, x, run=False)
    assert error(found, made(x)) < 1e-10 and not any(report.sites for report in reports)
