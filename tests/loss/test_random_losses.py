"""Random sums of what people add to a cross-entropy: outputs and all gradients in float64, whole and by blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from evaluate import error, strict_reference
from torch import Tensor, nn

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.loss.written import WHAT

pytestmark = [pytest.mark.usefixtures("uncached"), pytest.mark.sampled]
WIDTH, VOCABULARY = 16, 200
Term = Callable[[Tensor, Tensor], Tensor]


def entropy(draw: random.Random) -> Term:
    """Of some tokens; with weights of tokens, or smoothed labels."""
    options: dict[str, Any] = {"label_smoothing": draw.choice((0.0, 0.1, 0.3))}
    ignored, weighted = draw.choice((-100, 3)), draw.random() < 0.3

    def term(z: Tensor, y: Tensor) -> Tensor:
        if not weighted:
            return F.cross_entropy(z, y, ignore_index=ignored, **options)
        return (F.cross_entropy(z, y, reduction="none", **options) * (y % 5)).mean()

    return term


def normaliser(draw: random.Random) -> Term:
    """A function of each row's logsumexp."""
    function = draw.choice((torch.square, torch.abs, lambda x: x, lambda x: (x - 5).relu()))
    number, some = draw.choice((1e-2, 0.3, -1e-3)), draw.random() < 0.3

    def term(z: Tensor, y: Tensor) -> Tensor:
        each = function(torch.logsumexp(z, -1))
        return number * (each * (y % 2) if some else each).mean()

    return term


def by_hand(draw: random.Random) -> Term:
    """The mean of all logs."""
    number = draw.choice((0.1, 0.5))
    return lambda z, y: -number * torch.log_softmax(z, -1).mean(-1).mean()


class Head(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        makers = [entropy, *draw.choices((normaliser, by_hand), k=draw.randrange(3))]
        self.terms = [make(draw) for make in makers]
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=draw.random() < 0.5)
        self.scale, self.each = draw.choice((1.0, 0.3)), draw.random() < 0.3
        with torch.no_grad():
            self.head.weight *= draw.choice((1.0, 20.0))

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        z = self.head(F.rms_norm(x, (WIDTH,))).flatten(0, 1) * self.scale
        found = [term(z, y.flatten()) for term in self.terms]
        return found if self.each else [sum(found, torch.zeros((), dtype=z.dtype))]


def results(model: Head, call: Any) -> Iterator[Tensor]:
    torch.manual_seed(7)
    x, y = torch.randn(8, 30, WIDTH, dtype=torch.float64, requires_grad=True), torch.randint(0, VOCABULARY, (8, 30))
    found = call(x, y)
    yield from found
    given = [torch.full_like(each, 0.7 + i) for i, each in enumerate(found)]
    yield from torch.autograd.grad(found, [x, *model.parameters()], given)


@pytest.mark.parametrize("chunk", (1000, 32), ids=("whole", "blocks"))
@pytest.mark.parametrize("seed", range(16))
def test_equals_eager(seed: int, chunk: int) -> None:
    """Of one loss there is one gradient, to which the factors are proportional: all of them are taken."""
    REPORTS.clear()
    model = Head(seed).double()
    with strict_reference(run=False):
        call = torch.compile(model, backend="coda", options=REFERENCE | {"strict": True, "chunk": chunk})
        found = [*results(model, call)]
    assert all(error(mine, theirs) < 1e-10 for mine, theirs in zip(found, results(model, model), strict=True))
    taken = any(cast.what == WHAT for report in REPORTS for cast in report.casts)
    assert taken or len(found) - 1 - len([*model.parameters()]) > 1
    assert not taken or any(report.blocks for report in REPORTS) == (chunk == 32)
