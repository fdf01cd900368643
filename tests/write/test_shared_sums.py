"""The sum over a row that an epilogue takes for a Region is what loops read, too; they do not take it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from compiling import Half, close, half, run, streams
from torch import Tensor, fx, nn

from coda_inductor.inductor import joint
from coda_inductor.patterns import graph as g

aten = torch.ops.aten
ROW_SUMS = (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.Graph]]:
    """The graphs as they are when all stages are done."""
    found = list[fx.Graph]()
    monkeypatch.setattr(joint, "verify_kept", found.append)
    yield found


def sums(graph: fx.Graph) -> list[fx.Node]:
    """What loops sum over rows of columns, in the forward's order."""
    over = [n for n in graph.nodes if n.target in ROW_SUMS]
    return [n for n in over if (r := g.reduction(n)) is not None and r.dims == (len(r.source.meta["val"].shape) - 1,)]


@pytest.mark.usefixtures("interpreted")
def test_a_norms_backward_reads_the_sum_of_its_forward(graphs: list[fx.Graph]) -> None:
    """Without the triangle law the backward of the norm is loops: only the sum of the gradient is theirs."""
    model, inputs = half(), [x.requires_grad_() for x in streams()]
    leaves = [*inputs, *model.parameters()]
    wanted = torch.autograd.grad(model(*inputs).square().sum(), leaves)
    options = {"target": "reference", "disable": "triangle"}
    ran = run(model, *inputs, grad=True, options=options)
    assert ran == [] and ran.regions and ran.regions[0] > 2
    assert [(n.target, g.is_backward(n)) for n in sums(graphs[-1])] == [(aten.sum.dim_IntList, True)]
    for mine, theirs in zip(torch.autograd.grad(ran.output.square().sum(), leaves), wanted, strict=True):
        close(mine, theirs)


class Read(nn.Module):
    """A Llama layer's half whose norm, its largest, or what it is of, somebody else reads."""

    def __init__(self, reader: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.body, self.reader = Half(), reader

    def forward(self, attention: Tensor, residual: Tensor) -> tuple[Tensor, object]:
        h = residual + self.body.o(attention)
        mean = h.pow(2).mean(-1, keepdim=True)
        x = h * torch.rsqrt(mean + 1e-6) * self.body.norm.weight
        up = nn.functional.silu(self.body.gate(x)) * self.body.up(x)
        return h + self.body.down(up), self.reader(h, mean)


READERS: dict[str, tuple[Callable[[Tensor, Tensor], object], int]] = {
    "the mean": (lambda h, mean: mean.sin(), 0),
    "in a loop": (lambda h, mean: torch.special.i0(h * torch.rsqrt(mean + 1e-6)), 0),
    "the sum": (lambda h, mean: h.pow(2).sum(-1).sin(), 0),
    "another sum": (lambda h, mean: h.pow(4).sum(-1).sin(), 1),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", READERS)
def test_who_reads_a_sum(name: str, graphs: list[fx.Graph]) -> None:
    """The same numbers, and as many sums of loops as are not the Region's."""
    reader, left = READERS[name]
    torch.manual_seed(0)
    model, inputs = Read(reader).double(), streams()
    with torch.no_grad():
        wanted = model(*inputs)
    ran = run(model, *inputs, options={"target": "reference"})
    assert ran == [] and ran.regions == [3]
    for mine, theirs in zip(ran.output, wanted, strict=True):
        close(mine, theirs)
    assert len([n for n in sums(graphs[-1]) if n.users]) == left
