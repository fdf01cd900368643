"""Masks that hide exactly the later tokens, or nothing: attention reads none, and gives the same. Any other stays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, close, run
from cuda_attention import on_cuda
from torch import Tensor, fx, nn

from coda_inductor.attention import masks
from coda_inductor.patterns.constants import FEW, MOST, constant

B, T, HEADS, SIZE = 2, 128, 4, 16
aten, prims = torch.ops.aten, torch.ops.prims
Mask = Callable[[Tensor], Tensor | None]
pytestmark = pytest.mark.usefixtures("interpreted")


class Attention(nn.Module):
    """Attention with a mask that is built in the forward, between two products."""

    def __init__(self, mask: Mask, keys: int | None = None) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)
        self.mask, self.keys = mask, keys

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.keys is not None:
            k, v = k[:, :, : self.keys], v[:, :, : self.keys]
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return self.o(F.gelu(made.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries, as a column, and of keys."""
    at = torch.arange(x.shape[1], device=x.device)
    return at[:, None], at[None]


def compared(x: Tensor) -> Tensor:
    q, k = positions(x)
    return k <= q


def lower(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def added(x: Tensor) -> Tensor:
    """As it is added to scores."""
    return torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype, device=x.device).triu(1)


def least(x: Tensor) -> Tensor:
    """The dtype's least number, which is not minus infinity."""
    return torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)


def of_samples(x: Tensor) -> Tensor:
    """As transformers builds it: tokens of one sequence see each other."""
    q, k = positions(x)
    at = torch.arange(x.shape[1], device=x.device)
    one = (at.diff(prepend=at[:1] - 1) != 1).cumsum(0)
    return ((k <= q) & (one[q] == one[k]))[None, None].expand(x.shape[0], 1, -1, -1)


CAUSAL = dict[str, Mask](compared=compared, lower=lower, added=added, least=least, samples=of_samples)


def of_encoders(x: Tensor) -> Tensor:
    """As transformers builds it where there is no padding."""
    return (positions(x)[1] >= 0)[None, None].expand(x.shape[0], 1, x.shape[1], -1)


def padded(x: Tensor) -> Tensor:
    """As it is added, of ones for what stays."""
    ones = torch.ones(x.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    return (1 - ones)[:, None, None] * torch.finfo(x.dtype).min


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(1, x.shape[1], dtype=x.dtype, device=x.device)


NOTHING: dict[str, Mask] = {"of encoders": of_encoders, "padded": padded, "zeros": zeros}


def window(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) & (q - k < 64)


def prefix(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) | (k < 8)


def earlier(x: Tensor) -> Tensor:
    """Not the token itself, but for the first."""
    q, k = positions(x)
    return (k < q) | (q == 0)


def low(x: Tensor) -> Tensor:
    """A number that hides most scores, but not all that the dtype has."""
    return torch.full((x.shape[1], x.shape[1]), -65504.0, dtype=x.dtype, device=x.device).triu(1)


def near(x: Tensor) -> Tensor:
    """One number is not 0."""
    q, k = positions(x)
    return torch.where(k <= q, ((q == 7) & (k == 3)).to(x.dtype), -math.inf)


def of_the_input(x: Tensor) -> Tensor:
    """Values decide, though these hide nothing more."""
    q, k = positions(x)
    return (k <= q) & (x.detach()[:, None, None, :, 0] < 1e9)


def drawn(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) & (torch.rand(x.shape[1], device=x.device) < 2)[None]


def of_keys(x: Tensor) -> Tensor:
    """All queries see the same keys."""
    return torch.arange(x.shape[1], device=x.device)[None] < 100


OTHER: dict[str, Mask] = {
    "window": window, "prefix": prefix, "earlier": earlier, "low": low, "near": near, "input": of_the_input,
    "drawn": drawn, "of keys": of_keys, "none": lambda x: None,
}  # fmt: skip


def compiled(mask: Mask, **more: int) -> tuple[int, int]:
    """How many masks went, and how many operations read one, of a training step; its numbers are eager's."""
    torch.manual_seed(0)
    model, x = Attention(mask, **more).double(), torch.randn(B, T, 64, dtype=torch.float64, requires_grad=True)
    found, seen = [], list[int]()
    skip_masks = masks.skip_masks

    def counted(graph: fx.Graph, windows: bool) -> tuple[masks.Mask, ...]:
        gone = skip_masks(graph, windows)
        seen[:] = [len(gone), len([*masks.masked(graph)])]
        return gone

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coda_inductor.inductor.joint.skip_masks", counted)
        for compile_it in (False, True):
            model.zero_grad()
            leaf = x.detach().requires_grad_()
            torch.manual_seed(1)
            out = run(model, leaf, grad=True, options=REFERENCE).output if compile_it else model(leaf)
            (out * torch.linspace(0, 1, 64, dtype=torch.float64)).sum().backward()
            found.append([out, leaf.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for mine, eager in zip(found[1], found[0], strict=True):
        close(mine, eager)
    return seen[0], seen[1]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_goes(name: str) -> None:
    assert compiled(CAUSAL[name]) == (1, 0)


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("keys", [T, T - 8])
def test_a_mask_that_hides_nothing_goes(name: str, keys: int) -> None:
    """Whatever the numbers of queries and keys are."""

    def mask(x: Tensor) -> Tensor:
        made = NOTHING[name](x)
        assert made is not None
        return made[..., :keys]

    assert compiled(mask, keys=keys) == (1, 0)


@pytest.mark.parametrize("name", OTHER)
def test_another_stays(name: str) -> None:
    gone, _ = compiled(OTHER[name])
    assert gone == 0


class Scaled(Attention):
    """By a number that turns minus infinity around."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x), scale=-0.5)
        return self.o(F.gelu(made.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def test_a_scale_below_zero_keeps_its_mask() -> None:
    torch.manual_seed(0)
    model, x = Scaled(compared).double(), torch.randn(B, T, 64, dtype=torch.float64)
    with torch.no_grad():
        ran = run(model, x, options=REFERENCE)
        assert ran == [] and not any(report.masks for report in ran.reports)
        close(ran.output, model(x))


def test_equal_masks_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call makes its own of the booleans."""
    looked = list[str]()
    monkeypatch.setattr(masks, "constant", lambda mask, _: looked.append(mask.name) or constant(mask, frozenset()))  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    model = nn.Sequential(Attention(compared), Attention(compared), Attention(window)).double()
    ran = run(model, torch.randn(B, T, 64, dtype=torch.float64), options=REFERENCE)
    assert [len(report.masks) for report in ran.reports] == [2] and len(looked) == 2


LIBRARY = torch.library.Library("coda_tests_masks", "DEF")
LIBRARY.define("att(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal) -> Tensor")
LIBRARY.impl("att", lambda q, k, v, mask, is_causal: F.scaled_dot_product_attention(q, k, v, mask).clone(), "CPU")
torch.library.register_fake(
    "coda_tests_masks::att", lambda query, key, value, attn_mask, is_causal: torch.empty_like(query), lib=LIBRARY
)


def test_another_librarys_attention_keeps_its_mask() -> None:
    """To whom `is_causal` may be a hint."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        q = (x @ w).view(B, T, HEADS, SIZE).transpose(1, 2).contiguous()
        return torch.ops.coda_tests_masks.att(q, q, q, lower(x), False) * 2.0  # type: ignore[no-any-return]

    x, w = torch.randn(B, T, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64)
    ran = run(f, x, w, options=REFERENCE)
    assert ran == [] and not any(report.masks for report in ran.reports)
    close(ran.output, f(x, w))


def test_other_sizes_stay() -> None:
    """Fewer keys than queries: `is_causal` is of the same first token then, too, but nobody asked for it."""
    fewer: Mask = lambda x: torch.ones(x.shape[1], T - 8, dtype=torch.bool).tril()  # noqa: E731
    assert compiled(fewer, keys=T - 8) == (0, 2)


def test_switched_off_the_mask_stays() -> None:
    model, x = Attention(compared).double(), torch.randn(B, T, 64, dtype=torch.float64)
    for options, gone in (
        ({}, 1),
        ({"disable": "masks"}, 0),
        ({"only": "bilinearity"}, 0),
        ({"numerics": "strict"}, 1),
    ):
        ran = run(model, x, options=REFERENCE | options)
        assert ran == [] and sum(len(report.masks) for report in ran.reports) == gone


def test_without_a_backward_and_of_symbols() -> None:
    torch.manual_seed(0)
    model, x = Attention(compared).double(), torch.randn(B, T, 64, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(x)
    for dynamic, gone in ((False, 1), (True, 0)):
        ran = run(model, x, options=REFERENCE, dynamic=dynamic)
        assert ran == [] and sum(len(report.masks) for report in ran.reports) == gone
        close(ran.output, wanted)


# ---- what CUDA calls: the operations' schemas, on tensors without memory


@pytest.mark.parametrize("op", ["efficient", "cudnn"])
def test_cuda_is_asked_for_causal_attention(op: str) -> None:
    graph = on_cuda(op)
    (found,) = masks.skip_masks(graph)
    assert found.shape == f"[{T}, {T}]"
    forward, backward = (n for n in graph.nodes if "attention" in str(n.target))
    for node in (forward, backward):
        arguments = [a.name for a in node.target._schema.arguments]
        given = dict(zip(arguments, node.args, strict=False)) | node.kwargs
        assert (given["attn_bias"], given["is_causal"], given["scale"]) == (None, True, 0.5)
        assert given.get("dropout_p") == 0.0
    assert not any(n.target is aten.where.self for n in graph.nodes)
    graph.lint()


def test_the_least_number_of_float16_does_not_hide() -> None:
    """Scores are float32 in the kernel, and lie further apart."""
    torch.manual_seed(0)
    model, x = Attention(least).half(), 30 * torch.randn(B, T, 64, dtype=torch.float16)
    model.qkv.weight.data *= 30
    with torch.no_grad():
        ran = run(model, x, options=REFERENCE)
        assert ran == [] and not any(report.masks for report in ran.reports)
        assert float((ran.output - model(x)).norm() / model(x).norm()) < 1e-2


@pytest.mark.parametrize(("op", "gone"), [("efficient", 0), ("cudnn", 1)])
def test_what_torch_makes_of_booleans_for_cudnn_hides(op: str, gone: int) -> None:
    assert len(masks.skip_masks(on_cuda(op, hidden=-65504.0))) == gone


def test_a_mask_that_was_moved_to_the_gpu_goes() -> None:
    graph = on_cuda("efficient")
    (mask,) = {*map(masks.mask_of, masks.masked(graph))}
    with graph.inserting_after(mask):
        moved = graph.call_function(prims.device_put.default, (mask, torch.device("cuda"), False))
    moved.meta["val"] = mask.meta["val"]
    mask.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)
    assert [found.node for found in masks.skip_masks(graph)] == [moved.name]


def test_what_memory_held_is_no_constant() -> None:
    graph = on_cuda("efficient")
    (mask,) = {*map(masks.mask_of, masks.masked(graph))}
    zero = next(n for n in graph.nodes if n.target is aten.full.default)
    with graph.inserting_before(zero):
        taken = graph.call_function(aten.empty.memory_format, ([],), {"dtype": torch.bfloat16, "device": "cuda"})
    taken.meta["val"] = zero.meta["val"]
    zero.replace_all_uses_with(taken)
    assert constant(mask, frozenset()) is None


def test_the_gradient_of_a_mask_is_not_lost_and_draws_stay() -> None:
    assert masks.skip_masks(on_cuda("efficient", wanted=True)) == ()
    assert masks.skip_masks(on_cuda("efficient", wanted=True, hidden=0.0)) == ()
    assert masks.skip_masks(on_cuda("efficient", dropout=0.5)) == ()


def test_what_drops_scores_needs_no_mask_that_hides_nothing() -> None:
    """It draws for each score by its place."""
    graph = on_cuda("efficient", dropout=0.5, hidden=0.0)
    (found,) = masks.skip_masks(graph)
    assert found.hides == "nothing"
    forward, backward = (n for n in graph.nodes if "attention" in str(n.target))
    for node in (forward, backward):
        arguments = [a.name for a in node.target._schema.arguments]
        given = dict(zip(arguments, node.args, strict=False)) | node.kwargs
        assert (given["attn_bias"], given.get("is_causal", False), given["dropout_p"]) == (None, False, 0.5)


# ---- constants


def test_a_few_numbers_that_a_graph_holds() -> None:
    """As `torch.tensor(0.0)` within a model; at many nobody looks."""
    root = torch.nn.Module()
    root.few, root.many = torch.ones(3), torch.ones(FEW + 1)
    graph = torch.fx.Graph()
    for name, there in (("few", True), ("many", False)):
        node = graph.get_attr(name)
        node.meta["val"] = getattr(root, name)
        module = torch.fx.GraphModule(root, graph)
        assert (constant(next(n for n in module.graph.nodes if n.target == name), frozenset()) is not None) is there


def test_what_cannot_be_computed_is_no_constant() -> None:
    graph = on_cuda("efficient")
    (mask,) = {*map(masks.mask_of, masks.masked(graph))}
    assert constant(mask, frozenset()) is not None and constant(mask, frozenset(), most=T * T) is None
    assert constant(mask, frozenset(mask.all_input_nodes)) is None  # as if something wrote into it
    assert MOST >= 2 * 8192 * 8192
    next(n for n in graph.nodes if n.target is aten.full.default).args = ([-1], 0.0)  # raises
    assert constant(mask, frozenset()) is None
