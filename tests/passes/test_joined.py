"""A product of two tensors beside each other becomes one of each: which do, in float64 as eager, and when it stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, close, pretend, run
from evaluate import error, strict_reference
from torch import Tensor, fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from coda_inductor.core.region import SAMPLE, parse
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.explain.facts import explain
from coda_inductor.inductor import partition
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.passes.joined import fits, rejoined, split_joined
from coda_inductor.passes.switches import NAMES
from coda_inductor.patterns import graph as g

pytestmark = pytest.mark.usefixtures("uncached")
D, N = 32, 64
Join = Callable[[Tensor, Tensor], Tensor]


def beside(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], -1)


def first(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([b, a], 2)


def flat(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a.flatten(0, 1), b.flatten(0, 1)], 1).view(*a.shape[:2], -1)


def thrice(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b, a], -1)


def itself(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([b, b], -1)


def odd(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b[..., : N - 4]], -1)


def tokens(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b[..., :D]], 1)


def mixed(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b.float()], -1).to(a.dtype)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], -1) * 2


ONE, NONE = (beside, first, flat), (thrice, itself, odd, tokens, mixed, scaled)


class Block(nn.Module):
    """Attention and an MLP of one input, and the projection of both, as parallel blocks have it."""

    def __init__(self, join: Join = beside, bias: bool = True, d: int = D, n: int = N, twice: bool = False) -> None:
        super().__init__()
        self.q, self.up, self.join, self.twice = nn.Linear(d, d, bias=bias), nn.Linear(d, n, bias=bias), join, twice
        with torch.device("meta"):
            width = join(torch.empty(1, 1, d), torch.empty(1, 1, n)).shape[-1]
        self.out = nn.Linear(width, d, bias=bias)

    def forward(self, x: Tensor) -> Any:
        q = self.q(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        both = self.join(a, F.gelu(self.up(x)))
        y: Tensor = self.out(both)
        y = torch.add(x, y) if y.shape == x.shape else y  # of twice as many tokens
        return (y, both.amax()) if self.twice else y


class Columns(nn.Module):
    """A weight that lies as Conv1D's, and nothing behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, N)
        self.out = nn.Parameter(torch.randn(D + N, 48))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.sin(), torch.tanh(self.up(x))], -1) @ self.out


def given(dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 8, D, dtype=dtype, requires_grad=grad)


def unlike(model: nn.Module, *inputs: Tensor, inductor: bool = False) -> list[bool]:
    """Of the sums of two products that are made of a model: are they of unlike K? What it returns is as eager's."""
    REPORTS.clear()
    with strict_reference(run=inductor), torch.no_grad():
        found, wanted = torch.compile(model, backend="coda")(*inputs), model(*inputs)
    for mine, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True):
        assert mine.stride() == theirs.stride() and error(mine, theirs) < 1e-10
    (report,) = REPORTS
    return [site.region.unlike for site in report.sites if site.region.summed]


@pytest.mark.sampled
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("join", ONE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("inductor", [False, True], ids=["interpreted", "inductor"])
def test_the_copy_is_never_made(join: Join, bias: bool, inductor: bool) -> None:
    assert unlike(Block(join, bias).double(), given(), inductor=inductor) == [True]
    assert unlike(Block(join, bias, n=D).double(), given(), inductor=inductor) == [False]


def test_a_weight_in_columns() -> None:
    assert unlike(Columns().double(), given()) == [True]


class Stream(nn.Module):
    """A single-stream block of a diffusion transformer: what shifts, scales and gates the tokens is a vector of each
    image."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.q, self.up = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, N)
        self.out = nn.Linear(D + N, D)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shift, scale, gate = self.condition(F.silu(t))[:, None].chunk(3, -1)
        n = F.layer_norm(x, (D,)) * (1 + scale) + shift
        q = self.q(n).unflatten(-1, (-1, 16)).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        out: Tensor = x + gate * self.out(torch.cat([a, F.gelu(self.up(n), approximate="tanh")], -1))
        return out


@pytest.mark.parametrize(("batch", "extent"), [(1, "feature"), (2, "sample")])
def test_a_gate_of_each_image(batch: int, extent: str) -> None:
    torch.manual_seed(0)
    x, t = torch.randn(batch, SAMPLE, D, dtype=torch.float64), torch.randn(batch, D, dtype=torch.float64)
    assert unlike(Stream().double(), x, t) == [True]
    (region,) = [site.region for site in REPORTS[0].sites if site.region.unlike]
    assert sorted(o.extent for o in region.operands) == ["feature", extent, "tile"] and parse(region.text) == region


@pytest.mark.parametrize("join", NONE, ids=lambda f: f.__name__)
def test_what_is_beside_each_other_otherwise(join: Join) -> None:
    assert unlike(Block(join).double(), given()) == []


def test_others_read_the_copy() -> None:
    assert unlike(Block(twice=True).double(), given()) == []


class Attended(nn.Module):
    """What no epilogue makes is beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2 * D, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, self.out(torch.cat([x.sin(), y], -1)))


def test_no_epilogue_makes_a_piece() -> None:
    assert unlike(Attended().double(), given(), given()) == []


@pytest.mark.sampled
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("join", ONE, ids=lambda f: f.__name__)
def test_gradients(join: Join, frozen: bool) -> None:
    """Of the weight and of both pieces, also if the weight has none. Those of both pieces lie as in eager: cuDNN's
    attention may have planned its backward for that."""
    model, x = Block(join).double(), given(grad=True)
    model.out.weight.requires_grad_(not frozen)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    REPORTS.clear()
    with strict_reference(run=True):
        out = torch.compile(model, backend="coda")(x)
        found = [out, *torch.autograd.grad(out.sin().sum(), wanted)]
    out = model(x)
    for mine, theirs in zip(found, [out, *torch.autograd.grad(out.sin().sum(), wanted)], strict=True):
        assert mine.stride() == theirs.stride() and error(mine, theirs) < 1e-10
    regions = [site.region for site in REPORTS[0].sites]
    assert any(region.unlike for region in regions)


@pytest.mark.parametrize("join", ONE, ids=lambda f: f.__name__)
def test_attention_finds_its_gradient_where_it_was(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's backward (torch 2.11) may have been planned by eager, for the layout that eager's gradient has."""
    found = list[tuple[int, ...]]()

    def seen(forward: fx.Graph, backward: fx.Graph, results: int) -> int:
        given = [n.meta["val"] for n in backward.find_nodes(op="placeholder")]
        FakeTensorProp(fx.GraphModule({}, backward), given[0].fake_mode).propagate_dont_convert_inputs(*given)
        (call,) = [n for n in backward.nodes if "attention" in str(n.target) and "backward" in str(n.target)]
        found.append(call.args[0].meta["val"].stride())
        return 0

    monkeypatch.setattr(partition, "keep_inputs", seen)
    model, x = Block(join).double(), given(grad=True)
    for disable in ("", ",".join(NAMES)):
        torch._dynamo.reset()
        with strict_reference(run=True):
            torch.compile(model, backend="coda", options={"disable": disable})(x).sin().sum().backward()
    assert found[0] == found[1] and D + N in found[0]


class Given(nn.Module):
    """A piece is an input, or a view of one."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.up, self.out, self.turned = nn.Linear(D, N), nn.Linear(D + N, D), turned

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        made: Tensor = self.out(torch.cat([z.view_as(x) if self.turned else z, F.gelu(self.up(x))], -1))
        return made


@pytest.mark.parametrize("turned", [False, True])
def test_an_input_is_written_before_the_backward(turned: bool) -> None:
    """The gradient of the weight is of what the input was."""
    torch.manual_seed(0)
    model, x, z = Given(turned).double(), given(grad=True), torch.randn(3, 8, D, dtype=torch.float64)

    def gradients(call: Any) -> tuple[Tensor, ...]:
        mine = z.clone()
        loss = call(x, mine).sin().sum()
        mine.mul_(2)
        return torch.autograd.grad(loss, [x, *model.parameters()])

    with strict_reference(run=True):
        found = gradients(torch.compile(model, backend="coda"))
    assert all(error(mine, theirs) < 1e-10 for mine, theirs in zip(found, gradients(model), strict=True))


class Neighbours(nn.Module):
    """What lies beside each other is also added up over neighbours: a product's right operand."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out, self.near = nn.Linear(D, N), nn.Linear(D + N, D), nn.Linear(D + N, D)

    def forward(self, x: Tensor, adjacent: Tensor) -> Tensor:
        both = torch.cat([x.sin(), F.gelu(self.up(x))], 1)
        made: Tensor = self.out(both) + self.near(adjacent @ both)
        return made


@pytest.mark.parametrize("grad", [False, True])
def test_a_product_reads_it_as_its_right_operand(grad: bool) -> None:
    torch.manual_seed(0)
    model, x, near = Neighbours().double(), torch.randn(24, D).double(), torch.randn(24, 24).double()
    x.requires_grad_(grad)
    with strict_reference(run=True), torch.set_grad_enabled(grad):
        out, wanted = torch.compile(model, backend="coda")(x, near), model(x, near)
        found = torch.autograd.grad(out.sin().sum(), [x, *model.parameters()]) if grad else ()
        theirs = torch.autograd.grad(wanted.sin().sum(), [x, *model.parameters()]) if grad else ()
    assert all(error(a, b) < 1e-10 for a, b in zip((out, *found), (wanted, *theirs), strict=True))


@pytest.mark.parametrize("disable", ["pointwise,statistic", "summed", "parts", "joined"])
def test_what_no_region_takes_stays_as_it_came(disable: str) -> None:
    """The copy, or the gradient of both, or both of them."""
    model, x = Block().double(), given(grad=True)
    wanted = [x, *model.parameters()]
    with strict_reference(run=True):
        out = torch.compile(model, backend="coda", options={"disable": disable})(x)
        found = [out, *torch.autograd.grad(out.sin().sum(), wanted)]
    out = model(x)
    for mine, theirs in zip(found, [out, *torch.autograd.grad(out.sin().sum(), wanted)], strict=True):
        assert error(mine, theirs) < 1e-10


def split(join: Join, mode: Any = "infer", **kwargs: Any) -> int:
    """How many products of a graph are split."""
    found, x = list[int](), torch.empty(3, 8, D, dtype=torch.bfloat16, requires_grad=True)
    capture(Block(join, **kwargs).bfloat16(), (x,), {}, mode, lambda graph: found.append(len(split_joined(graph))))
    return found[0]


def test_which_are_split() -> None:
    assert [split(join) for join in ONE] == [1] * len(ONE)
    assert [split(join) for join in NONE] == [0] * len(NONE)
    assert [split(join, "train") for join in (*ONE, *NONE)] == [1] * len(ONE) + [0] * len(NONE)
    assert split(beside, twice=True) == split(beside, "train", twice=True) == 0


def test_a_piece_of_another_dtype_or_width() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(8, 16, dtype=torch.bfloat16)
    whole = torch.empty(8, 48, dtype=torch.bfloat16)
    assert fits(node, whole)
    assert not fits(node, whole.float())
    assert not fits(node, whole[None])
    node.meta["val"] = torch.empty(8, 12, dtype=torch.bfloat16)
    assert not fits(node, whole)


def test_what_is_overwritten_is_copied_first() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(D, N), nn.Linear(D + N, D)

        def forward(self, x: Tensor) -> Tensor:
            both = torch.cat([x, F.gelu(self.up(x))], -1)
            x.mul_(2)
            return torch.add(self.out(both), x)

    torch.manual_seed(0)
    model, x = Model().double(), given()
    with strict_reference(run=True), torch.no_grad():
        mine, theirs = x.clone(), x.clone()
        REPORTS.clear()
        assert error(torch.compile(model, backend="coda")(mine), model(theirs)) < 1e-10
        assert torch.equal(mine, theirs)
    assert not any(site.region.summed for report in REPORTS for site in report.sites)


@pytest.mark.parametrize("options", [{"disable": "joined"}, {"disable": "summed"}, {"numerics": "strict"}], ids=str)
def test_switches_and_strict_leave_it(options: dict[str, str]) -> None:
    """Strict rounds each product before they are added up."""
    model, x = Block().double(), given()
    ran = run(model, x, options=REFERENCE | options)
    with torch.no_grad():
        close(ran.output, model(x))
    assert not any(site.region.summed for report in ran.reports for site in report.sites)


def test_sizes_that_are_symbols() -> None:
    model = Block(flat).double()
    with strict_reference(run=False), torch.no_grad():
        compiled = torch.compile(model, backend="coda", dynamic=True)
        for rows in (8, 12):
            x = torch.randn(3, rows, D, dtype=torch.float64)
            assert error(compiled(x), model(x)) < 1e-10


@pytest.mark.parametrize("model", [Columns(), Block()], ids=["columns", "rows"])
def test_the_baseline_is_the_graph_as_it_came(model: nn.Module) -> None:
    """Of a graph that ran once in two products."""
    x, graphs = given(), list[fx.Graph]()
    capture(model.double(), (x,), {}, "infer", lambda graph: graphs.append(g.copied(graph)))
    (graph,) = graphs
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    values = [drawn(n) for n in inputs]
    results, counts = list[Tensor](), list[int]()
    for change in (lambda graph: None, split_joined, rejoined):
        change(graph)
        graph.lint()
        results.append(fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*values)[0])
        counts.append(sum(n.target is torch.ops.aten.cat.default for n in graph.nodes))
    assert counts == [1, 0, 1]
    assert all(error(found, results[0]) < 1e-10 for found in results)


def drawn(node: fx.Node) -> Tensor:
    return torch.randn(node.meta["val"].shape, dtype=torch.float64)


def test_a_tuner_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the graph in one piece, on a machine that is pretended."""
    pretend(monkeypatch, tmp_path)
    torch.manual_seed(0)
    model, x = Block(d=64, n=128).bfloat16(), torch.randn(2, 256, 64, dtype=torch.bfloat16)
    for off, count in (("", 1), ("summed", 0)):
        with torch.no_grad():
            ran = run(model, x, options={"disable": off, "strict": True})
            assert error(ran.output, model(x)) < 2e-2
        assert sum(site.region.unlike for r in ran.reports for site in r.sites) == count


def test_bytes() -> None:
    """The copy is gone, and what its loop made of the MLP leaves the epilogue."""
    with torch.device("meta"):
        model, x = Block(d=512, n=2048).bfloat16(), torch.empty(4, 1024, 512, dtype=torch.bfloat16)
    found = [explain(model, (x,), {}, "infer", Settings(target=t))["totals"] for t in ("sm_90a", "sm_100a")]
    assert [facts["passes_left"] for facts in found] == [0, 1]
    moved = 2 * 4096 * 2 * (512 + 2048)
    assert moved * 0.9 < found[1]["bytes_after"] - found[0]["bytes_after"] <= moved
