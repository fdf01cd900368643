"""What lies in memory of a head's scores, and what the backward makes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import REFERENCE
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain

TOKENS, WIDTH, WORDS = 512, 64, 2048
MATRIX = TOKENS * WORDS * 2  # bytes


class Head(nn.Module):
    """A norm, scores, and their loss: of what `change` makes of them. Of "narrow" ones there is no norm, whose gradient
    reads scores, too."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.norm, self.scores, self.change = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False), change

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = x.view(2, -1, WIDTH)
        scores = self.scores(torch.tanh(x) if self.change == "narrow" else self.norm(x))
        if self.change == "scaled":
            scores = scores / 15
        if self.change == "capped":
            scores = torch.tanh(scores / 30) * 30
        if self.change != "narrow" and scores.dtype == torch.bfloat16:
            scores = scores.float()
        return nn.functional.cross_entropy(scores.view(-1, WORDS), targets)


def case(change: str, dtype: torch.dtype) -> tuple[Head, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    return Head(change).to(dtype), x, torch.randint(0, WORDS, (TOKENS,))


@pytest.mark.parametrize("change", ["scaled", "capped", "narrow", "plain"])
def test_scores_lie_in_memory_once(change: str) -> None:
    """The sums beside the gradient read the scores, and the loss what was made of them, or their logarithms in bf16:
    that is made of the scores where it is read."""
    model, x, targets = case(change, torch.bfloat16)
    report: dict[str, Any] = explain(model, (x, targets), {}, "train", Settings(target="sm_90a"))
    (graph,) = report["graphs"]
    stored = [s for region in graph["regions"] for s in region["stores"] if s.endswith(f", {WORDS}]")]
    assert len(stored) == 1 and report["totals"]["saved_bytes"] < 1.1 * MATRIX
    # The scores are written once and read once; their gradient is written once, and both products read it.
    assert report["totals"]["bytes_after"] < 2.4 * MATRIX


@pytest.mark.parametrize("change", ["scaled", "capped", "narrow"])
def test_gradients_are_those_of_eager(change: str) -> None:
    model, x, targets = case(change, torch.float64)
    found = {}
    for name, call in (("ours", torch.compile(model, backend="coda", options=REFERENCE)), ("eager", model)):
        model.zero_grad()
        x.grad = None
        call(x, targets).backward()
        found[name] = [t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None]
    for ours, eager in zip(found["ours"], found["eager"], strict=True):
        assert (ours - eager).norm() <= 1e-10 * eager.norm()


class Overwritten(nn.Module):
    """What is made of scores reads a number that the forward overwrites."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("number", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        logarithms = nn.functional.log_softmax(self.scores(torch.tanh(x)), -1)
        made = (logarithms + self.number).pow(2).sum()
        self.number.add_(1)
        return made


def test_what_reads_overwritten_memory_is_not_made_again() -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    found = []
    for backend in (None, "coda"):
        torch.manual_seed(0)
        model = Overwritten().double()
        call = torch.compile(model, backend=backend, options=REFERENCE) if backend else model
        for _ in range(2):
            model.zero_grad()
            call(x).backward()
        assert model.scores.weight.grad is not None
        found.append(model.scores.weight.grad)
    assert (found[1] - found[0]).norm() <= 1e-10 * found[0].norm()


class Gated(nn.Module):
    """A gated activation that a LayerNorm reads, as EVA-02's."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS), nn.Linear(WORDS, WIDTH)
        self.norm = norm(WORDS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(nn.functional.silu(self.gate(x)) * self.up(x)))
        return out


@pytest.mark.parametrize(("mode", "stores"), [("train", 2), ("infer", 1)])
def test_what_the_backward_makes_of_two_stores_is_no_third(mode: str, stores: int) -> None:
    x, model = torch.randn(TOKENS, WIDTH).to(torch.bfloat16), Gated(nn.LayerNorm).to(torch.bfloat16)
    report: dict[str, Any] = explain(model, (x,), {}, mode, Settings(target="sm_90a"))  # type: ignore[arg-type]
    (graph,) = report["graphs"]
    first = next(r for r in graph["regions"] if len(r["products"]) == 2)
    assert len(first["stores"]) == stores
    if mode == "train":
        assert report["totals"]["saved_bytes"] <= 1.02 * report["totals"]["saved_bytes_inductor"]


def test_each_operation_is_walked_once() -> None:
    """Of an activation in which every step reads the one before it twice there are 2^60 ways back."""
    gate = nn.Linear(WIDTH, WORDS).to(torch.bfloat16)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        y = z = gate(x)
        for _ in range(60):
            y = y * (2 - y)
        return y.softmax(-1), z.sin()

    x = torch.randn(TOKENS, WIDTH).to(torch.bfloat16)
    report: dict[str, Any] = explain(call, (x,), {}, "infer", Settings(target="sm_90a"))
    assert report["graphs"]
