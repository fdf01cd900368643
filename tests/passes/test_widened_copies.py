"""What is widened to float32 and then copied is copied first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiling import fake_values
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.passes.casts import widen_last

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
