"""A product that is read in parts becomes one for each part: which do, in float64 as eager, and when one is better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import pretend, run
from evaluate import error, strict_reference
from torch import Tensor, fx, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.facts import explain
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.passes.parts import split_products
from coda_inductor.passes.switches import kind

pytestmark = pytest.mark.usefixtures("uncached")
D, N = 32, 64
Act = Callable[[Tensor], Tensor]


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def up_first(x: Tensor) -> Tensor:
    up, gate = x.chunk(2, -1)
    return up * F.gelu(gate)


def by_slices(x: Tensor) -> Tensor:
    """Whose gradients are padded and added up, not put beside each other."""
    return F.silu(x[..., :N]) * x[..., N:]


def three(x: Tensor) -> Tensor:
    a, b, c = x.split([16, N, 2 * N - 16 - N], -1)
    return torch.tanh(a).sum(-1, keepdim=True) + torch.sigmoid(b) * torch.exp(c).sum(-1, keepdim=True)


def turned(x: Tensor) -> Tensor:
    """Parts of a view whose tokens are in another order."""
    gate, up = x.transpose(0, 1).chunk(2, -1)
    return (F.silu(gate) * up).transpose(0, 1)


def read_twice(x: Tensor) -> Tensor:
    """By a slice, too, whose gradient is added to that of the part."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up + x[..., N:]


def overlapping(x: Tensor) -> Tensor:
    return F.silu(x[..., :N]) * x[..., N:] + torch.sin(x[..., 8 : N + 8])


def plain_part(x: Tensor) -> Tensor:
    """One is multiplied as it is, as v of q, k and v."""
    return F.silu(x[..., :N]) + x[..., N:] @ torch.ones(N, N, dtype=x.dtype, device=x.device)


OTHERS = (three, by_slices, turned, read_twice, overlapping, plain_part)


class Mlp(nn.Module):
    def __init__(self, act: Act, bias: bool = False, d: int = D, n: int = N) -> None:
        super().__init__()
        self.gain, self.act = nn.Parameter(torch.rand(d) + 0.5), act
        self.up, self.down = nn.Linear(d, 2 * n, bias=bias), nn.Linear(n, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.act(self.up(F.rms_norm(x, x.shape[-1:], self.gain, 1e-6))))
        return x + made


def made(act: Act, bias: bool = False, first: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 8, D, dtype=torch.float64, requires_grad=not first)
    return Mlp(act, bias).double(), x, torch.randn_like(x)


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, weight: Tensor) -> list[Tensor]:
    """The output and all gradients of a weighted sum of it."""
    out = run(x)
    wanted = [*([x] if x.requires_grad else []), *model.parameters()]
    return [out, *torch.autograd.grad((out * weight).sum(), wanted)]


def products(act: Act, mode: Any = "train", bias: bool = False, **settings: Any) -> tuple[int, int]:
    """Matrix products of the graph, and how many of them lie in pairs after the rewriting."""
    found, model = list[tuple[int, int]](), Mlp(act, bias)

    def seen(graph: fx.Graph) -> None:
        module = fx.GraphModule(nn.Module(), graph)
        report = rewrite_for(module.graph, Settings(target="sm_90a", **settings))
        pairs = sum(kind(site.region) == "pair" for site in report.sites)
        every = sum(n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for n in module.graph.nodes)
        found.append((every, pairs))

    capture(model.bfloat16(), (torch.empty(3, 256, D, dtype=torch.bfloat16, requires_grad=True),), {}, mode, seen)
    return found[0]


@pytest.mark.sampled
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [swiglu, up_first], ids=lambda f: f.__name__)
@pytest.mark.parametrize("inductor", [False, True], ids=["interpreted", "inductor"])
def test_gate_and_up_of_one_weight(act: Act, bias: bool, inductor: bool) -> None:
    """One epilogue computes with both, and another product's writes both of their gradients."""
    model, x, weight = made(act, bias)
    with strict_reference(run=inductor):
        REPORTS.clear()
        found = gradients(torch.compile(model, backend="coda"), model, x, weight)
    (report,) = REPORTS
    assert {"pair"} <= {kind(site.region) for site in report.sites}
    assert any(len(site.region.stores) == 2 and len(site.region.products) == 1 for site in report.sites)
    for mine, theirs in zip(found, gradients(model, model, x, weight), strict=True):
        assert mine.stride() == theirs.stride() and error(mine, theirs) < 1e-10


@pytest.mark.sampled
@pytest.mark.parametrize(
    "act", [three, by_slices, turned, read_twice, overlapping, plain_part], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("first", [False, True])
def test_whatever_reads_the_parts(act: Act, first: bool) -> None:
    model, x, weight = made(act, True, first)
    with strict_reference(run=False):
        found = gradients(torch.compile(model, backend="coda"), model, x, weight)
    for mine, theirs in zip(found, gradients(model, model, x, weight), strict=True):
        assert error(mine, theirs) < 1e-10


def split(act: Act, mode: Any) -> int:
    """How many products of a graph are read in parts alone."""
    found = list[int]()
    inputs = (torch.empty(3, 8, D, requires_grad=True),)
    capture(Mlp(act), inputs, {}, mode, lambda graph: found.append(len(split_products(graph))))
    return found[0]


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_which_are_split(mode: Any) -> None:
    assert [split(act, mode) for act in (swiglu, up_first, three)] == [1, 1, 1]
    assert [split(act, mode) for act in (by_slices, read_twice)] == [mode == "infer"] * 2
    assert [split(act, mode) for act in (turned, overlapping, plain_part)] == [0, 0, 0]


def test_parts_that_are_returned_share_memory() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(D, 2 * N)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            gate, up = self.up(x).chunk(2, -1)
            return gate, up, F.silu(gate) * up

    with strict_reference(run=False):
        gate, up, _ = torch.compile(Model(), backend="coda")(torch.randn(8, D))
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()


def test_one_product_is_better_than_several_without_epilogues() -> None:
    """Then the graph stays as it came; and in strict, which adds up as the graph does."""
    none = products(swiglu, disable=frozenset({"parts", "pair"}))
    assert products(swiglu, disable=frozenset({"pair"})) == none
    assert products(swiglu, disable=frozenset({"parts"}))[1] == 0 < products(swiglu)[1]
    strict = products(swiglu, numerics="strict", disable=frozenset({"parts"}))
    assert products(swiglu, numerics="strict") == strict
    assert none == (3, 0)


def test_a_tuner_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the graph in one piece, on a machine that is pretended."""
    pretend(monkeypatch, tmp_path)
    torch.manual_seed(0)
    model = Mlp(swiglu, n=128).bfloat16()
    x = torch.randn(512, D, dtype=torch.bfloat16, requires_grad=True)
    for off, pairs in (("", 1), ("pair", 0)):
        ran = run(model, x, grad=True, options={"disable": off, "strict": True})
        assert ran == [] and sum(kind(site.region) == "pair" for r in ran.reports for site in r.sites) == pairs
        assert error(ran.output, model(x)) < 2e-2


def test_explain_counts_the_graph_in_one_piece() -> None:
    with torch.device("meta"):
        model = Mlp(swiglu, d=256, n=1024).bfloat16()
        x = torch.empty(4096, 256, dtype=torch.bfloat16, requires_grad=True)
    totals = [
        explain(model, (x,), {}, "train", Settings(target="sm_90a", disable=frozenset(off)))["totals"]
        for off in (["pair"], ["pair", "parts"])
    ]
    assert totals[0] == totals[1]


def bias_of_tokens(x: Tensor, w: Tensor, d: Tensor) -> Tensor:
    return swiglu(torch.addmm(x[:, :1], x, w.t())) @ d.t()


def bias_of_a_number(x: Tensor, w: Tensor, d: Tensor) -> Tensor:
    return swiglu(torch.addmm(x[0, 0], x, w.t())) @ d.t()


def of_itself(x: Tensor, w: Tensor, d: Tensor) -> Tensor:
    """Left and right matrix are one tensor, and there are as many tokens as columns."""
    return swiglu(w.detach() @ w.t()) @ d.t() + x


def by_place(x: Tensor, w: Tensor, d: Tensor) -> Tensor:
    a, b = (x @ w.t()).chunk(2, -1)
    return (F.silu(a) * b) @ d.t() + torch.as_strided(b, (2 * N, D), (2 * N, 1), N) * 2


def pieces_of_parts(x: Tensor, w: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    a, b = (x @ w.t()).chunk(2, -1)
    return (F.silu(a) * b) @ d.t(), a[:, :8], b[:, :8]


FUNCTIONS = (bias_of_tokens, bias_of_a_number, of_itself, by_place, pieces_of_parts)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_odd_programs(f: Callable[..., Any]) -> None:
    """As many tokens as columns, so that nothing is told apart by its size."""
    torch.manual_seed(0)
    inputs = [torch.randn(*sizes, dtype=torch.float64).requires_grad_() for sizes in ((2 * N, D), (2 * N, D), (D, N))]
    outs, grads = [], []
    for run_by in (f, torch.compile(f, backend="coda")):
        with strict_reference(run=False):
            made = run_by(*inputs)
        found = [*made] if isinstance(made, tuple) else [made]
        outs.append(found)
        grads.append(torch.autograd.grad([t.sin().sum() for t in found], inputs, allow_unused=True))
    for theirs, mine in zip(*outs, strict=True):
        assert error(mine, theirs) < 1e-10 and mine.stride() == theirs.stride()
    for theirs, mine in zip(*grads, strict=True):
        assert (theirs is None and mine is None) or error(mine, theirs) < 1e-10


def test_sizes_that_are_symbols() -> None:
    """Of another tensor whose gradients lie beside each other."""
    torch.manual_seed(0)
    model = Mlp(swiglu).double()

    def f(x: Tensor) -> Tensor:
        return F.glu(model(x).transpose(1, 2), -1)

    x = torch.randn(4, 12, D, dtype=torch.float64, requires_grad=True)
    with strict_reference(run=False):
        mine = torch.compile(f, backend="coda", dynamic=True)(x)
        (found,) = torch.autograd.grad(mine.sin().sum(), [x])
    (wanted,) = torch.autograd.grad(f(x).sin().sum(), [x])
    assert error(mine, f(x)) < 1e-10 and error(found, wanted) < 1e-10


def test_bytes_of_gate_and_up_in_one_weight() -> None:
    """Of two thirds of what torch.compile moves. In one piece it was 1.7 times that: a float32 tile was stored."""
    with torch.device("meta"):
        model = Mlp(swiglu, d=256, n=1024).bfloat16()
        x = torch.empty(4096, 256, dtype=torch.bfloat16, requires_grad=True)
    totals = explain(model, (x,), {}, "train", Settings(target="sm_90a"))["totals"]
    assert totals["bytes_after"] < 0.75 * totals["bytes_before"]
    assert totals["saved_bytes"] <= 1.02 * totals["saved_bytes_inductor"]


def test_a_matrix_that_is_added_asks_nothing_of_dynamic_sizes() -> None:
    """Its sizes are symbols: to compare one with the product's width would be a guard."""
    w = torch.randn(8, 16, dtype=torch.float64)

    def add(x: Tensor, y: Tensor) -> Tensor:
        return torch.addmm(y.reshape(-1, 16), x.reshape(-1, 8), w)

    with strict_reference():
        compiled = torch.compile(add, backend="coda", dynamic=True)
        for n in (3, 5):
            x, y = torch.randn(n, 100, 8, dtype=torch.float64), torch.randn(n, 100, 16, dtype=torch.float64)
            torch.testing.assert_close(compiled(x, y), add(x, y), rtol=1e-10, atol=1e-10)
