"""Attention by masks that show a window of tokens: torch's flash attention has it without a mask, forward and backward.
Here on the CPU by the operation's definition; with CUDA's kernels in tests/gpu/test_attention.py."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, Ran, close, run
from cuda_attention import HEADS, on_cuda
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from coda_inductor.attention import masks, windows
from coda_inductor.attention.windows import LATER, NOTHING, Window
from coda_inductor.codegen.target import TARGETS
from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.inductor.joint_pass import JointPass, within
from coda_inductor.ops.attention import WINDOWED, WINDOWED_BACKWARD, seen
from coda_inductor.passes.switches import WINDOWS

B, T, GROUPS, SIZE = 2, 96, 2, 16
WIDTH = HEADS * SIZE
pytestmark = pytest.mark.usefixtures("uncached")


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the CPU's kernel were cuDNN's, and windows paid for any number of tokens, in any dtype."""
    monkeypatch.setattr(windows, "MASKED", "flash_attention_for_cpu")
    monkeypatch.setattr(windows, "TOKENS", 1)
    monkeypatch.setattr(windows, "SEEN", 1.0)
    monkeypatch.setattr(windows, "DTYPES", (torch.float64, torch.float32))
    skip_masks = masks.skip_masks
    monkeypatch.setattr("coda_inductor.inductor.joint.skip_masks", lambda graph, _: skip_masks(graph, windows=True))
    yield


class Attention(nn.Module):
    """Four heads behind one product, two of keys and values; a mask is built in the forward."""

    def __init__(
        self, window: Window, *, added: bool = False, grouped: bool = True, scale: float | None = None
    ) -> None:
        super().__init__()
        self.window, self.added, self.scale = window, added, scale
        self.groups = GROUPS if grouped else HEADS
        self.qkv = nn.Linear(64, WIDTH + 2 * self.groups * SIZE, bias=False)
        self.o = nn.Linear(WIDTH, 64, bias=False)

    def mask(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        ahead, (left, right) = at[None] - at[:, None], (self.window.left, self.window.right)
        stays = (ahead <= (T if right is None else right)) & (-ahead <= (T if left is None else left))
        if self.added:
            return torch.where(stays, 0.0, -math.inf).to(x.dtype)
        return stays[None, None].expand(x.shape[0], 1, -1, -1)

    def attention(self, x: Tensor) -> Tensor:
        own = self.groups * SIZE
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in self.qkv(x).split([WIDTH, own, own], -1))
        k, v = (t.repeat_interleave(HEADS // self.groups, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x), scale=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(F.gelu(self.attention(x).transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def compared(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> Ran:
    """The compiled run, whose results and gradients are eager's to 1e-10."""
    eager, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = model(eager)
    weights = torch.linspace(-1, 1, wanted.shape[-1], dtype=x.dtype)
    (wanted * weights).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    ran = run(model, mine, grad=True, options=REFERENCE)
    assert ran == []
    (ran.output * weights).sum().backward()
    close(ran.output, wanted)
    for a, b in zip([mine.grad, *(p.grad for p in model.parameters())], [eager.grad, *gradients], strict=True):
        assert a is not None and b is not None
        close(a, b)
    return ran


@pytest.mark.sampled
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("left", [0, 1, 17, None])
@pytest.mark.parametrize("right", [0, 5, 40, None])
def test_a_window_is_no_mask(left: int | None, right: int | None) -> None:
    torch.manual_seed(0)
    window = Window(left, right)
    ran = compared(Attention(window).double(), torch.randn(B, T, 64, dtype=torch.float64))
    assert [mask.hides for report in ran.reports for mask in report.masks] == [window.hides]
    assert sum(len(report.grouped) for report in ran.reports) == 1


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("how", [{"added": True}, {"grouped": False}, {"scale": 0.3}])
def test_in_any_spelling(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Attention(Window(9, 0), **how).double()
    ran = compared(model, torch.randn(B, T, 64, dtype=torch.float64))
    assert sum(len(report.masks) for report in ran.reports) == 1


@pytest.mark.usefixtures("on_the_cpu")
def test_a_scale_below_zero_keeps_its_mask() -> None:
    """Minus infinity is added behind the scale here, and before it in causal kernels."""
    torch.manual_seed(0)
    ran = compared(Attention(Window(9, 0), scale=-0.3).double(), torch.randn(B, T, 64, dtype=torch.float64))
    assert not any(report.masks for report in ran.reports)


@pytest.mark.usefixtures("on_the_cpu")
def test_its_result_may_be_returned_and_lies_as_it_did() -> None:
    torch.manual_seed(0)

    class Returned(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            if self.added:
                q, k, v = (t.contiguous() for t in (q, k, v))  # heads first, as no result lies
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))

    for first in (False, True):
        model = Returned(Window(9, 0), added=first, grouped=False).double()
        model.o = nn.Identity()  # type: ignore[assignment]
        ran = compared(model, torch.randn(B, T, 64, dtype=torch.float64))
        assert sum(len(report.masks) for report in ran.reports) == 1


@pytest.mark.usefixtures("on_the_cpu")
def test_under_checkpointing() -> None:
    torch.manual_seed(0)

    class Checkpointed(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False) + x  # type: ignore[no-any-return]

    ran = compared(Checkpointed(Window(9, 3)).double(), torch.randn(B, T, 64, dtype=torch.float64))
    assert sum(len(report.masks) for report in ran.reports) == 1


class Twice(Attention):
    """The result of one attention is read by another as it is, and as all of q, k and v."""

    def __init__(self, window: Window, other: Window) -> None:
        super().__init__(window, grouped=False)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        first = self.attention(x)
        mine, self.window = self.window, self.other
        mask, self.window = self.mask(x), mine
        second = F.scaled_dot_product_attention(first, first, first, attn_mask=mask)
        return self.o(F.gelu((first + second).transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


@pytest.mark.sampled
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("other", [Window(9, 3), Window(4, 0), LATER])
@pytest.mark.parametrize("first", [Window(9, 3), LATER])
def test_one_reads_the_other(first: Window, other: Window) -> None:
    torch.manual_seed(0)
    ran = compared(Twice(first, other).double(), torch.randn(B, T, 64, dtype=torch.float64))
    assert {mask.hides for report in ran.reports for mask in report.masks} == {first.hides, other.hides}


# ---- what is a window


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("lead", [(), (3, 1)])
def test_masks_are_read(hidden: float, lead: tuple[int, ...]) -> None:
    for left in (0, 1, 7, 8, None):
        for right in (0, 2, 8, None):
            stays = seen(10, left, right).expand(*lead, 10, 10)
            wanted = Window(left, right)
            assert masks.shown_by(stays, -1.0) == wanted
            assert masks.shown_by(torch.zeros(stays.shape).masked_fill(~stays, hidden), hidden) == wanted
            assert wanted.share(10) == pytest.approx(seen(10, left, right).double().mean().item())


def test_other_masks_are_no_windows() -> None:
    stays = seen(10, 3, 2)
    for row, column in ((5, 5), (0, 0), (9, 9), (4, 6), (9, 0), (0, 9), (0, 1)):
        one = stays.clone()
        one[row, column] ^= True
        assert masks.shown_by(one, -1.0) is None
        both = torch.stack([stays, one])[:, None]
        assert masks.shown_by(both, -1.0) is None and masks.shown_by(both.flip(0), -1.0) is None
    assert masks.shown_by(stays[:8], -1.0) is None
    assert masks.shown_by(torch.zeros(10, 10).masked_fill(~stays, -1.0), -2.0) is None  # hides too little
    added = torch.zeros(10, 10).masked_fill(~stays, -9.0)
    assert masks.shown_by(added, -2.0) == Window(3, 2)
    added[5, 5] = 0.5  # adds to what is seen
    assert masks.shown_by(added, -2.0) is None


def test_windows_are_said_in_words() -> None:
    assert (LATER.hides, NOTHING.hides) == ("the later tokens", "nothing")
    assert Window(64, 64).hides == "all other tokens but 64 before and 64 behind"
    assert Window(1023, 0).hides == "all other tokens but 1023 before"
    assert (
        Window(0, 0).hides == "all other tokens"
        and Window(None, 3).hides == "all other tokens but all before and 3 behind"
    )


# ---- what CUDA calls, and where torch's choice stays


def rewritten(graph: fx.Graph) -> list[fx.Node]:
    """The operations of ours behind the pass, which leaves none of torch's or all."""
    masks.skip_masks(graph, windows=True)
    graph.lint()
    ours = [n for n in graph.nodes if n.target in (WINDOWED, WINDOWED_BACKWARD)]
    theirs = [n for n in graph.nodes if "aten._scaled_dot_product" in str(n.target)]
    assert (len(ours), len(theirs)) in ((2, 0), (0, 2))
    return ours


FAR = partial(on_cuda, "cudnn", hidden=-65504.0, tokens=1024, size=64, left=63)


@pytest.mark.parametrize(("size", "left"), [(64, 63), (128, 0), (256, 200)])
def test_cuda_is_asked_for_flash_attention(size: int, left: int) -> None:
    made = FAR(size=size, left=left)
    query, key, value, gradient = made.find_nodes(op="placeholder")
    forward, backward = rewritten(made)
    assert forward.args == (query, key, value, left, 0) and forward.kwargs == {"scale": 0.5}
    results = [n for n in made.nodes if n.target is operator.getitem and n.args[0] is forward]
    assert backward.args == (gradient, query, key, value, *results, left, 0) and backward.kwargs == {"scale": 0.5}
    assert not any(n.target is torch.ops.aten.where.self for n in made.nodes)


STAYS: dict[str, Callable[[], fx.Graph]] = {
    "few tokens": partial(FAR, tokens=1000),
    "much is seen": partial(FAR, left=600),
    "causal": partial(FAR, left=None),
    "dropout": partial(FAR, dropout=0.5),
    "the sums are returned": partial(FAR, returned=1),
    "the memory-efficient kernel": partial(on_cuda, "efficient", tokens=1024, size=64, left=63),
    "float32": partial(FAR, dtype=torch.float32),
    "too wide": partial(FAR, size=264),
    "no multiple of 8": partial(FAR, size=132),
    "turned around": partial(FAR, scale=-0.5),
}


@pytest.mark.parametrize("name", STAYS)
def test_torchs_kernel_stays(name: str) -> None:
    assert rewritten(STAYS[name]()) == []


def test_a_backward_of_another_graphs_forward_keeps_its_mask() -> None:
    graph = FAR()
    backward = next(call.node for call in masks.masked(graph) if call.is_backward)
    with graph.inserting_after(backward):
        other = graph.node_copy(backward, lambda n: n)
    for made in other.all_input_nodes:
        if made.target is operator.getitem:
            with graph.inserting_before(next(iter(graph.nodes))):
                given = graph.placeholder(f"given_{made.name}")
            given.meta["val"] = made.meta["val"]
            other.replace_input_with(made, given)
    masks.skip_masks(graph, windows=True)
    assert not any(n.target in (WINDOWED, WINDOWED_BACKWARD) for n in graph.nodes)


def test_results_lie_as_torchs_did() -> None:
    graph = FAR()
    (forward,) = (call.node for call in masks.masked(graph) if not call.is_backward)
    result = next(n for n in forward.users if n.args[1] == 0)
    value, strides = result.meta["val"], (1024 * HEADS * 64, 64, HEADS * 64, 1)
    with value.fake_mode:
        result.meta["val"] = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    assert len(rewritten(graph)) == 2
    out = graph.output_node().args[0][0]  # type: ignore[index]
    assert isinstance(out, fx.Node) and out.meta["val"].stride() == strides


@pytest.mark.parametrize("how", [{}, {"disable": frozenset({"windows"})}, {"target": "reference"}])
def test_it_may_be_switched_off(how: dict[str, Any]) -> None:
    """On a Hopper, as explain says without one."""
    model, x = Attention(Window(64, 64)).bfloat16(), torch.randn(1, 1024, 64, dtype=torch.bfloat16)
    found = explain(model, (x,), {}, "train", Settings(**{"target": "sm_90a", **how}))
    assert [mask["hides"] for graph in found["graphs"] for mask in graph["masks"]] == (
        [] if how else ["all other tokens but 64 before and 64 behind"]
    )


def test_rows_that_begin_at_odd_places_stay_with_cudnn() -> None:
    """Flash attention reads 16 bytes at once."""
    for name in ("query", "key", "value", "grad_out"):
        graph = FAR()
        (node,) = {n for call in masks.masked(graph) if isinstance(n := call.given.get(name), fx.Node)}
        value = node.meta["val"]
        for apart, ours in ((68, 0), (72, 2)):
            strides = HEADS * 1024 * apart, 1024 * apart, apart, 1
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
            assert len(rewritten(graph)) == ours


def test_without_flash_attention_the_kernel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, key = torch.backends.cuda.flash_sdp_enabled(), JointPass(Settings()).uuid()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert rewritten(FAR()) == [] and JointPass(Settings()).uuid() != key  # nor does a cached graph have it
    finally:
        torch.backends.cuda.enable_flash_sdp(allowed)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert rewritten(FAR()) == []


def test_on_cards_that_never_ran_it_the_kernel_stays() -> None:
    for row in TARGETS.values():
        assert (WINDOWS in within(Settings(), row).disable) is not row.tested


# ---- the operation


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [NOTHING, LATER, Window(7, 3), Window(0, 0)])
@pytest.mark.parametrize("scale", [None, 0.3, 0.0])
def test_the_definition_is_attention_by_a_mask(window: Window, groups: int, scale: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 33, 8, dtype=torch.float64, requires_grad=True) for n in (4, groups, groups))
    stays = seen(33, window.left, window.right)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=stays, scale=scale, enable_gqa=True)
    given = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, (q, k, v), given)
    with torch.no_grad():
        made = WINDOWED(q, k, v, window.left, window.right, scale=scale)
        back = WINDOWED_BACKWARD(given, q, k, v, *made, window.left, window.right, scale=scale)
    for mine, eager in zip((made[0], *back), (wanted, *gradients), strict=True):
        torch.testing.assert_close(mine, eager, rtol=0, atol=1e-12)  # (a window of one token has gradients of 0)


def test_the_arithmetic_of_a_window_is_counted() -> None:
    q = torch.empty(2, 4, 32, 8, device="meta")
    for window in (NOTHING, LATER, Window(7, 3)):
        seen_by_all = int(seen(32, window.left, window.right).sum())
        with FlopCounterMode(display=False) as counter:
            made = WINDOWED(q, q, q, window.left, window.right)
            assert counter.get_total_flops() == 2 * 2 * 4 * 2 * 8 * seen_by_all  # two products, of 2 x 4 heads
            WINDOWED_BACKWARD(q, q, q, q, *made, window.left, window.right)
        assert counter.get_total_flops() == 7 * 2 * 4 * 2 * 8 * seen_by_all


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fake_results_look_like_real_ones(dtype: torch.dtype) -> None:
    packed = torch.randn(2, 24, 3 * 32, dtype=dtype)
    q, k, v = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in packed.chunk(3, -1))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(WINDOWED, (q, k, v, 5, 0), test_utils=tests)
    made = WINDOWED(q, k, v, 5, 0)
    torch.library.opcheck(WINDOWED_BACKWARD, (made[0], q, k, v, *made, 5, 0), test_utils=tests)
