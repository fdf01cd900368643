"""Gradients that are handed into a compiled backward beside its tangents, or not at all.

torch.ops.coda.gradient_key(x): the number of a slot, in which a gradient of x may be handed in. torch.ops.coda.hand_in:
puts one there. torch.ops.coda.gradient_of: what lies there, or zeros. torch.ops.coda.add_gradient_of: x and what lies
there, in the memory of x.

The gradient of a key is how often the gradient in its slot counts: once if `hand_in` returned it, and not at all where
autograd knows of none and makes a zero of it, one number in place of a tensor of zeros. So a hook that scales what
comes into a backward scales both. A slot lives as long as that number: what nobody reads goes with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.ops.lowering import alone_in_memory

_library = torch.library.Library("coda", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define("gradient_key(Tensor x) -> Tensor", tags=_tags)
_library.define("hand_in(Tensor gradient, Tensor key) -> Tensor", tags=_tags)
_library.define(
    "gradient_of(Tensor times, Tensor key, SymInt[] size, ScalarType dtype, Device device) -> Tensor", tags=_tags
)
_library.define("add_gradient_of(Tensor x, Tensor times, Tensor key) -> Tensor", tags=_tags)
_library.define("add_gradient_of_(Tensor(a!) x, Tensor times, Tensor key) -> ()", tags=_tags)


class Slot:
    """A gradient, until it is read."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient: Tensor | None = gradient


SLOTS = WeakValueDictionary[int, Slot]()
_numbers = itertools.count(1)


def _gradient_key(x: Tensor) -> Tensor:
    return torch.tensor([next(_numbers)], dtype=torch.float64)


def _hand_in(gradient: Tensor, key: Tensor) -> Tensor:
    times: Any = torch.ones_like(key)
    times.slot = SLOTS[int(key.item())] = Slot(gradient)
    return times  # type: ignore[no-any-return]


def handed_in(times: Tensor, key: Tensor) -> tuple[Tensor, float] | None:
    """The gradient in a slot, and how often it counts; None for zero. Raises BrokenInvariant if there is none."""
    slot, count = SLOTS.get(int(key.item())), float(times.item())
    if slot is None or slot.gradient is None:
        if count:
            raise BrokenInvariant("a gradient that was handed in beside a backward was lost or read before")
        return None
    gradient, slot.gradient = slot.gradient, None
    return (gradient, count) if count else None


def _gradient_of(times: Tensor, key: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    made = torch.zeros(size, dtype=dtype, device=device)
    _add_gradient_of_(made, times, key)
    return made


def _add_gradient_of_(x: Tensor, times: Tensor, key: Tensor) -> None:
    if found := handed_in(times, key):
        gradient, count = found
        x.add_(gradient, alpha=count)


def _add_gradient_of(x: Tensor, times: Tensor, key: Tensor) -> Tensor:
    _add_gradient_of_(made := x.clone(), times, key)
    return made


def _empty(times: Tensor, key: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    (x,) = inputs
    ctx.like = (x.shape, x.dtype, x.device)
    ctx.save_for_backward(output)


def _backward(ctx: Any, times: Tensor) -> Tensor:
    (key,) = ctx.saved_tensors
    made: Tensor = GRADIENT_OF(times, key, *ctx.like)
    return made


_library.impl("gradient_key", _gradient_key, "CompositeExplicitAutograd")
_library.impl("hand_in", _hand_in, "CompositeExplicitAutograd")
_library.impl("gradient_of", _gradient_of, "CompositeExplicitAutograd")
_library.impl("add_gradient_of", _add_gradient_of, "CompositeExplicitAutograd")
_library.impl("add_gradient_of_", _add_gradient_of_, "CompositeExplicitAutograd")
torch.library.register_fake("coda::gradient_key", lambda x: torch.empty(1, dtype=torch.float64), lib=_library)
torch.library.register_fake("coda::hand_in", lambda gradient, key: torch.empty_like(key), lib=_library)
torch.library.register_fake("coda::gradient_of", _empty, lib=_library)
torch.library.register_fake("coda::add_gradient_of", lambda x, times, key: torch.empty_like(x), lib=_library)
torch.library.register_fake("coda::add_gradient_of_", lambda x, times, key: None, lib=_library)
torch.library.register_autograd("coda::gradient_key", _backward, setup_context=_setup, lib=_library)

GRADIENT_KEY, HAND_IN = torch.ops.coda.gradient_key.default, torch.ops.coda.hand_in.default
GRADIENT_OF = torch.ops.coda.gradient_of.default
ADD_GRADIENT_OF, ADD_GRADIENT_OF_ = torch.ops.coda.add_gradient_of.default, torch.ops.coda.add_gradient_of_.default


def _lower(x: ir.TensorBox, times: ir.TensorBox, key: ir.TensorBox) -> ir.TensorBox:
    x = alone_in_memory(x)
    fallback_handler(ADD_GRADIENT_OF_, add_to_fallback_set=False)(x, times, key)
    return x


@cache
def register() -> None:
    """Tells Inductor, once. For an operation without a lowering it writes all that its arguments are made of into a log
    line that nobody reads, which takes it minutes for 16 layers."""
    register_lowering(ADD_GRADIENT_OF, type_promotion_kind=None)(_lower)
    for op in (GRADIENT_KEY, HAND_IN, GRADIENT_OF):
        register_lowering(op, type_promotion_kind=None)(fallback_handler(op, add_to_fallback_set=False))
