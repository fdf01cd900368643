"""A gradient that asks for a sign of what is dropped out reads what is left, which the next product reads as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from evaluate import error, strict_reference
from torch import Tensor, fx, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.explain.capture import capture
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.passes.dropped import read_dropped

aten = torch.ops.aten
Act = Callable[[Tensor, Tensor], Tensor]
"""Of what a product made, and of a tensor by which some of it is dropped."""

DROPPED: dict[str, Act] = {
    "mask and number": lambda x, u: F.relu(x) * (u > 0.3) * 1.5,
    "number and mask": lambda x, u: (u > 0.3) * (1.5 * F.relu(x)),
    "mask alone": lambda x, u: F.relu(x) * (u > 0.3),
    "dropout": lambda x, _: F.dropout(F.relu(x), 0.3),
}
OTHERS: dict[str, Act] = {
    "a number below 1": lambda x, u: F.relu(x) * (u > 0.3) * 0.5,
    "a negative number": lambda x, u: F.relu(x) * (u > 0.3) * -2.0,
    "what no mask is": lambda x, u: F.relu(x) * u * 1.5,
    "a mask of its own for each row": lambda x, u: F.relu(x) * (u[..., :1] > 0.3) * 1.5,
    "what no product reads": lambda x, u: torch.tanh(F.relu(x) * (u > 0.3) * 1.5),
    "the sign of what stands before": lambda x, u: torch.where(x > 0, x, 0.0) * (u > 0.3) * 1.5,
    "leaky": lambda x, u: F.leaky_relu(x, 0.1) * (u > 0.3) * 1.5,
    "another's sign": lambda x, u: torch.where(x > 0.5, x, 0.0) * (u > 0.3) * 1.5,
}


class Mlp(nn.Module):
    """x + down(act(up(norm(x)))); a LayerNorm, and biases, or neither."""

    def __init__(self, act: Act, biased: bool = False, d: int = 16, f: int = 48) -> None:
        super().__init__()
        self.act, self.norm = act, nn.LayerNorm(d) if biased else nn.RMSNorm(d)
        self.up, self.down = nn.Linear(d, f, bias=biased), nn.Linear(f, d, bias=biased)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x)), u))  # type: ignore[no-any-return]


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6, 16, dtype=torch.float64, requires_grad=True), torch.rand(4, 6, 48, dtype=torch.float64)


def signs(act: Act) -> list[list[str]]:
    """What the backward takes signs of, before and after: each as the operations that it is made of."""
    found: list[list[str]] = []

    def on_graph(graph: fx.Graph) -> None:
        for change in (lambda graph: None, read_dropped):
            change(graph)
            graph.lint()
            choices = graph.find_nodes(op="call_function", target=aten.where.self)
            read = [n.args[0].args[0] for n in choices if n.meta["partitioner_tag"] == "is_backward"]
            found.append([str(n.target) for n in read])

    capture(Mlp(act).bfloat16(), [t.detach().bfloat16().requires_grad_() for t in inputs()], {}, "train", on_graph)
    return found


@pytest.mark.parametrize("name", DROPPED)
def test_the_sign_is_that_of_what_is_left(name: str) -> None:
    before, after = signs(DROPPED[name])
    assert len(after) == len(before) == 1 and after == ["aten.mul.Tensor"] != before


@pytest.mark.parametrize("name", OTHERS)
def test_other_signs_stay(name: str) -> None:
    before, after = signs(OTHERS[name])
    assert after == before and len(after) == 1


def gradients(run: Callable[..., Tensor], model: nn.Module, x: Tensor, u: Tensor) -> list[Tensor]:
    out = run(x, u)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *model.parameters()])]


@pytest.mark.sampled
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("name", [name for name in (*DROPPED, *OTHERS) if name != "dropout"])
def test_the_gradients_are_eagers(name: str, biased: bool) -> None:
    model, (x, u) = Mlp((DROPPED | OTHERS)[name], biased).double(), inputs()
    with torch.no_grad():
        model.up.weight[:2] = 0.0  # at 0 itself
    with strict_reference(run=False):
        REPORTS.clear()
        found = gradients(torch.compile(model, backend="coda"), model, x, u)
    (report,) = REPORTS
    if name in DROPPED:
        assert any("relu" in site.laws for site in report.sites)
    for mine, theirs in zip(found, gradients(model, model, x, u), strict=True):
        assert error(mine, theirs) < 1e-10


def test_neither_signs_nor_masks_are_kept() -> None:
    """Of all tensors between the products only what the second one reads. Without the law the signs are."""
    kept = list[int]()
    for off in ((), ("relu",)):
        with torch.device("meta"):
            model = Mlp(DROPPED["dropout"], d=256, f=2048).bfloat16()
            x, u = (torch.empty(2, 2048, n, dtype=torch.bfloat16) for n in (256, 2048))
        settings = Settings(target="sm_90a", disable=frozenset(off))
        totals = explain(model, (x.requires_grad_(), u), {}, "train", settings)["totals"]
        kept.append(totals["saved_bytes"])
        if not off:
            assert totals["saved_bytes"] < totals["saved_bytes_inductor"]
    tile = 2 * 4096 * 2048
    assert tile <= kept[0] < 1.5 * tile and kept[1] - kept[0] >= tile
