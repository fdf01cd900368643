"""Tables are computed once: which values are tables, that compiled graphs keep them, and that nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import REFERENCE, run
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain, render
from coda_inductor.explain.steps import program
from coda_inductor.ops.custom import STORED
from coda_inductor.passes import tables
from coda_inductor.passes.tables import Table, store_tables

BATCH, LENGTH, HEADS, SIZE = 2, 192, 8, 16
WIDTH = HEADS * SIZE
HERE = "test_tables.py:"

pytestmark = pytest.mark.usefixtures("uncached")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are worth it at the sizes of these tests."""
    monkeypatch.setattr(tables, "WORTH", BATCH * LENGTH * WIDTH)


class Rotary(nn.Module):
    """x with q and k of a product rotated by its position, and added up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.rates = nn.Buffer(10.0 ** -torch.arange(0, 4, 4 / (SIZE // 2)))

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(LENGTH, dtype=self.rates.dtype)[:, None] * self.rates
        at = torch.cat((at, at), -1)
        cos, sin = at.cos() * 1.0, at.sin() * 1.0
        return (self.rotated(self.q(x), cos, sin) * self.rotated(self.k(x), cos, sin)).sum((1, 3))


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)


def gradients(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]


@pytest.mark.sampled
@pytest.mark.parametrize("checkpointed", [False, True])
def test_forward_and_backward_compute_each_once(checkpointed: bool) -> None:
    model = Rotary().double()
    parameters, x = list(model.parameters()), inputs()
    step = (lambda x: checkpoint(model, x, use_reentrant=False)) if checkpointed else model
    wanted = gradients(step, parameters, x)
    times = dict[bool, list[int]]()
    for on in (True, False):
        torch._dynamo.reset()
        options = REFERENCE | {"strict": True} | ({} if on else {"disable": "tables"})
        compiled = torch.compile(step, backend="coda", options=options, fullgraph=True)
        found, code = run_and_get_code(gradients, compiled, parameters, x)
        times[on] = [len(re.findall(r"\b(?:cos|sin)\(", text)) for text in code]
        for f, w in zip(found, wanted, strict=True):
            assert float((f - w).detach().norm() / w.detach().norm()) < 1e-12
    again = 2 if checkpointed else 0  # the forward is run again in the backward
    assert times[True] == [2, again], times
    assert times[False][0] >= 2 and times[False][1] >= again + 2, times


def of(f: Callable[..., Any], *args: Tensor) -> tuple[tuple[Table, ...], fx.Graph]:
    """What is stored of f's graph, and the graph after."""
    made = make_fx(f, tracing_mode="fake")(*args)
    found = store_tables(made.graph)
    made.recompile()
    for a, b in zip(made(*args), f(*args), strict=True):
        assert torch.equal(a, b)
    made.graph.lint()
    return found, made.graph


AT, X = torch.rand(LENGTH, SIZE), torch.rand(BATCH, HEADS, LENGTH, SIZE)


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (lambda at, x: (x * at.cos(),), ["[192, 16]"]),
        (lambda at, x: (x * at.sin().to(torch.float16)[None, None],), ["[192, 16]"]),
        (lambda at, x: (x * torch.cat([(h := at[:, :8].cos()), h], -1),), ["[192, 16]"]),  # halves put together
        (lambda at, x: (x * at.cos(), x * at.sin()), ["[192, 16]"] * 2),
        (lambda at, x: [half * at.cos()[:, :8] for half in x.chunk(2, -1)], []),  # by half of them, each
        (lambda at, x: (lambda cos: [half * cos for half in x.chunk(2, -1)])(at.cos()[:, :8]), ["[192, 16]"]),
        (lambda at, x: (x * at.exp(), x * at, x * at.reciprocal()), []),  # as fast as it can be read
        (lambda at, x: (x * at.log2().floor().exp2(),), ["[192, 16]"]),
        (lambda at, x: (x * (at.double().reciprocal() * 448).float(),), ["[192, 16]"]),
        (lambda at, x: (x.cos(), x * at), []),  # of every element
        (lambda at, x: (at.cos(), x @ at.sin().t()), []),  # in memory anyway
        (lambda at, x: (x[:1, :4] * at.cos(),), []),  # too seldom read
        (lambda at, x: (x[:, :4] * at[:, :1].cos(),), []),  # by too few
        (lambda at, x: (x + at.cos().sum(),), []),
        (lambda at, x: (x.half() * (c := at.cos()).half(), x * c.double().float()), ["[192, 16]"]),  # cast by each
        (lambda at, x: (x * at.cos(), x + (at * 1.0).cos(), x - at.cos()), ["[192, 16]"] * 2),  # equal ones are one
        (lambda at, x: (lambda c, d: (x * (d * 2.0), x + (c * 2.0)))(at.cos(), at.cos()), ["[192, 16]"]),  # in order
        (lambda at, x: (x * at.sum().cos(),), []),  # a number
        (lambda at, x: (x * (x[:1, :1] * at.cos()),), ["[1, 1, 192, 16]"]),
        (lambda at, x: (x * (x[:, :1] * at.cos()),), []),  # made with what is larger
    ],
)
def test_what_is_a_table(f: Callable[..., Any], shapes: list[str]) -> None:
    found, graph = of(f, AT, X)
    assert [t.shape for t in found] == shapes
    assert sum(n.target is STORED for n in graph.nodes) == len(shapes)


def test_every_reader_has_the_stored_value() -> None:
    def f(at: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        cos = at.cos()
        return x * cos, x + cos[None], cos

    _, graph = of(f, AT, X)
    (stored,) = (n for n in graph.nodes if n.target is STORED)
    (cos,) = stored.all_input_nodes
    assert list(cos.users) == [stored] and len(stored.users) == 3
    assert stored.meta["val"].shape == AT.shape


def test_a_few_elements_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert tables.WORTH > 1 << 20
    assert of(lambda at, x: (x * at.cos(),), AT, X)[0] == ()


def test_the_stored_value_is_the_value() -> None:
    x = torch.rand(3, 5, dtype=torch.float64).t()
    y = STORED(x)
    assert torch.equal(x, y) and y.data_ptr() != x.data_ptr()
    torch.library.opcheck(STORED, (x,))


def test_a_batch_that_grows() -> None:
    """One graph with symbolic sizes."""
    lin = nn.Linear(SIZE, SIZE, bias=False).double()

    def f(x: Tensor) -> Tensor:
        y: Tensor = lin(x)
        return y * torch.arange(x.shape[2], dtype=x.dtype)[:, None].cos()

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="coda", options=REFERENCE, dynamic=True)
    for batch in (2, 3, 5):
        x = torch.rand(batch, HEADS, LENGTH, SIZE, dtype=torch.float64)
        assert float((compiled(x) - f(x)).detach().abs().max()) < 1e-12


def test_it_is_said() -> None:
    ran = run(Rotary().double(), inputs(), options=REFERENCE | {"disable": "halves"})
    (report,) = ran.reports
    assert [t.shape for t in report.tables] == [f"[{LENGTH}, {SIZE}]"] * 2
    assert all(HERE in t.source for t in report.tables)
    for name, stored in (("pair", 0), ("bilinearity", 0), ("tables", 2), ("pair,tables", 2)):
        assert len(run(Rotary().double(), inputs(), options=REFERENCE | {"only": name}).reports[0].tables) == stored
    facts = explain(Rotary().double(), (inputs(),), {}, "train", Settings(target="reference"))
    assert [t["shape"] for t in facts["graphs"][0]["tables"]] == [f"[{LENGTH}, {SIZE}]"] * 2
    assert f"2 tables [{LENGTH}, {SIZE}] computed once" in render(facts)
    assert facts["totals"]["saved_bytes"] <= facts["totals"]["saved_bytes_inductor"] + 2 * 8 * LENGTH * SIZE


def test_a_table_is_no_step_of_a_program() -> None:
    """It is where its formula was."""
    (graph,) = program(Rotary().double(), (inputs(),), {}, "infer", Settings(target="reference"))["graphs"]
    assert graph["untouched"] == "" and not any("stored" in str(step.get("what")) for step in graph["after"])
    assert len(graph["after"]) == len(graph["before"]) + 1  # one pass makes both
