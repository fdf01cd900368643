"""What products of the forward alone read, the backward makes again where an epilogue reads what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, close, run
from torch import Tensor, nn

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.explain import capture, explain
from coda_inductor.inductor.joint import rewrite
from coda_inductor.inductor.records import Report
from coda_inductor.plan.again import Again
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.tuning.verdicts import ACCEPT_ALL, Decisions

TOKENS, WIDTH, INNER = 512, 64, 256
TILE = 2 * TOKENS * INNER  # bytes

pytestmark = pytest.mark.usefixtures("uncached")


class Gated(nn.Module):
    """A norm and a gated MLP; `returned`: with its activation."""

    def __init__(self, returned: bool = False, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.norm, self.returned, self.act = nn.RMSNorm(WIDTH, eps=1e-5), returned, act
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        n = self.norm(x)
        h = self.act(self.gate(n)) * self.up(n)
        return (x + self.down(h), h) if self.returned else x + self.down(h)


def given(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()


def facts(model: nn.Module, x: Tensor) -> Any:
    return explain(model, (x,), {}, "train", Settings(target="sm_90a"))


def stores(report: Any) -> list[int]:
    """Of the Regions that are [M, INNER]: how many tiles each stores."""
    (graph,) = report["graphs"]
    return [len(r["stores"]) for r in graph["regions"] if f", {INNER}]" in r["stores"][0]]


def test_the_backward_stores_it_and_the_forward_keeps_it_not() -> None:
    report = facts(Gated().bfloat16(), given(torch.bfloat16))
    assert stores(report) == [3, 3]  # gate, up and what down reads; both gradients, and it again
    streams = 2 * TOKENS * WIDTH
    assert 2 * TILE <= report["totals"]["saved_bytes"] < 2 * TILE + 2 * streams


def test_what_the_user_gets_is_kept() -> None:
    """It is in memory while the backward runs, whoever holds it."""
    report = facts(Gated(returned=True).bfloat16(), given(torch.bfloat16))
    assert stores(report)[1] == 2 and report["totals"]["saved_bytes"] >= 3 * TILE


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("act", [F.silu, F.gelu, torch.tanh], ids=["silu", "gelu", "tanh"])
def test_gradients_are_those_of_eager(act: Callable[[Tensor], Tensor], returned: bool) -> None:
    model, x = Gated(returned, act).double(), given()
    ran = run(model, x, grad=True, options=REFERENCE | {"strict": True})
    leaves = [x, *model.parameters()]
    outs = [o if isinstance(o, tuple) else (o,) for o in (ran.output, model(x))]
    mine, theirs = (torch.autograd.grad(sum(t.square().sum() for t in out), leaves) for out in outs)
    for a, b in zip(mine, theirs, strict=True):
        close(a, b)


class Scaled(Gated):
    """A buffer is in the activation, and overwritten behind it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, INNER))

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(n)) * self.up(n) * self.scale.clone())
        self.scale.mul_(2)
        return out


def test_what_is_made_again_reads_what_the_forward_read() -> None:
    model, x = Scaled().double(), given()
    leaves = [x, *model.parameters()]
    wanted = torch.autograd.grad(model(x).square().sum(), leaves)
    model.scale.div_(2)
    ran = run(model, x, grad=True, options=REFERENCE | {"strict": True})
    for a, b in zip(torch.autograd.grad(ran.output.square().sum(), leaves), wanted, strict=True):
        close(a, b)


class Mixer(nn.Module):
    """Two blocks of Mixer, each an MLP over the tokens and one over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        sizes = (TOKENS // 4, WIDTH) * 2
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(n, INNER), nn.GELU(), nn.Linear(INNER, n)) for n in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            x = x + self.mlps[i](self.norms[i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.mlps[i + 1](self.norms[i + 1](x))
        return x


def test_it_takes_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm's result of which the epilogue reads no mean yet is kept: that would be one more vector to compute."""
    x = torch.randn(4, TOKENS // 4, WIDTH).bfloat16().requires_grad_()
    again = facts(Mixer().bfloat16(), x)["totals"]
    found = Again._host
    monkeypatch.setattr(Again, "_host", lambda self, plan, n, h: None if n in plan.kept else found(self, plan, n, h))
    kept = facts(Mixer().bfloat16(), x)["totals"]
    assert again["kernels_after"] == kept["kernels_after"]
    assert kept["saved_bytes"] - again["saved_bytes"] >= 2 * TILE


def rewritten(decisions: Decisions) -> tuple[Report, Any]:
    """What becomes of the joint graph of a gated MLP."""
    reports = list[Report]()

    def note(graph: Any) -> None:
        reports.append(rewrite(graph, Settings(target="reference"), decisions=decisions))

    capture.capture(Gated().double(), (given(),), {}, "train", note)
    (report,) = reports
    return report, [len(s.region.stores) for s in report.sites if s.region.n == INNER]


def test_a_region_that_no_kernel_can_do_so_does_without() -> None:
    """The forward keeps it then, and the Region stays."""

    def legal(region: Region) -> None:
        if len(region.stores) > 2 and len(region.products) == 1:
            raise Unsupported("three stores")

    report, count = rewritten(Decisions(legal))
    assert count == [3, 2] and not report.refused


@pytest.mark.parametrize("hopeless", [False, True])
def test_a_region_that_loses_so_is_tried_without(hopeless: bool) -> None:
    rounds = list[list[int]]()

    def decide(plan: Plan, builts: list[Built]) -> Limits:
        backward = [b for b in builts if b.region.n == INNER and len(b.region.products) == 1]
        rounds.append([len(b.region.stores) for b in backward])
        slow = [b for b in backward if hopeless or len(b.region.stores) > 2]
        return Limits({acc.bit: "measured slower" for b in slow for acc in b.products})

    report, count = rewritten(Decisions(ACCEPT_ALL.legal, decide))
    assert rounds[:2] == [[3], [2]] and count == ([3] if hopeless else [3, 2])
    assert {r.reason for r in report.refused} == ({"measured slower"} if hopeless else set())
