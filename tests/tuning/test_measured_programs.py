"""Programs that are measured get what the user's graph gets behind the Regions, with its switches."""

from __future__ import annotations

import pytest
import torch
from float8_layers import E4M3
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.core.settings import Settings
from coda_inductor.ops.custom import STORED
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.passes import elementwise, tables
from coda_inductor.tuning.benchmark import as_in_the_whole


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
