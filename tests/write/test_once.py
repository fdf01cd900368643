"""A matrix product is computed once: in a Region, or plainly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conditioned_blocks import Chunks, inputs, model
from evaluate import error, strict_reference
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from zoo import WIDTH, Attention, Decoder, Mlp, Norm, Shape, token_ids

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.plan import search
from coda_inductor.rewrite.limits import Limits
from coda_inductor.write.emit import Emission

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Layers(nn.Module):
    """Two layers with rotary embeddings. Loops take the sum over the row that the first norm's backward needs, of what
    the gradients of queries, keys and values add up to; epilogues read that as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(Norm("hf") for _ in range(4))
        self.attention = nn.ModuleList(Attention(WIDTH, 4, 2, False, rope=True) for _ in range(2))
        self.mlps = nn.ModuleList(Mlp("separate", "F.silu", WIDTH, 24, False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return x


def layers() -> Made:
    return Layers().double(), (torch.randn(2, 6, WIDTH, dtype=torch.float64),)


def conditioned() -> Made:
    """Blocks that read one condition, each behind an activation of its own, by products without an epilogue."""
    return model(Chunks), inputs(batch=2)


def embedded() -> Made:
    """The gradient of the first norm goes to an embedding: a loop sums over the row of what three products make."""
    torch.manual_seed(0)
    return Decoder(Shape(norm="no gain", layers=1)).double(), (token_ids(),)


MODELS: dict[str, Callable[[], Made]] = {"layers": layers, "condition": conditioned, "embedding": embedded}


def compare(name: str, train: bool = True) -> None:
    module, args = MODELS[name]()
    given = [p for p in module.parameters() if train]

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        with torch.set_grad_enabled(train):
            y = call(*args)
        made = torch.autograd.grad(y.sin().sum(), given, allow_unused=True) if train else ()
        return [y, *(grad for grad in made if grad is not None)]

    wanted = run(module)
    with strict_reference(run=False):
        REPORTS.clear()
        found = run(torch.compile(module, backend="coda"))
    assert REPORTS[-1].sites
    for mine, theirs in zip(found, wanted, strict=True):
        assert error(mine, theirs) < 1e-10


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_eagers(name: str, train: bool) -> None:
    """The writing of Regions raises if a product is left beside the Region that computes it."""
    compare(name, train)


GUARDS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], Any]]] = {
    "a Region's stores are read": (
        "layers", lambda patch: patch.setattr(Emission, "supply", lambda self, built: None)),
    "what loops read becomes no Region": (
        "embedding", lambda patch: patch.setattr(search, "twice", lambda plan, used: Limits())),
}  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_one_that_is_left_is_seen(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken = GUARDS[guard]
    broken(monkeypatch)
    with pytest.raises(BackendCompilerFailed, match="would be computed twice"):
        compare(name)
