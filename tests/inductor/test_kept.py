"""What the forward keeps for the backward: a graph keeps hardly more than Inductor would let it keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import strict_reference
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.offline import rewrite_for, rewritten
from coda_inductor.inductor import kept
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report
from coda_inductor.schedule import model as schedule

BATCH, LENGTH, HEADS, SIZE = 2, 64, 4, 16
WIDTH = HEADS * SIZE

pytestmark = pytest.mark.usefixtures("interpreted")


class Attention(nn.Module):
    """A norm, then attention over queries, keys and values of one product; `turned` along the tokens, or as it made
    them."""

    angles: Tensor

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("angles", torch.linspace(0, 3, LENGTH * SIZE // 2).view(LENGTH, SIZE // 2))

    def turn(self, x: Tensor) -> Tensor:
        """Half of each head's features, by pairs; the rest as they are."""
        cos, sin = self.angles.cos()[:, : SIZE // 4], self.angles.sin()[:, : SIZE // 4]
        a, b, rest = x.split([SIZE // 4, SIZE // 4, SIZE // 2], -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        q, k = (self.turn(q), self.turn(k)) if self.turned else (q, k)
        q, k, v = (t.contiguous() for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def model(turned: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(turned) for _ in range(2)), nn.Linear(WIDTH, WIDTH)).double()


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)


def counted(turned: bool) -> tuple[int, int, Report]:
    """The bytes kept by Inductor, and by us; what was done."""
    found: list[Any] = []

    def on_graph(graph: fx.Graph) -> None:
        before = kept.kept(graph)
        report = rewrite_for(graph, Settings(target="reference"))
        found.extend((before, kept.kept(rewritten(graph)), report))

    capture(model(turned).bfloat16(), (inputs().bfloat16(),), {}, "train", on_graph)
    before, after, report = found
    return before, after, report


@pytest.mark.sampled
@pytest.mark.parametrize("turned", [False, True])
def test_no_product_is_kept_for_a_sum_alone(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads copies of the parts. By the triangle law the norm's backward would read the product itself."""
    before, after, report = counted(turned)
    assert after <= before and not any("triangle" in site.laws for site in report.sites)
    monkeypatch.setattr(kept, "MORE", 2.0)
    before, after, report = counted(turned)
    assert after > 1.2 * before and any("triangle" in site.laws for site in report.sites)  # or this test sees nothing


def test_where_torch_cannot_say_what_is_kept_the_sum_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not this graph")

    def on_graph(graph: fx.Graph) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(schedule, "min_cut_rematerialization_partition", fails)
            reports.append(rewrite_for(graph, Settings(target="reference")))

    reports: list[Report] = []
    capture(model().bfloat16(), (inputs().bfloat16(),), {}, "train", on_graph)
    assert any("triangle" in site.laws for site in reports[0].sites)


@pytest.mark.sampled
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("more", [kept.MORE, 2.0])
def test_the_gradients_are_eagers(turned: bool, more: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both ways, in float64."""
    monkeypatch.setattr(kept, "MORE", more)
    plain, x = model(turned), inputs()
    given = [x, *plain.parameters()]
    wanted = [y := plain(x), *torch.autograd.grad(y.sin().sum(), given)]
    with strict_reference():
        REPORTS.clear()
        found = [y := torch.compile(plain, backend="coda")(x), *torch.autograd.grad(y.sin().sum(), given)]
    assert any("triangle" in site.laws for r in REPORTS for site in r.sites) == (more == 2.0)
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < 1e-10


READ: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "by loops": (lambda y: y.sin() + y.view(-1).sum(), True),
    "by a product": (lambda y: (y @ y.mT, y.sin()), False),
    "by a product, widened and copied": (lambda y: y.float().t().clone() @ y, False),
    "by a product, repeated": (lambda y: y[None].expand(3, 8, 8).reshape(24, 8) @ y.new_zeros(8, 8), False),
    "by a product, in part": (lambda y: y[:, :4] @ y.new_zeros(4, 4), False),
    "by a product, in part, copied": (lambda y: y[:, :4].contiguous() @ y.new_zeros(4, 4), True),
    "by a product, copied, in part": (lambda y: y.t().contiguous()[:, :4] @ y.new_zeros(4, 4), True),
    "by a product, changed": (lambda y: y.sin() @ y.new_zeros(8, 8), True),
    "by a product, copied, in part, changed": (lambda y: y.t().contiguous()[:, :4].sin() @ y.new_zeros(4, 4), True),
    "by the caller": (lambda y: (y, y.sin()), False),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_alone(name: str) -> None:
    read, alone = READ[name]
    graph = make_fx(lambda x: read(x + 1), tracing_mode="fake")(torch.rand(8, 8)).graph
    (node,) = (n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor and n.args[1] == 1)
    assert kept.alone(node) is alone
    for loop in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default) if alone else ():
        loop.meta["partitioner_tag"] = "is_backward"
        assert kept.alone(node) is ("in part" in name)


@pytest.mark.parametrize("late", [torch.ops.aten.exp.default, torch.ops.aten.mm.default])
def test_what_loops_make_again_is_not_alone(late: Callable[..., Any]) -> None:
    """A backward's loop reads the node in place of its sine; a product reads the sine itself."""
    graph = make_fx(lambda x: ((y := x + 1).sin().exp().sum(), y.sin() @ x), tracing_mode="fake")(
        torch.rand(8, 8)
    ).graph
    node = next(iter(graph.nodes)).next
    assert kept.alone(node)
    for reader in graph.find_nodes(op="call_function", target=late):
        reader.meta["partitioner_tag"] = "is_backward"
    assert kept.alone(node) is (late is torch.ops.aten.mm.default)


def test_those_that_pay_nothing_go_first() -> None:
    assert kept.dearest({"a": True, "b": False, "c": False}) == {"b", "c"}
    assert kept.dearest({"a": True}) == {"a"} and kept.dearest({}) == frozenset()
