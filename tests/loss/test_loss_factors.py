"""Factors of the terms of a loss's gradient: what they are made of, and where they are added."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from evaluate import strict_reference
from torch import Tensor, fx

from coda_inductor.explain.capture import capture
from coda_inductor.loss import written as stage
from coda_inductor.loss.factors import added
from coda_inductor.loss.parts import SOFTMAX, Part
from coda_inductor.ops.custom import ADDED_UP
from coda_inductor.patterns.effects import Effects
from coda_inductor.write.writing import Writing

pytestmark = pytest.mark.usefixtures("uncached")
W = torch.randn(200, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)


def smoothed(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, label_smoothing=0.1)


def with_z(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(x, w)
    z = z.float() if z.dtype == torch.bfloat16 else z
    return F.cross_entropy(z, y) + 1e-2 * torch.logsumexp(z, -1).square().mean()


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(30, 16, dtype=dtype), W.detach().to(dtype).requires_grad_(), torch.randint(0, 200, (30,))


def test_a_number_lies_where_the_scores_do() -> None:
    scores = fx.Graph().placeholder("scores")
    scores.meta["val"] = torch.empty(4, 1, dtype=torch.float64, device="meta")
    call = partial(Writing(scores.graph, scores.next).call, scores)
    number = added(call, (Part(SOFTMAX, 2.0),), scores.meta["val"])
    assert number.meta["val"].device.type == "meta" and number.args[:2] == ([1, 1], 2.0)


def test_a_gradient_within_the_graph() -> None:
    """Where the program takes it itself no factor depends on a gradient from outside."""
    x, w, y = drawn(torch.float64)
    call = torch.compile(lambda x: torch.func.grad(with_z)(x, w, y), backend="coda", options=REFERENCE)
    (wanted,) = torch.autograd.grad(with_z(x.requires_grad_(), w, y), x)
    with strict_reference(run=False):
        assert torch.allclose(call(x.detach()), wanted, 1e-10, 1e-10)


def test_ones_are_added_before_the_gradient_is_rounded() -> None:
    """To a product in float32: what they take away is of the size of what the softmax gives."""
    found = list[list[object]]()

    def written(graph: fx.Graph) -> None:
        made, _ = stage.write_losses(graph, "reference", frozenset(), Effects())
        assert made
        found.append([u.target for n in graph.find_nodes(op="call_function", target=ADDED_UP) for u in n.users])

    capture(smoothed, drawn(torch.bfloat16), {}, "train", written)
    assert found == [[torch.ops.aten.add.Tensor]]


@pytest.mark.parametrize("rows", (512, 1000))
@pytest.mark.parametrize("loss", (smoothed, with_z))
def test_gradients_are_as_exact_at_each_number_of_rows(loss: Any, rows: int) -> None:
    """What eager rounds at the targets is 1 / rows, or that less a tenth: the same number in each row, by chance exact.
    Ours is rounded in each row, twice, and once more if what is written at the target is rounded there."""
    torch.manual_seed(0)
    w = (0.1 * torch.randn(8192, 64)).bfloat16().requires_grad_()
    x, y = torch.randn(rows, 64).bfloat16().requires_grad_(), torch.randint(0, 8192, (rows,))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = torch.autograd.grad(loss(*wide, y), wide)
    with strict_reference(run=False):
        call: Any = torch.compile(loss, backend="coda", options=REFERENCE, dynamic=False)
        found = torch.autograd.grad(call(x, w, y), (x, w))
    for ours, wanted in zip(found, exact, strict=True):
        assert (ours - wanted).norm() < 2.5e-3 * wanted.norm()
