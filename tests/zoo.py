"""Small models in plain PyTorch: one decoder whose every part has several spellings.

CASES is the table: a decoder, and what becomes of it. Being in it is what gets a decoder compiled and its graph lifted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5
VOCAB, WIDTH, HEADS, INNER = 30, 16, 4, 24

# Norms: x and the gain. All but the last five are RMSNorm.
NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hf": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)),
    "F.rms_norm": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS),
    "divide by sqrt": lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * w,
    "norm()": lambda x, w: x * (x.norm(dim=-1, keepdim=True).square() / x.shape[-1] + EPS) ** -0.5 * w,
    "norm() without eps": lambda x, w: w * x / (x.norm(2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5 + EPS),
    "sum / K": lambda x, w: x * w * ((x**2).sum(-1, keepdim=True) / x.shape[-1] + EPS).rsqrt(),
    "einsum": lambda x, w: x * w / (torch.einsum("btd,btd->bt", x, x)[..., None] / x.shape[-1] + EPS).sqrt(),
    "gemma": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w),
    "no gain": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS),
    "clamped": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp_min(EPS)) * w,
    "mean of |x|": lambda x, w: x / (x.abs().mean(-1, keepdim=True) + EPS) * w,
    "softmax without max": lambda x, w: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True) * w,
    "LayerNorm": lambda x, w: F.layer_norm(x, (x.shape[-1],), w, None, EPS),
    "LayerNorm, var": lambda x, w: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + EPS).sqrt() * w
    ),
    "none": lambda x, w: x,
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.silu": F.silu,
    "x * sigmoid": lambda x: x * torch.sigmoid(x),
    "x / (1 + exp(-x))": lambda x: x / (1 + torch.exp(-x)),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu squared": lambda x: F.relu(x).square(),
    "softplus": F.softplus,
    "leaky relu": F.leaky_relu,
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """HF's rotary embedding."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Norm(nn.Module):
    """One of NORMS with its gain."""

    def __init__(self, kind: str, width: int = WIDTH) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Any:
        return NORMS[self.kind](x, self.weight)


class Attention(nn.Module):
    """Causal attention over `kv` heads, with or without rotary embedding."""

    def __init__(self, width: int, heads: int, kv: int, bias: bool, rope: bool) -> None:
        super().__init__()
        self.head, self.rope, self.groups = width // heads, rope, heads // kv
        self.q, self.o = nn.Linear(width, width, bias), nn.Linear(width, width, bias)
        self.k, self.v = (nn.Linear(width, kv * self.head, bias) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, -1, self.head).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.rope:
            t_, f = (torch.arange(a, b, dtype=x.dtype, device=x.device) for a, b in ((0, t), (1, self.head + 1)))
            angle = t_[:, None] * f
            q, k = (rotate(y, angle.cos(), angle.sin()) for y in (q, k))
        k, v = (y.repeat_interleave(self.groups, 1) if self.groups > 1 else y for y in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))


class Mlp(nn.Module):
    """`kind`: separate gate and up, packed in one weight ("chunk", "split", "slice", "up first"), or "plain"."""

    def __init__(self, kind: str, activation: str, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.kind, self.act = kind, ACTIVATIONS[activation]
        if kind == "separate":
            self.gate, self.up = nn.Linear(width, inner, bias), nn.Linear(width, inner, bias)
        else:
            self.first = nn.Linear(width, inner if kind == "plain" else 2 * inner, bias)
        self.down = nn.Linear(inner, width, bias)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "plain":
            return self.down(self.act(self.first(x)))
        if self.kind == "separate":
            gate, up = self.gate(x), self.up(x)
        elif self.kind == "split":
            both = self.first(x)
            gate, up = both.split(both.shape[-1] // 2, dim=-1)
        elif self.kind == "slice":
            both = self.first(x)
            gate, up = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
        else:
            gate, up = self.first(x).chunk(2, dim=-1)
            gate, up = (up, gate) if self.kind == "up first" else (gate, up)
        return self.down(self.act(gate) * up)


@dataclass(frozen=True)
class Shape:
    """Everything in which two decoders may differ; `also` names what is returned beside the logits."""

    norm: str = "hf"
    act: str = "F.silu"
    mlp: str = "separate"
    kv: int = HEADS
    bias: bool = False
    rope: bool = False
    order: str = "pre"
    layers: int = 2
    tied: bool = False
    also: str = ""
    width: int = WIDTH
    heads: int = HEADS
    inner: int = INNER
    vocab: int = VOCAB
    scale: float = 1.0


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.order, self.scale = s.order, s.scale
        self.attention = Attention(s.width, s.heads, s.kv, s.bias, s.rope)
        self.mlp = Mlp(s.mlp, s.act, s.width, s.inner, s.bias)
        self.before, self.between = Norm(s.norm, s.width), Norm(s.norm, s.width)
        if s.order == "sandwich":
            self.after, self.last = Norm(s.norm, s.width), Norm(s.norm, s.width)

    def forward(self, x: Tensor) -> Any:
        if self.order == "parallel":
            n = self.before(x)
            return x + self.attention(n) + self.mlp(n)
        if self.order == "post":
            x = self.before(x + self.attention(x))
            return self.between(x + self.mlp(x))
        if self.order == "after":  # OLMo-2
            x = x + self.before(self.attention(x))
            return x + self.between(self.mlp(x))
        if self.order == "sandwich":  # Gemma-2
            x = x + self.after(self.attention(self.before(x)))
            return x + self.last(self.mlp(self.between(x)))
        x = x + self.scale * self.attention(self.before(x))
        return torch.add(x, self.mlp(self.between(x)), alpha=self.scale)


class Decoder(nn.Module):
    """Token ids -> logits; `also` returns the last normalised tensor or the residual stream as well."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.also = s.also
        self.embed, self.head = nn.Embedding(s.vocab, s.width), nn.Linear(s.width, s.vocab, bias=False)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = Norm(s.norm, s.width)
        if s.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        n = self.norm(x)
        logits = self.head(n)
        return (logits, {"n": n, "x": x}[self.also]) if self.also else logits


def token_ids(batch: int = 2, tokens: int = 6, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, (batch, tokens))


@dataclass(frozen=True)
class Case:
    """A decoder, the Regions that its graph gets, and in how many of these a law moved a factor out of the product."""

    name: str
    shape: Shape
    regions: int
    deferred: int

    def build(self) -> tuple[nn.Module, tuple[Tensor]]:
        torch.manual_seed(0)
        return Decoder(self.shape).double().eval(), (token_ids(vocab=self.shape.vocab),)


# Two layers. o-proj and down become Regions with the residual and the next norm's statistic; gate and up are one; q, k
# and v of the second layer and the head each take the norm's factor. The first norm follows no product. So 10 and 6.
CASES: tuple[Case, ...] = (
    Case("norm: hf", Shape(norm="hf"), 10, 6),
    Case("norm: F.rms_norm", Shape(norm="F.rms_norm"), 10, 6),
    Case("norm: divide by sqrt", Shape(norm="divide by sqrt"), 10, 6),
    Case("norm: norm()", Shape(norm="norm()"), 10, 6),
    Case("norm: norm() without eps", Shape(norm="norm() without eps"), 10, 6),
    Case("norm: sum / K", Shape(norm="sum / K"), 10, 6),
    Case("norm: einsum", Shape(norm="einsum"), 10, 6),
    Case("norm: gemma", Shape(norm="gemma"), 10, 6),
    Case("norm: no gain", Shape(norm="no gain"), 10, 6),
    Case("norm: clamped", Shape(norm="clamped"), 10, 6),
    Case("norm: mean of |x|", Shape(norm="mean of |x|"), 10, 6),
    Case("norm: softmax without max", Shape(norm="softmax without max"), 10, 6),
    Case("norm: LayerNorm", Shape(norm="LayerNorm"), 10, 6),
    Case("norm: LayerNorm, var", Shape(norm="LayerNorm, var"), 10, 6),
    Case("norm: none", Shape(norm="none"), 6, 0),
    Case("activation: F.silu", Shape(act="F.silu"), 10, 6),
    Case("activation: x * sigmoid", Shape(act="x * sigmoid"), 10, 6),
    Case("activation: x / (1 + exp(-x))", Shape(act="x / (1 + exp(-x))"), 10, 6),
    Case("activation: gelu", Shape(act="gelu"), 10, 6),
    Case("activation: gelu, tanh", Shape(act="gelu, tanh"), 10, 6),
    Case("activation: quick gelu", Shape(act="quick gelu"), 10, 6),
    Case("activation: relu", Shape(act="relu"), 10, 6),
    Case("activation: relu squared", Shape(act="relu squared"), 10, 6),
    Case("activation: softplus", Shape(act="softplus"), 12, 8),
    Case("activation: leaky relu", Shape(act="leaky relu"), 10, 6),
    Case("mlp: chunk", Shape(mlp="chunk"), 10, 6),
    Case("mlp: split", Shape(mlp="split"), 10, 6),
    Case("mlp: slice", Shape(mlp="slice"), 10, 6),
    Case("mlp: up first", Shape(mlp="up first"), 10, 6),
    Case("mlp: plain", Shape(mlp="plain"), 10, 6),
    Case("mlp: chunk, bias", Shape(mlp="chunk", bias=True), 10, 6),
    Case("mlp: split, bias", Shape(mlp="split", bias=True), 10, 6),
    Case("order: parallel", Shape(order="parallel"), 10, 5),
    Case("order: post", Shape(order="post"), 9, 5),
    Case("order: after", Shape(order="after"), 2, 0),
    Case("order: sandwich", Shape(order="sandwich"), 2, 0),
    Case("grouped heads", Shape(kv=2), 10, 6),
    Case("one kv head", Shape(kv=1), 10, 6),
    Case("bias", Shape(bias=True), 10, 6),
    Case("rotary", Shape(rope=True), 12, 6),
    Case("rotary, bias, one kv head", Shape(rope=True, bias=True, kv=1), 12, 6),
    Case("Llama", Shape(rope=True, kv=2, norm="F.rms_norm", layers=3), 18, 10),
    Case("GPT-2", Shape(bias=True, mlp="plain", act="gelu, tanh", norm="LayerNorm", tied=True), 10, 6),
    Case("BERT", Shape(bias=True, mlp="plain", act="gelu", norm="LayerNorm", order="post"), 9, 4),
    Case("NeoX", Shape(bias=True, mlp="plain", act="gelu", norm="LayerNorm", order="parallel"), 10, 5),
    Case("tied", Shape(tied=True), 10, 6),
    Case("normalised stream returned", Shape(also="n"), 9, 5),
    Case("stream returned", Shape(also="x"), 10, 6),
    Case("residual multiplier", Shape(scale=0.5), 10, 6),
    Case("all sizes equal", Shape(width=8, heads=8, inner=8, vocab=8), 10, 6),
    Case("square", Shape(inner=16, vocab=16), 10, 6),
    Case("square and tied", Shape(tied=True, inner=16, vocab=16), 10, 6),
    Case("square, tied, packed", Shape(tied=True, inner=16, vocab=16, mlp="chunk", bias=True, rope=True), 12, 6),
    Case("one layer", Shape(layers=1), 4, 2),
)  # fmt: skip
