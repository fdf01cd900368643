"""Products of complex numbers as products of their parts: the same values, and what is read as complex is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import REFERENCE, run
from torch import Tensor

from coda_inductor.inductor import joint
from coda_inductor.passes.complex import as_real

pytestmark = pytest.mark.usefixtures("uncached")

T, HEADS, HEAD = 6, 2, 8


def table(dtype: torch.dtype = torch.complex128) -> Tensor:
    angles = torch.arange(T)[:, None] * 0.3 ** torch.arange(HEAD // 2)
    return torch.polar(torch.ones_like(angles), angles).to(dtype)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embeddings of x @ w, as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (HEADS, -1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-3)


def backwards(x: Tensor, turns: Tensor) -> Tensor:
    """Turned back: the conjugate of a part of a longer table."""
    pairs = torch.view_as_complex(x.unflatten(-1, (HEADS, -1, 2)))
    return torch.view_as_real(pairs * torch.cat([turns, turns])[:T].conj()[:, None]).flatten(-3)


def both_read(x: Tensor, turns: Tensor) -> Tensor:
    """The product is also read as complex numbers."""
    product = torch.view_as_complex(x.unflatten(-1, (HEADS, -1, 2))) * turns[:, None]
    return torch.view_as_real(product).flatten(-3) + product.abs().sum()


def viewed_twice(x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Two views of one product are returned."""
    product = torch.view_as_complex(x.unflatten(-1, (HEADS, -1, 2))) * turns[:, None]
    return torch.view_as_real(product), torch.view_as_real(product)


def rotated(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, w, turns: f(x @ w, turns)


@pytest.mark.parametrize(("f", "left"), [(turned, 0), (backwards, 0), (both_read, 1)])
def test_values_and_gradients(
    f: Callable[[Tensor, Tensor], Tensor], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def counted(graph: torch.fx.Graph) -> None:
        as_real(graph)
        values = [n.meta.get("val") for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor]
        found.append(sum(isinstance(v, Tensor) and v.is_complex() for v in values))

    monkeypatch.setattr(joint, "as_real", counted)
    torch.manual_seed(0)
    x, w = (torch.randn(n, 16, dtype=torch.float64).requires_grad_() for n in (T, 16))
    ran = run(rotated(f), x, w, table(), options=REFERENCE | {"strict": True}, grad=True)
    wanted = rotated(f)(x, w, table())
    torch.testing.assert_close(ran.output, wanted, rtol=1e-12, atol=1e-12)
    for got, exact in zip(
        torch.autograd.grad(ran.output.sum(), (x, w)), torch.autograd.grad(wanted.sum(), (x, w)), strict=True
    ):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    assert bool(found[0]) == bool(left), found


def test_it_can_be_switched_off() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(T, 16, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64)
    ran = run(rotated(turned), x, w, table(), options=REFERENCE | {"strict": True, "disable": "complex"})
    torch.testing.assert_close(ran.output, rotated(turned)(x, w, table()), rtol=1e-12, atol=1e-12)


def test_two_views_of_one_product_share_its_memory() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(T, 16, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64)
    ran = run(lambda x, w, turns: viewed_twice(x @ w, turns), x, w, table(), options=REFERENCE | {"strict": True})
    first, second = ran.output
    torch.testing.assert_close(first, viewed_twice(x @ w, table())[0], rtol=1e-12, atol=1e-12)
    first.zero_()
    assert not bool(second.any())


def conjugated(x: Tensor, turns: Tensor) -> Tensor:
    """A copy of what is conjugated only when it is read."""
    product = torch.view_as_complex(x.unflatten(-1, (HEADS, -1, 2))) * turns[:, None]
    return torch.view_as_real(product.conj().resolve_conj())


def negated(x: Tensor, turns: Tensor) -> tuple[Tensor, ...]:
    """Copies of an imaginary part that is negated only when it is read."""
    part = (torch.view_as_complex(x.unflatten(-1, (HEADS, -1, 2))) * turns[:, None]).conj().imag
    return part.clone(), part.resolve_neg(), part * 2


@pytest.mark.parametrize("f", [conjugated, negated])
def test_copies_of_what_is_turned_when_it_is_read(f: Callable[[Tensor, Tensor], Any]) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(n, 16, dtype=torch.float64).requires_grad_() for n in (T, 16))
    ran = run(lambda x, w, turns: f(x @ w, turns), x, w, table(), options=REFERENCE | {"strict": True}, grad=True)
    outs, wanted = ([t] if isinstance(t, Tensor) else t for t in (ran.output, f(x @ w, table())))
    for mine, its in zip(outs, wanted, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad([t.sum() for t in some], (x, w)) for some in (outs, wanted))
    for got, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def test_what_is_returned_lies_as_in_eager() -> None:
    """Queries and keys of one product with their heads first, which attention reads and the caller keeps."""

    def f(x: Tensor, w: Tensor, turns: Tensor) -> list[Tensor]:
        q, k, v = (x @ w).view(2, T, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        pairs = (torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * turns for t in (q, k))
        q, k = (torch.view_as_real(p).flatten(-2) for p in pairs)
        return [torch.nn.functional.scaled_dot_product_attention(q, k, v), q, k]

    x, w = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, T, 4), (4, 3 * HEADS * HEAD)))
    wanted = f(x, w, table())
    for grad in (False, True):
        found = run(f, x, w.requires_grad_(grad), table(), grad=grad, options=REFERENCE | {"strict": True}).output
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.stride() == theirs.stride()
            torch.testing.assert_close(mine.detach(), theirs)
