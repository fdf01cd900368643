"""What the laws do to joint graphs: each firing is an equality in float64, and each law of the backward is a switch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Set
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import Graph, Read, error, strict_reference
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from transformer_blocks import KINDS, stack, steps
from zoo import WIDTH, Attention, Mlp, Norm

from coda_inductor.inductor import joint_pass
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report
from coda_inductor.patterns.terms import Term, Terms
from coda_inductor.plan import search
from coda_inductor.rewrite import beside, triangle
from coda_inductor.rewrite.derive import derive
from coda_inductor.rewrite.laws import LAWS
from coda_inductor.rewrite.limits import NONE
from coda_inductor.rewrite.program import Program

ALL = frozenset(law.name for law in LAWS)


class Decoder(nn.Module):
    """Two layers with rotary embeddings: the statistics of their norms' gradients lie beside attention."""

    def __init__(self, norm: str = "hf", bias: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(norm) for _ in range(4))
        self.attention = nn.ModuleList(Attention(WIDTH, 4, 2, bias, rope=True) for _ in range(2))
        self.mlps = nn.ModuleList(Mlp("separate", "F.silu", WIDTH, 24, bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return x


class Relu(nn.Module):
    """Two norms, each before a plain feed-forward layer with ReLU."""

    def __init__(self, norm: str = "hf", bias: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(norm) for _ in range(2))
        self.mlps = nn.ModuleList(Mlp("plain", "relu", WIDTH, 24, bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return x


class Squared(Relu):
    """The same with the square of ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(Mlp("plain", "relu squared", WIDTH, 24, False) for _ in range(2))


class Adapters(nn.Module):
    """Two norms, each before a layer with an adapter: the sums of both its products are one sum with their result."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm("hf") for _ in range(2))
        self.ups, self.downs = (
            nn.ModuleList(nn.Linear(*s, False) for _ in range(2)) for s in ((WIDTH, 24), (24, WIDTH))
        )
        self.into, self.back = (nn.ModuleList(nn.Linear(*s, False) for _ in range(2)) for s in ((WIDTH, 2), (2, 24)))

    def forward(self, x: Tensor) -> Tensor:
        layers = zip(self.norms, self.ups, self.downs, self.into, self.back, strict=True)
        for norm, up, down, into, back in layers:
            n = norm(x)
            x = x + down(torch.tanh(up(n) + back(into(n)) * 1.5))
        return x


class Biased(nn.Module):
    """Two layers of attention whose biases are added to their products, or, `apart`, behind them; keys are copied."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart, self.norms = apart, nn.ModuleList(Norm("LayerNorm") for _ in range(2))
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5 for _ in range(8))
        self.biases = nn.ParameterList(10 * torch.randn(WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, norm in enumerate(self.norms):
            n, parts = norm(x), []
            for w, b in ((self.weights[4 * i + j], self.biases[3 * i + j]) for j in range(3)):
                y = F.linear(n, w) + b if self.apart else F.linear(n, w, b)
                parts.append(y.unflatten(-1, (4, -1)).transpose(1, 2))
            q, k, v = parts
            a = F.scaled_dot_product_attention(q, k.contiguous(), v)
            x = x + F.linear(a.transpose(1, 2).flatten(2), self.weights[4 * i + 3])
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], Set[str]]] = {
    "rotary": (Decoder, {"bilinearity", "triangle", "adjoint"}),
    "rotary, LayerNorm": (
        lambda: Decoder("LayerNorm", True),
        {"bilinearity", "shift", "moments", "triangle", "adjoint"},
    ),
    "relu": (Relu, {"bilinearity", "triangle", "relu"}),
    "relu, LayerNorm": (
        lambda: Relu("LayerNorm", True),
        {"bilinearity", "shift", "moments", "triangle", "relu"},
    ),
    "squared relu": (Squared, {"bilinearity", "triangle", "root"}),
    "adapters": (Adapters, {"bilinearity", "triangle"}),
    "biases apart": (lambda: Biased(True), {"triangle"}),
    **{"-".join(map(str, kind)): (stack(*kind), {"triangle"}) for kind in KINDS},
}


def joint(model: nn.Module, *args: Tensor) -> Graph:
    """The joint graph of the model, with random inputs and tangents."""
    graphs: list[fx.Graph] = []

    def note(graph: fx.Graph, *_: Any, **__: Any) -> Report:
        graphs.append(fx.GraphModule(graph.owning_module, copy.deepcopy(graph)).graph)  # type: ignore[arg-type]
        return Report()

    with strict_reference(run=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_pass, "rewrite", note)
        torch.compile(model, backend="coda")(*args).sum().backward()
    (graph,) = graphs
    values = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    return Graph(graph, [torch.randn(v.shape, dtype=v.dtype) for v in values])


def read(name: str) -> Read:
    torch.manual_seed(0)
    width = WIDTH
    return Read(joint(MODELS[name][0]().double(), torch.randn(2, 6, width, dtype=torch.float64)))


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_each_firing_is_an_equality(name: str) -> None:
    graph = read(name)
    fired = derive(Program(graph.lifted), ALL)
    assert {f.law for f in fired} >= MODELS[name][1]
    for f in fired:
        axes = sorted(f.before.axes)
        assert f.after.axes <= f.before.axes
        before, after = graph.value(f.before), graph.value.at(f.after, axes).expand(graph.value(f.before).shape)
        assert error(after, before) < 1e-9, f


def test_every_law_fires() -> None:
    """On one of these models, so that no law is there for its proof alone. Gauge leaves no receipt, but lets others
    fire; softmax rewrites nodes before there are terms (test_softmax.py)."""
    assert set[str]().union(*(laws for _, laws in MODELS.values())) == ALL - {"gauge", "softmax"}
    graph = read("rotary")
    with_it, without = (len(derive(Program(graph.lifted), laws)) for laws in (ALL, ALL - {"gauge"}))
    assert with_it > without


class Scaled(nn.Module):
    """ReLU of a product that is scaled by feature, and has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), Norm("hf")
        self.up, self.down = nn.Linear(WIDTH, 24, False), nn.Linear(24, WIDTH)
        self.scale, self.bias = nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        y: Tensor = self.down(F.relu(self.up(self.norm(x)) * self.scale + self.bias))
        return x + y


def test_a_scale_by_feature_does_not_leave_the_sum_behind_a_relu() -> None:
    torch.manual_seed(0)
    graph = Read(joint(Scaled().double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)))
    fired = derive(Program(graph.lifted), ALL)
    assert {f.law for f in fired} >= {"triangle"} and "relu" not in {f.law for f in fired}


def test_a_relu_may_drop_what_a_bias_of_minus_infinity_makes() -> None:
    """Its gradient is 0, and 0 times the bias is no number: the bias is not taken out of the sum."""
    torch.manual_seed(0)
    model, x = Relu("LayerNorm", True).double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for mlp in model.mlps:
            next(m.bias for m in mlp.modules() if isinstance(m, nn.Linear) and m.bias is not None)[::3] = -torch.inf
    wanted = steps(model, model, [x], True)
    with strict_reference(run=False):
        REPORTS.clear()
        found = steps(torch.compile(model, backend="coda"), model, [x], True)
    assert "relu" in {law for site in REPORTS[-1].sites for law in site.laws}
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    assert len(pairs) > 8 and all(b.isfinite().all() and error(a, b) < 1e-10 for a, b in pairs)


def test_the_adjoint_keeps_no_tensor_for_a_statistic() -> None:
    """Without it queries are kept from before the rotary embedding as well; with it one table of the embedding, which
    all layers share. The gradients are the same. What keys and values add to the row is summed where their gradients
    meet, with or without."""
    torch.manual_seed(0)
    model, x = Decoder().double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    wanted, kept, laws = steps(model, model, [x], True), [], []
    for off in ("", "adjoint"):
        with strict_reference(run=False):
            REPORTS.clear()
            with (saved := Saved()):
                found = steps(torch.compile(model, backend="coda", options={"disable": off}), model, [x], True)
        kept.append(saved.elements)
        laws.append("adjoint" in {law for site in REPORTS[-1].sites for law in site.laws})
        assert all(a is None or b is None or error(a, b) < 1e-10 for a, b in zip(found, wanted, strict=True))
    queries = 2 * 6 * WIDTH  # of each layer, before the rotary embedding
    table = 6 * 4  # [tokens, columns of a head]
    assert laws == [True, False] and kept[1] + table == kept[0] + 2 * queries


def test_what_attention_reads_is_all_that_is_kept_for_a_statistic() -> None:
    """The products that biases are added to are not, nor what was copied for attention. (A softmax does not see the
    keys' biases: their gradients are rounding.)"""
    torch.manual_seed(0)
    x, kept = torch.randn(2, 6, WIDTH, dtype=torch.float64), list[int]()
    for apart in (False, True):
        model = Biased(apart).double()
        wanted = steps(model, model, [x], True)
        with strict_reference(run=False):
            REPORTS.clear()
            with (saved := Saved()):
                found = steps(torch.compile(model, backend="coda"), model, [x], True)
        kept.append(saved.elements)
        assert any("triangle" in site.laws for site in REPORTS[-1].sites)
        pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
        assert len(pairs) > 14 and all(float(b.norm()) < 1e-10 or error(a, b) < 1e-10 for a, b in pairs)
    assert kept[0] == kept[1]


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the elements that are kept for the backward."""

    def __init__(self) -> None:
        self.elements = 0

        def pack(x: Tensor) -> Tensor:
            self.elements += x.numel()
            return x

        super().__init__(pack, lambda x: x)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def gated(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    h = rms(x + x @ a)
    return (torch.tanh(h @ b) * (h @ c)) @ d


def sandwich(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    h = rms(x + rms(torch.tanh(x @ a) @ b))
    return torch.tanh(h @ c) @ d


def by_its_sum(x: Tensor, a: Tensor, b: Tensor, *_: Tensor) -> Tensor:
    h = x @ a
    return (h * torch.tanh(h.sum(-1, keepdim=True))) @ b


def softmax(x: Tensor, a: Tensor, b: Tensor, *_: Tensor) -> Tensor:
    e = torch.exp(x @ a)
    return (e / e.sum(-1, keepdim=True)) @ b


@pytest.mark.parametrize("f", [gated, sandwich, by_its_sum, softmax], ids=lambda f: f.__name__)
def test_no_epilogue_reads_what_is_made_of_its_own_tile(f: Callable[..., Tensor]) -> None:
    """The user's graph holds the sums that a law has moved; where it computes them they come too late."""
    torch.manual_seed(0)
    args = [torch.randn(12 if i == 0 else 16, 16, dtype=torch.float64, requires_grad=True) for i in range(5)]
    wanted = torch.autograd.grad(f(*args).square().sum(), args, allow_unused=True)
    with strict_reference(run=False):
        found = torch.autograd.grad(torch.compile(f, backend="coda")(*args).square().sum(), args, allow_unused=True)
    assert all(a is None or b is None or error(a, b) < 1e-10 for a, b in zip(found, wanted, strict=True))


def late_nodes_are_read(patch: pytest.MonkeyPatch) -> None:
    def holding(self: Program, t: Term, order: Any, mask: int | None = None) -> Iterator[fx.Node]:
        return (n for n in self.nodes.get(t, ()) if self.layout(n) == (order, True))

    patch.setattr(Program, "holding", holding)
    patch.setattr(search, "circular", lambda made: NONE)  # which would mend it


def the_scale_does_not_leave_the_sum(patch: pytest.MonkeyPatch) -> None:
    affine = beside.affine

    def unscaled(terms: Terms, *rest: Any) -> Any:
        found = affine(terms, *rest)
        return found and (terms.const(1.0), found[1])

    patch.setattr(beside, "affine", unscaled)


def rank_one_parts_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    affine = beside.affine
    patch.setattr(beside, "affine", lambda *args: (found := affine(*args)) and (found[0], []))


def biases_before_a_relu_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    affine = beside.affine
    patch.setattr(triangle, "affine", lambda *args: (found := affine(*args)) and (found[0], []))


def a_difference_is_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(triangle, "_difference", lambda terms, a, b: terms.const(0.0))


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (late_nodes_are_read, lambda: test_no_epilogue_reads_what_is_made_of_its_own_tile(gated)),
    (the_scale_does_not_leave_the_sum, lambda: test_each_firing_is_an_equality("rotary")),
    (rank_one_parts_are_forgotten, lambda: test_each_firing_is_an_equality("rotary, LayerNorm")),
    (biases_before_a_relu_are_forgotten, lambda: test_each_firing_is_an_equality("relu, LayerNorm")),
    (a_difference_is_nothing, lambda: test_each_firing_is_an_equality("pre-layer-True")),
]


@pytest.mark.sampled
@pytest.mark.parametrize("i", range(len(MUTATIONS)), ids=lambda i: MUTATIONS[i][0].__name__)
def test_a_broken_guard_is_seen(i: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises((AssertionError, BackendCompilerFailed)):
        MUTATIONS[i][0](patch)
        MUTATIONS[i][1]()


@pytest.mark.parametrize(("numerics", "some"), [("strict", False), ("default", True)])
def test_strict_uses_no_law(numerics: str, some: bool) -> None:
    """Nor does it move a cast, or add two products up in one accumulator."""
    model = Decoder().double()
    with strict_reference(run=False):
        REPORTS.clear()
        torch.compile(model, backend="coda", options={"numerics": numerics})(
            torch.randn(2, 6, WIDTH).double()
        ).sum().backward()
    sites = [site for report in REPORTS for site in report.sites]
    assert sites and any(site.laws for site in sites) == some
    assert any(site.region.summed for site in sites) <= some
