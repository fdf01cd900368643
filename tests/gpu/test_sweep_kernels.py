"""Sweeps on a Hopper GPU against the interpreter in float64: any M, ragged N, outputs poisoned with NaN; and whole
layers, whose attention leaves what they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compiling import Norm
from sweep_cases import CASES, apart, tensors
from test_training_device import as_good_as_eager
from torch import Tensor, nn

from coda_inductor.core.region import DTYPES
from coda_inductor.core.sweep import Sweep, interpret_sweep, shape
from coda_inductor.kernels import launch
from coda_inductor.kernels.sweep_launch import SweepLaunch, sweep_launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.usefixtures("uncached"),
]

ROUNDED, SUMMED = 4e-3, 1e-5  # relative (Frobenius) of what is stored in bf16, of sums
KERNELS = dict[str, SweepLaunch]()


def kernel(sweep: Sweep, tmp_path_factory: pytest.TempPathFactory) -> SweepLaunch:
    if sweep.digest not in KERNELS:
        KERNELS[sweep.digest] = sweep_launch(sweep.text, str(tmp_path_factory.mktemp("sweeps")), strict=True)
    return KERNELS[sweep.digest]


def blank(sweep: Sweep, m: int) -> list[Tensor]:
    return [torch.full(shape(o, m), float("nan"), dtype=DTYPES[o.dtype], device="cuda") for o in sweep.outputs]


@pytest.mark.parametrize("m", [1, 7, 8, 64, 1000, 8200])
@pytest.mark.parametrize("n", [16, 272, 1600])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_kernels_mean_what_the_sweep_means(
    make: Callable[[int], Sweep], n: int, m: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sweep = make(n)
    run, inputs, outs = kernel(sweep, tmp_path_factory), tensors(sweep, m, "cuda", seed=m), blank(sweep, m)
    run(inputs, outs)
    exact = Sweep(tuple(("f64", w) for _, w in sweep.inputs), sweep.parts, sweep.outputs)
    wanted = interpret_sweep(exact, [x.double() for x in inputs])
    for out, whole, o in zip(outs, wanted, sweep.outputs, strict=True):
        error = float((out.double() - whole.double()).norm() / whole.double().norm().clamp_min(1e-30))
        assert error < (ROUNDED if o.extent == "tile" else SUMMED), (o, error)
    again = blank(sweep, m)
    run(inputs, again)
    assert all(map(torch.equal, outs, again))  # the order of sums is fixed


def test_unread_outputs_and_misaligned_inputs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is None goes to scratch; what does not start at 16 bytes is copied; of no tokens sums are 0."""
    sweep, m = apart(272), 40
    run, inputs, outs = kernel(sweep, tmp_path_factory), tensors(sweep, m, "cuda"), blank(sweep, m)
    run(inputs, outs)
    some: list[Tensor | None] = [out if i % 2 else None for i, out in enumerate(blank(sweep, m))]
    shifted = torch.empty(inputs[0].numel() + 1, dtype=inputs[0].dtype, device="cuda")[1:].view_as(inputs[0])
    with pytest.warns(RuntimeWarning, match="16-byte"):
        run([shifted.copy_(inputs[0]), *inputs[1:]], some)
    assert all(b is None or torch.equal(a, b) for a, b in zip(outs, some, strict=True))
    none = blank(sweep, 0)
    run(tensors(sweep, 0, "cuda"), none)
    assert all(not out.any() for out in none)
    launch.FALLBACKS.clear()


WIDTH, HEADS = 512, 8


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # type: ignore[no-any-return]


class Packed(nn.Module):
    """A layer of GPT-2 up to its second norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(x)
        q, k, v = (heads(y) for y in self.qkv(self.norm(x)).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Rotated(nn.Module):
    """A layer of Llama up to its second norm, half as many heads of k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.norm, self.q = Norm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(x)
        y = self.norm(x)
        half = WIDTH // HEADS // 2
        place = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = torch.outer(place, 10000.0 ** (-torch.arange(half, device=x.device) / half)).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def turned(h: Tensor) -> Tensor:
            first, second = h.chunk(2, -1)
            return h * cos + torch.cat([-second, first], -1) * sin

        q, k = turned(heads(self.q(y))), turned(heads(self.k(y)))
        y = F.scaled_dot_product_attention(q, k, heads(self.v(y)), is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("tune", "batch"), [("off", 4), ("quick", 4), ("off", 1)])
@pytest.mark.parametrize("make", [Packed, Rotated], ids=lambda make: make.__name__)
def test_gradients_beside_attention(make: Callable[[], nn.Module], tune: str, batch: int, tmp_path: Path) -> None:
    """tune=off keeps every Sweep, quick those that win at this small size."""
    torch.manual_seed(0)
    model = make().to("cuda", torch.bfloat16)
    x = torch.randn(batch, 4096 // batch, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    report = as_good_as_eager(model, x, tmp_path, tune)
    ran = [launch.LAUNCHES[kept.sweep.digest] for kept in report.swept]
    assert ran == [1] if tune == "off" else ran in ([], [1])
