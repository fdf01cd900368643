"""Keys and values that stay: repeated otherwise, read elsewhere, or in memory that the caller overwrites."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, run
from shared_heads import (
    BATCH,
    GROUPS,
    HEADS,
    LENGTH,
    SIZE,
    WIDTH,
    Attention,
    Repeat,
    as_transformers,
    equals_eager,
    inputs,
    model,
)
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("uncached")
values_alone = pytest.mark.usefixtures("interpreted")


def tiled(x: Tensor) -> Tensor:
    """The heads one after another, and that several times: another order."""
    batch, length, groups, _ = x.shape
    x = x.transpose(1, 2)[:, None].expand(-1, HEADS // groups, -1, -1, -1)
    return x.reshape(batch, HEADS, length, SIZE)


def apart(x: Tensor) -> Tensor:
    """The numbers of a head do not lie side by side."""
    return as_transformers(torch.cat([x, x.sin()], -1).unflatten(-1, (SIZE, 2))[..., 0])


class Read(Attention):
    """The repeated keys are read elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (w(n).unflatten(-1, (-1, SIZE)) for w in (self.q, self.k, self.v))
        keys, values = self.repeat(k), self.repeat(v)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2)) + keys.cumsum(1).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


class Unequal(Attention):
    """Keys have fewer heads than values."""

    def __init__(self, repeat: Repeat) -> None:
        super().__init__(repeat)
        self.v = nn.Linear(WIDTH, 2 * GROUPS * SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (w(n).unflatten(-1, (-1, SIZE)) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), self.repeat(k), self.repeat(v), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def two(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(make(), make(), nn.Linear(WIDTH, WIDTH)).double()


class Returned(Attention):
    """Keys are returned, as of a cache, so that the caller may overwrite them before the backward. A `copy` of them may
    be none once it is compiled."""

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        super().__init__(as_transformers)
        self.copy = copy

    def forward(self, x: Tensor) -> Any:
        q, k, v = (w(x).unflatten(-1, (-1, SIZE)) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), self.repeat(k), self.repeat(v), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2)), self.copy(k.detach())


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda k: k, "turned": lambda k: k.transpose(1, 2), "clone": torch.clone, "power of 1": lambda k: k**1,
    "cat of one": lambda k: torch.cat([k]), "pad": lambda k: F.pad(k, (0, 0)), "dropout": lambda k: F.dropout(k, 0.0),
    "empty": lambda k: torch.empty_like(k).copy_(k), "scattered": lambda k: torch.zeros_like(k).slice_scatter(k, 2),
}  # fmt: skip


class Summed(torch.autograd.Function):
    """Repeats whose gradients are added up in another dtype, or over something else as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return as_transformers(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = grad.unflatten(1, (GROUPS, -1))
        if ctx.how == "features":
            return parts.sum((2, 4), keepdim=True).squeeze(2).expand(-1, -1, -1, SIZE).transpose(1, 2), None
        found = parts.sum(2, dtype=torch.float32 if ctx.how == "float32" else None).to(grad.dtype)
        whole = torch.sum(grad, None, keepdim=True) if ctx.how == "everything" else 0
        return (found + whole).transpose(1, 2), None


def summed(x: Tensor, how: str) -> Tensor:
    return Summed.apply(x, how)  # type: ignore[no-any-return, no-untyped-call]


def shifted(x: Tensor) -> Tensor:
    """Rows that do not begin at multiples of 16 bytes."""
    wider = torch.cat([x[..., :1], x], -1)
    return as_transformers(wider[..., 1:])


STAYS: dict[str, Callable[[], nn.Module]] = {
    "where rows begin": lambda: two(lambda: Attention(shifted)),
    **{
        f"summed, {how}": partial(two, partial(Attention, partial(summed, how=how)))
        for how in ("float32", "everything", "features")
    },
    "in another order": lambda: two(lambda: Attention(tiled)),
    "not side by side": lambda: two(lambda: Attention(apart)),
    "read elsewhere": lambda: two(lambda: Read(as_transformers)),
    "of unequal heads": lambda: two(lambda: Unequal(as_transformers)),
}


@pytest.mark.sampled
@values_alone
@pytest.mark.parametrize("name", STAYS)
def test_what_is_something_else_stays(name: str) -> None:
    plain, x = STAYS[name](), inputs()
    assert equals_eager(plain, x, run=False) == 0
    with torch.no_grad():
        ran = run(plain, x, options=REFERENCE)
        wanted = plain(x)
    assert (ran == [] and sum(len(report.grouped) for report in ran.reports) == 0) or "summed" in name
    assert float((ran.output - wanted).norm() / wanted.norm()) < 1e-10


@pytest.mark.sampled
@pytest.mark.parametrize("name", COPIES)
def test_keys_that_are_returned_are_not_read_again(name: str) -> None:
    """The caller may overwrite them before the backward. The copies for every head were kept for that."""
    plain, x = Returned(COPIES[name]).double(), inputs()
    overwritten_in_between(plain, x, plain.q.weight)


@pytest.mark.sampled
@pytest.mark.parametrize("name", COPIES)
def test_keys_that_are_inputs_are_not_read_again(name: str) -> None:
    plain, x = Attention(as_transformers).double(), inputs()

    def f(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        q = plain.q(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k, v = (as_transformers(COPIES[name](t).reshape(keys.shape)) for t in (keys, keys.sin()))
        return plain.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), keys

    cache = torch.linspace(-1, 1, BATCH * LENGTH * GROUPS * SIZE, dtype=torch.float64)
    overwritten_in_between(f, x, plain.q.weight, cache.view(BATCH, LENGTH, GROUPS, SIZE))


def overwritten_in_between(function: Callable[..., Any], x: Tensor, weight: Tensor, *cache: Tensor) -> None:
    """What the function returns second is overwritten between forward and backward."""
    found = []
    for compile_it in (False, True):
        args = (x, *(t.clone() for t in cache))
        if compile_it:
            ran = run(function, *args, grad=True, options=REFERENCE)
            assert ran == [] and sum(len(report.grouped) for report in ran.reports) == 0
        y, overwritten = ran.output if compile_it else function(*args)
        overwritten.data.zero_()
        found.append(torch.autograd.grad(y.sin().sum(), [x, weight]))
    for mine, eager in zip(found[1], found[0], strict=True):
        assert float((mine - eager).norm() / eager.norm()) < 1e-10


def test_gradients_that_share_memory() -> None:
    """They lie in memory as they did: none could be copied by itself."""

    def f(q: Tensor, k: Tensor, more: Tensor, w: Tensor) -> Tensor:
        both = torch.cat([k, more], 1)
        y = F.scaled_dot_product_attention(q, as_transformers(both), as_transformers(both.detach() @ w))
        return y.flatten(0, 2) @ w

    torch.manual_seed(0)
    shapes = (3, HEADS, 320, SIZE), (3, 40, GROUPS, SIZE), (3, 40, GROUPS, SIZE), (SIZE, SIZE)
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    wanted = torch.autograd.grad(f(*given).sin().sum(), given)
    ran = run(f, *given, grad=True, options=REFERENCE)
    assert ran == [] and sum(len(report.grouped) for report in ran.reports) == 1
    for mine, eager in zip(torch.autograd.grad(ran.output.sin().sum(), given), wanted, strict=True):
        assert float((mine - eager).norm() / eager.norm()) < 1e-10 and mine.stride() == eager.stride()


@values_alone
def test_switched_off_it_stays() -> None:
    plain, x = model(as_transformers), inputs()
    for options, count in (
        ({}, 3),
        ({"disable": "grouped"}, 0),
        ({"only": "bilinearity"}, 0),
        ({"numerics": "strict"}, 3),
    ):
        ran = run(plain, x, grad=True, options=REFERENCE | options)
        assert ran == [] and sum(len(report.grouped) for report in ran.reports) == count


@torch.library.custom_op("coda_tests_grouped::put_", mutates_args={"x"})
def put_(x: Tensor) -> None:
    """Overwrites it with its sine."""
    x.copy_(x.sin())


def test_what_is_overwritten_before_attention_is_not_read() -> None:
    """The copies have what was there before."""

    def f(x: Tensor, keys: Tensor, values: Tensor, w: Tensor) -> Tensor:
        q = (x @ w).view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)
        k, v = as_transformers(keys), as_transformers(values)
        put_(keys)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.gelu(y.transpose(1, 2).flatten(2) @ w)

    torch.manual_seed(0)
    shapes = (BATCH, LENGTH, WIDTH), *2 * [(BATCH, LENGTH, GROUPS, SIZE)], (WIDTH, WIDTH)
    given = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    wanted = f(*(t.clone() for t in given))
    ran = run(f, *given, options=REFERENCE)
    assert ran == [] and sum(len(report.grouped) for report in ran.reports) == 0
    assert float((ran.output - wanted).norm() / wanted.norm()) < 1e-10
