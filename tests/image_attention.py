"""An image of tokens whose attention adds to each score a number for the row of the key, and one for its column, as SAM
does; graphs of it with CUDA's kernels, in float64; and what these graphs mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

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


def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if CUDA's kernels took float64, and features paid for any number of keys."""
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


def sam_of(h: Tensor, w: Tensor) -> Tensor:
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
        given = {"is_causal": False} | dict(zip(names, args, strict=False)) | kwargs
        read = [given[name] for name in ("query", "key", "value", "attn_bias")]
        leaves = [None if x is None else x.detach().requires_grad_() for x in read]
        with torch.enable_grad():
            out = attention(leaves, given.get("scale"), given["is_causal"])
        if n.target in KERNELS:
            return (like(out.detach(), n.meta["val"][0]), *[torch.zeros(())] * 8)
        there = [x for x in leaves if x is not None]
        made = torch.autograd.grad(out, there, given.get("grad_out", given.get("grad_out_")))
        return tuple(like(x, val) for x, val in zip(made, n.meta["val"], strict=False))


def attention(read: list[Any], scale: float | None, causal: bool) -> Tensor:
    query, key, value, bias = read
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
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


def written(graph: fx.Graph) -> str:
    """The code that Inductor makes of it, which nobody runs."""
    values = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    module = fx.GraphModule(nn.Module(), g.copied(graph))
    module.graph.set_codegen(fx.graph.CodeGen())
    lowering = GraphLowering(module, values, values[0].fake_mode.shape_env)
    with V.set_fake_mode(values[0].fake_mode), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
        lowering.run(*values)
        return str(lowering.codegen()[0])
