"""Models that others have patched, as Liger-Kernel and Unsloth do: forwards that call autograd functions, operations
that torch cannot read, kernels of their own, graph breaks. Eager's result, and Regions around what is opaque."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, Half, Norm, half, run, streams
from evaluate import strict_reference
from torch import Tensor, fx, nn

import coda_inductor.inductor.compile
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report

EXACT = 1e-10
pytestmark = pytest.mark.usefixtures("uncached")


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class RMSNormFunction(torch.autograd.Function):
    """Forward and backward by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, r)
        return x * r * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (x, weight, r) = grads, ctx.saved_tensors
        n = x * r
        g = grad * weight
        return r * (g - n * (g * n).mean(-1, keepdim=True)), (grad * n).sum(0)


class SwiGLUFunction(torch.autograd.Function):
    """As RMSNormFunction."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (gate, up) = grads, ctx.saved_tensors
        s = torch.sigmoid(gate)
        return grad * up * (s + gate * s * (1 - s)), grad * gate * s


norm_by_hand: Callable[..., Tensor] = RMSNormFunction.apply
swiglu_by_hand: Callable[..., Tensor] = SwiGLUFunction.apply


@torch.library.custom_op("patched::rms", mutates_args=())
def opaque_rms(x: Tensor, weight: Tensor) -> Tensor:
    return rms(x, weight)


@opaque_rms.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("patched::silu_mul_", mutates_args=("gate",))
def opaque_silu_mul_(gate: Tensor, up: Tensor) -> None:
    gate.copy_(F.silu(gate) * up)


class OpaqueNorm(nn.Module):
    """Stands in the place of a norm, with its weight."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return opaque_rms(x, self.weight)  # type: ignore[no-any-return]


def liger_forward(self: Half, attention: Tensor, residual: Tensor) -> Tensor:
    h = residual + self.o(attention)
    x = norm_by_hand(h, self.norm.weight)
    return h + self.down(swiglu_by_hand(self.gate(x), self.up(x)))  # type: ignore[no-any-return]


def in_place_forward(self: Half, attention: Tensor, residual: Tensor) -> Tensor:
    """The activation overwrites the gate's product."""
    h = residual + self.o(attention)
    x = self.norm(h)
    gate = self.gate(x)
    opaque_silu_mul_(gate, self.up(x))
    return h + self.down(gate)  # type: ignore[no-any-return]


def functions(patch: pytest.MonkeyPatch, model: Half) -> None:
    """A class's forward calls autograd functions."""
    patch.setattr(Half, "forward", liger_forward)


def one_function(patch: pytest.MonkeyPatch, model: Half) -> None:
    patch.setattr(Norm, "forward", lambda self, x: norm_by_hand(x, self.weight))


def module(patch: pytest.MonkeyPatch, model: Half) -> None:
    """An instance's module is another one, whose operation cannot be read."""
    model.norm = OpaqueNorm(model.norm)  # type: ignore[assignment]


def method(patch: pytest.MonkeyPatch, model: Half) -> None:
    """An instance's forward is bound anew."""
    model.norm.forward = OpaqueNorm(model.norm).forward  # type: ignore[method-assign]


def in_place(patch: pytest.MonkeyPatch, model: Half) -> None:
    patch.setattr(Half, "forward", in_place_forward)


def disabled(patch: pytest.MonkeyPatch, model: Half) -> None:
    """A forward that Dynamo must not enter: two graphs, o-projection alone in the first."""
    patch.setattr(Norm, "forward", torch.compiler.disable(Norm.forward))


Patch = Callable[[pytest.MonkeyPatch, Half], None]

# Without a patch: o with its residual, gate and up with SwiGLU and the norm's factor, down with its residual. What can
# be read changes nothing. Behind a norm that cannot, gate and up take no factor; SwiGLU that cannot be read leaves two
# single products, each with the norm's factor.
UNREAD = "is not an operation that we lift"
PATCHES: list[tuple[Patch, list[list[int]], int, set[str]]] = [
    (functions, [[1, 2, 1]], 1, set()),
    (one_function, [[1, 2, 1]], 1, set()),
    (module, [[1, 2, 1]], 0, {f"patched.rms.default {UNREAD}"}),
    (method, [[1, 2, 1]], 0, {f"patched.rms.default {UNREAD}"}),
    (in_place, [[1, 1, 1, 1]], 2, {f"<built-in function getitem> {UNREAD}"}),
    (disabled, [[1], [2, 1]], 0, set()),
]


@pytest.mark.parametrize(("patched", "products", "deferred", "opaque"), PATCHES, ids=[p.__name__ for p, *_ in PATCHES])
def test_patched(
    monkeypatch: pytest.MonkeyPatch, patched: Patch, products: list[list[int]], deferred: int, opaque: set[str]
) -> None:
    """`products` of the Regions of each graph, of how many of them a law moved a factor, what was not understood."""
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model, x = half(), streams()
    with torch.no_grad():
        unpatched = model(*x)
    patched(monkeypatch, model)
    with torch.no_grad():
        wanted = model(*x)
    assert difference(wanted, unpatched) < EXACT
    ran = run(model, *x, options=REFERENCE)
    assert ran == [] and difference(ran.output, wanted) < EXACT
    assert [[len(site.region.products) for site in report.sites] for report in ran.reports] == products
    assert sum("bilinearity" in site.laws for report in ran.reports for site in report.sites) == deferred
    assert {r.reason for report in ran.reports for r in report.opaque} == opaque


def difference(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("patched", [functions, one_function])
def test_gradients_of_a_patched_model(monkeypatch: pytest.MonkeyPatch, patched: Patch) -> None:
    """The backward that they wrote is the one that is compiled."""
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model, x = half(), streams()
    patched(monkeypatch, model)
    weight = torch.randn(x[0].shape, dtype=torch.float64)
    (model(*x) * weight).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    ran = run(model, *x, options=REFERENCE, grad=True)
    (ran.output * weight).sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert ran == [] and len(found) == len(wanted) == 5
    assert all(difference(f, w) < EXACT for f, w in zip(found, wanted, strict=True))


# ---- a kernel of theirs: on the CPU there is nothing to launch it, so its meaning stands in for it


@pytest.mark.parametrize("analysed", [True, False])
def test_a_triton_kernel_in_the_graph(monkeypatch: pytest.MonkeyPatch, analysed: bool) -> None:
    """Without an analysis of what the kernel writes, torch takes it to write all that it is given, the stream and the
    weight too."""
    triton_norm = pytest.importorskip("patched_triton").triton_norm
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda **_: True)  # since 2.14 it may be asked for more
    written = ["y"] if analysed else ["x", "weight", "y"]
    monkeypatch.setattr("torch._higher_order_ops.triton_kernel_wrap.get_mutated_tensors", lambda *_: written)
    model, x = half(), streams()
    with torch.no_grad():
        wanted = model(*x)
    monkeypatch.setattr(Norm, "forward", lambda self, x: triton_norm(x, self.weight))
    found, report, calls = meant(monkeypatch, model, x)
    assert calls == 1 and difference(found, wanted) < EXACT
    assert [len(site.region.products) for site in report.sites] == [1, 2, 1]


def meant(monkeypatch: pytest.MonkeyPatch, model: Half, x: Sequence[Tensor]) -> tuple[Tensor, Report, int]:
    """The output of the graph that Inductor would compile, the report, and how often the kernel stands in it."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    calls: list[fx.Node] = []

    class Meaning(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.target is not triton_kernel_wrapper_functional:
                return super().run_node(n)
            calls.append(n)
            how: dict[str, Any] = self.fetch_args_kwargs_from_env(n)[1]
            given: dict[str, Tensor] = how["kwargs"]
            written = {name: given[name].clone() for name in how["tensors_to_clone"]}
            return written | {"y": rms(given["x"], given["weight"])}

    def interpreted(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        def call(args: list[Any]) -> Any:
            mine = list(args)
            args.clear()
            return Meaning(gm).run(*mine)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    with strict_reference(), torch.no_grad():
        monkeypatch.setattr(coda_inductor.inductor.compile, "compile_fx_inner", interpreted)
        REPORTS.clear()
        found = torch.compile(model, backend="coda", fullgraph=True)(*x)
    (report,) = REPORTS
    return found, report, len(calls)
