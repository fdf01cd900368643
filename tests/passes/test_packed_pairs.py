"""Loops over pairs of 16-bit neighbours read and write each pair as one integer: the same bits; others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiling import run
from torch import Tensor

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.passes.casts import PACKED

T, HEADS, HEAD, WIDTH = 320, 2, 8, 16
ONLY = {"target": "reference", "only": "complex,casts", "strict": True}
"""No Region takes the pairs."""
Program = Callable[[Tensor, Tensor], Tensor]


def parts_of(turns: Tensor) -> tuple[Tensor, Tensor]:
    return turns.real[:, None], turns.imag[:, None]


def turned(z: Tensor, turns: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pairs of neighbours as complex numbers, in the dtype of z or another."""
    pairs = torch.view_as_complex(z.float().unflatten(-1, (HEADS, -1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-3).to(dtype or z.dtype)


def combed(z: Tensor, turns: Tensor) -> Tensor:
    """Every second number, and what is between."""
    (c, s), z = parts_of(turns), z.unflatten(-1, (HEADS, -1))
    a, b = z[..., ::2], z[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-3).to(z.dtype)


def heads_first(z: Tensor, turns: Tensor) -> Tensor:
    """What lies by token is read head by head."""
    pairs = torch.view_as_complex(z.float().unflatten(-1, (HEADS, -1, 2)).transpose(0, 1))
    return torch.view_as_real(pairs * turns).flatten(-2).to(z.dtype).transpose(0, 1).flatten(1)


def halves(z: Tensor, turns: Tensor) -> Tensor:
    """The numbers of a pair are half a head apart."""
    (c, s), (a, b) = parts_of(turns), z.unflatten(-1, (HEADS, 2, -1)).unbind(-2)
    return torch.cat((a * c - b * s, b * c + a * s), -1).flatten(-2).to(z.dtype)


def apart(z: Tensor, turns: Tensor) -> Tensor:
    """The halves of a head become neighbours: they are read apart."""
    (c, s), (a, b) = parts_of(turns), z.unflatten(-1, (HEADS, 2, -1)).unbind(-2)
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-3).to(z.dtype)


def one_of_two(z: Tensor, turns: Tensor) -> Tensor:
    """The second number of each pair is not read."""
    (c, s), a = parts_of(turns), z.unflatten(-1, (HEADS, -1))[..., ::2]
    return torch.stack((a * c, a * s), -1).flatten(-3).to(z.dtype)


def read_by_a_loop(z: Tensor, turns: Tensor) -> Tensor:
    """A loop reads the result, which would have to be stored for it."""
    return turned(z, turns).sin()


def scaled_columns(z: Tensor, turns: Tensor) -> Tensor:
    """One loop needs the largest of all rows before another begins: each would turn the pairs anew."""
    y = turned(z, turns)
    return y / y.nan_to_num(1.0, 1.0, 1.0).abs().amax(0)


def scaled_columns_in_float32(z: Tensor, turns: Tensor) -> Tensor:
    """The same, through one cast."""
    y = turned(z, turns).float()
    return (y / y.nan_to_num(1.0, 1.0, 1.0).abs().amax(0)).to(z.dtype)


def scaled_by_the_largest(z: Tensor, turns: Tensor) -> Tensor:
    y = turned(z, turns)
    return y / y.t().nan_to_num(1.0, 1.0, 1.0).abs().max()


def largest_of_columns(z: Tensor, turns: Tensor) -> Tensor:
    """One loop, which needs no store."""
    return turned(z, turns).nan_to_num(1.0, 1.0, 1.0).abs().amax(0)


def scaled_rows(z: Tensor, turns: Tensor) -> Tensor:
    """All in one loop over the rows."""
    y = turned(z, turns)
    return y / y.nan_to_num(1.0, 1.0, 1.0).abs().amax(1, keepdim=True)


def gated(z: Tensor, turns: Tensor) -> Tensor:
    """Two operations, of one loop."""
    y = turned(z, turns)
    return y * y.sigmoid()


def of_a_loop(z: Tensor, turns: Tensor) -> Tensor:
    """What is turned is computed, and would have to be stored."""
    return turned(z.sin(), turns)


def beside(z: Tensor, turns: Tensor) -> Tensor:
    """The product may be written beside other numbers, at an odd place."""
    ones = torch.ones(WIDTH, WIDTH, dtype=z.dtype)
    return turned(z, turns) @ ones + torch.cat((z[:, :1], z), 1)[:, 1:] @ ones


def chunks(z: Tensor, turns: Tensor) -> Tensor:
    """Of two parts that lie one behind the other."""
    (c, s), (a, b) = parts_of(turns), z.unflatten(-1, (HEADS, -1)).chunk(2, -1)
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-3).to(z.dtype)


def pairs_of_pairs(z: Tensor, turns: Tensor) -> Tensor:
    """Pairs are turned into pairs, not their numbers."""
    (c, s), (a, b) = parts_of(turns[:, :2]), z.unflatten(-1, (-1, 2, 2)).unbind(-2)
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-3).to(z.dtype)


def repeated(z: Tensor, turns: Tensor) -> Tensor:
    """Each head is read twice."""
    heads = z.unflatten(-1, (HEADS, 1, HEAD)).expand(T, HEADS, 2, HEAD)
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2))) * turns[:, None, None]
    return torch.view_as_real(pairs).flatten(1).to(z.dtype) @ torch.ones(2 * WIDTH, WIDTH, dtype=z.dtype)


def chunked(z: Tensor, turns: Tensor) -> Tensor:
    """Numbers of pairs that keep a dimension of their own, and a factor that fits without it."""
    a, b = z.view(T, 2, 2, 2, 2).chunk(2, -1)
    v = torch.linspace(-1, 1, 2 * T).view(T, 1, 2, 1, 1).to(z.dtype) * turns.real[0, 0].to(z.dtype)
    return torch.cat((a * v - b * v, b * v + a * v), -1).flatten(1)


def of_two_dtypes(z: Tensor, turns: Tensor) -> Tensor:
    """A number and an integer."""
    (c, s), z = parts_of(turns), z.unflatten(-1, (HEADS, -1))
    a, b = z[..., ::2], z[..., 1::2]
    return torch.cat(((a * c - b * s).to(z.dtype)[..., None], (b * 3).int()[..., None]), -1).flatten(1)


def turned_by_columns(z: Tensor, turns: Tensor) -> Tensor:
    """A table that lies transposed, of which the loop's result would lie so, too."""
    c, s, z = turns.real.t().contiguous().t(), turns.imag.t().contiguous().t(), z[:, :HEAD] @ z[:HEAD, :HEAD]
    a, b = z[..., ::2], z[..., 1::2]
    return torch.stack((c * a - s * b, c * b + s * a), -1).to(z.dtype).flatten(1) @ z[:HEAD, :1].expand(HEAD, WIDTH)


def copied(z: Tensor, turns: Tensor) -> Tensor:
    """A copy, which a loop makes."""
    return combed(z.view(WIDTH, T).t().contiguous(), turns)


def rounded(z: Tensor, turns: Tensor) -> Tensor:
    """Of numbers of 32 bits."""
    return turned(z.float() @ torch.eye(WIDTH), turns, z.dtype)


def widened(z: Tensor, turns: Tensor) -> Tensor:
    """Stored in 32 bits."""
    return (turned(z, turns, torch.float32) @ torch.eye(WIDTH)).to(z.dtype)


def transposed(z: Tensor, turns: Tensor) -> Tensor:
    """Neighbours of the view lie in other rows of memory."""
    return combed(z.view(WIDTH, T).t(), turns)


CASES: dict[str, tuple[Program, torch.dtype, int]] = {
    "complex numbers": (turned, torch.bfloat16, 1),
    "in float16": (turned, torch.float16, 1),
    "every second number": (combed, torch.bfloat16, 1),
    "heads first": (heads_first, torch.bfloat16, 1),
    "halves": (halves, torch.bfloat16, 0),
    "halves that become neighbours": (apart, torch.bfloat16, 0),
    "one of two": (one_of_two, torch.bfloat16, 0),
    "a loop reads them": (read_by_a_loop, torch.bfloat16, 0),
    "loops over columns read them": (scaled_columns, torch.bfloat16, 1),
    "a loop over all reads them": (scaled_by_the_largest, torch.bfloat16, 1),
    "one loop over columns reads them": (largest_of_columns, torch.bfloat16, 0),
    "a loop over rows reads them": (scaled_rows, torch.bfloat16, 0),
    "one loop reads them twice": (gated, torch.bfloat16, 0),
    "a loop makes them": (of_a_loop, torch.bfloat16, 0),
    "beside others": (beside, torch.bfloat16, 0),
    "chunks that become neighbours": (chunks, torch.bfloat16, 0),
    "pairs of pairs": (pairs_of_pairs, torch.bfloat16, 0),
    "repeated": (repeated, torch.bfloat16, 0),
    "chunked": (chunked, torch.bfloat16, 1),
    "of two dtypes": (of_two_dtypes, torch.bfloat16, 0),
    "turned by columns": (turned_by_columns, torch.bfloat16, 0),
    "copied": (copied, torch.bfloat16, 0),
    "rounded": (rounded, torch.bfloat16, 0),
    "widened": (widened, torch.bfloat16, 0),
    "transposed": (transposed, torch.bfloat16, 0),
    "in float32": (turned, torch.float32, 0),
}


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, WIDTH], the weights before and behind, and the turns [T, HEAD / 2]; numbers of all signs, and NaN."""
    torch.manual_seed(0)
    x, before, behind = (torch.randn(n, WIDTH).to(dtype) for n in (T, WIDTH, WIDTH))
    x[3, 1], x[5, 2] = float("nan"), float("inf")
    return x, before, behind, torch.polar(torch.ones(T, HEAD // 2), torch.randn(T, HEAD // 2))


def chained(f: Program) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda x, before, behind, turns: f(x @ before, turns) @ behind


def packed() -> int:
    return sum(cast.what == PACKED for report in REPORTS for cast in report.casts)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name: str) -> None:
    f, dtype, count = CASES[name]
    given = inputs(dtype)
    plainly = run(chained(f), *given, options=ONLY | {"disable": "complex"}).output
    assert packed() == 0
    found = run(chained(f), *given, options=ONLY).output
    error = 1e-5 if dtype == torch.float32 else 0.0  # there complex numbers are multiplied
    torch.testing.assert_close(found, plainly, rtol=error, atol=error, equal_nan=True)
    assert packed() == count


@pytest.mark.usefixtures("interpreted")
def test_what_is_widened_for_loops_is_rounded_first() -> None:
    """As in eager. (Torch 2.11 leaves out that it is rounded and widened again, where the pairs are not stored.)"""
    f, given = chained(scaled_columns_in_float32), inputs(torch.bfloat16)
    found = run(f, *given, options=ONLY).output
    torch.testing.assert_close(found, f(*given), rtol=0.0, atol=0.0, equal_nan=True)
    assert packed() == 1


@pytest.mark.usefixtures("interpreted")
def test_what_a_graph_is_given_may_lie_anywhere() -> None:
    """At an odd place no integer of 32 bits begins."""
    x, _, behind, turns = inputs(torch.bfloat16)
    odd = torch.cat((torch.zeros(1, dtype=x.dtype), x.flatten()))[1:].view(T, WIDTH)

    def f(x: Tensor, behind: Tensor, turns: Tensor) -> Tensor:
        return turned(x, turns) @ behind

    found = run(f, odd, behind, turns, options=ONLY).output
    torch.testing.assert_close(found, f(x, behind, turns), rtol=0.0, atol=0.0, equal_nan=True)
    assert packed() == 0


@pytest.mark.usefixtures("uncached")
def test_attention_and_its_gradients_as_inductor_compiles_them() -> None:
    torch.manual_seed(0)

    def attended(x: Tensor, wq: Tensor, wk: Tensor, turns: Tensor) -> Tensor:
        q, k = (turned(x @ w, turns).view(1, T, HEADS, HEAD).transpose(1, 2) for w in (wq, wk))
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)

    x, wq, wk, turns = inputs(torch.bfloat16)
    x = x.nan_to_num(1.0, 1.0)
    found = []
    for options in (ONLY, ONLY | {"disable": "complex"}):
        weights = [w.clone().requires_grad_() for w in (wq, wk)]
        out = run(attended, x, *weights, turns, options=options, grad=True).output
        found.append([out, *torch.autograd.grad(out.float().sin().sum(), weights)])
        assert packed() == (3 if options is ONLY else 0)  # of k's gradient, a sum, a loop is made
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.usefixtures("interpreted")
def test_rows_and_sizes_that_are_symbols() -> None:
    given = inputs(torch.bfloat16)
    for x in (given[0], given[3]):
        torch._dynamo.mark_dynamic(x, 0)
    ran = run(chained(turned), *given, options=ONLY).output
    assert torch.equal(ran.nan_to_num(7.0), chained(turned)(*given).nan_to_num(7.0))
    assert packed() == 1


@pytest.mark.usefixtures("uncached")
def test_what_is_returned_lies_as_in_eager() -> None:
    """Though it is made of what lies otherwise."""

    def keys(x: Tensor, w: Tensor, turns: Tensor) -> Tensor:
        z = (x @ w).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        a, b = z[..., ::2], z[..., 1::2]
        return (
            torch.stack((a * turns.real - b * turns.imag, b * turns.real + a * turns.imag), -1).to(x.dtype).flatten(-2)
        )

    x, w, _, turns = inputs(torch.bfloat16)
    wanted = keys(x, w, turns)
    found = run(keys, x, w, turns, options=ONLY).output
    assert packed() == 1 and found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.usefixtures("interpreted")
def test_what_is_put_beside_something_of_any_size_adds_no_guard() -> None:
    def beside(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x @ w, torch.cat((x[:, :1], y), -1)

    x, w, *_ = inputs(torch.bfloat16)
    y = torch.randn(T, 5).bfloat16()
    torch._dynamo.mark_dynamic(y, 1)
    ran = run(beside, x, y, w, options=ONLY)
    assert ran == [] and ran.output[1].shape == (T, 6)
