"""Which tensors lie in memory as an epilogue reads them, and what happens to those that do not."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.inductor.joint import rewrite
from coda_inductor.patterns.layout import dense

CASES = {
    "dense": (torch.empty(2, 3, 4), True),
    "turned": (torch.empty(2, 4, 3).transpose(1, 2), False),
    "with a gap": (torch.empty(2, 3, 8)[..., :4], False),
    "of size one": (torch.empty(3, 1, 4).transpose(0, 1), True),
    "column of one": (torch.empty(3, 8)[:, :1], False),
    "scalar": (torch.empty(()), True),
}


@pytest.mark.parametrize(("value", "is_dense"), CASES.values(), ids=CASES)
def test_dense(value: Tensor, is_dense: bool) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = value
    assert dense(node) is is_dense


def heads_first(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    """The operand of the product lies with its heads [B, H] before its tokens, as attention may leave it."""
    x = torch.cumsum(x, 2)  # opaque, [B, H, S, D]
    return torch.relu(residual + x.transpose(1, 2).reshape(12, 10) @ w)


def turned_residual(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    return torch.relu(torch.cumsum(residual.t(), 0).t() + x.transpose(1, 2).reshape(12, 10) @ w)


@pytest.mark.parametrize("function", [heads_first, turned_residual])
def test_values_that_lie_otherwise_are_copied_or_left(function: Callable[..., Tensor]) -> None:
    args = torch.randn(2, 2, 6, 5), torch.randn(12, 8), torch.randn(10, 8)
    found: list[fx.Graph] = []
    capture(function, args, {}, "infer", found.append)
    (graph,) = found
    report = rewrite(graph, Settings())
    inputs = dict(zip(inspect.signature(function).parameters, args, strict=True))
    inputs_in_order = [inputs[node.meta["name"]] for node in graph.find_nodes(op="placeholder")]
    torch.testing.assert_close(fx.GraphModule(torch.nn.Module(), graph)(*inputs_in_order)[0], function(*args))
    assert len(report.sites) == (1 if function is heads_first else 0)
