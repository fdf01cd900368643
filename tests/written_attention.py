"""Attention that is written out, as products and a softmax, in many spellings; and graphs of it in float64 before and
after they are rewritten for CUDA's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from image_attention import Meaning
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from coda_inductor.attention import features, written
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture
from coda_inductor.inductor import joint
from coda_inductor.inductor.records import Report
from coda_inductor.patterns import graph as g

aten = torch.ops.aten
B, T, H, D = 2, 40, 4, 8
CUDNN = aten._scaled_dot_product_cudnn_attention.default
STAGES = (joint.written_attention, joint.constant_masks, joint.grouped_heads, joint.added_positions)
Written = Callable[["Layer", Tensor, Tensor, Tensor], Tensor]
"""Of queries, keys and values [batch, heads, tokens, size], the result [batch, heads, tokens, size]."""


def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if CUDA's kernels took float64, and paid for any number of keys."""
    for module in (written, features):
        monkeypatch.setattr(module, "DTYPES", (torch.float64,))
        for least in ("KEYS", "NUMBERS", *(("KEYS_TRAINED", "NUMBERS_TRAINED") if module is written else ())):
            monkeypatch.setattr(module, least, 1)


class Layer(nn.Module):
    """Attention between two products. `heads`: how many heads of keys and values there are."""

    def __init__(self, attention: Written, heads: int = H) -> None:
        super().__init__()
        self.sizes = [H * D, heads * D, heads * D]
        self.qkv, self.o = nn.Linear(16, sum(self.sizes)), nn.Linear(H * D, 16)
        self.register_buffer("past", torch.ones(1, 1, T, T).tril())
        self.register_buffer("table", torch.randn(H, T, T))
        self.register_buffer("windows", torch.randn(B, T, T))
        self.learned = nn.Parameter(torch.randn(H, T, T))
        self.size, self.attention = nn.Parameter(torch.tensor(0.3)), attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        made = self.attention(self, q, k, v)
        return self.o(made.transpose(1, 2).reshape(B, T, H * D))  # type: ignore[no-any-return]


# ---- spellings


def plain(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1) @ v


def scaled_queries(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q * 0.125) @ k.mT, -1) @ v


def einsum(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.3
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def heads_in_batches(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).mul(0.4).softmax(-1), v).view(B, H, T, D)


def keys_first(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first product is made the other way round."""
    return (k @ q.mT * 0.3).transpose(-1, -2).softmax(-1) @ v


def first_axis(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both are, and the softmax is taken down the columns."""
    return (v.mT @ (k @ q.mT).softmax(-2)).mT


def turned(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The second product is made the other way round."""
    weights = (q @ k.mT * 0.3).softmax(-1)
    return (v.mT @ weights.mT).mT


def by_hand(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without torch's softmax, nor a maximum."""
    e = (q @ k.mT * 0.2).exp()
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


def late_quotient(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By logarithms."""
    return (q @ k.mT * 0.2).log_softmax(-1).exp() @ v


def buffer(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As minGPT: which tokens are later is a buffer."""
    scores = (q @ k.mT) * (1.0 / math.sqrt(D))
    return scores.masked_fill(a.past[:, :, :T, :T] == 0, -math.inf).softmax(-1) @ v  # type: ignore[index]


def later(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.2
    return scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v


def low(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A number hides, and the scale comes last."""
    scores = (q @ k.mT).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e12) / 3
    return scores.softmax(-1) @ v


def seen(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A choice the other way round."""
    stays = torch.arange(T)[:, None] >= torch.arange(T) - 2
    return torch.where(stays, q @ k.mT, -math.inf).softmax(-1) @ v


def added(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers has it."""
    mask = torch.full((T, T), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)[None, None]
    return ((q @ k.transpose(2, 3)) * 0.35 + mask).softmax(-1) @ v


def distances(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As BLOOM has it: what is added first, in a product with batch and heads in one, tells no queries apart."""
    slopes = 0.5 ** torch.arange(H, dtype=q.dtype)
    added = (slopes[:, None, None] * torch.arange(T, dtype=q.dtype)[None, None]).repeat(B, 1, 1)
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    scores = added.baddbmm(q, k.mT, beta=0.5, alpha=0.25).view(B, H, T, T)
    later = torch.full((T, T), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    return torch.bmm((scores + later).softmax(-1).view(B * H, T, T), v).view(B, H, T, D)


def of_few_bits(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of another dtype, exact in any."""
    mask = torch.full((T, T), -math.inf).triu(1)
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def adds_nothing(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Megatron has it: what lies there is not read."""
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    there = torch.full((B * H, T, T), math.inf, dtype=q.dtype)
    return torch.bmm(torch.baddbmm(there, q, k.mT, beta=0.0, alpha=0.25).softmax(-1), v).view(B, H, T, D)


def heads_first(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask is repeated for other samples than its own: heads and samples are another product."""
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    hidden = (torch.arange(B)[:, None, None] + torch.arange(T)[:, None] < torch.arange(T)).repeat(H, 1, 1)
    return torch.bmm(torch.bmm(q, k.mT).masked_fill(hidden, -math.inf).softmax(-1), v).view(B, H, T, D)


def subtracted(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    apart = (torch.arange(T)[:, None] - torch.arange(T)).abs().to(q.dtype)
    return ((q @ k.mT - apart) * 0.5).softmax(-1) @ v


def grouped(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads share keys and values."""
    k, v = (x[:, :, None].expand(B, H // 2, 2, T, D).reshape(B, H, T, D) for x in (k, v))
    return (q @ k.mT * 0.3).softmax(-1) @ v


def twice(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to what attention made."""
    return plain(a, plain(a, q, k, v), k, v)


def values_are_keys(a: Layer, q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    return plain(a, q, k, k)


def all_alike(a: Layer, q: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return plain(a, q, q, q)


SPELLINGS: dict[str, Written] = {
    f.__name__: f
    for f in (
        plain, scaled_queries, einsum, heads_in_batches, keys_first, first_axis, turned, by_hand, late_quotient,
        buffer, later, low, seen, added, of_few_bits, adds_nothing, heads_first, distances, subtracted, grouped, twice,
        values_are_keys, all_alike,
    )
}  # fmt: skip


# ---- those whose masks only a run knows: in inference


def table(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Swin has it: a number for each head and pair of tokens."""
    return ((q * 0.3) @ k.mT + a.table[None]).softmax(-1) @ v  # type: ignore[index]


def windows(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Windows of images have a mask for all heads, beside that of all windows."""
    scores = (q @ k.mT + a.table).view(1, B, H, T, T) + a.windows[:, None][None]  # type: ignore[index, operator]
    return scores.view(B, H, T, T).softmax(-1) @ v


def keys_of_samples(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of keys alone."""
    return (q @ k.mT + a.windows[:, None, :1]).softmax(-1) @ v  # type: ignore[index]


def low_of_buffers(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(a.past == 0, -1e30).softmax(-1) @ v  # type: ignore[arg-type]


Y = 5
"""Rows of an image of all tokens."""


def image(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the first code of SAM has it, with samples and heads in one."""
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    places = q.reshape(B * H, Y, T // Y, D)
    down = torch.einsum("bhwc,hkc->bhwk", places, a.learned[0, : Y * Y, :D].reshape(Y, Y, D))
    across = torch.einsum("bhwc,wkc->bhwk", places, a.learned[:2, :32, :D].reshape(T // Y, T // Y, D))
    scores = ((q * 0.3) @ k.mT).view(-1, Y, T // Y, Y, T // Y)
    scores = scores + down[:, :, :, :, None] + across[:, :, :, None, :]
    return (scores.view(-1, T, T).softmax(-1) @ v).view(B, H, T, D)


def image_of_sums(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers has it: both are added up before."""
    places = q.reshape(B * H, Y, T // Y, D)
    down = torch.einsum("bhwc,hkc->bhwk", places, a.learned[0, : Y * Y, :D].reshape(Y, Y, D))
    across = torch.einsum("bhwc,wkc->bhwk", places, a.learned[:2, :32, :D].reshape(T // Y, T // Y, D))
    scores = (q * 0.3) @ k.mT
    both = (down[:, :, :, :, None] + across[:, :, :, None, :]).reshape(scores.shape)
    return (scores + both).softmax(-1, dtype=q.dtype) @ v


def two_hide(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows whose every key is hidden, some by minus infinity."""
    odd, least = torch.arange(T) % 2 == 1, torch.finfo(q.dtype).min
    scores = (q @ k.mT).masked_fill(odd & (a.past == 0), -math.inf)
    return (scores + torch.zeros(T, T, dtype=q.dtype).masked_fill(a.past[0, 0] == 0, least).flip(0)).softmax(-1) @ v  # type: ignore[index]


def two_are_added(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Together they are minus infinity."""
    least = torch.finfo(q.dtype).min
    first = torch.zeros(T, T, dtype=q.dtype).masked_fill(a.past[0, 0] == 0, least)  # type: ignore[index]
    return (q @ k.mT + first + first.flip(0) + first.flip(1)).softmax(-1) @ v


def two_levels(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of a row whose every key is hidden the higher number counts."""
    i = torch.arange(T)
    return (q @ k.mT).masked_fill(i[:, None] < i, -1e30).masked_fill(i[:, None] == i, -1e12).softmax(-1) @ v


def padded_left(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Padding in front, beside what minus infinity hides."""
    i = torch.arange(T)
    return (q @ k.mT).masked_fill(i[:, None] < i, -math.inf).masked_fill(i < 7, -1e30).softmax(-1) @ v


def two_that_add(a: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each of two products is a mask of the other's scores: one of them is."""
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    more = a.table.repeat(B, 1, 1)  # type: ignore[operator]
    scores = torch.baddbmm(more, q, k.mT) + torch.baddbmm(more, q.sin(), k.cos().mT)
    return torch.bmm(scores.softmax(-1), v).view(B, H, T, D)


def complements(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    odd = (torch.arange(T) % 2).to(q.dtype)
    return (q @ k.mT - 1e35 * odd - 1e34 * (1 - odd)).softmax(-1) @ v


UNKNOWN: dict[str, Written] = {
    f.__name__: f
    for f in (
        two_hide, two_are_added, two_levels, padded_left, two_that_add, complements, table, windows, keys_of_samples,
        low_of_buffers,
    )
}  # fmt: skip


# ---- graphs


class Bounded(Meaning):
    """No mask has numbers that cuDNN could not turn into powers of two."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target is CUDNN:
            mask = self.fetch_args_kwargs_from_env(n)[0][3]
            assert mask is None or bool((mask >= -2.1e38).all())
        return super().run_node(n)


def results(graph: fx.Graph) -> list[Any]:
    """What it returns for random inputs; what is a triangle stays one."""
    torch.manual_seed(1)
    inputs = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    values = [torch.randn(x.shape, dtype=torch.float64) for x in inputs]
    values = [torch.ones_like(x).tril() if x.shape == (1, 1, T, T) else x for x in values]
    made = Bounded(fx.GraphModule(nn.Module(), graph)).run(*values)
    return [x for x in tree_leaves(made) if x is not None]


def both(
    model: nn.Module, mode: Any, how: dict[str, Any] | None = None, inputs: Sequence[Tensor] = ()
) -> tuple[Report, fx.Graph, fx.Graph]:
    """The report, the graph before, and the graph after."""
    found = list[tuple[Report, fx.Graph, fx.Graph]]()

    def one(graph: fx.Graph) -> None:
        before = g.copied(graph)
        report = joint.rewrite(graph, Settings(**(how or {})), "sm_90a", stages=STAGES)
        found.append((report, before, graph.owning_module.graph))  # type: ignore[union-attr]

    given = inputs or [torch.randn(B, T, 16, dtype=torch.float64, requires_grad=mode == "train")]
    capture(model.double(), (*given,), {}, mode, one)
    return found[0]


def compared(
    model: nn.Module, mode: Any, how: dict[str, Any] | None = None, inputs: Sequence[Tensor] = ()
) -> tuple[Report, fx.Graph]:
    """The report, and the graph; its results are those of the graph before, and lie as they did."""
    report, before, after = both(model, mode, how, inputs)
    for a, b in zip(results(after), results(before), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)
        assert a.stride() == b.stride()
    return report, after


def fused(graph: fx.Graph) -> int:
    """How many operations of attention there are, forward."""
    return sum(n.target is CUDNN for n in graph.nodes)
