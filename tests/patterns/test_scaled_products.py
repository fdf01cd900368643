"""Products of 8-bit operands: which scales are understood, and which multiplications afterwards are scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import REFERENCE
from evaluate import strict_reference
from float8_layers import E4M3, E5M2, errors
from torch import Tensor, fx

from coda_inductor.codegen import source
from coda_inductor.core.region import Region
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten

M, N, K = 32, 48, 64
Shape = tuple[int, ...]


def node(
    scale_a: Shape, scale_b: Shape, dtype: torch.dtype = torch.float32, v2: tuple[int, int] | None = None, **more: Any
) -> fx.Node:
    """A product with scales of these shapes, in a graph; by recipes of the second version of the operation."""
    graph = fx.Graph()
    shapes = {"a": (M, K), "b": (K, N), "scale_a": scale_a, "scale_b": scale_b, "bias": (N,), "result": ()}
    dtypes = {"a": E4M3, "b": E4M3, "bias": torch.bfloat16, "result": torch.float32}
    x = {name: graph.placeholder(name) for name in shapes}
    for name, shape in shapes.items():
        x[name].meta["val"] = torch.empty(shape, dtype=dtypes.get(name, dtype))
    more = {key: x.get(value, value) if isinstance(value, str) else value for key, value in more.items()}
    if v2 is None:
        args: tuple[Any, ...] = (x["a"], x["b"], x["scale_a"], x["scale_b"])
        made = graph.call_function(aten._scaled_mm.default, args, {"out_dtype": torch.bfloat16} | more)
    else:
        args = (x["a"], x["b"], [x["scale_a"]], [v2[0]], [0], [x["scale_b"]], [v2[1]], [0], None, torch.bfloat16)
        made = graph.call_function(aten._scaled_mm_v2.default, args, more)
    made.meta["val"] = torch.empty(M, N, dtype=torch.bfloat16)
    return made


@pytest.mark.parametrize("v2", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(
    ("scale_a", "scale_b", "understood"),
    [
        ((), (), True),
        ((1,), (1, 1), True),
        ((M, 1), (1, N), True),
        ((M, 1), (), True),
        ((1, 1), (1, N), True),
        ((M,), (N,), False),
        ((1, M), (1, N), False),
        ((M, 1), (N, 1), False),
        ((N, 1), (1, M), False),
        ((M, K // 16), (K // 16, N), False),
        ((M, 1), (1, N // 16), False),
    ],
)
def test_scales_are_one_or_of_rows_and_columns(scale_a: Shape, scale_b: Shape, understood: bool, v2: bool) -> None:
    found = g.operands(node(scale_a, scale_b, v2=(1, 1) if v2 else None))
    assert found.understood is understood
    assert [x.name for x in (found.left, found.right, *found.scales)] == ["a", "b", "scale_a", "scale_b"]


def test_what_else_may_be_asked_of_a_product() -> None:
    rows = ((M, 1), (1, N))
    assert not any(g.operands(node(*rows, dtype=d)).understood for d in (torch.float64, torch.float8_e8m0fnu))
    assert g.operands(node(*rows)).fast is False and g.operands(node(*rows, use_fast_accum=True)).fast is True
    (added,) = g.operands(node(*rows, bias="bias")).addends
    assert added.name == "bias" and g.operands(node(*rows, bias="bias")).understood
    assert not g.operands(node(*rows, scale_result="result")).understood
    assert g.operands(node(*rows, v2=(1, 1), use_fast_accum=True)).fast
    assert not g.operands(node(*rows, v2=(1, 2))).understood  # blocks of a row
    assert not g.operands(node(*rows, v2=(1, 1), contraction_dim=[0, 1])).understood


def test_alike() -> None:
    rows = ((M, 1), (1, N))
    plain, fast, other = node(*rows), node(*rows, use_fast_accum=True), node(*rows)
    other.args[1].meta["val"] = torch.empty(K, N, dtype=E5M2)  # type: ignore[union-attr]
    assert g.like(plain, node((), ())) and not g.like(plain, fast) and not g.like(plain, other)


def bare(a: Tensor, b: Tensor) -> Tensor:
    one = torch.ones(())
    return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)


Scale = Callable[[Tensor, Tensor, Tensor], Tensor]
# what a product without scales is multiplied by, of its rows, its columns and a tile; is that one value with it?
AFTERWARDS: dict[str, tuple[Scale, bool]] = {
    "rows by columns": (lambda r, c, t: r * c, True),
    "columns by rows": (lambda r, c, t: c * r, True),
    "rows": (lambda r, c, t: r * 2.0, False),
    "rows by rows": (lambda r, c, t: r * r.abs(), False),
    "columns by columns": (lambda r, c, t: c * c.abs(), False),
    "a tile by rows": (lambda r, c, t: t * r, False),
    "a sum": (lambda r, c, t: r + c, False),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_what_is_multiplied_afterwards(name: str) -> None:
    """Right in any case."""
    torch.manual_seed(0)
    scale, one_value = AFTERWARDS[name]
    a, b = torch.randn(M, K).to(E4M3), torch.randn(N, K).to(E4M3)
    r, c, t = torch.rand(M, 1) + 0.5, torch.rand(1, N) + 0.5, torch.randn(M, N)

    def f(a: Tensor, b: Tensor, r: Tensor, c: Tensor, t: Tensor) -> Tensor:
        return (bare(a, b.t()) * scale(r, c, t)).bfloat16().relu()

    with strict_reference(run=False), torch.no_grad():
        REPORTS.clear()
        found = torch.compile(f, backend="coda", options=REFERENCE | {"strict": True})(a, b, r, c, t)
    regions = [site.region for report in REPORTS for site in report.sites]
    assert any(map(scales, regions)) == one_value
    wanted = (a.double() @ b.double().t() * scale(r, c, t).double()).relu()
    mine, eager = errors([found, f(a, b, r, c, t)], [wanted] * 2)
    assert mine <= 1.05 * eager


def scales(region: Region) -> bool:
    return any(let.op == "scaled" for let in region.lets)


def test_the_largest_is_among_what_is_stored() -> None:
    """Who looks for it there finds it."""
    torch.manual_seed(0)
    a, b = torch.randn(M, K).to(E4M3), torch.randn(N, K).to(E4M3)
    r, c = torch.rand(M, 1) + 0.5, torch.rand(1, N) + 0.5

    def f(a: Tensor, b: Tensor, r: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        h = (torch._scaled_mm(a, b.t(), r, c, out_dtype=torch.bfloat16) * 0.3).abs()
        return h, h.amax(1), h.amax(0), (h.float() >= h.amax(1, keepdim=True).float() * 1.0).sum(1)

    with strict_reference(run=False), torch.no_grad():
        REPORTS.clear()
        h, rows, columns, found = torch.compile(f, backend="coda", options=REFERENCE | {"strict": True})(a, b, r, c)
    (site,) = (site for report in REPORTS for site in report.sites)
    assert sorted((x.of, x.over) for x in site.region.reductions) == [("max", "M"), ("max", "N")]
    assert torch.equal(rows, h.amax(1)) and torch.equal(columns, h.amax(0))
    assert bool((found >= 1).all())


@pytest.mark.parametrize("rounded", [False, True])
def test_reciprocals_of_scales_are_read(rounded: bool) -> None:
    """A kernel that divided would find 1 / 0 past the edge, and mask every maximum. What is made of rounded scales is
    none of them."""
    torch.manual_seed(0)
    a, b = torch.randn(M, K).to(E4M3), torch.randn(N, K).to(E4M3)
    r, c = torch.rand(M, 1) + 0.5, torch.rand(1, N) + 0.5

    def f(a: Tensor, b: Tensor, r: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        ones = torch.ones_like(r), torch.ones_like(c)
        early = [r.bfloat16().reciprocal(), c.bfloat16().float().reciprocal()] if rounded else []
        h = torch._scaled_mm(a, b.t(), *ones, out_dtype=torch.float32) * (r.reciprocal() * c.reciprocal())
        return h, h.abs().amax(1), h.abs().amax(0), *early

    with strict_reference(run=False), torch.no_grad():
        REPORTS.clear()
        found = torch.compile(f, backend="coda", options=REFERENCE | {"strict": True})(a, b, r, c)
    (site,) = (site for report in REPORTS for site in report.sites)
    assert "rcp" not in {let.op for let in site.region.lets}
    assert {o.dtype for o in site.region.operands} == {"f32"}
    text = source.render(site.region)
    assert text.count('Max("r') == 2 and "masked=True" not in text
    for mine, eager in zip(found, f(a, b, r, c), strict=True):
        assert torch.allclose(mine, eager, rtol=1e-6)
