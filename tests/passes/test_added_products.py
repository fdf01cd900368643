"""Products that are added up in a float32 matrix, as the weight's gradient of a head in blocks of rows, as Regions that
do so in its memory. On a machine that is pretended, with `large` counted from 32."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import pretend, run
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Let, Operand, Product, Region, Store
from coda_inductor.kernels import launch
from coda_inductor.measure import timing
from coda_inductor.ops.custom import ADD_PRODUCT_, ADDED_UP
from coda_inductor.passes import plain
from coda_inductor.passes.plain import Found, as_region, write_plain

TOKENS, WIDTH, VOCABULARY, CHUNK = 768, 64, 512, 256
pytestmark = pytest.mark.usefixtures("uncached")
bf16, f32 = torch.bfloat16, torch.float32
OPTIONS: dict[str, Any] = {"chunk": CHUNK, "strict": True}
IN_PLACE = re.compile(r"coda_[0-9a-f]{16}\(\[.*, (\w+)\], \[(\w+)\]\)")


class Head(nn.Module):
    """A head with its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), y)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setattr(plain, "ADDED_LEAST", 32)


def drawn() -> tuple[Head, Tensor, Tensor]:
    """A head, and what it is given."""
    model = Head().to(bf16)
    return model, torch.randn(TOKENS, WIDTH, dtype=bf16), torch.randint(0, VOCABULARY, (TOKENS,))


def error(model: Head, x: Tensor, y: Tensor, gradient: Tensor) -> float:
    """Of the weight's gradient, against float64."""
    exact = copy.deepcopy(model).double()
    (wanted,) = torch.autograd.grad(exact(x.double(), y), [exact.head.weight])
    return float((gradient.double() - wanted).norm() / wanted.norm())


def test_the_weights_gradient_is_added_up_in_its_memory(machine: None) -> None:
    """Of three blocks the first makes the matrix, and the others add to it where it lies."""
    model, x, y = drawn()
    compiled = torch.compile(model, backend="coda", options=OPTIONS)
    loss, (code,) = run_and_get_code(compiled, x, y)
    calls = [found.groups() for found in IN_PLACE.finditer(code) if found[1] == found[2]]
    assert len(calls) == 2 and len({*calls}) == 1 and launch.FALLBACKS.total() == 0
    loss.backward()
    (eager,) = torch.autograd.grad(model(x, y), [model.head.weight])
    assert model.head.weight.grad is not None
    assert error(model, x, y, model.head.weight.grad) < 1.1 * error(model, x, y, eager)


def test_a_region_for_each_block(machine: None) -> None:
    """All but the first, of equal blocks one kernel; in the report they are bare, as other products."""
    ran = run(*drawn(), grad=True, options=OPTIONS)
    assert ran == []
    (report,) = ran.reports
    added = [site.region for site in report.sites if site.region.accumulates]
    assert len(added) == 2 and len({region.digest for region in added}) == 1
    assert (added[0].n, added[0].depth, added[0].products[0].a_layout) == (WIDTH, CHUNK, "km")


@pytest.mark.parametrize("options", [{"disable": "bare"}, {"tune": "quick"}], ids=["switched off", "slower"])
def test_what_does_not_win_is_cublass(machine: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]) -> None:
    """The kernel is measured against what adds the product otherwise."""

    def slower(calls: Sequence[object], rounds: int, **how: object) -> list[timing.Times]:
        return [timing.Times(2.0 - i, 2.0 - i) for i in range(len(calls))]

    if "tune" in options:
        monkeypatch.setattr(timing, "compared", slower)
    ran = run(*drawn(), grad=True, options=OPTIONS | options)
    (report,) = ran.reports
    assert report.blocks and not any(site.region.accumulates for site in report.sites)


def sums() -> tuple[fx.Graph, list[fx.Node]]:
    """Products of [768, 512] transposed and [768, 64], each added to the one before, behind that which makes it."""
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    turned = graph.call_function(torch.ops.aten.permute.default, (left, [1, 0]))
    made = [graph.call_function(ADDED_UP, (None, turned, right))]
    made += [graph.call_function(ADDED_UP, (made[-1], turned, right))]
    made += [graph.call_function(ADDED_UP, (made[-1], turned, right))]
    graph.output((made[-1],))
    with FakeTensorMode() as mode:
        values = {left: torch.randn(TOKENS, VOCABULARY, dtype=bf16), right: torch.randn(TOKENS, WIDTH, dtype=bf16)}
        for node, value in values.items():
            node.meta["val"] = mode.from_tensor(value)
        turned.meta["val"] = left.meta["val"].t()
        for node in made:
            node.meta["val"] = torch.empty(VOCABULARY, WIDTH)
    return graph, made


def test_each_adds_to_what_the_one_before_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written one after the other, as Regions whose meaning is the interpreter's: the sum of all."""
    monkeypatch.setattr(plain, "ADDED_LEAST", 32)
    graph, made = sums()
    found: Found = {node: read for node in made if (read := as_region(node)) is not None}
    assert [*found] == made[1:] and all(region.accumulates for region, _ in found.values())
    outputs = write_plain(graph, "reference", found)
    assert outputs[1].args[0] is outputs[0] and outputs[0].args[0] is made[0]
    graph.lint()
    left, right = torch.randn(TOKENS, VOCABULARY, dtype=bf16), torch.randn(TOKENS, WIDTH, dtype=bf16)
    (total,) = fx.GraphModule(nn.Module(), graph)(left, right)
    torch.testing.assert_close(total, 3 * (left.t().float() @ right.float()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("spoilt", ["strided", "of another dtype", "small", "odd"])
def test_what_a_kernel_cannot_add_to(monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    monkeypatch.setattr(plain, "ADDED_LEAST", 128 if spoilt == "small" else 32)
    _, (first, second, _) = sums()
    assert (as_region(second) is None) is (spoilt == "small")
    if spoilt == "strided":
        first.meta["val"] = torch.empty(WIDTH, VOCABULARY).t()
    elif spoilt == "of another dtype":
        first.meta["val"] = torch.empty(VOCABULARY, WIDTH, dtype=bf16)
    elif spoilt == "odd":
        second.meta["val"] = torch.empty(VOCABULARY - 4, WIDTH)
    assert as_region(second) is None


def added(store: str = "sum", operand: str = "tile", op: str = "add", dtype: str = "f32") -> Region:
    """[M, 64] with something added."""
    product = Product("acc0", 0, 1, 128, "kn", a_layout="km")
    lets = (Let("sum", op, ("acc0", "into")),)
    return Region(64, "bf16", (product,), (Operand("into", operand, "f32"),), lets, (Store(store, dtype),), ())  # type: ignore[arg-type]


def test_which_regions_accumulate() -> None:
    assert added().accumulates
    others = [added("acc0"), added(operand="feature"), added(op="mul"), added(dtype="bf16")]
    assert not any(region.accumulates for region in others)


def test_the_operation_that_adds_by_a_region() -> None:
    """In place; the same as by the interpreter."""
    region = added()
    left, right, into = torch.randn(128, 96).to(bf16), torch.randn(128, 64).to(bf16), torch.randn(96, 64)
    (wanted,) = interpret(region, [left, right, into])
    given = into.clone()
    assert torch.equal(ADDED_UP(into, left, right, region.text, "reference"), wanted) and torch.equal(given, into)
    ADD_PRODUCT_(given, left, right, region.text, "reference")
    assert torch.equal(given, wanted)
