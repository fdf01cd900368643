"""Training on the reference target, in float64: outputs and all gradients equal eager's, with the Regions counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from evaluate import error, strict_reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformer_blocks import KINDS, Block, D, stack, steps

from coda_inductor.inductor.joint_pass import REPORTS


class Tied(nn.Module):
    """An embedding whose weight is the head's as well, and a square weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.twice = nn.Embedding(30, D), Block("pre", "rms", True), nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.embedding(ids))
        return torch.tanh(self.twice(torch.tanh(self.twice(x)))) @ self.embedding.weight.T


class Checkpointed(nn.Module):
    """Two blocks that are run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block("pre", "rms", True), Block("pre", "layer", False)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def frozen() -> nn.Module:
    model = stack("pre", "rms", True)()
    for name, p in model.named_parameters():
        p.requires_grad_("down" not in name and "n1" not in name)
    return model


# model, does its input need a gradient, Regions
CASES: dict[str, tuple[Callable[[], nn.Module], bool, int]] = {
    **{
        "-".join(map(str, k)): (stack(*k), True, n)
        for k, n in zip(KINDS, (13, 13, 13, 13, 15, 13, 15, 13, 13, 13, 13, 13), strict=True)
    },
    "input without a gradient": (stack("pre", "rms", True), False, 13),
    "frozen parameters": (frozen, True, 13),
    "tied and twice": (Tied, False, 9),
    "checkpointed": (Checkpointed, True, 12),
}
BY_INDUCTOR = ("pre-rms-True", "post-layer-False", "checkpointed")  # the others' graphs are interpreted


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_eagers(name: str) -> None:
    """Two steps of accumulation, so that gradients are added to."""
    make, wants, regions = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    for p in model.parameters():
        nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.3)
    ids = isinstance(model, Tied)
    xs = [torch.randint(0, 30, (2, 6)) if ids else torch.randn(2, 6, D, dtype=torch.float64) for _ in range(2)]
    wanted = [steps(model, model, xs, wants)]
    with strict_reference(run=name in BY_INDUCTOR):
        REPORTS.clear()
        found = steps(torch.compile(model, backend="coda"), model, xs, wants)
    assert [len(r.sites) for r in REPORTS] == [regions]
    for mine, theirs in zip(found, wanted[0], strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or error(mine, theirs) < 1e-10


def test_the_triangle_is_a_switch() -> None:
    """Without it the norm's backward sums over a tile of its own, in a pass, and the gradients are the same."""
    torch.manual_seed(0)
    model, x = stack("pre", "rms", True)().double(), torch.randn(2, 6, D, dtype=torch.float64)
    laws = []
    for off in ("", "triangle"):
        with strict_reference(run=False):
            REPORTS.clear()
            out = steps(torch.compile(model, backend="coda", options={"disable": off}), model, [x], True)
        laws.append("triangle" in {law for site in REPORTS[-1].sites for law in site.laws})
        for mine, theirs in zip(out, steps(model, model, [x], True), strict=True):
            assert mine is None or theirs is None or error(mine, theirs) < 1e-10
    assert laws == [True, False]


def test_nobody_is_warned_of_torchs_own(recwarn: pytest.WarningsRecorder) -> None:
    """A copy of a joint graph with deepcopy made torch 2.13 warn of its own LeafSpec, in the user's terminal."""
    model, x = stack("pre", "rms", True)().double(), torch.randn(2, 6, D, dtype=torch.float64, requires_grad=True)
    with strict_reference():
        REPORTS.clear()
        torch.compile(model, backend="coda")(x).sum().backward()
    assert REPORTS[-1].sites and not [w for w in recwarn if "LeafSpec" in str(w.message)]
