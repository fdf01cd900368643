"""Heads and losses by blocks of rows: equal to the whole, in which of the two ways, and what stays whole and why."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from torch import Tensor, nn

from coda_inductor.inductor import joint
from coda_inductor.passes import blocks

B, T, WIDTH, VOCABULARY = 3, 20, 16, 200
STRICT = REFERENCE | {"strict": True, "chunk": 1}
Done = list[tuple[tuple[blocks.Blocks, ...], list[str]]]

pytestmark = pytest.mark.usefixtures("uncached")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Done:
    """What each graph had written in blocks, and the reasons of what stays whole; also small scores are."""
    found: Done = []
    write = blocks.write_blocks

    def written(*args: object) -> object:
        made, left = write(*args)
        found.append((made, [*left.values()]))
        return made, left

    monkeypatch.setattr(blocks, "MINIMUM", 16)
    monkeypatch.setattr(blocks, "TILE", 8)
    monkeypatch.setattr(joint, "MIB", 20_000)
    monkeypatch.setattr(joint, "write_blocks", written)
    return found


class Head(nn.Module):
    """A product, a norm, and a head, whose loss a function takes of scores [B, T, V] and targets [B, T]."""

    def __init__(self, loss: Callable[[Tensor, Tensor], object], bias: bool = False, learned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.gain, self.loss = nn.Parameter(torch.rand(WIDTH) + 0.5), loss
        self.temperature = nn.Parameter(torch.tensor(1.5)) if learned else None

    def forward(self, x: Tensor, y: Tensor) -> object:
        hidden = F.rms_norm(x + self.product(x), (WIDTH,), self.gain)
        scores = self.head(hidden)
        return self.loss(scores if self.temperature is None else scores * self.temperature, y)


def entropy(z: Tensor, y: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(z.float() if z.dtype != torch.float64 else z, y, **options)  # type: ignore[arg-type]


def flat(z: Tensor, y: Tensor, **options: object) -> Tensor:
    return entropy(z.flatten(0, 1), y.flatten(), **options)


def capped(z: Tensor, y: Tensor) -> Tensor:
    return flat(15 * torch.tanh(z / 15), y, ignore_index=-1)


def with_z(z: Tensor, y: Tensor) -> Tensor:
    return flat(z, y) + 1e-2 * torch.logsumexp(z, -1).square().mean()


def by_hand(z: Tensor, y: Tensor) -> Tensor:
    return -(torch.log_softmax(z, -1).gather(-1, y[..., None]).squeeze(-1) * (y > 5)).sum() / 7


def weighted(z: Tensor, y: Tensor) -> Tensor:
    each = flat(z, y, reduction="none").view(y.shape)
    return (each * torch.linspace(0.5, 1.5, y.shape[1], dtype=each.dtype)).mean()


def shifted(z: Tensor, y: Tensor) -> Tensor:
    return flat(z, F.pad(y, (0, 1), value=-100)[:, 1:])


EARLY = {
    "mean": flat,
    "sum": lambda z, y: flat(z, y, reduction="sum") / 11,
    "smoothed": lambda z, y: flat(z, y, label_smoothing=0.1),
    "ignored": lambda z, y: flat(z, y.where(y % 3 != 0, -100)),
    "capped": capped,
    "z-loss": with_z,
    "by hand": by_hand,
    "weighted tokens": weighted,
    "shifted labels": shifted,
    "times a number": lambda z, y: 0.3 * flat(z / 0.7, y),
    "distilled": lambda z, y: F.kl_div(torch.log_softmax(z, -1), torch.full_like(z, 1 / VOCABULARY)),
}
LATE = {
    "returned": lambda z, y: (flat(z, y), z),
    "a loss for each sequence": lambda z, y: flat(z, y, reduction="none").view(y.shape).mean(1),
}
WHOLE = {
    "features between the rows": lambda z, y: entropy(z.transpose(1, 2), y),
    "a norm over the tokens": lambda z, y: flat(z - z.mean((0, 1)), y),
    "the largest of all": lambda z, y: flat(z - z.amax().detach(), y),
    "neighbours": lambda z, y: flat(z[:, 1:] + 0.5 * z[:, :-1], y[:, 1:]),
}
PROGRAMS = EARLY | LATE | WHOLE


def run(model: nn.Module, x: Tensor, y: Tensor, compiled: bool, **options: object) -> list[Tensor]:
    """The results, and the gradients of x and of all parameters."""
    torch._dynamo.reset()
    x = x.clone().requires_grad_()
    call = torch.compile(model, backend="coda", dynamic=False, options=STRICT | options) if compiled else model
    found = call(x, y.clone())
    results = found if isinstance(found, tuple) else (found,)
    given = [torch.linspace(0.7, 1.3, r.numel(), dtype=r.dtype).view(r.shape) for r in results]
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [*results, *torch.autograd.grad(results, wanted, given, materialize_grads=True)]


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, T, WIDTH, dtype=dtype), torch.randint(0, VOCABULARY, (B, T))


@pytest.mark.parametrize("more", ("", "bias", "learned"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_the_whole(done: Done, name: str, more: str) -> None:
    """Outputs and all gradients in float64; and how each was written."""
    model, (x, y) = Head(PROGRAMS[name], more == "bias", more == "learned").double(), drawn(torch.float64)
    wanted, found = run(model, x, y, False), run(model, x, y, True)
    for want, got in zip(wanted, found, strict=True):
        assert float((want - got).abs().max()) <= 1e-10 * max(1.0, float(want.abs().max()))
    ((made, left),) = done
    if name in WHOLE:
        assert not made and len(left) == 1
        return
    assert len(made) == 1, left
    (block,) = made
    assert block.count == 4 and not left
    assert bool(block.whole) == (name in LATE)
