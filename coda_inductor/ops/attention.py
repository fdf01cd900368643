"""torch.ops.coda.windowed_attention and its backward: each query sees the keys of a window of tokens.

Their eager meaning is the definition, on every device. Compiled graphs call torch's flash attention on CUDA, which has
windows (`aten._flash_attention_forward`); no composite operation of torch's leads to them.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import (
    add_layout_constraint,
    fallback_handler,
    lowerings,
    register_lowering,
    sdpa_constraint,
)
from torch.utils.flop_counter import register_flop_formula

aten = torch.ops.aten
_library = torch.library.Library("coda", "FRAGMENT")
_library.define(
    "windowed_attention(Tensor query, Tensor key, Tensor value, int? left, int? right, *, float? scale=None)"
    " -> (Tensor output, Tensor logsumexp, Tensor rng_state, Tensor unused)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "windowed_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor output,"
    " Tensor logsumexp, Tensor rng_state, Tensor unused, int? left, int? right, *, float? scale=None)"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

WINDOWED = torch.ops.coda.windowed_attention.default
"""windowed_attention(query [B, H, T, D], key [B, G, T, D], value [B, G, T, D], left, right) -> output [B, H, T, D] as
the query lies, the logarithm of each row's sum of exponentials [B, H, T] in float32 (of float64: float64), and two
tensors that the backward hands to torch. Token q sees the keys q - left to q + right; None: all on that side. H / G
heads in succession share keys and values."""
WINDOWED_BACKWARD = torch.ops.coda.windowed_attention_backward.default
"""windowed_attention_backward(grad_out, what the forward read, what it returned, left, right) -> the gradients of what
it read, as that lies."""


def seen(tokens: int, left: int | None, right: int | None, device: torch.device | None = None) -> Tensor:
    """[T, T]: does the token of a row see the key of a column?"""
    every = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    every = every if right is None else every.tril(right)
    return every if left is None else every.triu(-left)


def pairs(tokens: int, left: int | None, right: int | None) -> int:
    """How many pairs of tokens see each other."""
    hidden = [max(tokens - 1 - n, 0) for n in (left, right) if n is not None]
    return tokens**2 - sum(n * (n + 1) // 2 for n in hidden)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _scores(query: Tensor, key: Tensor, left: int | None, right: int | None, scale: float) -> Tensor:
    """[B, H, T, T], with minus infinity for what is hidden."""
    scores = scale * _wide(query) @ _wide(_repeated(key, query)).transpose(-1, -2)
    return scores.masked_fill(~seen(query.shape[-2], left, right, query.device), -math.inf)


def _or_torchs(scale: float | None, query: Tensor) -> float:
    """What scores are multiplied by."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _once(gradient: Tensor, like: Tensor) -> Tensor:
    """Summed over the heads that share keys or values, and as these lie."""
    gradient = gradient.unflatten(1, (like.shape[1], -1)).sum(2)
    return torch.empty_like(like).copy_(gradient)


def _eager(
    query: Tensor, key: Tensor, value: Tensor, left: int | None, right: int | None, *, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = _scores(query, key, left, right, _or_torchs(scale, query))
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp[..., None]).exp()
    out, lse, state, unused = _fake(query, key, value, left, right)
    return out.copy_(weights @ _wide(_repeated(value, query))), lse.copy_(logsumexp), state.zero_(), unused.zero_()


def _eager_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    rng_state: Tensor,
    unused: Tensor,
    left: int | None,
    right: int | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    scale = _or_torchs(scale, query)
    weights = (_scores(query, key, left, right, scale) - logsumexp[..., None]).exp()
    given, wide = _wide(grad_out), _wide(_repeated(value, query))
    inner = (given * _wide(output)).sum(-1, keepdim=True)
    scores = scale * weights * (given @ wide.transpose(-1, -2) - inner)
    of_query = scores @ _wide(_repeated(key, query))
    of_key, of_value = scores.transpose(-1, -2) @ _wide(query), weights.transpose(-1, -2) @ given
    return torch.empty_like(query).copy_(of_query), _once(of_key, key), _once(of_value, value)


def _fake(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    state, unused = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide), state, unused


def _fake_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_library.impl("windowed_attention", _eager, "CompositeExplicitAutograd")
_library.impl("windowed_attention_backward", _eager_backward, "CompositeExplicitAutograd")
torch.library.register_fake("coda::windowed_attention", _fake, lib=_library)
torch.library.register_fake("coda::windowed_attention_backward", _fake_backward, lib=_library)


@register_flop_formula(torch.ops.coda.windowed_attention)
def _flops(
    query: torch.Size, key: object, value: object, left: int | None, right: int | None, *_: object, **__: object
) -> int:
    return 4 * math.prod(query) * pairs(query[2], left, right) // max(query[2], 1)


@register_flop_formula(torch.ops.coda.windowed_attention_backward)
def _flops_backward(grad_out: object, query: torch.Size, *given: Any, **__: object) -> int:
    *_, left, right = given
    return 10 * math.prod(query) * pairs(query[2], left, right) // max(query[2], 1)


# ---- compiled


def _by_token(x: Any) -> Any:
    """[B, H, T, D] as [B, T, H, D], or back: torch's flash attention has the tokens first."""
    boxed = x if isinstance(x, ir.TensorBox) else ir.TensorBox(x)  # the constraint leaves views of buffers bare
    return lowerings[aten.permute.default](boxed, [0, 2, 1, 3])


def _lower(query: Any, key: Any, value: Any, left: Any, right: Any, *, scale: float | None = None) -> Any:
    if query.get_device().type != "cuda":
        return fallback_handler(WINDOWED, add_to_fallback_set=False)(query, key, value, left, right, scale=scale)
    tokens = query.get_size()[2]
    flash = fallback_handler(aten._flash_attention_forward.default, add_to_fallback_set=False)
    given = [*map(_by_token, (query, key, value)), None, None, tokens, tokens, 0.0, False, False]
    out, *others = flash(*given, scale=scale, window_size_left=left, window_size_right=right)
    return _by_token(out), *others[:3]


def _lower_backward(*given: Any, scale: float | None = None) -> Any:
    grad_out, query, key, value, output, logsumexp, *states, left, right = given
    if query.get_device().type != "cuda":
        return fallback_handler(WINDOWED_BACKWARD, add_to_fallback_set=False)(*given, scale=scale)
    tokens = query.get_size()[2]
    flash = fallback_handler(aten._flash_attention_backward.default, add_to_fallback_set=False)
    first = [*map(_by_token, (grad_out, query, key, value, output)), logsumexp, None, None, tokens, tokens, 0.0, False]
    return [_by_token(x) for x in flash(*first, *states, scale=scale, window_size_left=left, window_size_right=right)]


@cache
def register() -> None:
    """Tells Inductor, once."""
    for operation, lower in ((WINDOWED, _lower), (WINDOWED_BACKWARD, _lower_backward)):
        register_lowering(operation, type_promotion_kind=None)(lower)
        add_layout_constraint(operation, sdpa_constraint)
