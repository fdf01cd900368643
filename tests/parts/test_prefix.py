"""Class tokens and registers beside rows that a rotary embedding turns: one value of all rows, or left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import REFERENCE, close, run
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.inductor import joint
from coda_inductor.parts.prefix import write_prefixes
from coda_inductor.patterns.graph import aten

BATCH, TOKENS, HEADS, SIZE, FIRST = 2, 7, 3, 8, 2
WIDTH = HEADS * SIZE
STRICT = REFERENCE | {"strict": True}

pytestmark = pytest.mark.usefixtures("uncached")
values_alone = pytest.mark.usefixtures("interpreted")


def angles(rows: int) -> Tensor:
    drawn = torch.rand(rows, SIZE // 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.cat([drawn, drawn], -1)


TABLES = {rows: (angles(rows).cos(), angles(rows).sin()) for rows in (TOKENS - FIRST, TOKENS - 1)}


LARGE = torch.ones(BATCH, HEADS, TOKENS - FIRST, SIZE, dtype=torch.float64)


def tables(rows: int = TOKENS - FIRST) -> tuple[Tensor, Tensor]:
    return TABLES[rows]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape) * sin


def behind(q: Tensor) -> Tensor:
    first, rest = q.split([FIRST, TOKENS - FIRST], -2)
    return torch.cat([first, turned(rest, *tables())], -2)


def one_beside(q: Tensor) -> Tensor:
    return torch.cat([q[:, :, :1], neighbours(q[:, :, 1:], *tables(TOKENS - 1))], 2)


def before(q: Tensor) -> Tensor:
    return torch.cat([turned(q[:, :, :-FIRST], *tables()), q[:, :, -FIRST:]], 2)


def between(q: Tensor) -> Tensor:
    return torch.cat([q[:, :, :1], turned(q[:, :, 1:-1], *tables()), q[:, :, -1:]], 2)


def other_order(q: Tensor) -> Tensor:
    """The turned part first, and tables on the left."""
    (cos, sin), rest = tables(), q[:, :, FIRST:]
    a, b = rest.chunk(2, -1)
    return torch.cat([q[:, :, :FIRST], sin * torch.cat([-b, a], -1) + cos * rest], 2)


def in_float32(q: Tensor) -> Tensor:
    """Widened and rounded again: exact for the rows that stay."""
    x = q.to(torch.bfloat16)
    rest = turned(x[:, :, FIRST:].float(), *(t.float() for t in tables()))
    return torch.cat([x[:, :, :FIRST], rest.to(torch.bfloat16)], 2).double()


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "behind": behind, "one beside": one_beside, "before": before, "between": between, "other order": other_order,
    "in float32": in_float32,
}  # fmt: skip


def with_rest(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda q: torch.cat([q[:, :, :FIRST], f(q[:, :, FIRST:])], 2)


def shifted(q: Tensor) -> Tensor:
    """Not the rows that are beside it."""
    return torch.cat([q[:, :, :FIRST], turned(q[:, :, 1:-1], *tables())], 2)


def of_another(q: Tensor) -> Tensor:
    return torch.cat([q.sin()[:, :, :FIRST], turned(q[:, :, FIRST:], *tables())], 2)


def same_node_twice(x: Tensor) -> Tensor:
    cos, _ = tables()
    return turned(x, cos, cos)


def narrower(x: Tensor) -> Tensor:
    """Rounded on the way: the rows that stay are not."""
    return turned(x.float(), *(t.float() for t in tables())).double()


def of_other_rows(q: Tensor) -> Tensor:
    """What is beside it are not the rows that are left."""
    return torch.cat([q[:, :, 1 : FIRST + 1], turned(q[:, :, FIRST:], *tables())], 2)


def two_factors(x: Tensor) -> Tensor:
    """What one table turns to 0 reads another, whose rows nobody knows."""
    (cos, sin), (a, b) = tables(), x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * TABLES[TOKENS - 1][0][1:] * sin


def not_finite(x: Tensor) -> Tensor:
    """An exponential of a finite number may be infinite."""
    cos, sin = tables()
    return x * cos + x.exp() * sin


def of_integers(q: Tensor, table: Tensor) -> Tensor:
    """Not all of them are numbers of float32."""
    x = (q * 2**30).long()
    return torch.cat([x[:, :, :FIRST], (x[:, :, FIRST:] * table).long()], 2).double() / 2**30


LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": shifted,
    "of another": of_another,
    "of other rows": of_other_rows,
    "two factors": with_rest(two_factors),
    "one node twice": with_rest(same_node_twice),
    "narrower": with_rest(narrower),
    "not finite": with_rest(not_finite),
    "a sum with a table": with_rest(lambda x: x * tables()[0] + tables()[1]),
    "one factor for all rows": with_rest(lambda x: turned(x, *(t[:1] for t in tables()))),
    "a number": with_rest(lambda x: x * 2.0),
    "a number beside": with_rest(lambda x: turned(x, *tables()) + 1.0),
    "twice": with_rest(lambda x: (y := turned(x, *tables())) + y),
    "a large table": with_rest(lambda x: x * LARGE),
    "zeros of fewer dimensions": with_rest(lambda x: turned(x, *tables()) + torch.zeros(HEADS, TOKENS - FIRST, SIZE)),
    "integers": lambda q: of_integers(q, tables()[0].float()),
    "masked": lambda q: behind(q.masked_fill(q > 9, float("-inf"))),
    "alone": with_rest(lambda x: x.sin()),
}


class Attention(nn.Module):
    """Queries and keys behind `f`, and what is made of them; torch 2.11 cannot run attention's gradient in float64."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for w in (self.q, self.k, self.v))
        out: Tensor = torch.tanh(self.f(q) @ self.f(k).mT) @ v
        return out.transpose(1, 2).flatten(2)


def cats(graph: torch.fx.Graph) -> int:
    """Those of tokens, and tensors that are 0 but for some tokens."""
    along = {aten.cat.default: 1, aten.slice_scatter.default: 2}
    found = [n for n in graph.nodes if n.target in along and n.meta["val"].dim() == 4]
    return sum(len(n.args) > along[n.target] and n.args[along[n.target]] in (2, -2) for n in found)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Before and behind the pass, for each graph."""
    found: list[int] = []

    def count(graph: torch.fx.Graph, overwritten: frozenset[str]) -> None:
        found.append(cats(graph))
        write_prefixes(graph, overwritten)
        found.append(cats(graph))

    monkeypatch.setattr(joint, "write_prefixes", count)
    return found


def drawn() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)


@values_alone
@pytest.mark.parametrize("name", TAKEN)
def test_values_and_gradients(name: str, counted: list[int]) -> None:
    torch._dynamo.reset()
    x, model = drawn().requires_grad_(), Attention(TAKEN[name]).double()
    ran = run(model, x, grad=True, options=STRICT)
    wanted = model(x)
    rounds = name == "in float32"
    assert (ran.output - wanted).norm() <= (0.02 if rounds else 1e-10) * wanted.norm()
    inputs = [x, *model.parameters()]
    found, right = (torch.autograd.grad(y.square().sum(), inputs) for y in (ran.output, wanted))
    for ours, eager in zip(found, right, strict=True):
        assert (ours - eager).norm() <= (0.05 if rounds else 1e-10) * eager.norm()
    assert counted[0] >= 4 and counted[1] == 0, counted  # of queries and keys, forward and backward


@values_alone
@pytest.mark.parametrize("name", ["behind", "one beside"])
def test_an_epilogue_makes_it(name: str) -> None:
    torch._dynamo.reset()
    model = Attention(TAKEN[name]).double()
    with torch.no_grad():
        ran = run(model, drawn(), options=STRICT)
        close(ran.output, model(drawn()))
    regions = [site.region for report in ran.reports for site in report.sites]
    assert sum(r.half > 0 for r in regions) == 2


@pytest.mark.sampled
@values_alone
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str, counted: list[int]) -> None:
    torch._dynamo.reset()
    model = Attention(LEFT[name]).double()
    with torch.no_grad():
        ran = run(model, drawn(), options=STRICT)
        wanted = model(drawn())
    assert (ran.output - wanted).norm() <= (1e-5 if name == "narrower" else 1e-10) * wanted.norm()
    assert counted == [2, 2]


@values_alone
def test_sizes_that_are_symbols_are_left(counted: list[int]) -> None:
    torch._dynamo.reset()
    model, x = Attention(behind).double(), drawn()
    with torch.no_grad():
        found = torch.compile(model, backend="coda", dynamic=True, options=STRICT)(x.repeat(2, 1, 1))
        close(found, model(x.repeat(2, 1, 1)))
    assert counted[:1] == counted[1:2]


class Overwritten(nn.Module):
    """Cosines lie in a buffer that each call of the forward overwrites."""

    cos: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cos", tables()[0].clone())

    def forward(self, x: Tensor) -> Tensor:
        first, rest = self.w(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2).split([FIRST, TOKENS - FIRST], -2)
        made = torch.cat([first, turned(rest, self.cos, tables()[1])], -2)
        self.cos.mul_(0.5)
        return torch.tanh(made @ made.mT).sum(-1)


def test_what_is_overwritten_is_left(counted: list[int]) -> None:
    torch._dynamo.reset()
    found = []
    for backend in (None, "coda"):
        torch.manual_seed(0)
        model = Overwritten().double()
        call = torch.compile(model, backend=backend, options=STRICT) if backend else model
        with torch.no_grad():
            found.append([call(drawn()), call(drawn()), model.cos])
    for ours, eager in zip(*found, strict=True):
        close(ours, eager)
    assert counted == [1, 1]


@values_alone
def test_it_can_be_switched_off(counted: list[int]) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        run(Attention(behind).double(), drawn(), options=STRICT | {"disable": "prefix"})
    assert counted == []


def test_explain_credits_the_region_with_what_was_rewritten() -> None:
    """The cat and what it puts beside each other are gone; so says the share of bytes that no kernel moves."""
    torch._dynamo.reset()
    rows, tokens = torch.rand(1024, 32), 1025
    cos, sin = (torch.cat([f(rows)] * 2, -1).to(torch.bfloat16) for f in (torch.cos, torch.sin))
    w, v = (nn.Linear(512, 512).to(torch.bfloat16) for _ in "wv")

    def call(x: Tensor) -> Any:
        q = w(x).unflatten(-1, (8, 64)).transpose(1, 2)
        return v(torch.cat([q[:, :, :1], turned(q[:, :, 1:], cos, sin)], 2).transpose(1, 2).flatten(2))

    x = torch.empty(4, tokens, 512, dtype=torch.bfloat16)
    found = dict[str, float]()
    for name in ("", "prefix"):
        settings = Settings(target="sm_90a", disable=frozenset({name} - {""}))
        found[name] = explain(call, (x,), {}, "infer", settings)["totals"]["coverage"]
    assert found[""] > 0.5 and found["prefix"] < 0.1


SEEN: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "returned": one_beside,
    "two views of it": lambda q: (one_beside(q).flatten(2), one_beside(q).transpose(1, 2)),
    "by its place": lambda q: torch.as_strided(one_beside(q), (BATCH, HEADS, TOKENS, SIZE), (168, 56, 8, 1)).sin(),
    "one behind the other": lambda q: one_beside(one_beside(q)).sin(),
}


@pytest.mark.parametrize("name", SEEN)
def test_nobody_sees_that_it_lies_otherwise(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    w, f = nn.Linear(WIDTH, WIDTH).double(), SEEN[name]

    def call(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return f(w(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2))

    with torch.no_grad():
        ours, eager = torch.compile(call, backend="coda", options=STRICT)(drawn()), call(drawn())
    for mine, theirs in zip(*((t,) if isinstance(t, Tensor) else t for t in (ours, eager)), strict=True):
        close(mine, theirs)
        assert mine.stride() == theirs.stride()


def many_factors(x: Tensor) -> Tensor:
    for _ in range(100):
        x = x * tables()[0]
    return x


def many_turns(x: Tensor) -> Tensor:
    (cos, sin), turn = tables(), x
    for _ in range(30):
        a, b = turn.chunk(2, -1)
        turn = torch.cat([-b, a], -1)
    return x * cos + turn * sin


@values_alone
@pytest.mark.parametrize("f", [many_factors, many_turns])
def test_long_chains_end(f: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    model = Attention(with_rest(f)).double()
    with torch.no_grad():
        close(run(model, drawn(), options=STRICT).output, model(drawn()))


@values_alone
def test_of_packed_queries_keys_and_values(counted: list[int]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    w = nn.Linear(WIDTH, 3 * WIDTH).double()

    def call(x: Tensor) -> Tensor:
        q, k, v = w(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4).unbind(0)
        out: Tensor = torch.tanh(behind(q) @ behind(k).mT) @ v
        return out

    with torch.no_grad():
        close(torch.compile(call, backend="coda", options=STRICT)(drawn()), call(drawn()))
    assert counted == [2, 0]


CUT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "shifted": lambda h, w, v: torch.tanh((h[1:] * 0.5 + h[:-1]) @ w),
    "halves": lambda h, w, v: torch.cat([h[: h.shape[0] // 2] @ w, torch.tanh(h[h.shape[0] // 2 :] @ v)]),
    "text and image": lambda h, w, v: torch.cat([h[:4] + torch.tanh(h[:4] @ w), h[4:] + torch.tanh(h[4:] @ v)]),
    "the last": lambda h, w, v: torch.tanh(h[-3:]).sum() * torch.tanh(h[:-3] @ v),
    "their number": lambda h, w, v: torch.tanh(h @ w) + (torch.arange(16) + h.shape[0]),
    "every other": lambda h, w, v: torch.tanh(h[::2] @ w).sum() + torch.tanh(h[1::2] @ v),
}


@pytest.mark.sampled
@values_alone
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CUT)
def test_symbols_of_rows_are_not_compared(name: str, train: bool) -> None:
    """To ask whether two symbols are equal would add a guard, and leave the graph to Inductor."""

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return CUT[name](x + torch.tanh(x @ v) @ w, w, v)

    compiled = torch.compile(f, backend="coda", dynamic=True, options=STRICT)
    for rows in (32, 46):
        args = [torch.randn(n, 16, dtype=torch.float64, requires_grad=train) for n in (rows, 16, 16)]
        found, wanted = compiled(*args), f(*args)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-10)
        if train:
            mine, theirs = (torch.autograd.grad(out.square().sum(), args) for out in (found, wanted))
            assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(mine, theirs, strict=True))
