"""Gradients from outside are expected to lie as the outputs do: where, that no copy of them is made then, and that
every gradient is right however they lie. torch 2.13 expects it by itself, so these tests take that away first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiling import REFERENCE
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.testing._internal.two_tensor import TwoTensor

from coda_inductor.core.settings import Settings
from coda_inductor.inductor.tangents import as_outputs
from coda_inductor.patterns.graph import is_tangent

BATCH, TOKENS, HEADS, SIZE = 2, 160, 4, 16
WIDTH = HEADS * SIZE
PERMUTED = (TOKENS * WIDTH, SIZE, WIDTH, 1)
CONTIGUOUS = (TOKENS * WIDTH, TOKENS * SIZE, SIZE, 1)

pytestmark = pytest.mark.usefixtures("uncached", "contiguous")


@pytest.fixture
def contiguous() -> Iterator[None]:
    """As torch 2.11 has it."""
    with functorch_config.patch(guess_tangent_strides_as_outputs=False):
        yield


class Heads(nn.Module):
    """The stream, and q and v with their heads before the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, v = (y.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for y in (self.q(x), self.v(x)))
        return x * 2, q.sigmoid(), v.exp()


def inputs() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)


class Seen(CustomGraphPass):
    """The strides of the gradients that joint graphs expect."""

    def __init__(self) -> None:
        self.strides: list[tuple[int, ...]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.strides += [n.meta["val"].stride() for n in graph.nodes if is_tangent(n)]

    def uuid(self) -> Any:
        return None


def turned(t: Tensor) -> Tensor:
    """What attention's backward returns: by token, seen by head."""
    return t.transpose(1, 2) if t.dim() == 4 else t


def by_head(t: Tensor) -> Tensor:
    return turned(t).contiguous()


def expanded(t: Tensor) -> Tensor:
    return turned(t)[..., :1].expand_as(turned(t))


LIES = {"as outputs": (turned, 0), "by head": (by_head, 2), "expanded": (expanded, 3)}


def step(f: Callable[..., Any], model: nn.Module, lies: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], int]:
    """Every gradient, for random ones that lie so, and how many copies were made on the way back."""
    x = inputs().requires_grad_()
    out = f(x)
    torch.manual_seed(1)
    grads = [lies(torch.randn(turned(o).shape, dtype=x.dtype)) for o in out]
    with torch.profiler.profile(record_shapes=True) as seen:
        found = torch.autograd.grad(out, [x, *model.parameters()], grads)
    shapes = [list(o.shape) for o in out]  # inside, whoever copies copies [tokens, features]
    return list(found), sum(e.name == "aten::copy_" and e.input_shapes[0] in shapes for e in seen.events())


def compiled(model: nn.Module, **options: Any) -> tuple[Any, Seen]:
    torch._dynamo.reset()
    seen = Seen()
    inductor = {"inductor.joint_custom_pre_pass": seen}
    return torch.compile(model, backend="coda", options=REFERENCE | {"strict": True} | inductor | options), seen


@pytest.mark.parametrize("how", LIES)
def test_gradients_that_lie_as_the_outputs_are_not_copied(how: str) -> None:
    torch.manual_seed(2)
    model, (lies, copies) = Heads().double(), LIES[how]
    wanted, _ = step(model, model, lies)
    f, seen = compiled(model)
    found, copied = step(f, model, lies)
    assert seen.strides == [(TOKENS * WIDTH, WIDTH, 1), PERMUTED, PERMUTED]
    for a, b in zip(found, wanted, strict=True):
        assert a.stride() == b.stride() and float((a - b).norm() / b.norm()) < 1e-12
    assert copied == copies
    assert not functorch_config.guess_tangent_strides_as_outputs


def test_switched_off_they_are_contiguous() -> None:
    """As torch would have it, and with what _ONLY does not name."""
    torch.manual_seed(2)
    model = Heads().double()
    for options in ({"disable": "layouts"}, {"only": "pointwise"}):
        f, seen = compiled(model, **options)
        _, copied = step(f, model, turned)
        assert seen.strides == [(TOKENS * WIDTH, WIDTH, 1), CONTIGUOUS, CONTIGUOUS] and copied == 2
    f, seen = compiled(model, only="layouts")
    assert step(f, model, turned)[1] == 0 and PERMUTED in seen.strides


def dynamo(f: Callable[..., Any], *args: Tensor, dynamic: bool | None = None) -> fx.GraphModule:
    """Dynamo's graph of f."""
    graphs = list[fx.GraphModule]()

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(f, backend=keep, fullgraph=True, dynamic=dynamic)(*args)
    return graphs[0]


def heads(y: Tensor) -> Tensor:
    return y.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "by token": (lambda x: (x * 2, heads(x.sin())), True),
    "of one token": (lambda x: heads(x[:, :1].sin()), False),  # contiguous
    "of one sample": (lambda x: heads(x[:1].sin()), True),
    "contiguous": (lambda x: (x * 2, x.sin()), False),
    "contiguous, and one by token without a gradient": (lambda x: (x * 2, heads(x.detach().sin())), False),
    "one head": (lambda x: x.sin().unflatten(-1, (1, WIDTH)).transpose(1, 2), False),  # contiguous
    "expanded beside": (lambda x: (heads(x.sin()), x.sum(-1, keepdim=True).expand_as(x)), False),
    "holes beside": (lambda x: (heads(x.sin()), x.cos()[..., :3]), False),
    "holes": (lambda x: heads(x.cos())[..., :3], False),
    "holes without a gradient": (lambda x: (heads(x.sin()), x.detach().cos()[..., :3]), True),
    "numbers beside": (lambda x: (heads(x.sin()), x.detach().int(), x.shape[0]), True),
    "a cache": (lambda x: (x * 2, (k := heads(x.sin())), k.softmax(-1).sum(-1)), False),
    "a cache, and queries": (lambda x: (heads(x.cos()), (k := heads(x.sin())), k.softmax(-1).sum(-1)), False),
    "a cache that is another view": (lambda x: (heads(y := x.sin()), heads(y).softmax(-1).sum(-1)), False),
    "read as it was before": (lambda x: (heads(y := x.sin()), y.sum(-1)), False),
    "an input": (lambda x: (heads(x), x.sin()), False),
    "two views": (lambda x: (heads(y := x.sin()), y.flatten(0, 1)), True),
    "logits": (lambda x: x.sin().transpose(1, 2), False),  # by the class, for a loss, which returns them so
    "turned weight": (lambda x: x.sin().flatten(0, 1).t(), False),
    "tokens last": (lambda x: heads(x.sin()).transpose(2, 3), False),
    "complex": (lambda x: heads(torch.complex(x.sin(), x)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_where_they_are_expected(name: str) -> None:
    f, wanted = CASES[name]
    gm = dynamo(f, inputs().requires_grad_())
    assert as_outputs(gm, Settings()) == wanted
    assert not as_outputs(gm, Settings(disable=frozenset({"layouts"})))
    with functorch_config.patch(guess_tangent_strides_as_outputs=True):
        assert as_outputs(gm, Settings(disable=frozenset({"layouts"})))


def test_without_gradients_nothing_is_expected() -> None:
    with torch.no_grad():
        assert not as_outputs(dynamo(lambda x: heads(x.sin()), inputs()), Settings())


def test_unknown_sizes_and_values_are_left_to_torch() -> None:
    x = inputs().requires_grad_()
    f = CASES["by token"][0]
    assert not as_outputs(dynamo(f, x, dynamic=True), Settings())
    gm = dynamo(f, x)
    assert as_outputs(gm, Settings())
    gm.graph.output_node().all_input_nodes[0].meta.pop("example_value")
    assert not as_outputs(gm, Settings())


def test_subclasses_are_left_to_torch() -> None:
    two = TwoTensor(inputs(), inputs()).requires_grad_()
    assert not as_outputs(dynamo(lambda x: heads(x.sin()), two), Settings())


@pytest.mark.parametrize("nested", [False, True])
def test_outputs_of_other_sizes_are_left_to_torch(nested: bool) -> None:
    local_map_hop = pytest.importorskip("torch._higher_order_ops.local_map").local_map_hop
    gm = dynamo(CASES["by token"][0], inputs().requires_grad_())
    assert as_outputs(gm, Settings())
    graph = fx.Graph() if nested else gm.graph
    at = graph.placeholder("x") if nested else graph.find_nodes(op="placeholder")[0]
    with graph.inserting_after(at):
        graph.call_function(local_map_hop, (None, at))
    if nested:
        gm.add_submodule("nested", fx.GraphModule({}, graph))
    assert not as_outputs(gm, Settings())


def test_expanded_outputs_are_right() -> None:
    """torch 2.11 would copy a gradient into what has one place for many elements."""
    model = nn.Linear(WIDTH, WIDTH).double()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x)
        return heads(y), y.sum(-1, keepdim=True).expand(-1, -1, 8)

    def gradients(f: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(3)
        out = f(inputs())
        return list(torch.autograd.grad(out, list(model.parameters()), [torch.randn(o.shape).double() for o in out]))

    wanted = gradients(f)
    torch._dynamo.reset()
    found = gradients(torch.compile(f, backend="coda", options=REFERENCE | {"strict": True}))
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-12
