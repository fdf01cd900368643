"""Inference in FP8: weights cast once, what they multiply cast at each call, by one scale for each row or for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import REFERENCE
from evaluate import strict_reference
from float8_layers import BLOCKS, E4M3, WIDTH, by_row, errors
from torch import Tensor, nn

from coda_inductor.core.region import Region
from coda_inductor.inductor.joint_pass import REPORTS

OPTIONS: dict[str, Any] = REFERENCE | {"strict": True}
BATCH, LENGTH, LARGEST = 2, 56, 448.0
GRANULARITIES = ("row", "tensor")

each_granularity = pytest.mark.parametrize("by", [pytest.param("row", marks=by_row), "tensor"])
each_block = pytest.mark.parametrize("block", BLOCKS)


def cast(x: Tensor, by: str) -> tuple[Tensor, Tensor]:
    """x in 8 bits, and the scale that it was divided by, as torchao's quantize_ does it."""
    over = [-1] if by == "row" else list(range(x.dim()))
    scale = (x.abs().amax(over, keepdim=True) / LARGEST).float()
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


class Quantized(nn.Module):
    """A linear layer whose weight is in 8 bits."""

    def __init__(self, linear: nn.Linear, by: str) -> None:
        super().__init__()
        self.by, self.bias = by, linear.bias
        self.data, self.scale = map(nn.Buffer, cast(linear.weight.detach(), by))

    def forward(self, x: Tensor) -> Tensor:
        data, scale = cast(x, self.by)
        scale = scale.view(-1, 1) if self.by == "row" else scale.view(1, 1)
        of_weight = self.scale.t()
        rows = data.view(-1, data.shape[-1])
        out = torch._scaled_mm(
            rows, self.data.t(), scale, of_weight, bias=self.bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return out.view(*x.shape[:-1], -1)


def drawn(block: str, seed: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """A block in float64 and in bfloat16, of equal random parameters, and an input."""
    torch.manual_seed(seed)
    model = BLOCKS[block](nn.Linear)
    for p in model.parameters():
        nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    model = model.bfloat16()
    true = BLOCKS[block](nn.Linear).double()
    true.load_state_dict(model.state_dict())
    return true, model, torch.randn(BATCH, LENGTH, WIDTH).bfloat16()


def quantized(model: nn.Module, by: str) -> nn.Module:
    """The model with its linear layers in 8 bits, in place."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, Quantized(child, by))
    return model


def taken(region: Region) -> tuple[int, bool, list[str]]:
    """A Region's products, whether in fast accumulation, and what is taken of its rows and columns."""
    return len(region.products), region.fast, sorted(f"{r.of} {r.over}" for r in region.reductions)


WANTED = {
    "mlp": [(2, True, ["max N"]), (1, True, [])],
    "gpt": [(1, True, ["max N"]), (1, True, [])],
}
"""The largest of a tensor is that of the largest of its rows."""


def ours(model: nn.Module, x: Tensor, block: str, **options: Any) -> Tensor:
    """What backend="coda" makes of it, with the Regions that are wanted. In strict a pass takes the largest."""
    with strict_reference(run=False), torch.no_grad():
        REPORTS.clear()
        out = torch.compile(model, backend="coda", options=OPTIONS | options)(x)
    (report,) = REPORTS
    strict = options.get("numerics") == "strict"
    assert [taken(site.region) for site in report.sites] == [(n, f, [] if strict else r) for n, f, r in WANTED[block]]
    return out  # type: ignore[no-any-return]


@pytest.mark.sampled
@each_block
@each_granularity
def test_outputs_are_about_as_exact_as_inductors(by: str, block: str) -> None:
    """Over five seeds at most 1.05 times as far from float64 on average, and never 1.25 times."""
    mine, theirs = list[float](), list[float]()
    for seed in range(5):
        true, model, x = drawn(block, seed)
        wanted = true(x.double())
        model = quantized(model, by)
        with torch.no_grad():
            mine += errors([ours(model, x, block)], [wanted])
            torch._dynamo.reset()
            theirs += errors([torch.compile(model, backend="inductor")(x)], [wanted])
            torch._dynamo.reset()
    assert sum(mine) <= 1.05 * sum(theirs) and all(a <= 1.25 * b for a, b in zip(mine, theirs, strict=True))


@each_granularity
def test_every_rounding_is_kept_where_asked(by: str) -> None:
    """No Region is lost by it, and eager is as near as it is to Inductor."""
    _, model, x = drawn("mlp", 0)
    model = quantized(model, by)
    with torch.no_grad():
        eager, found = model(x).double(), ours(model, x, "mlp", numerics="strict")
        torch._dynamo.reset()
        assert errors([found], [eager])[0] <= 1.05 * errors([torch.compile(model, backend="inductor")(x)], [eager])[0]


@each_block
@each_granularity
def test_torchaos_own_layers(by: str, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchao is installed, which is not asked for a GPU: the same bits by eager, and the same Regions."""
    api = pytest.importorskip("torchao.quantization")
    for check in ("_check_hardware_support", "_fp8_mm_compat"):
        monkeypatch.setattr(f"torchao.quantization.quant_api.{check}", lambda *_: True)
    _, model, x = drawn(block, 0)
    with torch.no_grad():
        wanted = quantized(drawn(block, 0)[1], by)(x)
        granularity = api.PerRow() if by == "row" else api.PerTensor()
        config = api.Float8DynamicActivationFloat8WeightConfig(granularity=granularity, set_inductor_config=False)
        api.quantize_(model, config)
        assert torch.equal(model(x), wanted)
        found = ours(model, x, block)
    assert errors([found], [wanted.double()])[0] < 2e-2
