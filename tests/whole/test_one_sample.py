"""Diffusion transformers of one image: what a product of one row makes of the condition scales, shifts and gates all
tokens, so epilogues read it as vectors over features. In float64, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conditioned_blocks import Apart, Chunks, D, Table, inputs, model
from evaluate import compiled, error, strict_reference
from torch import Tensor, nn

from coda_inductor.inductor.joint_pass import REPORTS


@pytest.mark.sampled
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
def test_several_images_of_few_tokens_are_eagers(block: Callable[[], nn.Module]) -> None:
    """Whose vectors are none over features, and which fill no tile."""
    made, args = model(block), inputs(2)
    found, (report,) = compiled(made, *args, run=False)
    assert error(found, made(*args)) < 1e-10
    assert not any("bilinearity" in site.laws for site in report.sites)


@pytest.mark.sampled
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
