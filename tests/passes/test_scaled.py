"""8-bit products in the form that Regions read: what is computed once, how matrices lie, what is largest, which casts
are left to Inductor."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from float8_layers import E4M3, Scaled, by_row, product
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.ops.custom import STORED
from coda_inductor.passes import elementwise
from coda_inductor.passes.elementwise import write_passes
from coda_inductor.passes.reductions import write_maxima
from coda_inductor.passes.scaled import add_up_fast, in_rows, largest_of_rows, share
from coda_inductor.passes.tables import store_shared, store_sources
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.layout import TRANSPOSES, dense
from coda_inductor.write.verifying import Before

M, N, K = 32, 48, 64


def traced(f: Callable[..., object], *args: Tensor) -> fx.GraphModule:
    return make_fx(f, select_decomp_table(), tracing_mode="fake")(*args)


def casts(module: fx.GraphModule) -> int:
    found = module.graph.find_nodes(op="call_function", target=prims.convert_element_type.default)
    return sum(node.args[1] == E4M3 for node in found)


def same(module: fx.GraphModule, f: Callable[..., object], *args: Tensor) -> None:
    """The graph is well formed, and returns what f does."""
    module.graph.lint()
    module.recompile()
    for mine, theirs in zip(module(*(x.clone() for x in args)), f(*(x.clone() for x in args)), strict=True):  # type: ignore[call-overload]
        assert torch.equal(mine.float(), theirs.float()) and mine.stride() == theirs.stride()


def two_layers(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Which cast what they read each for itself."""
    return tuple(product(Scaled(x, -1), Scaled(y.t(), 0), fast=True) for y in (v, w))  # type: ignore[return-value]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(N, K).bfloat16()


@by_row
def test_equal_computations_are_one() -> None:
    module = traced(two_layers, *inputs())
    assert casts(module) == 4
    share(module.graph)
    assert casts(module) == 3
    same(module, two_layers, *inputs())


@by_row
def test_the_sides_of_a_joint_graph_share_what_is_small() -> None:
    """The largest of rows and the scales, no tensor."""
    module = traced(two_layers, *inputs())
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    for node in nodes[len(nodes) // 2 :]:
        node.meta["partitioner_tag"] = "is_backward"
    share(module.graph)
    module.graph.eliminate_dead_code()
    assert casts(module) == 4
    assert len(module.graph.find_nodes(op="call_function", target=aten.amax.default)) == 3
    assert len(module.graph.find_nodes(op="call_function", target=aten.log2.default)) == 3
    same(module, two_layers, *inputs())


def test_the_forward_reads_nothing_of_the_backward() -> None:
    """Of two equal ones the first may be the backward's."""
    module = traced(lambda x: (x.abs().amax(1) + 1, x.abs().amax(1) + 2), inputs()[0])
    first, second = module.graph.find_nodes(op="call_function", target=aten.amax.default)
    first.meta["partitioner_tag"], second.meta["partitioner_tag"] = "is_backward", "is_forward"
    share(module.graph)
    assert len(module.graph.find_nodes(op="call_function", target=aten.amax.default)) == 2


def test_what_is_large_is_not_made_of_what_is_small_for_both_sides() -> None:
    """The outer product of two vectors is a tensor."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.amax(0, True) * x.amax(1, True) + i for i in range(2))

    module = traced(f, inputs()[0])
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    for node in nodes[len(nodes) // 2 :]:
        node.meta["partitioner_tag"] = "is_backward"
    share(module.graph)
    module.graph.eliminate_dead_code()
    assert len(module.graph.find_nodes(op="call_function", target=aten.amax.default)) == 2
    assert len(module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)) == 2


def of_two(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A tensor that a product reads, made of two, and its largest."""
    h = torch.sin(x) * torch.cos(x)
    return h @ w.t(), h.abs().amax(0), w.to(E4M3)


def widened_twice(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = (x @ w.t()) + (x @ w.t())
    return h.float().sum(0), torch.sin(h.float()), w.to(E4M3)


@pytest.mark.parametrize("late", [False, True], ids=["one_side", "two_sides"])
@pytest.mark.parametrize("f", [of_two, widened_twice])
def test_what_products_and_passes_read_is_stored_once(f: Callable[..., object], late: bool) -> None:
    """Where nothing on the other side of the graph reads it."""
    module = traced(f, *inputs()[:2])
    reader = module.graph.output_node().args[0][1]  # type: ignore[index]
    for node in [reader, *reader.all_input_nodes] if late else ():  # type: ignore[union-attr]
        node.meta["partitioner_tag"] = "is_backward"
    store_sources(module.graph)
    stored = module.graph.find_nodes(op="call_function", target=STORED)
    assert [n.args[0].target for n in stored] == ([] if late else [aten.mul.Tensor if f is of_two else aten.add.Tensor])
    assert late or len(stored[0].users) > 1
    same(module, f, *inputs()[:2])


def test_without_8_bits_nothing_is_stored() -> None:
    module = traced(lambda x, w: ((h := torch.sin(x) * torch.cos(x)) @ w.t(), h.abs().amax(0)), *inputs()[:2])
    store_sources(module.graph)
    assert not module.graph.find_nodes(op="call_function", target=STORED)


def test_what_is_returned_stays_apart() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return Scaled(x, -1).data, Scaled(x, -1).data

    module = traced(f, inputs()[0])
    share(module.graph)
    assert casts(module) == 2
    assert len(module.graph.find_nodes(op="call_function", target=aten.amax.default)) == 1
    same(module, f, inputs()[0])


@by_row
def test_what_is_overwritten_in_between_is_not_the_same() -> None:
    def f(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = product(Scaled(x, -1), Scaled(v.t(), 0), fast=True)
        x.mul_(-2)
        return first, product(Scaled(x, -1), Scaled(w.t(), 0), fast=True)

    module = traced(f, *inputs())
    (write,) = module.graph.find_nodes(op="call_function", target=aten.mul_.Tensor)
    write.replace_all_uses_with(write.args[0])  # as chained passes may leave it
    share(module.graph)
    assert casts(module) == 4
    same(module, f, *inputs())


def test_draws_are_not_the_same() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.rand_like(x) + torch.rand_like(x),)

    module = traced(f, inputs()[0])
    before = len(module.graph.nodes)
    share(module.graph)
    assert len(module.graph.nodes) == before


@by_row
def test_right_matrices_become_views_of_rows() -> None:
    """Of a transposed weight the cast lies as that does, and is no view."""
    module = traced(two_layers, *inputs())
    in_rows(module.graph)
    products = [node for node in module.graph.nodes if node.target in g.SCALED]
    for node in products:
        right = g.operands(node).right
        assert right.target in TRANSPOSES and dense(right.args[0])  # type: ignore[arg-type]
        assert right.meta["val"].stride() == (1, K)
    same(module, two_layers, *inputs())
    count = len(module.graph.nodes)
    in_rows(module.graph)
    assert len(module.graph.nodes) == count  # once is enough


@pytest.mark.parametrize("shape", [(M, K), (2, 16, K), (K,)])
def test_the_largest_is_that_of_the_rows(shape: tuple[int, ...]) -> None:
    """NaN too; but of a vector there is nothing to split, and a weight's rows no epilogue makes."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x).abs().max(), x.abs().max()

    x = torch.randn(shape).bfloat16()
    module = traced(f, x)
    largest_of_rows(module.graph)
    left = module.graph.find_nodes(op="call_function", target=aten.max.default)
    assert len(left) == (1 if len(shape) > 1 else 2)
    same(module, f, x)
    x.view(-1)[3] = float("nan")
    module.recompile()
    assert all(value.isnan() for value in module(x))


@by_row
def test_what_several_products_read_is_stored_once() -> None:
    module = traced(two_layers, *inputs())
    share(module.graph)
    store_shared(module.graph)
    (kept,) = module.graph.find_nodes(op="call_function", target=STORED)
    assert kept.meta["val"].dtype == E4M3 and len(kept.users) == 2
    same(module, two_layers, *inputs())


def in_both_forms(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    """A product asked for in both forms, fast and slow, by position and by name."""
    a, b, one = left.to(E4M3), right.to(E4M3).t(), torch.ones(())
    old = [
        aten._scaled_mm.default(a, b, one, one, None, None, torch.bfloat16, False),
        aten._scaled_mm.default(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        aten._scaled_mm.default(a, b, one, one, out_dtype=torch.bfloat16),
    ]
    by = [one], [0], [0]
    new = [
        aten._scaled_mm_v2.default(a, b, *by, *by, None, torch.bfloat16, [], False),
        aten._scaled_mm_v2.default(a, b, *by, *by, None, torch.bfloat16),
    ]
    return *old, *new


def test_all_products_add_up_fast() -> None:
    """Those that did not are told; all else that they were given stays."""
    module = traced(in_both_forms, *inputs()[:2])
    products = [n for n in module.graph.nodes if n.target in g.SCALED]
    assert [g.operands(n).fast for n in products] == [False, True, False, False, False]
    told = add_up_fast(module.graph)
    assert [c.node for c in told] == [n.name for n in (products[0], *products[2:])]
    assert all(g.operands(n).fast for n in products) and not any(c.absorbed for c in told)
    assert add_up_fast(module.graph) == ()
    same(module, in_both_forms, *inputs()[:2])


def test_other_scales_add_up_as_they_ask() -> None:
    """Of a product whose scales are of blocks, or are scaled again, nothing is known."""
    module = traced(in_both_forms, *inputs()[:2])
    first, *others = [n for n in module.graph.nodes if n.target in g.SCALED]
    first.args = (*first.args[:5], first.args[2], *first.args[6:])  # scale_result
    others[-1].args = (*others[-1].args[:3], [99], *others[-1].args[4:])  # recipe_a
    told = add_up_fast(module.graph)
    assert [c.node for c in told] == [n.name for n in others[1:-1]]
    assert [g.operands(n).fast for n in (first, *others)] == [False, True, True, True, False]


def rows_and_columns(x: Tensor) -> tuple[Tensor, ...]:
    rows, columns = Scaled(x, -1), Scaled(x, 0)
    return rows.data, columns.data.t().contiguous(), rows.scale, columns.scale


@pytest.mark.parametrize("more", [0, 1])
def test_what_is_small_is_left(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """A pass takes longer to launch than it saves; on the target that interprets, all are made."""
    monkeypatch.setattr(elementwise, "WORTH", N * K + more)
    module = traced(rows_and_columns, torch.randn(N, K))
    for target, count in (("sm_90a", not more), ("reference", True)):
        graph = copy.deepcopy(module.graph)
        before = Before.of(graph)
        made, left = write_passes(graph, target, before)
        assert len(made) == count and {*left.values()} == ({elementwise.SMALL} if not count else set())
        assert len(write_maxima(graph, target, before.effects)) == count
