"""Loops over heads that are read in parts: which sums are taken of parts, which gradients are put beside each other,
and that all of it computes what eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from evaluate import strict_reference
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.parts.lanes import join_gradients, loop_by_parts, sum_by_parts
from coda_inductor.passes.casts import BESIDE, BY_PARTS, Cast

TOKENS, HEADS, HEAD = 6, 3, 8
WIDTH = HEADS * HEAD
Program = Callable[[Tensor], Tensor]
Cut = Callable[[Tensor], tuple[Tensor, ...]]


def normalised(x: Tensor) -> Tensor:
    """The gradient of a norm, as autograd writes it."""
    mean = (x * x.cos()).sum(-1, keepdim=True) / x.shape[-1]
    return (x.cos() - x * mean).sin()


def of(cut: Cut, f: Program = normalised) -> Program:
    """What is made of a sum, cut in parts and put together in another order."""
    return lambda x: torch.cat([p.exp() for p in reversed(cut(f(x)))], -1)


def slices_of(x: Tensor) -> tuple[Tensor, ...]:
    return x[..., : HEAD // 2], x[..., HEAD // 2 :]


def neighbours(x: Tensor) -> tuple[Tensor, ...]:
    return x[..., ::2], x[..., 1::2]


def halves_and_quarters(x: Tensor) -> tuple[Tensor, ...]:
    return x[..., : HEAD // 2], x[..., HEAD // 2 : HEAD // 4 * 3], x[..., HEAD // 4 * 3 :]


def turned(x: Tensor) -> Tensor:
    return normalised(x).transpose(0, 1).float().double()


def read_whole(x: Tensor) -> Tensor:
    y = normalised(x)
    return torch.cat([*slices_of(y), y.sum(0, keepdim=True).expand_as(y)], -1)


def rounded(x: Tensor) -> Tensor:
    return of(slices_of, lambda y: y * y.bfloat16().sum(-1, keepdim=True))(x)


SUMS: dict[str, Program] = {
    "slices": of(slices_of), "split": of(lambda x: x.split(HEAD // 2, -1)), "neighbours": of(neighbours),
    "quarters": of(lambda x: x.chunk(4, -1)), "turned": of(slices_of, turned),
}  # fmt: skip
OTHER_SUMS: dict[str, Program] = {
    "whole": normalised, "read whole, too": read_whole, "16 bits": rounded,
    "two kinds": of(halves_and_quarters), "unequal": of(lambda x: x.split((HEAD - 2, 2), -1)),
    "tokens": of(slices_of, lambda x: x * (x * x).sum(0, keepdim=True)),
    "tokens, too": of(slices_of, lambda x: x * (x * x).sum((0, -1), keepdim=True)),
    "cut by tokens": lambda x: torch.cat([*normalised(x).split(TOKENS // 2, 0)], -1),
    "all heads cut": lambda x: torch.cat([*normalised(x).flatten(1).split(WIDTH // 2, -1)], 0),
    "unbound": of(lambda x: x.unbind(-1), lambda x: normalised(x)[..., None]),
    "of one number": lambda x: x * x.mean().sum(0),
    "squeezed": lambda x: torch.cat([*((x[:1, 0] ** 2).sum(-1, keepdim=True).squeeze() * x).split(HEAD // 2, -1)], -1),
    "eighths": of(lambda x: x.split(1, -1)),
    "a matrix": lambda x: (x * x).sum(-1, keepdim=True) @ slices_of(x)[0][0][:1],
    "in another dtype": of(slices_of, lambda x: x * (x * x).sum(-1, keepdim=True, dtype=torch.float32)),
}  # fmt: skip


def padded(x: Tensor, start: int, end: int, dim: int = -1) -> Tensor:
    return torch.slice_scatter(
        torch.full(x.shape, 0, dtype=x.dtype), x.narrow(dim, start, end - start).exp(), dim, start, end
    )


def converted(x: Tensor, start: int, end: int) -> Tensor:
    return torch.slice_scatter(torch.full(x.shape, 0.0), x[..., start:end], -1, start, end)


def channels_last(x: Tensor) -> Tensor:
    y = torch.stack([x, x.cos()]).clone(memory_format=torch.channels_last)
    whole = torch.full(y.shape, 0, dtype=y.dtype)
    first, second = (torch.slice_scatter(whole, y[..., i : i + 4], -1, i, i + 4) for i in (0, 4))
    return first + second


def twice(x: Tensor) -> Tensor:
    return x + x


def halves(x: Tensor) -> Tensor:
    return padded(x, 4, 8) + padded(x, 0, 4)


GRADIENTS: dict[str, Program] = {
    "halves": lambda x: halves(x) @ x.mT,
    "quarters": lambda x: (padded(x, 2, 4) + padded(x, 6, 8) + (padded(x, 0, 2) + padded(x, 4, 6))).flatten(1),
    "tokens": lambda x: (padded(x, 0, 3, 0) + padded(x, 3, 6, 0)).permute(1, 2, 0) @ x[:, 0],
}
OTHER_GRADIENTS: dict[str, Program] = {
    "read by a loop": lambda x: halves(x).sin(),
    "a part is missing": lambda x: (padded(x, 0, 2) + padded(x, 4, 6)).flatten(1),
    "a part twice": lambda x: (halves(x) + padded(x, 0, 4)).flatten(1),
    "added to itself": lambda x: (halves(x) + padded(x, 0, 4)[:] * 1 + padded(x, 0, 4)).flatten(1),
    "a sum twice": lambda x: twice(halves(x)).flatten(1),
    "a part of a sum twice": lambda x: (twice(padded(x, 0, 4)) + padded(x, 4, 8)).flatten(1),
    "of two shapes": lambda x: (padded(x[:1], 0, 4) + padded(x, 4, 8)).flatten(1),
    "of two ranks": lambda x: (padded(x[0], 0, 4) + padded(x, 4, 8)).flatten(1),
    "converted": lambda x: (converted(x, 0, 4) + converted(x, 4, 8)).flatten(1).double(),
    "overlapping": lambda x: (padded(x, 0, 4) + padded(x, 2, 6)).flatten(1),
    "unequal": lambda x: (padded(x, 0, 2) + padded(x, 2, 8)).flatten(1),
    "of two dimensions": lambda x: (padded(x, 0, 4) + padded(x, 3, 6, 0)).flatten(1),
    "over others": lambda x: (torch.slice_scatter(x, x[..., :4], -1, 4, 8) + padded(x, 0, 4)).flatten(1),
    "of two dtypes": lambda x: (padded(x, 0, 4) + padded(x.float(), 4, 8)).flatten(1),
    "times": lambda x: torch.add(padded(x, 0, 4), padded(x, 4, 8), alpha=2).flatten(1),
    "lies otherwise": lambda x: channels_last(x).flatten(2),
    "and a number": lambda x: (halves(x) + 1).flatten(1),
}


def drawn() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(TOKENS, HEADS, HEAD, dtype=torch.float64)


def rewritten(f: Program, rewrite: Callable[[fx.Graph], tuple[Cast, ...]]) -> tuple[Cast, ...]:
    """What a rewriting says of f, which it does not change."""
    x = drawn()
    gm = make_fx(f, tracing_mode="fake")(x)
    found = rewrite(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert torch.allclose(gm(x), f(x), 1e-12, 1e-12)
    return found


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_taken_of_parts(name: str) -> None:
    (cast,) = rewritten(SUMS[name], sum_by_parts)
    assert cast.what == BY_PARTS and not cast.absorbed


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_other_sums_stay(name: str) -> None:
    assert rewritten(OTHER_SUMS[name], sum_by_parts) == ()


def test_sums_of_long_rows_stay() -> None:
    x = torch.randn(2, 512)
    gm = make_fx(lambda x: torch.cat([*normalised(x).split(256, -1)], 0), tracing_mode="fake")(x)
    assert sum_by_parts(gm.graph) == ()


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_parts_stand_beside_each_other(name: str) -> None:
    (cast,) = rewritten(GRADIENTS[name], join_gradients)
    assert cast.what == BESIDE and len(cast.absorbed) >= 3 and cast.absorbed[0].startswith("add")


@pytest.mark.parametrize("name", OTHER_GRADIENTS)
def test_other_gradients_stay(name: str) -> None:
    assert rewritten(OTHER_GRADIENTS[name], join_gradients) == ()


@pytest.mark.parametrize("start", [0, None], ids=["a part", "no part"])
def test_what_is_doubled_again_and_again_is_soon_given_up(start: int | None) -> None:
    def f(x: Tensor) -> Tensor:
        y = x if start is None else padded(x, start, start + 4)
        for _ in range(60):
            y = y + y
        return y.flatten(1)

    assert rewritten(f, join_gradients) == ()


def test_what_others_read_is_not_gone() -> None:
    def f(x: Tensor) -> Tensor:
        first, second = padded(x, 0, 4), padded(x, 4, 8)
        return (first + second).flatten(1) @ first.flatten(1).mT

    (cast,) = rewritten(f, join_gradients)
    assert len(cast.absorbed) == 2


def test_the_sign_of_zero_is_kept_where_it_is_asked_for() -> None:
    assert rewritten(GRADIENTS["halves"], lambda graph: loop_by_parts(graph, exact=True)) == ()
    (cast,) = rewritten(SUMS["slices"], lambda graph: loop_by_parts(graph, exact=True))
    assert cast.what == BY_PARTS


class Attention(torch.nn.Module):
    """Rotary embeddings of halves or neighbours and norms of each head, in either order, behind products."""

    def __init__(self, cut: Cut, join: Callable[[Tensor, Tensor], Tensor], last: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.cut, self.join, self.last = cut, join, last

    def turned(self, x: Tensor, angle: Tensor) -> Tensor:
        a, b = self.cut(x)
        return self.join(a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())

    def forward(self, x: Tensor) -> Tensor:
        angle, unit = x[:, None, : HEAD // 2].detach(), (HEAD,)
        q, k, v = (p(x).unflatten(-1, (HEADS, HEAD)) for p in (self.q, self.k, self.v))
        if self.last:
            q, k = (F.rms_norm(self.turned(t, angle), unit) for t in (q, k))
        else:
            q, k = (self.turned(F.rms_norm(t, unit), angle) for t in (q, k))
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)


def together(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], -1)


def alternating(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b], -1).flatten(-2)


@pytest.mark.parametrize(
    ("cut", "join", "last", "expected"),
    [
        (slices_of, together, True, {BY_PARTS: 2, BESIDE: 2}),
        (lambda x: x.chunk(2, -1), together, True, {BY_PARTS: 2}),
        (neighbours, alternating, True, {}),
        (slices_of, together, False, {}),
    ],
    ids=["slices", "chunk", "neighbours", "norm first"],
)
def test_the_backward_of_attention(
    cut: Cut, join: Callable[[Tensor, Tensor], Tensor], last: bool, expected: dict[str, int]
) -> None:
    torch.manual_seed(0)
    model = Attention(cut, join, last).double()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    wanted = model(x)
    seed, leaves = torch.randn_like(wanted), (x, *model.parameters())
    with strict_reference(run=False):
        REPORTS.clear()
        found = torch.compile(model, backend="coda")(x)
        said = [c.what for c in REPORTS[-1].casts if c.what in (BY_PARTS, BESIDE)]
        pairs = zip(*(torch.autograd.grad(y, leaves, seed) for y in (found, wanted)), strict=True)
        assert torch.allclose(found, wanted, 1e-10, 1e-10)
        assert all(torch.allclose(mine, theirs, 1e-10, 1e-10) for mine, theirs in pairs)
    assert {what: said.count(what) for what in said} == expected


def test_gradients_of_what_is_added_to_itself() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        a, b = slices_of(y + y)
        return a.sin(), b.cos()

    torch.manual_seed(0)
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((TOKENS, HEAD), (HEAD, HEAD)))
    with strict_reference(run=False):
        made = [torch.cat(call(x, w)).square().sum() for call in (torch.compile(f, backend="coda"), f)]
    found, wanted = (torch.autograd.grad(y, (x, w)) for y in made)
    assert all(torch.allclose(mine, theirs, 1e-10, 1e-10) for mine, theirs in zip(found, wanted, strict=True))


def test_it_can_be_switched_off() -> None:
    model = Attention(slices_of, together, True).double()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    with strict_reference(run=False):
        REPORTS.clear()
        torch.compile(model, backend="coda", options={"disable": "heads"})(x)
    assert not [c for c in REPORTS[-1].casts if c.what in (BY_PARTS, BESIDE)]
