"""Programs that are measured get what the user's graph gets behind the Regions, with its switches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from float8_layers import E4M3
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.codegen.target import SM_90A
from coda_inductor.core.settings import Settings
from coda_inductor.ops.custom import STORED
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.passes import elementwise, tables
from coda_inductor.schedule.held import CacheMark
from coda_inductor.tuning import benchmark
from coda_inductor.tuning.benchmark import Programs, as_in_the_whole


def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The largest of rows and columns of a product's result, and scales of a column that all of its elements read."""
    h = x @ w
    scale = h.abs().amax(1, keepdim=True).log2().exp2()
    return h * scale, h.abs().amax(0), w.to(E4M3)


@pytest.mark.parametrize(
    ("disable", "passes", "stored"), [("", 1, 1), ("elementwise", 0, 1), ("tables", 1, 0), ("elementwise,tables", 0, 0)]
)
def test_as_in_the_users_graph(monkeypatch: pytest.MonkeyPatch, disable: str, passes: int, stored: int) -> None:
    monkeypatch.setattr(tables, "WORTH", 1)
    monkeypatch.setattr(elementwise, "WORTH", 1)
    inputs = torch.randn(48, 64), torch.randn(64, 32)
    module = make_fx(program, tracing_mode="fake")(*inputs)
    as_in_the_whole(module.graph, Settings.read({}, {"disable": disable})[0])
    found = {op: len(module.graph.find_nodes(op="call_function", target=op)) for op in (ELEMENTWISE, STORED)}
    assert found == {ELEMENTWISE: passes, STORED: stored}
    module.recompile()
    for mine, theirs in zip(module(*inputs), program(*inputs), strict=True):
        assert torch.allclose(mine.float(), theirs.float())


@pytest.mark.parametrize(("disable", "longest"), [("", SM_90A.longest_held), ("rows", 0)])
def test_their_loops_hold_as_long_rows(monkeypatch: pytest.MonkeyPatch, disable: str, longest: int) -> None:
    """And Inductor's caches tell such programs from others."""
    held, passes = list[int](), list[object]()

    def compile_fx(module: fx.GraphModule, _: list[Tensor], inner: object, config_patches: dict[str, Any]) -> Any:
        passes.append(config_patches["joint_custom_post_pass"])
        return module

    def rows_held(compile_graph: object, longest: int) -> object:
        held.append(longest)
        return compile_graph

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    monkeypatch.setattr(benchmark, "rows_held", rows_held)
    settings = Settings.read({}, {"disable": disable})[0]
    Programs(settings).compiled(make_fx(torch.sin)(torch.ones(2)).graph, [torch.ones(2)])
    assert held == [longest]
    assert [p.uuid() if isinstance(p, CacheMark) else p for p in passes] == [
        CacheMark(longest).uuid() if longest else None
    ]
