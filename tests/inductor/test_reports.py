"""A report says whether the graph is another than it was: if Inductor then fails, the graph as it was is tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiling import REFERENCE, run
from float8_layers import Scaled
from torch import Tensor

pytestmark = pytest.mark.usefixtures("uncached")

X = torch.randn(48, 64).bfloat16()


def product_alone(x: Tensor) -> tuple[Tensor, ...]:
    return (x @ x.t(),)


def casts(x: Tensor) -> tuple[Tensor, ...]:
    """Beside it: they become passes, and nothing a Region."""
    h = torch.sin(x)
    return x @ x.t(), Scaled(h, -1).data, Scaled(h, 0).data.t().contiguous()


def complex_product(x: Tensor) -> tuple[Tensor, ...]:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return x @ x.t(), torch.view_as_real(pairs * pairs[:1])


@pytest.mark.parametrize(("f", "rewrote"), [(product_alone, False), (casts, True), (complex_product, True)])
def test_whether_the_graph_is_another(f: Callable[[Tensor], tuple[Tensor, ...]], rewrote: bool) -> None:
    (report,) = run(f, X, options=REFERENCE).reports
    assert report.rewrote == rewrote and not report.sites
