"""Large products with nothing beside them as Regions, and products that leave in float32: what is taken, what is left,
and that a training step computes what it did. On a machine that is pretended, with `large` counted from 64."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from codegen_cases import blank_outputs, random_inputs, turned_left
from compiling import Norm, fake_values, pretend, run
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from trained_layers import errors, gradients

from coda_inductor.codegen import legality
from coda_inductor.codegen.target import SM_90A
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Product, Region, Store
from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.explain.listing import render
from coda_inductor.explain.steps import program
from coda_inductor.kernels import launch
from coda_inductor.measure import timing
from coda_inductor.passes import plain
from coda_inductor.passes.casts import EARLY, round_first, write_wide
from coda_inductor.passes.plain import as_region
from coda_inductor.tuning import plain_products

LARGE, WIDTH = SM_90A.deep_least, 64
pytestmark = pytest.mark.usefixtures("uncached")
aten, bf16 = torch.ops.aten, torch.bfloat16


class Block(nn.Module):
    """A norm between two products; the first layer's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, 96, bias=False), Norm(96), nn.Linear(96, 72, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))  # type: ignore[no-any-return]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setattr(plain, "DEEP_LEAST", 64)


def step(dtype: torch.dtype = bf16, grad: bool = True, rows: int = 320) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block().to(dtype), torch.randn(rows, WIDTH, dtype=dtype, requires_grad=grad)


def as_good_as_eager(model: Block, x: Tensor) -> list[list[Region]]:
    """One step; asserts that all gradients are. The Regions of each graph."""
    exact, x64 = copy.deepcopy(model).double(), x.detach().double().requires_grad_(x.requires_grad)
    wanted = gradients(exact(x64), exact, x64)
    eager = errors(gradients(model(x), model, x), wanted)
    ran = run(model, x, grad=True)
    mine = errors(gradients(ran.output, model, x), wanted)
    assert all(a < 1.5 * b for a, b in zip(mine, eager, strict=True)), list(zip(mine, eager, strict=True))
    assert ran == []
    return [[site.region for site in report.sites] for report in ran.reports]


@pytest.mark.parametrize("grad", [True, False])
def test_weight_gradients_and_what_else_is_bare_are_regions(
    machine: None, monkeypatch: pytest.MonkeyPatch, grad: bool
) -> None:
    model, x = step(grad=grad)
    (regions,) = as_good_as_eager(model, x)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")  # so that nothing is launched but what runs
    launch.LAUNCHES.clear()
    assert as_good_as_eager(model, x) == [regions]
    layouts = [(r.products[0].a_layout, r.products[0].b_layout) for r in regions if r.is_plain]
    assert layouts.count(("km", "kn")) == 2  # both weights' gradients
    assert ("mk", "kn") in layouts or not grad  # that of the input
    assert sum(launch.LAUNCHES.values()) == len(regions) and not launch.FALLBACKS


def test_who_loses_stays_and_is_measured_once(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[int]()

    def timed(calls: Sequence[Callable[[], object]], rounds: int, **how: object) -> list[timing.Times]:
        for call in calls:
            call()
        compared.append(len(calls))
        return (
            [timing.Times(2.0, 2.0), timing.Times(1.0, 1.0)]
            if len(calls) == 2
            else [timing.Times(1.0, 1.0)] * len(calls)
        )

    monkeypatch.setattr(timing, "compared", timed)
    model, x = step()
    assert as_good_as_eager(model, x) == [[]]
    once = len(compared)
    (report,) = run(model, x, grad=True).reports
    lost = {r.reason for r in report.refused if r.reason.startswith("measured slower: ")}
    assert lost and len(compared) == once  # on disk
    assert len([t for t in report.timings if t["baseline_ms"] == 1.0]) >= 3


def test_without_memory_to_try_it_the_product_stays(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(node: fx.Node, device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(plain_products, "sample", full)
    model, x = step()
    ran = run(model, x, grad=True)
    assert not any(site.region.is_plain for site in ran.reports[0].sites)
    assert len(ran) == 1 and "out of memory while it was measured" in ran[0]


@pytest.mark.parametrize(("names", "left"), [("bare", 0), ("casts", 3), ("", 3)])
def test_it_can_be_switched_off(machine: None, monkeypatch: pytest.MonkeyPatch, names: str, left: int) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_DISABLE", names)
    (regions,) = as_good_as_eager(*step())
    assert sum(r.is_plain for r in regions) == left


def test_one_may_read_another(machine: None) -> None:
    """A chain of three: each Region reads what the one before makes."""
    torch.manual_seed(0)
    given = [torch.randn(320, 320, dtype=bf16) for _ in range(4)]

    def chain(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return x @ u @ v @ w

    ran = run(chain, *given)
    assert ran == [] and ran.regions == [3]
    exact = chain(*(x.double() for x in given))
    assert (ran.output - exact).norm() < 1.1 * (chain(*given) - exact).norm()


@pytest.mark.parametrize(("m", "copied"), [(16, 0), (12, 1)])
def test_a_left_operand_whose_rows_are_not_aligned_is_copied(machine: None, m: int, copied: int) -> None:
    """[K, M] with an M that 8 does not divide, its rows side by side: no kernel can load it, and that is said."""
    region = turned_left(64, 32)
    inputs, outs = [x.contiguous() for x in random_inputs(region, m, "cpu")], blank_outputs(region, m, "cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch.kernel(region.text)(inputs, outs)
    assert sum(launch.LAUNCHES.values()) == 1 and len(launch.FALLBACKS) == len(caught) == copied
    assert all(torch.equal(out, wanted) for out, wanted in zip(outs, interpret(region, inputs), strict=True))


# ---- which products


def product(f: Callable[..., Tensor], *shapes: tuple[int, int], dtype: torch.dtype = bf16) -> fx.Node:
    """The one product of a function of matrices."""
    with FakeTensorMode():
        graph = make_fx(f)(*(torch.empty(s, dtype=dtype) for s in shapes)).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    return node  # type: ignore[no-any-return]


M, N, K = LARGE, LARGE + 64, LARGE + 128
SHAPES = {"mk": (M, K), "km": (K, M), "nk": (N, K), "kn": (K, N)}


@pytest.mark.parametrize(("left", "right"), [*itertools.product(("mk", "km"), ("nk", "kn"))])
def test_every_layout_is_read_as_it_lies(left: str, right: str) -> None:
    node = product(
        lambda a, b: (a if left == "mk" else a.t()) @ (b.t() if right == "nk" else b), SHAPES[left], SHAPES[right]
    )
    found = as_region(node)
    assert found is not None
    region, inputs = found
    wanted = Product("acc0", 0, 1, K, right, a_layout=left)  # type: ignore[arg-type]
    assert region == Region(N, "bf16", (wanted,), (), (), (Store("acc0", "bf16"),), ())
    assert [i.op for i in inputs] == ["placeholder"] * 2
    assert legality.candidates(region, M) == SM_90A.plain


REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, int], ...]]] = {
    "few rows": (lambda a, b: a @ b, ((M - 8, K), (K, N))),
    "few columns": (lambda a, b: a @ b, ((M, K), (K, LARGE - 8))),
    "short": (lambda a, b: a @ b, ((M, LARGE - 8), (LARGE - 8, N))),
    "odd": (lambda a, b: a @ b, ((M, K), (K, N + 4))),
    "a matrix and itself": (lambda a: a.t() @ a, ((K, M),)),
    "columns of a wider one, not aligned": (lambda a, b: a[:, 1 : K + 1] @ b, ((M, K + 4), (K, N))),
    "columns of a wider one, that start between": (lambda a, b: a[:, 1 : K + 1] @ b, ((M, K + 8), (K, N))),
    "every other column": (lambda a, b: a[:, ::2] @ b, ((M, 2 * K), (K, N))),
    "one row, repeated": (lambda a, b: a.expand(M, K) @ b, ((1, K), (K, N))),
    "rows that overlap": (lambda a, b: a.view(-1).as_strided((M, K), (8, 1)) @ b, ((M, K), (K, N))),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_bare_region(why: str) -> None:
    f, shapes = REFUSED[why]
    assert as_region(product(f, *shapes)) is None


def test_integers_and_eight_bits_are_none() -> None:
    assert as_region(product(lambda a, b: a @ b, (M, K), (K, N), dtype=torch.int32)) is None


def test_those_of_another_device_or_an_illegal_dtype_are_none() -> None:
    def graph(dtype: torch.dtype) -> fx.Graph:
        return product(lambda a, b: a @ b.t(), (M, K), (N, K), dtype=dtype).graph

    cpu, legal = torch.device("cpu"), legality.check
    assert [len(x) for x in plain.plain_products(graph(bf16), legal, cpu)] == [1, 0]
    assert [len(x) for x in plain.plain_products(graph(bf16), legal, torch.device("cuda"))] == [0, 0]
    found, refused = plain.plain_products(graph(torch.float32), legal, cpu)
    assert not found and list(refused.values()) == ["matrices of f32 (kernels multiply bf16, f16, e4m3 or e5m2)"]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)  # type: ignore[untyped-decorator]
def test_sizes_that_nobody_knows_are_asked_nothing() -> None:
    def f(a: Tensor, w: Tensor) -> Tensor:
        return a[:, torch.nonzero(a[0]).squeeze(1)].t() @ w

    given = torch.randn(8, 24), torch.randn(8, 16)
    ran = run(f, *given, dynamic=True, options={"target": "reference"})
    assert ran == [] and torch.allclose(ran.output, f(*given), rtol=1e-4)


# ---- products that leave in float32


def casts(f: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = bf16) -> list[str]:
    """The shapes of what leaves in float32 of a function of matrices; asserts that its outputs are as before."""

    with FakeTensorMode():
        made = make_fx(f, select_decomp_table())(*(torch.empty(s, dtype=dtype) for s in shapes))
    lie = [
        (n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype)
        for n in made.graph.output_node().all_input_nodes
    ]
    found = [cast.shape for cast in write_wide(made.graph, torch.device("cpu"))]
    made.graph.lint()
    outputs = made.graph.output_node().all_input_nodes
    assert lie == [(n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype) for n in outputs]
    wide = made.graph.find_nodes(op="call_function", target=aten.mm.dtype)
    assert len(wide) == len(found) and all(n.meta["val"].dtype == torch.float32 for n in wide)
    return found


def test_what_is_returned_in_float32_is_written_so() -> None:
    assert casts(lambda a, b: (a.t() @ b).float(), (64, 16), (64, 24)) == ["[16, 24]"]
    assert casts(lambda a, b: (a.t() @ b).t().float(), (64, 16), (64, 24)) == ["[24, 16]"]
    assert casts(lambda a, b: (a @ b).view(2, 8, 24).float(), (16, 32), (32, 24)) == ["[2, 8, 24]"]
    assert casts(lambda a, b: (a @ b).float(), (16, 32), (32, 24), dtype=torch.float16) == ["[16, 24]"]
    assert len(casts(lambda a, b: [(a @ b).float(), (a.cos() @ b).float()], (16, 32), (32, 24))) == 2


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: (a @ b).float() + 1,  # a loop reads on
        lambda a, b: [(y := a @ b).float(), y],  # read narrow, too
        lambda a, b: [(y := a @ b).float(), y.float().cos()],
        lambda a, b: (a @ b).double(),
        lambda a, b: (a @ b).float()[:, :20] @ b.float()[:20],  # a product reads on
        lambda a, b: (a @ b).expand(2, 16, 24).float(),
        lambda a, b: (a[:15] @ b).float(),  # 15 rows
        lambda a, b: (a @ b[:, :20]).float(),
        lambda a, b: (a[:, :20] @ b[:20]).float(),
    ],
)
def test_what_is_not(f: Callable[..., object]) -> None:
    assert casts(f, (16, 32), (32, 24)) == []


def test_products_of_another_device_are_left() -> None:
    graph = product(lambda a, b: (a @ b).float(), (16, 32), (32, 24)).graph
    assert write_wide(graph, torch.device("cuda")) == ()


def test_float32_products_have_no_cast() -> None:
    assert casts(lambda a, b: (a @ b).float(), (16, 32), (32, 24), dtype=torch.float32) == []


REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "copied": lambda x: x.cos().t().clone(memory_format=torch.contiguous_format),
    "repeated, as keys are": lambda x: x.cos().unsqueeze(1).expand(16, 3, 32).clone().view(48, 32),
    "widened before": lambda x: x.bfloat16().float().unsqueeze(1).expand(16, 3, 32).clone(),
    "widened before and read": lambda x: (y := x.bfloat16().float()).t().clone() + y.sum(),
    "of an input": lambda x: x.t().clone(memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_is_repeated_and_rounded_is_rounded_first(name: str) -> None:
    """The same numbers, lying as they did, and nothing is copied in float32."""

    def f(x: Tensor) -> Tensor:
        return REPEATED[name](x).bfloat16()

    x = torch.randn(16, 32)
    made = make_fx(f, select_decomp_table())(x)
    wanted, copies = made(x), [n for n in made.graph.nodes if n.target in (aten.clone.default, aten.expand.default)]
    fake_values(made.graph)
    round_first(made.graph)
    made.graph.lint()
    made.recompile()
    assert [n.op for n in made.graph.nodes].index("call_function") == 1
    found = made(x)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    assert copies and all(n.meta["val"].dtype == bf16 for n in copies) == (name != "widened before and read")


KEPT: dict[str, Callable[[Tensor], object]] = {
    "read in float32, too": lambda x: [(y := x.cos().t().clone()).bfloat16(), y],
    "of views alone": lambda x: x.cos().t().view(4, 8, 16).bfloat16(),
    "of what is only repeated, which copies it": lambda x: x.cos().unsqueeze(1).expand(16, 3, 32).bfloat16(),
    "to float64": lambda x: x.cos().t().clone().double(),
    "of a tensor with gaps": lambda x: x[:, :3].view(2, 8, 3).clone().bfloat16(),
    "of one that was widened": lambda x: x.bfloat16()[:, :3].float().view(48).clone().bfloat16(),
    "of one that was repeated": lambda x: x.bfloat16()[:1].expand(4, 32).float().view(128).clone().bfloat16(),
    "of float64": lambda x: x.double().cos().t().clone().bfloat16(),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_casts_stay(name: str) -> None:
    with FakeTensorMode():
        graph = make_fx(KEPT[name], select_decomp_table())(torch.randn(16, 32)).graph
    before = str(graph)
    round_first(graph)
    assert str(graph) == before


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_returned_is_a_tensor_of_its_own(grad: bool) -> None:
    """A cast there and back is a copy, which nothing else makes where a view repeats nothing."""

    def f(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x.float().expand(x.shape).to(bf16)
        x.add_(1)
        return y, h @ w

    given = [torch.ones(4, 8, dtype=bf16), torch.randn(320, 64).requires_grad_(grad), torch.randn(64, 64)]
    y, _ = run(f, *given, grad=grad, options={"target": "reference"}).output
    assert torch.equal(y, torch.ones(4, 8, dtype=bf16)) and y.data_ptr() != given[0].data_ptr()


def test_a_report_says_what_was_rounded_first() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).float().view(320, 1, 64).expand(320, 3, 64).clone().bfloat16()

    with torch.no_grad():
        x, w = torch.randn(320, 64), torch.randn(64, 64)
        (report,) = run(f, x, w, options={"target": "reference"}).reports
    assert [(c.shape, c.what, c.absorbed) for c in report.casts] == [("[320, 3, 64]", EARLY, ())]


class Autocast(nn.Module):
    """A block of float32 weights under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", bf16):
            return self.block(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("settings", "count"), [({}, 3), ({"disable": frozenset({"casts"})}, 0), ({"numerics": "strict"}, 0)]
)
def test_explain_says_so(settings: dict[str, object], count: int) -> None:
    x = torch.zeros(1024, WIDTH, requires_grad=True)
    facts = explain(Autocast(), (x,), {}, "train", Settings(target="sm_90a", **settings))  # type: ignore[arg-type]
    shapes = [c["shape"] for c in facts["graphs"][0]["casts"]]
    assert sorted(shapes) == ["[1024, 64]", "[72, 96]", "[96, 64]"][:count]  # the weights' and the input's


def test_they_are_listed_as_the_products_that_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `graph`: the transpose of what lies as [K, M], and the dtype that leaves."""
    x = torch.zeros(1024, WIDTH, requires_grad=True)

    def listed(model: nn.Module, x: Tensor) -> list[tuple[str, ...]]:
        (graph,) = program(model, (x,), {}, "train", Settings(target="sm_90a"))["graphs"]
        steps = [s for s in graph["after"] if s["kind"] == "gemm" and "region" not in s]
        assert all(f"[{s['id']}] gemm t=" in render({"target": "sm_90a", "graphs": [graph]}) for s in steps)
        return [(p["a"], p["b"], s["stores"][0]["type"]) for s in steps for p in s["products"]]

    wide = {"float32[96, 64]", "float32[1024, 64]", "float32[72, 96]"}
    assert {t for *_, t in listed(Autocast(), x)} == wide
    monkeypatch.setattr(plain, "DEEP_LEAST", 64)
    found = listed(Block().to(bf16), x.detach().to(bf16).requires_grad_())
    assert {t for *_, t in found} == {"bfloat16[72, 96]", "bfloat16[96, 64]", "bfloat16[1024, 64]"}
    assert [a.endswith(".T") for a, _, t in found] == ["1024" not in t for *_, t in found]
