"""torch.ops.coda.loss_rows: what is left of a cross-entropy's rows when the exponentials of their scores are stored.
torch.ops.coda.loss_targets: their targets, where softmax and one-hot have different factors.

Of scores s [M, V] and targets t [M] an epilogue has stored exp(s - s_t), and 0 at the target, and has added each row up
to `total`. Then, for each row, with a = 1 / (1 + total):

    loss = logsumexp(s) - s_t = log(1 + total)
    softmax(s) - onehot(t) = a E,  E = exp(s - s_t), and -total at the target

So one number a row is written, and the row needs no other pass. What is rounded at the target goes into `a`.

**Rows of a great loss.** exp(s - s_t) was held at e^64, so that bfloat16 has it. A row whose total is near that is
computed again from x and the weight, relative to its maximum: exp(s - max), and a = 1 / its sum. Where the scores are
bounded, no row is that far, and x and the weight are None.

**Different factors**, as with a z-loss: softmax(s) - k onehot(t) = a E with (exp(-loss) - k) / a at the target.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

from coda_inductor.kernels.loss.rows import finish, finish_targets
from coda_inductor.ops.lowering import alone_in_memory

CAP = 64.0
"""Exponents are held at this. Its exponential, 6e27, times any vocabulary is a number of bfloat16's and float32's."""
LIMIT = math.exp(CAP - 0.1)
"""Totals from here on are of rows that are computed again: a GPU's exponential of CAP may be a little less."""
SMALLEST, LARGEST = 1e-30, 1e30
"""What is rounded at the target goes into the row's factor between these: beyond, bfloat16 has fewer bits."""

_library = torch.library.Library("coda", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_GIVEN = "Tensor total, Tensor target, Tensor? slope, Tensor? x, Tensor? weight, Tensor? bias, float scale"
_library.define(f"loss_rows(Tensor exponentials, {_GIVEN}) -> (Tensor, Tensor, Tensor)", tags=_tags)
_library.define(f"loss_rows_(Tensor(a!) e, Tensor(b!) loss, Tensor(c!) factor, {_GIVEN}) -> ()", tags=_tags)

LOSS_ROWS, LOSS_ROWS_ = torch.ops.coda.loss_rows.default, torch.ops.coda.loss_rows_.default
"""loss_rows(exponentials [M, V], total [M, 1] in float32 (of float64: float64), target [M, 1] in int64, slope [M, 1] or
None, x [M, K], weight [V, K], bias [V] or None, scale) -> E [M, V], loss [M, 1], a [M, 1] as `total`. The scores are
scale * (x @ weight.T + bias). `slope`: what the exponentials are multiplied by in the gradient, at the target.
loss_rows_ writes over its first three."""


def _in_place(
    e: Tensor, loss: Tensor, factor: Tensor, total: Tensor, target: Tensor, slope: Tensor | None,
    x: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: float,
) -> None:  # fmt: skip
    if e.is_cuda:
        finish(e, loss, factor, total, target, slope, x, weight, bias, scale, LIMIT)
        return
    first, mine, part = -total, torch.log1p(total), 1 / (1 + total)
    first = first if slope is None else first * slope
    far = ~(total < LIMIT).squeeze(1)
    if x is not None and weight is not None and bool(far.any()):
        s, at = x[far].to(total.dtype) @ weight.to(total.dtype).T, target[far]
        s = scale * (s if bias is None else s + bias.to(total.dtype))
        top = s.amax(1, keepdim=True)
        exp = torch.exp(s - top)
        whole, there = exp.sum(1, keepdim=True), s.gather(1, at)
        e[far] = exp.to(e.dtype)
        mine[far], first[far], part[far] = torch.log(whole) + top - there, torch.exp(there - top) - whole, 1 / whole
    stored = first.to(e.dtype)
    e.scatter_(1, target, stored)
    loss.copy_(mine)
    factor.copy_(part * _rounded_away(first, stored))


def _functional(
    exponentials: Tensor, total: Tensor, target: Tensor, slope: Tensor | None, x: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    e, loss, factor = exponentials.clone(), torch.empty_like(total), torch.empty_like(total)
    _in_place(e, loss, factor, total, target, slope, x, weight, bias, scale)
    return e, loss, factor


def _fake(exponentials: Tensor, total: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(exponentials), torch.empty_like(total), torch.empty_like(total)


_library.impl("loss_rows", _functional, "CompositeExplicitAutograd")
_library.impl("loss_rows_", _in_place, "CompositeExplicitAutograd")
torch.library.register_fake("coda::loss_rows", _fake, lib=_library)
torch.library.register_fake("coda::loss_rows_", lambda *_: None, lib=_library)


_OF_ROWS = "Tensor loss, Tensor target, Tensor hot, Tensor rest, Tensor? slope"
_library.define(f"loss_targets(Tensor e, Tensor factor, {_OF_ROWS}) -> (Tensor, Tensor)", tags=_tags)
_library.define(f"loss_targets_(Tensor(a!) e, Tensor(b!) factor, {_OF_ROWS}) -> ()", tags=_tags)

LOSS_TARGETS, LOSS_TARGETS_ = torch.ops.coda.loss_targets.default, torch.ops.coda.loss_targets_.default
"""loss_targets(E [M, V], a [M, 1], loss [M, 1], target [M, 1], k [M, 1], 1 - k [M, 1], slope [M, 1] or None) -> E with
(softmax - k) slope / a at the target, a. k and 1 - k are given, so that neither is a difference. What is rounded at the
target goes into a where it is the most of its row: at least a quarter of what all others are together, 1 - softmax.
loss_targets_ writes over its first two."""


def _targets_in_place(
    e: Tensor, factor: Tensor, loss: Tensor, target: Tensor, hot: Tensor, rest: Tensor, slope: Tensor | None
) -> None:
    if e.is_cuda and e.dtype != torch.float64:
        finish_targets(e, factor, loss, target, hot, rest, slope)
        return
    there = torch.where(hot < rest, torch.exp(-loss) - hot, rest + torch.expm1(-loss))
    most = there.abs() >= -0.25 * torch.expm1(-loss)
    value = (there if slope is None else there * slope) / factor
    stored = value.to(e.dtype)
    e.scatter_(1, target, stored)
    factor.copy_(torch.where(most, factor * _rounded_away(value, stored), factor))


def _targets(e: Tensor, factor: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    made = e.clone(), factor.clone()
    _targets_in_place(*made, *given)
    return made


def _rounded_away(value: Tensor, stored: Tensor) -> Tensor:
    """What a row's factor is multiplied by, so that `stored` counts as much as `value`."""
    size = value.abs()
    return torch.where((size > SMALLEST) & (size < LARGEST), value / stored.to(value.dtype), 1.0)


_library.impl("loss_targets", _targets, "CompositeExplicitAutograd")
_library.impl("loss_targets_", _targets_in_place, "CompositeExplicitAutograd")
torch.library.register_fake(
    "coda::loss_targets", lambda e, a, *_: (torch.empty_like(e), torch.empty_like(a)), lib=_library
)
torch.library.register_fake("coda::loss_targets_", lambda *_: None, lib=_library)


def _lower_targets(e: ir.TensorBox, factor: ir.TensorBox, *given: object) -> tuple[ir.TensorBox, ...]:
    e, factor = alone_in_memory(e), alone_in_memory(factor, 1)
    fallback_handler(LOSS_TARGETS_, add_to_fallback_set=False)(e, factor, *given)
    return e, factor


def _lower(e: ir.TensorBox, total: ir.TensorBox, *given: object) -> tuple[ir.TensorBox, ...]:
    e = alone_in_memory(e)
    size, of = total.get_size(), {"dtype": total.get_dtype(), "device": total.get_device()}
    loss, factor = (lowerings[torch.ops.aten.full.default]([*size], 0.0, **of) for _ in range(2))
    for made in (loss, factor):
        made.realize()
    fallback_handler(LOSS_ROWS_, add_to_fallback_set=False)(e, loss, factor, total, *given)
    return e, loss, factor


@cache
def register() -> None:
    """Tells Inductor, once."""
    register_lowering(LOSS_ROWS, type_promotion_kind=None)(_lower)
    register_lowering(LOSS_TARGETS, type_promotion_kind=None)(_lower_targets)
