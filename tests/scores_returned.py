"""A model that returns its scores beside the loss, and what may be done with both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from compiling import REFERENCE
from torch import Tensor, nn

TOKENS, WIDTH, WORDS = 128, 16, 64
STRICT = REFERENCE | {"strict": True}


class Head(nn.Module):
    """(loss, scores), as transformers' models return them; `kind` changes what is returned."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.first, self.scores = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.kind = kind

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        hidden = F.gelu(self.first(x))
        scores = self.scores(hidden)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        others: dict[str, Any] = {
            "": (loss, scores),
            "alone": scores,
            "two": (loss, scores, hidden),
            "beside the loss": (scores.square().mean(), hidden),
            "twice": (loss, scores, scores),
            "with a view": (loss, scores, scores[0]),
            "an input": (loss, x),
            "no gradient": (loss, scores.detach()),
            "no loss": (loss.expand(2, 2), scores),
            "a router's": (self.first(x).square().mean(), scores),
            "rounded": (loss, scores.round()),
        }
        return others[self.kind]


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, torch.randint(0, WORDS, (2, TOKENS))


def gradients(call: Callable[..., Any], model: nn.Module, use: Callable[..., Any]) -> list[Tensor]:
    """What `use` of the outputs leaves: outputs, and gradients of input and weights."""
    x, targets = given()
    model.zero_grad()
    outputs = call(x, targets)
    use(*outputs)
    return [o.detach() for o in outputs] + [t.grad for t in (x, *model.parameters()) if t.grad is not None]


USES: dict[str, Callable[..., Any]] = {
    "the loss": lambda loss, scores, *_: loss.backward(),
    "both": lambda loss, scores, *_: (loss + scores.square().sum()).backward(),
    "the scores": lambda loss, scores, *_: scores.sin().sum().backward(),
    "an expanded gradient": lambda loss, scores, *_: (2 * loss + scores.sum()).backward(),
    "one after the other": lambda loss, scores, *_: (loss.backward(retain_graph=True), scores.exp().sum().backward()),
    "the scores first": lambda loss, scores, *_: (scores.exp().sum().backward(retain_graph=True), loss.backward()),
    "all": lambda *outputs: sum(o.square().sum() for o in outputs).backward(),
}
