"""Gradients that are handed into a compiled backward beside its tangents, or not at all.

torch.ops.coda.gradient_key(x): a key, through whose gradient one of x may be handed in, and a number. hand_in: puts a
gradient into the slot of that number. gradient_of: what lies there, or zeros. add_gradient_of: x and what lies there,
in the memory of x.

The gradient of a key is how often the gradient in the slot counts: once if `hand_in` returned it, and not at all where
autograd knows of none and makes a zero of it, one number in place of a tensor of zeros. So a hook that scales what
comes into a backward scales both. A slot is of one backward and is empty when that ends.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import _current_graph_task_id as current_backward
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.ops.lowering import alone_in_memory

_library = torch.library.Library("coda", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define("gradient_key(Tensor x) -> (Tensor, Tensor)", tags=_tags)
_library.define("hand_in(Tensor gradient, Tensor number) -> Tensor", tags=_tags)
_library.define(
    "gradient_of(Tensor times, Tensor number, SymInt[] size, ScalarType dtype, Device device) -> Tensor", tags=_tags
)
_library.define("add_gradient_of(Tensor x, Tensor times, Tensor number) -> Tensor", tags=_tags)
_library.define("add_gradient_of_(Tensor(a!) x, Tensor times, Tensor number) -> ()", tags=_tags)


class Slot:
    """A gradient, until it is read or the backward ends."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient: Tensor | None = gradient

    def clear(self) -> None:
        """Gives its memory back."""
        self.gradient = None


SLOTS = WeakValueDictionary[tuple[int, int], Slot]()
"""By the backward that runs, as autograd numbers them, and the number of the forward's call."""
_numbers = itertools.count(1)
engine = torch.autograd.Variable._execution_engine


def _place(number: Tensor) -> tuple[int, int]:
    return current_backward(), int(number.item())


def _gradient_key(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, dtype=torch.float64, device="cpu"), torch.tensor([next(_numbers)], device="cpu")


def _hand_in(gradient: Tensor, number: Tensor) -> Tensor:
    times: Any = torch.ones(1, dtype=torch.float64, device="cpu")
    times.slot = slot = SLOTS[_place(number)] = Slot(gradient.detach())
    with contextlib.suppress(RuntimeError):  # a backward that is compiled itself takes no callback, and keeps `times`
        engine.queue_callback(slot.clear)
    return times  # type: ignore[no-any-return]


def handed_in(times: Tensor, number: Tensor) -> tuple[Tensor, float] | None:
    """The gradient in a slot, and how often it counts; None for zero. Raises BrokenInvariant if there is none."""
    if not (count := float(times.item())):
        return None
    slot = SLOTS.get(_place(number))
    if slot is None or slot.gradient is None:
        raise BrokenInvariant("a gradient that was handed in beside a backward was lost or read before")
    gradient = slot.gradient
    slot.clear()
    return gradient, count


def _gradient_of(
    times: Tensor, number: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    made = torch.zeros(size, dtype=dtype, device=device)
    _add_gradient_of_(made, times, number)
    return made


def _add_gradient_of_(x: Tensor, times: Tensor, number: Tensor) -> None:
    if found := handed_in(times, number):
        gradient, count = found
        x.add_(gradient, alpha=count)


def _add_gradient_of(x: Tensor, times: Tensor, number: Tensor) -> Tensor:
    _add_gradient_of_(made := x.clone(), times, number)
    return made


def _empty(times: Tensor, number: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _setup(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    (x,), (_, number) = inputs, output
    ctx.like = (x.shape, x.dtype, x.device)
    ctx.save_for_backward(number)
    ctx.mark_non_differentiable(number)


def _backward(ctx: Any, times: Tensor, _: object) -> Tensor:
    (number,) = ctx.saved_tensors
    made: Tensor = GRADIENT_OF(times, number, *ctx.like)
    return made


def _no_second(ctx: Any, times: Tensor) -> None:
    raise RuntimeError("torch.compile does not support a backward of a backward")


_library.impl("gradient_key", _gradient_key, "CompositeExplicitAutograd")
_library.impl("hand_in", _hand_in, "CompositeExplicitAutograd")
_library.impl("gradient_of", _gradient_of, "CompositeExplicitAutograd")
_library.impl("add_gradient_of", _add_gradient_of, "CompositeExplicitAutograd")
_library.impl("add_gradient_of_", _add_gradient_of_, "CompositeExplicitAutograd")
torch.library.register_fake("coda::gradient_key", _gradient_key, lib=_library)
torch.library.register_fake("coda::hand_in", lambda gradient, number: number.double(), lib=_library)
torch.library.register_fake("coda::gradient_of", _empty, lib=_library)
torch.library.register_fake("coda::add_gradient_of", lambda x, times, number: torch.empty_like(x), lib=_library)
torch.library.register_fake("coda::add_gradient_of_", lambda x, times, number: None, lib=_library)
torch.library.register_autograd("coda::gradient_key", _backward, setup_context=_setup, lib=_library)
torch.library.register_autograd("coda::hand_in", _no_second, lib=_library)

GRADIENT_KEY, HAND_IN = torch.ops.coda.gradient_key.default, torch.ops.coda.hand_in.default
GRADIENT_OF = torch.ops.coda.gradient_of.default
ADD_GRADIENT_OF, ADD_GRADIENT_OF_ = torch.ops.coda.add_gradient_of.default, torch.ops.coda.add_gradient_of_.default


def _lower(x: ir.TensorBox, times: ir.TensorBox, number: ir.TensorBox) -> ir.TensorBox:
    x = alone_in_memory(x)
    fallback_handler(ADD_GRADIENT_OF_, add_to_fallback_set=False)(x, times, number)
    return x


@cache
def register() -> None:
    """Tells Inductor, once. For an operation without a lowering it writes all that its arguments are made of into a log
    line that nobody reads, which takes it minutes for 16 layers."""
    register_lowering(ADD_GRADIENT_OF, type_promotion_kind=None)(_lower)
    for op in (GRADIENT_KEY, HAND_IN, GRADIENT_OF):
        register_lowering(op, type_promotion_kind=None)(fallback_handler(op, add_to_fallback_set=False))
