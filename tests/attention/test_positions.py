"""What is added to scores by the place of a key along one of its axes, as in SAM, is features of queries and
keys: the same in float64, forward and backward. Here by the definition of attention; with CUDA's kernels in
tests/gpu/test_attention.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from coda_inductor.attention import features
from coda_inductor.core.settings import Settings
from coda_inductor.explain import like_cuda
from coda_inductor.explain.capture import capture
from coda_inductor.inductor.joint import rewrite
from coda_inductor.inductor.records import Report
from coda_inductor.patterns import graph as g

aten = torch.ops.aten
B, H, Y, X, D = 2, 3, 4, 8, 8
KERNELS = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
BACKWARDS = (
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
Mask = Callable[["Attention", Tensor], Tensor]


def chosen(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel that CUDA has in 16 bits, in float64: the memory-efficient one where a mask has a gradient."""
    assert attn_mask is not None
    learned = attn_mask.requires_grad
    mask = like_cuda.aligned(attn_mask).expand(*query.shape[:3], key.shape[2]) if learned else attn_mask
    out: Tensor = KERNELS[not learned](query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
    return out


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number of keys."""
    monkeypatch.setitem(like_cuda.COMPOSITES, aten.scaled_dot_product_attention.default, chosen)
    monkeypatch.setattr(features, "DTYPES", (torch.float64,))
    monkeypatch.setattr(features, "KEYS", 1)
    monkeypatch.setattr(features, "NUMBERS", 1)


class Attention(nn.Module):
    """Attention over an image of tokens, between two products. It adds `mask` to its scores."""

    def __init__(self, mask: Mask, scale: float | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 3 * H * D), nn.Linear(H * D, 16)
        self.rows, self.columns = nn.Parameter(torch.randn(Y, Y, D)), nn.Parameter(torch.randn(X, X, D))
        self.mask, self.scale, self.dropout = mask, scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = self.mask(self, q)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, dropout_p=self.dropout)
        return self.o(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def along(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """[B * H, Y, X, Y] and [B * H, Y, X, X]: of each query, a number for each row and each column."""
        q = q.reshape(B * H, Y, X, D)
        return torch.einsum("bhwc,hkc->bhwk", q, self.rows), torch.einsum("bhwc,wkc->bhwk", q, self.columns)


def sam(a: Attention, q: Tensor) -> Tensor:
    """As transformers has it."""
    h, w = a.along(q)
    return (h[:, :, :, :, None] + w[:, :, :, None, :]).reshape(B, H, Y * X, Y * X)


def of_heads(a: Attention, q: Tensor) -> Tensor:
    """With batch and heads apart."""
    h, w = (t.unflatten(0, (B, H)) for t in a.along(q))
    return (w[..., None, :] + h[..., None]).flatten(-2).flatten(2, 3)  # type: ignore[no-any-return]


def columns_first(a: Attention, q: Tensor) -> Tensor:
    """Keys are numbered column by column."""
    h, w = a.along(q)
    return (h[..., None] + w[..., None, :]).transpose(-1, -2).reshape(B, H, Y * X, Y * X)


def in_parts(a: Attention, q: Tensor) -> Tensor:
    """Columns in two halves, each with a number of its own, and a third addend that tells no keys apart."""
    h, w = a.along(q)
    both = h[..., None, None] + w[..., None, :2, None]
    return (both + (w[..., None, None, :4] + w[..., :1, None, None])).reshape(B, H, Y * X, Y * X)


def alone(a: Attention, q: Tensor) -> Tensor:
    """Rows only."""
    return a.along(q)[0][..., None].expand(-1, -1, -1, -1, X).reshape(B, H, Y * X, Y * X)


SPELLINGS: dict[str, tuple[Mask, int]] = {
    "sam": (sam, Y + X),
    "of_heads": (of_heads, Y + X),
    "columns_first": (columns_first, Y + X),
    "in_parts": (in_parts, Y + 2 + 4 + 1),
    "alone": (alone, Y),
}


class Meaning(fx.Interpreter):
    """Attention by its definition; its results lie as the kernels' do."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target not in (*KERNELS, *BACKWARDS):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        names = [a.name for a in n.target._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        read = [given[name] for name in ("query", "key", "value", "attn_bias")]
        leaves = [None if x is None else x.detach().requires_grad_() for x in read]
        with torch.enable_grad():
            out = attention(leaves, given.get("scale"))
        if n.target in KERNELS:
            return (like(out.detach(), n.meta["val"][0]), *[torch.zeros(())] * 8)
        there = [x for x in leaves if x is not None]
        made = torch.autograd.grad(out, there, given.get("grad_out", given.get("grad_out_")))
        return tuple(like(x, val) for x, val in zip(made, n.meta["val"], strict=False))


def attention(read: list[Any], scale: float | None) -> Tensor:
    query, key, value, bias = read
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return (scores if bias is None else scores + bias).softmax(-1) @ value  # type: ignore[no-any-return]


def like(x: Tensor, val: Tensor) -> Tensor:
    return torch.empty_strided(val.shape, val.stride(), dtype=x.dtype).copy_(x)


def results(graph: fx.Graph) -> list[Any]:
    """What it returns for random inputs."""
    torch.manual_seed(1)
    values = [torch.randn(n.meta["val"].shape, dtype=torch.float64) for n in graph.find_nodes(op="placeholder")]
    made = Meaning(fx.GraphModule(nn.Module(), graph)).run(*values)
    return [x for x in made if x is not None]


def compared(model: nn.Module, mode: Any, how: dict[str, Any] | None = None) -> tuple[Report, fx.Graph]:
    """The report, and the graph; its results are those of the graph before."""
    found = list[tuple[Report, fx.Graph, fx.Graph]]()

    def both(graph: fx.Graph) -> None:
        before = g.copied(graph)
        report = rewrite(graph, Settings(**(how or {})), "reference")
        found.append((report, before, graph.owning_module.graph))  # type: ignore[union-attr]

    x = torch.randn(B, Y * X, 16, dtype=torch.float64, requires_grad=mode == "train")
    capture(model.double(), (x,), {}, mode, both)
    ((report, before, after),) = found
    for a, b in zip(results(after), results(before), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    return report, after


def number(report: Report) -> list[int]:
    return [a.features for a in report.grouped if a.features]


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_mask_is_features(spelling: str, scale: float | None, mode: str) -> None:
    mask, wanted = SPELLINGS[spelling]
    report, graph = compared(Attention(mask, scale), mode)
    assert number(report) == [wanted]
    sizes = [n.meta["val"].shape for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not [s for s in sizes if s.numel() >= B * H * (Y * X) ** 2]  # nothing is as large as the mask


def table(a: Attention, q: Tensor) -> Tensor:
    """What tells all keys apart in one tensor."""
    return a.along(q)[0].repeat(1, 1, 1, X).reshape(B, H, Y * X, Y * X)


def hidden(a: Attention, q: Tensor) -> Tensor:
    """Columns that are hidden: minus infinity times 0 would be no number."""
    h, w = a.along(q)
    none = torch.where(torch.arange(X) == 1, -torch.inf, 0.0).to(q.dtype)
    return (h[:, :, :, :, None] + (w + none)[:, :, :, None, :]).reshape(B, H, Y * X, Y * X)


def learned(a: Attention, q: Tensor) -> Tensor:
    """A table that the user may have filled with anything."""
    h, w = a.rows[..., 0], a.columns[..., 0]  # [Y, Y] and [X, X]
    both = h[:, None, :, None] + w[None, :, None, :]
    return both.reshape(1, 1, Y * X, Y * X).expand(B, H, -1, -1)


def numbered(a: Attention, q: Tensor) -> Tensor:
    return sam(a, q) + 1.0


def twice(a: Attention, q: Tensor) -> Tensor:
    h, w = a.along(q)
    return torch.add(h[:, :, :, :, None], w[:, :, :, None, :], alpha=2).reshape(B, H, Y * X, Y * X)


def widened(a: Attention, q: Tensor) -> Tensor:
    """One addend is a product in float32."""
    h, _ = a.along(q)
    narrow = q.reshape(B * H, Y, X, D).float()
    return sam_of(h, torch.einsum("bhwc,wkc->bhwk", narrow, a.columns.float()))


def biased(a: Attention, q: Tensor) -> Tensor:
    """One addend is a product and a bias that hides rows."""
    bias = torch.where(torch.arange(Y) == 1, -torch.inf, 0.0).to(q.dtype)
    h = torch.addmm(bias, q.reshape(-1, D), a.rows[0].T).reshape(-1, Y, X, Y)
    return sam_of(h, a.along(q)[1])


def sam_of(h: Tensor, w: Tensor) -> Tensor:
    return (h[:, :, :, :, None] + w[:, :, :, None, :]).reshape(B, H, Y * X, Y * X)


STAY: dict[str, Mask] = {
    "table": table,
    "hidden": hidden,
    "learned": learned,
    "numbered": numbered,
    "twice": twice,
    "widened": widened,
}


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("mask", STAY)
def test_any_other_mask_stays(mask: str, mode: str) -> None:
    assert number(compared(Attention(STAY[mask]), mode)[0]) == []


class Read(Attention):
    """Its mask is read by something else, too."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = self.mask(self, q)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(out.transpose(1, 2).flatten(2)), mask


class Shared(Attention):
    """Two calls read one mask: their gradients are added up before they are summed."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = self.mask(self, q)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = F.scaled_dot_product_attention(out, k, v, attn_mask=mask)
        return self.o(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_mask_that_others_read_stays(mode: str) -> None:
    assert number(compared(Read(sam), mode)[0]) == []


def test_two_calls_may_read_one_mask() -> None:
    assert number(compared(Shared(sam), "infer")[0]) == [Y + X] * 2
    assert number(compared(Shared(sam), "train")[0]) == []


class OfHeads(Attention):
    """All heads share a mask: its gradient is summed over them, too."""

    def along(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q = q.mean(1).reshape(B, Y, X, D)
        return torch.einsum("bhwc,hkc->bhwk", q, self.rows), torch.einsum("bhwc,wkc->bhwk", q, self.columns)


def shared(a: Attention, q: Tensor) -> Tensor:
    h, w = a.along(q)
    return (h[:, :, :, :, None] + w[:, :, :, None, :]).reshape(B, 1, Y * X, Y * X)


def test_all_heads_may_share_a_mask() -> None:
    assert number(compared(OfHeads(shared), "infer")[0]) == [Y + X]
    assert number(compared(OfHeads(shared), "train")[0]) == []


def test_an_addend_that_is_overwritten_stays() -> None:
    """Its sum holds what was there before."""
    found = list[int]()

    def overwritten(graph: fx.Graph) -> None:
        product = graph.find_nodes(op="call_function", target=aten.bmm.default)[-1]
        attention = graph.find_nodes(op="call_function", target=KERNELS[1])[0]
        with graph.inserting_before(attention):
            node = graph.call_function(aten.mul_.Tensor, (product, 2))
        node.meta["val"] = product.meta["val"]
        found.append(len(features.write_positions(graph)))
        graph.erase_node(node)
        found.append(len(features.write_positions(graph)))

    capture(Attention(sam).double(), (torch.randn(B, Y * X, 16, dtype=torch.float64),), {}, "infer", overwritten)
    assert found == [0, 1]


@pytest.mark.parametrize("how", [{"scale": -0.3}, {"dropout": 0.5}])
def test_a_scale_below_zero_and_dropout_keep_the_mask(how: dict[str, Any]) -> None:
    assert number(compared(Attention(sam, **how), "train")[0]) == []


@pytest.mark.parametrize("how", [{"numerics": "strict"}, {"disable": frozenset({"positions"})}])
def test_it_can_be_switched_off(how: dict[str, Any]) -> None:
    assert number(compared(Attention(sam), "train", how)[0]) == []


def flat(a: Attention, q: Tensor) -> Tensor:
    """One mask [tokens, tokens] for all samples and heads."""
    q = q.mean((0, 1)).reshape(Y, X, D)
    h, w = torch.einsum("hwc,hkc->hwk", q, a.rows), torch.einsum("hwc,wkc->hwk", q, a.columns)
    return (h[:, :, :, None] + w[:, :, None, :]).reshape(Y * X, Y * X)


def test_a_mask_may_be_a_matrix() -> None:
    assert number(compared(Attention(flat), "infer")[0]) == [Y + X]


class Again(Attention):
    """The backward computes the forward once more."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) + x  # type: ignore[no-any-return]


def test_under_checkpointing() -> None:
    assert number(compared(Again(sam), "train")[0]) == [Y + X]


@pytest.mark.parametrize(
    ("name", "value"), [("KEYS", Y * X + 1), ("NUMBERS", B * H * (Y * X) ** 2 + 1), ("WIDEST", 16)]
)
def test_few_keys_and_wide_heads_stay(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(features, name, value)
    assert number(compared(Attention(sam), "train")[0]) == []


@pytest.mark.parametrize("spelling", ["sam", "columns_first"])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_an_odd_number_of_keys(monkeypatch: pytest.MonkeyPatch, spelling: str, mode: str) -> None:
    """The memory-efficient kernel reads such a mask behind a copy with longer rows."""
    monkeypatch.setitem(globals(), "X", 7)
    report, graph = compared(Attention(SPELLINGS[spelling][0]), mode)
    assert number(report) == [Y + X]
    assert not graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)


def huge(a: Attention, q: Tensor) -> Tensor:
    """A product that hides every second row by the least number there is: over the scale it would be infinite."""
    zero, most = (torch.full((), x, dtype=q.dtype) for x in (0.0, torch.finfo(q.dtype).min))
    least = torch.where(torch.arange(Y) % 2 == torch.arange(2)[:, None], most, zero)
    h = (F.one_hot(torch.arange(Y * X) % 2, 2).to(q.dtype) @ least).reshape(1, Y, X, Y)
    return sam_of(h, a.along(q)[1])


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_the_least_number_hides(mode: str) -> None:
    assert number(compared(Attention(huge), mode)[0]) == [Y + X]


LIBRARY = torch.library.Library("coda_tests_positions", "DEF")
LIBRARY.define("twice(*, Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda *, x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("coda_tests_positions::twice", lambda *, x: torch.empty_like(x), lib=LIBRARY)


class Doubled(torch.autograd.Function):
    """What reads the gradient has no argument by place."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor) -> Tensor:
        return mask.view_as(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.ops.coda_tests_positions.twice(x=grad)


def test_a_gradient_that_something_else_reads_stays() -> None:
    def mask(a: Attention, q: Tensor) -> Tensor:
        return Doubled.apply(sam(a, q))  # type: ignore[no-any-return, no-untyped-call]

    assert number(compared(Attention(mask), "train")[0]) == []
