"""Tensors of few numbers are cast by Inductor."""

from __future__ import annotations

import copy

import pytest
import torch
from float8_layers import Scaled
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.passes import elementwise
from coda_inductor.passes.elementwise import write_passes
from coda_inductor.passes.reductions import write_maxima
from coda_inductor.write.verifying import Before

M, N = 48, 64


def rows_and_columns(x: Tensor) -> tuple[Tensor, ...]:
    rows, columns = Scaled(x, -1), Scaled(x, 0)
    return rows.data, columns.data.t().contiguous(), rows.scale, columns.scale


@pytest.mark.parametrize("more", [0, 1])
def test_what_is_small_is_left(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """A pass takes longer to launch than it saves; on the target that interprets, all are made."""
    monkeypatch.setattr(elementwise, "WORTH", M * N + more)
    module = make_fx(rows_and_columns, select_decomp_table(), tracing_mode="fake")(torch.randn(M, N))
    for target, count in (("sm_90a", not more), ("reference", True)):
        graph = copy.deepcopy(module.graph)
        before = Before.of(graph)
        made, left = write_passes(graph, target, before)
        assert len(made) == count and {*left.values()} == ({elementwise.SMALL} if not count else set())
        assert len(write_maxima(graph, target, before.effects)) == count
