"""Scores divided by a number, of columns whose rows no epilogue writes: the norm before the head is, instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import REFERENCE, close, run
from evaluate import captured
from torch import Tensor, fx

from coda_inductor.passes.factors import move_factors
from coda_inductor.patterns.graph import aten

D, TOKENS = 64, 320

pytestmark = pytest.mark.usefixtures("uncached")


def moved(program: Callable[..., Any], *shapes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of what numbers multiply that have moved."""
    (graph,) = captured(program, *(torch.randn(shape).bfloat16() for shape in shapes))
    module = fx.GraphModule(graph.graph.owning_module or {}, graph.graph)
    before = set(module.graph.nodes)
    told = move_factors(module.graph)
    module.graph.lint()
    new = [n for n in module.graph.nodes if n not in before and n.target is aten.mul.Tensor]
    assert len(told) == len(new)
    return [tuple(n.meta["val"].shape) for n in new]


def scores(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """As Granite's."""
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * g) @ w / 16


RAGGED = ((TOKENS, D), (D,), (D, 4 * D + 3))


def test_where_scores_are_divided() -> None:
    """Of a length that no epilogue writes if they are returned: there the norm before them is multiplied."""
    assert moved(scores, *RAGGED) == [(TOKENS, D)]
    assert moved(lambda x, g, w: scores(x, g, w) * 3, *RAGGED) == [(TOKENS, D)] * 2
    for *shapes, columns in ((*RAGGED[:2], (D, 4 * D + 8)), (*RAGGED[:2], (D, 2 * D + 3))):
        assert moved(scores, *shapes, columns) == []
    assert moved(lambda x, g, w: (x @ w) / 16, *RAGGED) == []  # which no loop makes
    assert moved(lambda x, g, w: 16 / scores(x, g, w).exp(), *RAGGED) == [(TOKENS, D)]
    assert moved(lambda x, g, w: 16 / ((x * g) @ w), *RAGGED) == []


def test_an_adapter_behind_divided_scores_has_its_number_moved_as_well() -> None:
    """The first that moves does not keep the others."""
    (graph,) = captured(
        lambda x, g, w, a, b: (scores(x, g, w), 2 * ((x @ a) @ b)),
        *(torch.randn(shape).bfloat16() for shape in (*RAGGED, (D, 8), (8, 96))),
    )
    module = fx.GraphModule(graph.graph.owning_module or {}, graph.graph)
    assert len(move_factors(module.graph)) == 1
    numbers = [n for n in module.graph.nodes if n.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor)]
    numbers = [n for n in numbers if not isinstance(n.args[1], fx.Node)]
    assert [tuple(n.meta["val"].shape) for n in numbers] == [(TOKENS, D), (TOKENS, 8)]


@pytest.mark.parametrize("grad", [False, True])
def test_divided_scores_are_eagers(grad: bool) -> None:
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=grad) for shape in RAGGED]
    ran, wanted = run(scores, *given, options=REFERENCE | {"strict": True}, grad=grad), scores(*given)
    close(ran.output, wanted)
    if grad:
        seed = torch.randn_like(wanted)
        for found, want in zip(*(torch.autograd.grad(y, given, seed) for y in (ran.output, wanted)), strict=True):
            close(found, want)
    assert [c.what for c in ran.reports[0].casts] == ["multiplied by 0.0625 before its product"] * (not grad)
