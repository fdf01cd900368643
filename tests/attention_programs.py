"""Programs in which memory is read by what is no Region: passes beside attention, tables of rotary embeddings, and keys
that several heads share. All have a layer of 32 features and are trained. An operation of their own, which is no
product, stands for attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from programs import Program, program
from small_tensors import rms
from torch import Tensor, nn

D, HEADS = 32, 4
BESIDE: dict[str, Program] = {}
TABLES: dict[str, Program] = {}
OTHER_SIZES = {"B": 2, "T": 24, "D": D, "P": 3 * D, "H": D // HEADS, "K": 2 * (D // HEADS)}


LIBRARY = torch.library.Library("coda_tests_attention", "DEF")
LIBRARY.define("mix(Tensor q, Tensor k, Tensor v) -> Tensor")
LIBRARY.define("mix_backward(Tensor g, Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)")


def _mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, T, D] each, of k and v perhaps fewer heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return (torch.tanh(q) * k + v).transpose(1, 2).contiguous().transpose(1, 2)


def _mix_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Each gradient lies token by token, as attention's do."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(_mix(*leaves), leaves, g)
    rows = torch.contiguous_format  # copies: none may be the gradient that was given, whose memory is used again
    return tuple(x.transpose(1, 2).clone(memory_format=rows).transpose(1, 2) for x in grads)


def _by_token(x: Tensor) -> Tensor:
    b, h, t, d = x.shape
    return x.new_empty((b, t, h, d)).transpose(1, 2)


LIBRARY.impl("mix", _mix, "CPU")
LIBRARY.impl("mix_backward", _mix_backward, "CPU")
torch.library.register_fake("coda_tests_attention::mix", lambda q, k, v: _by_token(q), lib=LIBRARY)
torch.library.register_fake(
    "coda_tests_attention::mix_backward",
    lambda g, q, k, v: tuple(_by_token(x) for x in (q, k, v)),
    lib=LIBRARY,
)
OPS = torch.ops.coda_tests_attention


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
    return OPS.mix_backward(g, *ctx.saved_tensors)  # type: ignore[no-any-return]


torch.library.register_autograd(
    "coda_tests_attention::mix",
    _gradients,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=LIBRARY,
)


def heads(x: Tensor, width: int = D // HEADS) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)  # type: ignore[no-any-return]


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


@program(BESIDE, "x:BTD r:BTD'", train=3)
class NormMoved(nn.Module):
    """A layer whose LayerNorm reads a stream less a running mean, which is then updated; the residual is zeroed."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.qkv, self.out = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("mean", torch.randn(D))

    def forward(self, x: Tensor, r: Tensor) -> Any:
        x = r + self.up(x) - self.mean
        r.zero_()
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.5)
        q, k, v = self.qkv(self.norm(x)).split(D, -1)
        return x + self.out(joined(OPS.mix(heads(q), heads(k), heads(v))))


@program(BESIDE, "x:BTD w:DP o:DD | bias:P last:BTD", train=3)
def queries_kept(x: Tensor, w: Tensor, o: Tensor, bias: Tensor, last: Tensor) -> Any:
    """Attention's inputs are written over a state that the same layer reads, and the bias moves."""
    n = rms(x + last)
    q, k, v = (n @ w + bias).split(D, -1)
    with torch.no_grad():
        last.copy_(q)
        bias.mul_(0.5)
    return x + joined(OPS.mix(heads(q), heads(k), heads(v))) @ o


@program(BESIDE, "x:BTD w:DP o:DD g:D | scale:TD", train=2, inductor=False)
def gradients_scaled(x: Tensor, w: Tensor, o: Tensor, g: Tensor, scale: Tensor) -> Any:
    """What scales queries, and their gradients beside attention's, is a function of what is written."""
    q, k, v = (F.layer_norm(x, (D,), g) @ w).split(D, -1)
    q = q * torch.sigmoid(scale)
    with torch.no_grad():
        scale.add_(1)
    return x + joined(OPS.mix(heads(q), heads(k), heads(v))) @ o


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@program(TABLES, "x:BTD q:DD k:DD | at:TH", infer=1, train=3, inductor=False)
def angles_moved(x: Tensor, q: Tensor, k: Tensor, at: Tensor) -> Any:
    """Streaming: the positions go on after they were read."""
    cos, sin = at.cos() * 1.0, at.sin() * 1.0
    y = rotated(heads(x @ q), cos, sin) * rotated(heads(x @ k), cos, sin)
    with torch.no_grad():
        at.add_(1)
    return y.sum((1, 3)), torch.tanh(x @ q)


@program(TABLES, "x:BTD q:DD k:DK v:DK | at:TH seen:BTK", infer=1, train=4, inductor=False)
def shared_keys_kept(x: Tensor, q: Tensor, k: Tensor, v: Tensor, at: Tensor, seen: Tensor) -> Any:
    """Keys and values of two heads for four; the keys go into a state, and are read from it."""
    cos, sin = at.cos(), at.sin()
    keys, values = x @ k + seen, x @ v
    with torch.no_grad():
        seen.copy_(keys)
        at.mul_(0.5)
    y = OPS.mix(rotated(heads(x @ q), cos, sin), rotated(heads(keys), cos, sin), heads(values))
    return rms(x + joined(y)) @ q
