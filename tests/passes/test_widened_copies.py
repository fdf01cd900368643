"""What is widened and then copied is copied first; what is put together and then rounded is rounded first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiling import fake_values
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.passes.casts import round_first, widen_last

aten, prims, bf16 = torch.ops.aten, torch.ops.prims, torch.bfloat16


WIDENED: dict[str, Callable[[Tensor], object]] = {
    "turned": lambda x: x.t().float().clone(memory_format=torch.contiguous_format),
    "as it lies": lambda x: x.t().float().clone(),
    "read in float32, too": lambda x: [(y := x.t().float()).clone(memory_format=torch.contiguous_format), y.cos()],
    "a part": lambda x: x[:, 3:].float().clone(),
}


@pytest.mark.parametrize("name", WIDENED)
def test_what_is_widened_and_copied_is_copied_first(name: str) -> None:
    """The same numbers, lying as they did; the copy is of 16 bits."""
    x = torch.randn(16, 32).bfloat16()
    module = make_fx(WIDENED[name], select_decomp_table())(x)
    wanted = module(x)
    fake_values(module.graph)
    widen_last(module.graph)
    module.graph.lint()
    module.recompile()
    copies = module.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert [n.meta["val"].dtype for n in copies] == [bf16]
    wide = next(iter(copies[0].users))
    assert wide.meta["val"].dtype == torch.float32 and wide.meta["val"].stride() == copies[0].meta["val"].stride()
    for mine, theirs in zip(*([v] if isinstance(v, Tensor) else v for v in (module(x), wanted)), strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride() and mine.dtype == theirs.dtype


UNWIDENED: dict[str, Callable[[Tensor], object]] = {
    "of float32": lambda x: x.float().cos().clone(),
    "to float64": lambda x: x.double().clone(),
    "of integers": lambda x: (x > 0).float().clone(),
    "rounded": lambda x: x.cos().half().clone(),
}


@pytest.mark.parametrize("name", UNWIDENED)
def test_other_copies_stay(name: str) -> None:
    with FakeTensorMode():
        graph = make_fx(UNWIDENED[name], select_decomp_table())(torch.randn(16, 32, dtype=bf16)).graph
    before = str(graph)
    widen_last(graph)
    assert str(graph) == before


def test_what_is_overwritten_before_it_is_copied_was_widened_before() -> None:
    graph, value = fx.Graph(), torch.randn(16, 32, dtype=bf16)
    widened = value.float()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    wide = graph.call_function(prims.convert_element_type.default, (x, torch.float32))
    written = graph.call_function(aten.copy_.default, (x, y))
    copy = graph.call_function(aten.clone.default, (wide,))
    graph.output((copy,))
    with FakeTensorMode() as mode:
        for node in (x, y, written):
            node.meta["val"] = mode.from_tensor(value)
        wide.meta["val"] = copy.meta["val"] = mode.from_tensor(widened)
    before = str(graph)
    widen_last(graph)
    assert str(graph) == before


TOGETHER: dict[str, Callable[[Tensor], Tensor]] = {
    "pairs": lambda x: torch.stack([x.cos(), x.sin()], -1).flatten(-2).bfloat16(),
    "in the order of x": lambda x: torch.cat([x.t().cos(), x.t().sin()]).bfloat16(),
    "one twice": lambda x: torch.cat([y := x.cos(), x.sin(), y], 1).bfloat16(),
    "beside what was widened": lambda x: torch.cat([x.bfloat16().float(), x.sin()]).bfloat16(),
    "not finite": lambda x: torch.cat([x / 0.0, (x - x) / 0.0, x * 1e38]).half(),
    "viewed": lambda x: torch.cat([x.cos(), x.sin()]).view(2, 16, 32).transpose(0, 1).half(),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_is_put_together_and_rounded_is_rounded_first(name: str) -> None:
    """The same numbers, lying as they did; what is put together has 16 bits."""
    x = torch.randn(16, 32)
    module = make_fx(TOGETHER[name], select_decomp_table())(x)
    wanted = module(x)
    fake_values(module.graph)
    assert len(round_first(module.graph)) == 1
    module.graph.lint()
    module.recompile()
    (cat,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    found = module(x)
    assert {n.meta["val"].dtype for n in (cat, *cat.all_input_nodes)} == {wanted.dtype} == {found.dtype}
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert found.stride() == wanted.stride()


APART: dict[str, Callable[[Tensor], object]] = {
    "read in float32, too": lambda x: [(y := torch.cat([x.cos(), x.sin()])).bfloat16(), y],
    "a view that is read": lambda x: [(y := torch.cat([x.cos(), x.sin()]).view(-1)).bfloat16(), y.exp()],
    "to float64": lambda x: torch.cat([x.cos(), x.sin()]).double(),
    "of float64": lambda x: torch.cat([x.double().cos(), x.double()]).bfloat16(),
    "with a part of another dtype": lambda x: torch.cat([x.bfloat16().cos(), x]).bfloat16(),
    "with a part that has gaps": lambda x: torch.cat([x[:, :3], x[:, 5:8]]).bfloat16(),
    "a part": lambda x: torch.cat([x.cos(), x.sin()])[:, 3:].bfloat16(),
    "repeated": lambda x: torch.cat([x.cos(), x.sin()]).unsqueeze(1).expand(32, 3, 32).bfloat16(),
    "computed on": lambda x: torch.cat([x.cos(), x.sin()]).exp().bfloat16(),
}


@pytest.mark.parametrize("name", APART)
def test_other_casts_of_what_is_put_together_stay(name: str) -> None:
    with FakeTensorMode():
        graph = make_fx(APART[name], select_decomp_table())(torch.randn(16, 32)).graph
    before = str(graph)
    assert round_first(graph) == () and str(graph) == before


def test_what_the_forward_puts_together_is_not_rounded_by_the_backwards_cast() -> None:
    with FakeTensorMode():
        graph = make_fx(TOGETHER["pairs"], select_decomp_table())(torch.randn(16, 32)).graph
    (cast,) = graph.find_nodes(op="call_function", target=prims.convert_element_type.default)
    cast.meta["partitioner_tag"] = "is_backward"
    assert round_first(graph) == ()
