"""Keys and values that several heads share: the backward keeps them once, as attention reads them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from evaluate import strict_reference
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.core.settings import Settings
from coda_inductor.inductor import emit, repeats
from coda_inductor.inductor.capture import capture
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.offline import rewrite_for
from coda_inductor.inductor.schedule import partition, saved

BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 128, 4, 2, 16
WIDTH, NARROW = HEADS * SIZE, GROUPS * SIZE

pytestmark = pytest.mark.usefixtures("uncached")


class Attention(nn.Module):
    """A norm, then attention whose keys and values serve two heads each; they are repeated as transformers does."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qo")
        self.k, self.v = (nn.Linear(WIDTH, NARROW, bias=False) for _ in "kv")

    def repeated(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (GROUPS, SIZE))
        if self.transposed:
            x = x.transpose(1, 2)[:, :, None].expand(-1, -1, HEADS // GROUPS, -1, -1)
            return x.reshape(BATCH, HEADS, LENGTH, SIZE)
        x = x[:, :, :, None].expand(-1, -1, -1, HEADS // GROUPS, -1).reshape(BATCH, LENGTH, HEADS, SIZE)
        return x.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q = self.q(n).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, self.repeated(self.k(n)), self.repeated(self.v(n)), is_causal=True)
        out: Tensor = x + self.o(y.transpose(1, 2).flatten(2))
        return out


def model(transposed: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(transposed) for _ in range(3)), nn.Linear(WIDTH, WIDTH)).double()


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)


def kept(transposed: bool) -> tuple[int, int]:
    """How many tensors of the size of unrepeated keys the backward keeps: Inductor's, ours."""
    found = list[int]()

    def count(graph: fx.Graph) -> None:
        halves = partition(graph)
        assert halves is not None
        found.append(list(saved(halves).values()).count(BATCH * LENGTH * NARROW * 2))

    def on_graph(graph: fx.Graph) -> None:
        count(graph)
        rewrite_for(graph, Settings(target="reference"))
        count(graph)

    capture(model(transposed).bfloat16(), (inputs().bfloat16(),), {}, "train", on_graph)
    before, after = found
    return before, after


@pytest.mark.parametrize("transposed", [True, False])
def test_none_is_kept_beside_its_copy(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(transposed) == (0, 0)
    monkeypatch.setattr(emit, "read_repeats", lambda *a: None)
    before, after = kept(transposed)
    assert before == 0 and after >= 4  # or this test sees nothing


@pytest.mark.parametrize("transposed", [True, False])
def test_the_gradients_are_eagers(transposed: bool) -> None:
    """STRICT, float64, end to end."""
    x, plain = inputs(), model(transposed)
    wanted = torch.autograd.grad(plain(x).sin().sum(), [x, *plain.parameters()])
    with strict_reference():
        REPORTS.clear()
        found = torch.autograd.grad(torch.compile(plain, backend="coda")(x).sin().sum(), [x, *plain.parameters()])
    assert sum(len(r.sites) for r in REPORTS) >= 10
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-10


def test_what_is_no_repeat() -> None:
    """One dimension of size 1 must grow, and nothing else."""

    def sizes(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
        graph = make_fx(lambda x: x.expand(after))(torch.rand(before)).graph
        (node,) = (n for n in graph.nodes if n.target is torch.ops.aten.expand.default)
        for n, shape in ((node.args[0], before), (node, after)):
            n.meta["val"] = torch.empty(shape)
        return repeats.repeated(node)

    assert sizes((2, 1, 3), (2, 4, 3)) == 1
    assert sizes((1, 1, 3), (2, 4, 3)) is None and sizes((2, 3), (2, 3)) is None and sizes((3,), (2, 3)) is None
