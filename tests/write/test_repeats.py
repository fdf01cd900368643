"""Keys and values that several heads share: the backward keeps them once, as attention reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import strict_reference
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.schedule.model import partition, saved
from coda_inductor.write import emit, repeats

BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 128, 8, 2, 16  # of wider keys and values the sums are taken elsewhere
WIDTH, NARROW = HEADS * SIZE, GROUPS * SIZE

pytestmark = pytest.mark.usefixtures("uncached")

Repeat = Callable[[Tensor], Tensor]
"""Of keys or values [batch, length, groups, size], those of every head [batch, heads, length, size]."""
Made = Callable[[Tensor], Tensor]
"""What values are made by, of the same shape; they are then read in two places."""


def as_transformers(x: Tensor) -> Tensor:
    batch, length, groups, _ = x.shape
    return x.transpose(1, 2)[:, :, None].expand(-1, -1, HEADS // groups, -1, -1).reshape(batch, HEADS, length, SIZE)


def heads_last(x: Tensor) -> Tensor:
    batch, length, groups, _ = x.shape
    x = x[:, :, :, None].expand(-1, -1, -1, HEADS // groups, -1).reshape(batch, length, HEADS, SIZE)
    return x.transpose(1, 2)


def permuted(x: Tensor) -> Tensor:
    batch, length, groups, _ = x.shape
    x = x[:, :, :, None].expand(-1, -1, -1, HEADS // groups, -1).permute(0, 2, 3, 1, 4)
    return x.reshape(batch, HEADS, length, SIZE)


def interleaved(x: Tensor) -> Tensor:
    return x.transpose(1, 2).repeat_interleave(HEADS // x.shape[2], dim=1)


class Attention(nn.Module):
    """A norm, then attention whose keys and values serve several heads each."""

    def __init__(self, repeat: Repeat, groups: int = GROUPS, made: Made | None = None, eager: bool = False) -> None:
        super().__init__()
        self.repeat, self.groups, self.made, self.eager = repeat, groups, made, eager
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qo")
        self.k, self.v = (nn.Linear(WIDTH, groups * SIZE, bias=False) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q = self.q(n).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k, v = (w(n).unflatten(-1, (self.groups, SIZE)) for w in (self.k, self.v))
        v = self.made(v) if self.made else v
        keys, values = self.repeat(k), self.repeat(v)
        if self.eager:
            y = torch.matmul(torch.softmax(q @ keys.transpose(2, 3) / 4, -1), values)
        else:
            y = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        flat = v.flatten(2).square().cumsum(1).sum(-1, keepdim=True) if self.made else 0
        out: Tensor = x + self.o(y.transpose(1, 2).flatten(2)) + 1e-2 * flat
        return out


def model(*kind: Any, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(*kind, **more) for _ in range(3)), nn.Linear(WIDTH, WIDTH)).double()


def inputs(length: int = LENGTH) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, length, WIDTH, dtype=torch.float64, requires_grad=True)


def kept(repeat: Repeat) -> tuple[int, int]:
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

    capture(model(repeat).bfloat16(), (inputs().bfloat16(),), {}, "train", on_graph)
    before, after = found
    return before, after


@pytest.mark.parametrize("repeat", [as_transformers, heads_last, permuted])
def test_none_is_kept_beside_its_copy(repeat: Repeat, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(repeat) == (0, 0)
    monkeypatch.setattr(emit, "read_repeats", lambda *a: None)
    before, after = kept(repeat)
    assert before == 0 and after >= 4  # or this test sees nothing


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{f.__name__: (partial(model, f), LENGTH) for f in (as_transformers, heads_last, permuted, interleaved)},
    "one for all heads": (lambda: model(as_transformers, 1), LENGTH),
    "one for all heads, of as many tokens": (lambda: model(as_transformers, 1), HEADS),
    "values that a loop made, read flat as well": (lambda: model(as_transformers, made=torch.tanh), LENGTH),
    "values that no loop made": (lambda: model(as_transformers, made=partial(torch.cumsum, dim=-1)), LENGTH),
    "products instead of attention": (lambda: model(as_transformers, made=torch.tanh, eager=True), LENGTH),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_are_eagers(name: str) -> None:
    """STRICT, float64; the joint graph interpreted."""
    make, length = CASES[name]
    equals_eager(make(), inputs(length), run=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gradients_are_eagers(dynamic: bool) -> None:
    equals_eager(model(as_transformers), inputs(), run=True, dynamic=dynamic)


def equals_eager(plain: nn.Module, x: Tensor, run: bool, **how: Any) -> None:
    """Output and all gradients, with Regions."""
    given = [x, *plain.parameters()]
    y = plain(x)
    wanted = [y, *torch.autograd.grad(y.sin().sum(), given)]
    with strict_reference(run=run):
        REPORTS.clear()
        y = torch.compile(plain, backend="coda", **how)(x)
        found = [y, *torch.autograd.grad(y.sin().sum(), given)]
    assert sum(len(r.sites) for r in REPORTS) >= 2
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < 1e-10


def test_sizes_that_differ_are_a_bug() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = torch.empty(2, 3), torch.empty(3, 2)
    repeats.same(a, a)
    with pytest.raises(BrokenInvariant, match="a is"):
        repeats.same(a, b)


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
