"""Adapters: a number beside a product moves to the smallest tensor, and the layer's own product and the adapter's are
one sum in one accumulator. In float64, outputs and all gradients as eager's, and what stays as it came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import captured, compiled, error, strict_reference
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from trained_layers import as_eager

from coda_inductor.codegen import legality
from coda_inductor.codegen.cases import adapter
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.explain.facts import explain
from coda_inductor.explain.steps import program
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report
from coda_inductor.passes.factors import move_factors
from coda_inductor.patterns.graph import aten

pytestmark = pytest.mark.usefixtures("uncached")
D, N, RANK, TOKENS = 64, 96, 8, 320


class Adapted(nn.Module):
    """A linear layer with an adapter, as peft writes it."""

    def __init__(self, d: int, n: int, scale: float, bias: bool = False, frozen: bool = True, rank: int = RANK) -> None:
        super().__init__()
        self.base = nn.Linear(d, n, bias=bias).requires_grad_(not frozen)
        self.a, self.b, self.scale = nn.Linear(d, rank, bias=False), nn.Linear(rank, n, bias=False), scale

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        return result + self.b(self.a(x)) * self.scale  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """A residual, a norm and SwiGLU, of adapted layers."""

    def __init__(self, norm: Callable[[Tensor], Tensor], *args: Any) -> None:
        super().__init__()
        self.o, self.down = Adapted(N, D, *args), Adapted(N, D, *args)
        self.gate, self.up, self.norm = Adapted(D, N, *args), Adapted(D, N, *args), norm

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        h = h + self.o(x)
        n = self.norm(h)
        return h + self.down(F.silu(self.gate(n)) * self.up(n))  # type: ignore[no-any-return]


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def layer(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],))


def plain(x: Tensor) -> Tensor:
    return x


def unlike(reports: list[Report]) -> list[Region]:
    """Those that add up two products of unlike K."""
    return [site.region for report in reports for site in report.sites if site.region.unlike]


def inputs(*widths: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, TOKENS // 2, width, dtype=torch.float64) for width in widths]


@pytest.mark.sampled
@pytest.mark.parametrize("scale", [2.0, -1.5])
@pytest.mark.parametrize("norm", [plain, rms, layer])
@pytest.mark.parametrize(("bias", "frozen"), [(False, True), (True, False)])
def test_a_training_step_is_eagers(scale: float, norm: Callable[[Tensor], Tensor], bias: bool, frozen: bool) -> None:
    torch.manual_seed(0)
    reports = as_eager(Mlp(norm, scale, bias, frozen).double(), *inputs(N, D))
    assert all(region.products[0].k > RANK for region in unlike(reports))  # the larger K first
    assert len(unlike(reports)) >= 2


@pytest.mark.parametrize("norm", [plain, rms, layer])
def test_in_inference_all_layers_are_one_sum(norm: Callable[[Tensor], Tensor]) -> None:
    """Also behind a norm, whose scale leaves both products."""
    torch.manual_seed(0)
    made = Mlp(norm, 2.0).double()
    found, (report,) = compiled(made, *inputs(N, D))
    assert error(found, made(*inputs(N, D))) < 1e-10
    assert len(unlike([report])) == 4 if norm is not layer else 2
    assert sum(len(site.region.products[0].terms) for site in report.sites) == 12


class Elsewhere(nn.Module):
    """Another product's epilogue reads the layer's own product by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.base, self.v = nn.Linear(N, D, False), nn.Linear(D, N, False), nn.Linear(N, N, False)
        self.a, self.b, self.q = nn.Linear(D, RANK, False), nn.Linear(RANK, N, False), nn.Linear(N, N, False)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        n = rms(h + self.o(x))
        base = self.base(n)
        y = base + 2 * self.b(self.a(n))
        return self.v(torch.tanh(self.q(torch.tanh(y))) * base) + base  # type: ignore[no-any-return]


def twins(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    """Two sums with one product."""
    base = x @ w
    return torch.tanh(base + (x @ a) @ b), torch.sin(base + (x @ a.flip(0)) @ b.flip(1))


def normed_twins(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    return twins(rms(x + x.sin() @ w @ w.t()), w, a, b)


def squares(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    """They are no square of a sum."""
    return torch.tanh((x @ w).square() + ((x @ a) @ b).square())


@pytest.mark.parametrize("program", [twins, normed_twins, squares])
def test_what_is_no_sum_of_two(program: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    args = [torch.randn(size, dtype=torch.float64) for size in ((TOKENS, D), (D, N), (D, RANK), (RANK, N))]
    found, (report,) = compiled(program, *args)
    assert all(error(f, w) < 1e-10 for f, w in zip(found, program(*args), strict=True))
    assert not unlike([report]) and report.sites


def test_a_product_that_others_read_stays() -> None:
    torch.manual_seed(0)
    made, args = Elsewhere().double(), inputs(N, D)
    found, (report,) = compiled(made, *args)
    assert error(found, made(*args)) < 1e-10 and not unlike([report])
    as_eager(made, *args)


def shared(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    y = (x @ a) @ b
    return x @ w + 2 * y, y.relu()


def returned(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    low = x @ a
    return x @ w + 2 * (low @ b), low, 2 * low


def nested(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    return x @ w + 2 * ((3 * ((0.5 * x) @ a)) @ b)


def twice(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    """Two adapters of one layer, of which one accumulator takes in one."""
    return x @ w + 2 * ((x @ a) @ b) + 4 * ((x @ a.flip(0)) @ b.flip(1))


def overwritten(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    z, (d, e, f) = x.sin(), (t.detach() for t in (w, a, b))
    y = z @ d + 2 * ((z @ e) @ f)
    return y, z.mul_(2) @ a, w @ w.t()


def of_itself(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    s = 2 * (x @ w)
    return s @ s.t(), x @ w


def by_symbols(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    return (x @ w + 2 * ((x @ a) @ b)).view(-1, 2, N)


def summed(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    """The gradient is one row, repeated."""
    return (x @ w + 2 * ((x @ a) @ b)).sum(0)


def beside(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    """The gradient is a part of a larger tensor."""
    return torch.stack([x @ w + 2 * ((x @ a) @ b), x @ w], 1)[:, :1].flatten(0, 1)


def a_part(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    z = torch.stack([x, x], 1)[:, 0]
    return z @ w + ((2 * z) @ a) @ b


def repeated(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    z = 2 * ((x @ a) @ b)[None].expand(3, TOKENS, N)
    return z.view(3 * TOKENS, N), z.transpose(0, 1)


PROGRAMS: list[Callable[..., Any]] = [
    shared, returned, nested, twice, overwritten, of_itself, by_symbols, summed, beside, squares, a_part, repeated,
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_other_programs_are_eagers(program: Callable[..., Any], dynamic: bool) -> None:
    def given() -> list[Tensor]:
        torch.manual_seed(0)
        sizes = ((TOKENS, D), (D, N), (D, RANK), (RANK, N))
        return [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes]

    results = []
    for backend in ("eager", "coda"):
        leaves = given()
        args = [leaves[0].clone(), *leaves[1:]]
        with strict_reference(run=False):
            step = torch.compile(program, backend=backend, dynamic=dynamic)
            outs = step(*args)
            outs = outs if isinstance(outs, tuple) else (outs,)
            weights = [torch.sin(torch.arange(o.numel(), dtype=o.dtype)).view(o.shape) for o in outs]
            grads = torch.autograd.grad(
                sum((o * w).sum() for o, w in zip(outs, weights, strict=True)), leaves, allow_unused=True
            )
        results.append([*outs, *(g for g in grads if g is not None)])
    for mine, theirs in zip(*results, strict=True):
        assert mine.shape == theirs.shape and mine.stride() == theirs.stride() and error(mine, theirs) < 1e-10


def test_what_the_forward_overwrites_is_kept_for_the_backward() -> None:
    """The gradient of `a` reads 2 x, which the forward has; moved, it would read x, as it is no more then."""

    def step(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = x @ w + ((2 * x) @ a) @ b
        x.add_(1)
        return y

    torch.manual_seed(0)
    x, w, a, b = (torch.randn(size, dtype=torch.float64) for size in ((TOKENS, D), (D, N), (D, RANK), (RANK, N)))
    leaves, results = [a.requires_grad_(), b.requires_grad_()], []
    for backend in ("eager", "coda"):
        given = x.clone()
        with strict_reference(run=False):
            y = torch.compile(step, backend=backend)(given, w, a, b)
            results.append([y, given, *torch.autograd.grad(y.sin().sum(), leaves)])
    assert all(error(mine, theirs) < 1e-10 for mine, theirs in zip(*results, strict=True))


def test_under_checkpointing() -> None:
    torch.manual_seed(0)
    made = Mlp(rms, 2.0).double()

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return checkpoint(self.inner, x, h, use_reentrant=False)  # type: ignore[no-any-return]

    assert len(unlike(as_eager(Kept(), *inputs(N, D)))) >= 3


def numbers(graph: fx.Graph) -> list[tuple[int, ...]]:
    """The shapes of what numbers multiply."""
    found = (n for n in graph.nodes if n.target in (aten.mul.Tensor, aten.mul.Scalar))
    return [tuple(n.meta["val"].shape) for n in found if not isinstance(n.args[1], fx.Node)]


def moved(program: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Any:
    (graph,) = captured(program, *(torch.randn(shape).to(dtype) for shape in shapes))
    module = fx.GraphModule(graph.graph.owning_module or {}, graph.graph)
    move_factors(module.graph)
    module.graph.lint()
    return numbers(module.graph)


ADAPTER = ((TOKENS, D), (D, RANK), (RANK, N))


def test_where_a_number_moves() -> None:
    assert moved(lambda x, a, b: 2 * ((x @ a) @ b), *ADAPTER) == [(TOKENS, RANK)]
    assert moved(lambda x, w, a: (x @ w, (2 * x) @ a), (TOKENS, D), (D, N), (D, RANK)) == [(TOKENS, RANK)]


@pytest.mark.parametrize(
    ("program", "dtype"),
    [
        (lambda x, a, b: 2 * ((x @ a) @ b), torch.float16),  # 2 (x a) may be out of range
        (lambda x, a, b: 2 * ((x @ a) @ b).float(), torch.bfloat16),  # rounded first
        (lambda x, a, b: (lambda y: (2 * y, y + 1))((x @ a) @ b), torch.bfloat16),  # read by another
        (lambda x, a, b: 2 * (x[:, :RANK] @ b), torch.bfloat16),  # which no product makes
        (lambda x, a, b: 0 * ((x @ a) @ b), torch.bfloat16),  # of what is infinite it is NaN
        (lambda x, a, b: 1e30 * ((x @ a) @ b), torch.float32),  # may be infinite before B makes it small
        (lambda x, a, b: 1e-30 * ((x @ a) @ b), torch.float32),  # may vanish
        (lambda x, a, b: 2 * ((x @ a) @ b)[None].expand(2, TOKENS, N), torch.float32),  # in memory otherwise
        (lambda x, a, b: (2 * x) @ a, torch.bfloat16),  # no product reads x: the number costs no pass of its own
        (lambda x, a, b: (x @ a, (y := 2 * x) @ a, y.relu()), torch.bfloat16),  # read by more than products
    ],
)
def test_where_a_number_stays(program: Callable[..., Any], dtype: torch.dtype) -> None:
    (graph,) = captured(program, *(torch.randn(shape).to(dtype) for shape in ADAPTER))
    before = numbers(graph.graph)
    assert moved(program, *ADAPTER, dtype=dtype) == before


def test_both_products_say_the_law() -> None:
    """The norm's scale left both products of each of the two layers behind it."""
    torch.manual_seed(0)
    facts = program(Mlp(rms, 2.0).double(), tuple(inputs(N, D)), {}, "infer", Settings(target="reference"))
    (graph,) = facts["graphs"]
    sums = [step for step in graph["after"] if len(step.get("products", ())) == 2 and step["laws"]]
    at = {law["at"] for law in graph["laws"]}
    assert len(sums) == 2 and all(p["name"] in at for step in sums for p in step["products"])


class Rotated(nn.Module):
    """Queries with an adapter behind a norm, turned by a rotary embedding: its halves are lanes of both products."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.o, self.q, self.k = nn.Linear(N, D, False), Adapted(D, D, 2.0, rank=rank), nn.Linear(D, D, False)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        n = rms(h + self.o(x))
        angles = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * torch.linspace(1, 0.1, 8, dtype=h.dtype)
        cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
        q, k = (p(n).unflatten(-1, (4, 16)).transpose(1, 2) for p in (self.q, self.k))
        q, k = (t * cos + torch.cat([-t[..., 8:], t[..., :8]], -1) * sin for t in (q, k))
        return F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("rank", [4, 8, 16])
def test_all_lanes_of_a_product_are_alike(rank: int) -> None:
    """At rank 16 half of the columns are not four times as many, and all are."""
    torch.manual_seed(0)
    assert as_eager(Rotated(rank).double(), *inputs(N, D))[0].sites


@pytest.mark.parametrize(
    ("switches", "sums"), [({}, 4), ({"disable": frozenset({"factors"})}, 0), ({"numerics": "strict"}, 0)]
)
def test_a_switch_leaves_it(switches: dict[str, Any], sums: int) -> None:
    """Without it both products of a layer have unlike weights in the sum."""
    torch.manual_seed(0)
    made, args = Mlp(plain, 2.0).double(), inputs(N, D)
    with strict_reference(run=False), torch.no_grad():
        REPORTS.clear()
        found = torch.compile(made, backend="coda", options=options(switches))(*args)
    assert error(found, made(*args)) < 1e-10 and len(unlike(list(REPORTS))) == sums


def options(switches: dict[str, Any]) -> dict[str, Any]:
    return {name: ",".join(value) if isinstance(value, frozenset) else value for name, value in switches.items()}


def test_only_the_first_k_is_whole_steps() -> None:
    region = adapter(4096, 4096)
    (first,) = region.products
    assert first.plus is not None and first.k % legality.TILE_K == 0 and first.plus[2] % legality.TILE_K
    legality.check(region)
    turned = replace(first, k=first.plus[2], plus=(*first.plus[:2], first.k))
    with pytest.raises(Unsupported, match="in one sum"):
        legality.check(replace(region, products=(turned,)))


def test_what_is_kept_for_the_backward_is_the_narrow_tensor() -> None:
    with torch.device("meta"):
        made = Adapted(1024, 4096, 2.0, rank=16).bfloat16()
        x = torch.empty(2, 4096, 1024, dtype=torch.bfloat16, requires_grad=True)
    totals = explain(made, (x,), {}, "train", Settings(target="sm_90a"))["totals"]
    assert totals["saved_bytes"] <= 1.01 * totals["saved_bytes_inductor"]
    assert totals["bytes_after"] < 0.3 * totals["bytes_before"]


def test_behind_a_norm_the_backward_reads_the_sum_alone() -> None:
    """Its statistic is taken of what both products add up to: neither is there by itself."""
    torch.manual_seed(0)
    (report,) = as_eager(Mlp(rms, 2.0).double(), *inputs(N, D))
    assert len(unlike([report])) >= 6
    with torch.device("meta"):
        made = Mlp(rms, 2.0).bfloat16()
        args = [torch.empty(4096, n, dtype=torch.bfloat16, requires_grad=True) for n in (N, D)]
    totals = explain(made, args, {}, "train", Settings(target="sm_90a"))["totals"]
    assert totals["saved_bytes"] <= totals["saved_bytes_inductor"]
