"""What a review found wrong, each in the fewest lines that show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import compiled, error
from torch import Tensor

from coda_inductor.core.dtypes import ROUNDED
from coda_inductor.core.ops import OPS
from coda_inductor.patterns.pointwise import FUNCTIONS
from coda_inductor.write.vectors import COMPARISONS

torch.manual_seed(0)
W = torch.randn(8, 8, dtype=torch.float64)
W2 = torch.randn(8, 8, dtype=torch.float64)
X = torch.randn(6, 8, dtype=torch.float64)
SQUARE = W.t().contiguous().t()
F32 = torch.randn(6, 8), torch.randn(8, 8)


def check(f: Callable[..., Any], *args: Tensor, tolerance: float = 1e-12, **options: Any) -> Any:
    found, _ = compiled(f, *args, run=False, **options)
    wanted = f(*args)
    for mine, theirs in zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]:
        assert error(mine, theirs) < tolerance
    return found


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (y := F.relu(F.linear(x, W)), y + 0.0, y * 1, y / 1),
        lambda x: (y := F.linear(x, W), F.silu(y), y * torch.sigmoid(y), y / (1 + torch.exp(-y))),
    ],
)
def test_outputs_have_memory_of_their_own(f: Callable[[Tensor], Any]) -> None:
    found = check(f, X)
    assert len({t.data_ptr() for t in found}) == len(found)


def test_an_island_of_float64_stays_one() -> None:
    x, w = F32
    check(lambda x: torch.log((F.linear(x, w).double() * 1e-6).abs() + 1), x, tolerance=1e-9)


@pytest.mark.parametrize("numerics", ["default", "strict"])
def test_a_cast_to_eight_bits_rounds(numerics: str) -> None:
    x, w = F32
    check(
        lambda x: (F.relu(F.linear(x, w)) * 4).to(torch.float8_e4m3fn).float() * 0.3,
        x,
        tolerance=1e-5,
        numerics=numerics,
    )


def test_a_permutation_that_permutes_nothing() -> None:
    check(lambda x: F.relu(x @ SQUARE.permute(0, 1)), X)


def test_each_half_of_a_graph_keeps_its_precision() -> None:
    x, w = F32

    def f(x: Tensor, z: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        h = F.layer_norm(r + F.linear(z, W2), (8,), r[0], r[1])
        return F.silu(F.linear(x, w)), F.linear(h, W)

    y, h = compiled(f, x, X, X, run=False)[0]
    assert error(y, f(x, X, X)[0]) < 1e-5 and error(h, f(x, X, X)[1]) < 1e-12


@pytest.mark.parametrize("shape", [(3, 16), (1, 48)])
def test_two_dimensions_viewed_as_two_others(shape: tuple[int, int]) -> None:
    r = torch.randn(shape, dtype=torch.float64)
    check(lambda x, r: F.linear(F.relu(F.linear(x, W)), W2) + r.view(6, 8), X, r)
    check(lambda r: F.relu(F.linear(r.view(-1, 8), W)) * 2, r)


def test_strict_rounds_in_vectors_too() -> None:
    w = W.bfloat16()
    check(lambda x: F.silu(F.linear(x, w)) * (w.exp() * 2 + w).sum(1), X.bfloat16(), tolerance=2e-2, numerics="strict")
    assert set(OPS) - set(FUNCTIONS) - set(ROUNDED) - set(COMPARISONS) == {
        "add", "sub", "mul", "neg", "rcp", "sqrt", "rsqrt", "sigmoid",  # which terms spell as sums, products and powers
        "first", "second", "scaled", "over_head",  # which no vector is
    }  # fmt: skip


@pytest.mark.parametrize("by", [torch.gt, torch.le, torch.lt, torch.ge])
def test_vectors_choose_by_a_sign(by: Callable[..., Tensor]) -> None:
    """Of a gain, in the order of the choice's arguments: the mean's part of the next product is a vector of it."""
    gain = W.sum(1)
    for chosen in (lambda: torch.where(by(gain, 0), 2.0, gain), lambda: torch.where(by(gain, 0), gain.exp(), 3 * gain)):
        check(lambda x, c=chosen: (F.layer_norm(F.linear(x, W) + x, (8,)) * c()) @ W2, X)


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8)])
def test_one_token(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    check(lambda x: F.layer_norm(F.linear(F.silu(F.linear(x, W)), W2) + x, (8,)) @ W, x)


def test_a_symbolic_width() -> None:
    with torch._dynamo.config.patch(assume_static_by_default=False):
        check(lambda x, w, v: F.linear(F.silu(F.linear(x, w)), v) + x, X, W, W2)


def test_attention_of_one_head_by_two_products() -> None:
    """Its result lies as the next product reads it. Inductor takes any view of it for the end of a pattern of
    attention, of four dimensions."""
    x, w = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(3, 8, 8, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w[i]).view(2, 6, 1, 8).transpose(1, 2) for i in range(3))
        a = torch.softmax(q @ k.transpose(-2, -1) / 3, -1) @ v
        return F.gelu(F.linear(a.transpose(1, 2).reshape(2, 6, 8), W)) + x

    for run in (False, True):
        found, (report,) = compiled(f, x, run=run)
        assert error(found, f(x)) < 1e-12 and report.sites
