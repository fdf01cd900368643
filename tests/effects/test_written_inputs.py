"""What the user writes to between forward and backward is refused by the backward that reads it, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import error, strict_reference
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from coda_inductor.inductor import partition

pytestmark = pytest.mark.usefixtures("uncached")
D = 32
Way = Callable[["Layer", Tensor], Tensor]


def plain(layer: Layer, z: Tensor) -> Tensor:
    made: Tensor = layer.first(z)
    return made


def flattened(layer: Layer, z: Tensor) -> Tensor:
    made: Tensor = layer.first(z.flatten(0, 1)).view_as(z)
    return made


def normed(layer: Layer, z: Tensor) -> Tensor:
    made: Tensor = layer.first(F.rms_norm(z, (D,), layer.gain))
    return made


def gated(layer: Layer, z: Tensor) -> Tensor:
    made: Tensor = layer.second(F.gelu(layer.first(layer.gain.expand_as(z))) * z)
    return made


def in_parts(layer: Layer, z: Tensor) -> Tensor:
    a, b = z.chunk(2)
    return torch.cat([layer.first(a), layer.second(b)])


WAYS = (plain, flattened, normed, gated, in_parts)


class Layer(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.way = nn.Linear(D, D), nn.Linear(D, D), way
        self.gain = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.way(self, z) + x


def gradients(model: nn.Module, call: Any, batch: int, write: bool) -> list[Tensor]:
    torch.manual_seed(batch)
    x, z = (torch.randn(batch, 8, D, dtype=torch.float64) for _ in range(2))
    loss = call(x, z).sin().sum()
    if write:
        z.mul_(2)
    return [g for g in torch.autograd.grad(loss, [*model.parameters()], allow_unused=True) if g is not None]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_a_view_of_an_input(way: Way, dynamic: bool) -> None:
    """The backward reads the input in rows of tokens, or a part of it."""
    model = Layer(way).double()
    with strict_reference(run=True):
        compiled = torch.compile(model, backend="coda", dynamic=dynamic)
        for batch in (4, 6):
            wanted = gradients(model, model, batch, write=False)
            for mine, theirs in zip(gradients(model, compiled, batch, write=False), wanted, strict=True):
                assert error(mine, theirs) < 1e-10
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(model, compiled, batch, write=True)


def test_nobody_would_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard broken: the forward keeps views, to which nobody counts the writes."""
    monkeypatch.setattr(partition, "keep_inputs", lambda *_: 0)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_view_of_an_input(flattened, dynamic=False)


class Theirs(CustomPartitionerFn):
    """A partitioner of the user's."""

    asked = 0

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.asked += 1
        made: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        return made

    def uuid(self) -> str:
        return "theirs"


def test_a_partitioner_of_the_users_is_asked() -> None:
    theirs, model = Theirs(), Layer(normed).double()
    with strict_reference(run=True), torch._inductor.config.patch(custom_partitioner_fn=theirs):
        compiled = torch.compile(model, backend="coda")
        found, wanted = (gradients(model, call, 4, write=False) for call in (compiled, model))
    assert theirs.asked and all(error(a, b) < 1e-10 for a, b in zip(found, wanted, strict=True))


def graphs(first: Any = torch.ops.aten.view.default, *more: Any) -> tuple[fx.Graph, fx.Graph]:
    """A forward that keeps a view of its input, and a view of that; its backward reads both."""
    forward, backward, z = fx.Graph(), fx.Graph(), torch.empty(4, 6)
    node = forward.placeholder("z")
    node.meta["val"], views = z, [node]
    for target, given in ((first, more or ([2, 12],)), (torch.ops.aten.view.default, ([24],))):
        views.append(forward.call_function(target, (views[-1], *given)))
        views[-1].meta["val"] = target(views[-2].meta["val"], *given)
    forward.output((forward.call_function(torch.ops.aten.sin.default, (node,)), *views[1:]))
    read = [backward.placeholder(view.name) for view in views[1:]]
    backward.output(tuple(backward.call_function(torch.ops.aten.cos.default, (r,)) for r in read))
    return forward, backward


def test_a_view_of_a_view() -> None:
    """Each is made of the input, which is kept once, by its name; the forward makes none."""
    forward, backward = graphs()
    forward.output_node().meta["desc"] = ["sin", "first", "second"]
    assert partition.keep_inputs(forward, backward, 1) == 2
    z = torch.randn(4, 6)
    first, *kept = fx.GraphModule({}, forward)(z)
    assert first.equal(z.sin()) and [k is z for k in kept] == [True] and len(forward.nodes) == 3
    assert [n.name for n in backward.find_nodes(op="placeholder")] == ["z"]
    assert forward.output_node().meta["desc"] == ["sin", "first"]
    a, b = fx.GraphModule({}, backward)(*kept)
    assert a.equal(z.view(2, 12).cos()) and b.equal(z.flatten().cos())


def test_what_is_overwritten_stays() -> None:
    """An operation that writes is not made again."""
    forward, backward = graphs(torch.ops.aten.mul_.Tensor, 2)
    assert partition.keep_inputs(forward, backward, 1) == 0 and len(backward.find_nodes(op="placeholder")) == 2


class Stashed(torch.autograd.Function):
    """Autograd looks after what is saved, and not after what lies on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, view: bool) -> Tensor:
        v = z.view(-1, D)
        y = (x @ v / D).exp()
        ctx.stashed = v if view else z
        ctx.save_for_backward(*(() if view else (v,)), y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *_, y = ctx.saved_tensors
        return (grad * y / D) @ ctx.stashed.view(-1, D).t(), None, None


@pytest.mark.parametrize("view", [False, True])
def test_what_lies_on_ctx(view: bool) -> None:
    """A write to the saved result is refused, one to what is only stashed wherever torch.compile refuses it."""

    def call(x: Tensor, z: Tensor) -> Tensor:
        made: Tensor = Stashed.apply(x, z, view)  # type: ignore[no-untyped-call]
        return made

    def gradient(compiled: Any, write: str) -> str:
        torch.manual_seed(0)
        x, z = torch.randn(4, D, dtype=torch.float64, requires_grad=True), torch.randn(4, 8, D, dtype=torch.float64)
        y = compiled(x, z)
        with torch.no_grad():
            {"y": y, "z": z}[write].mul_(2)
        try:
            return f"{float(torch.autograd.grad(y, [x], torch.ones_like(y))[0].norm()):.10g}"
        except RuntimeError as why:
            return str(why)[:60]

    with strict_reference(run=True):
        ours, theirs = torch.compile(call, backend="coda"), torch.compile(call)
        assert gradient(ours, "y") == gradient(theirs, "y") and "variables needed" in gradient(ours, "y")
        assert gradient(ours, "z") == gradient(theirs, "z")


@pytest.mark.parametrize("mode", ["donated", "no_static", "all"])
def test_saved_tensors_hooks(mode: str) -> None:
    """AOTAutograd finds what is kept by its name to put hooks into the graphs."""
    hooks = [fx.symbolic_trace(lambda x: x * 2), fx.symbolic_trace(lambda x: x / 2)]
    for hook in hooks:
        hook.meta["user_cache_hash"] = "halves"
    model = Layer(flattened).double()
    with strict_reference(run=True), torch._functorch.config.patch(saved_tensors_hooks_filtering_mode=mode):
        compiled = torch.compile(model, backend="coda")
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            found = gradients(model, compiled, 4, write=False)
    wanted = gradients(model, model, 4, write=False)
    assert all(error(a, b) < 1e-10 for a, b in zip(found, wanted, strict=True))
