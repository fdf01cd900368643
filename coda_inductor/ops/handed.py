"""Gradients that are handed into a compiled backward beside its tangents, or not at all.

torch.ops.coda.gradient_key(x): a key for a gradient of x. torch.ops.coda.gradient_of(key): the gradient that was handed
in with it, or zeros. torch.ops.coda.add_gradient_of(x, key): x and that gradient, in the memory of x.

A key is a number on the CPU. `hand_in` gives the gradient a number, which travels as the key's own gradient; where
autograd knows of none it makes a zero of it, one number in place of a tensor of zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.ops.lowering import alone_in_memory

_library = torch.library.Library("coda", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define("gradient_key(Tensor x) -> Tensor", tags=_tags)
_library.define("gradient_of(Tensor key, SymInt[] size, ScalarType dtype, Device device) -> Tensor", tags=_tags)
_library.define("add_gradient_of(Tensor x, Tensor key) -> Tensor", tags=_tags)
_library.define("add_gradient_of_(Tensor(a!) x, Tensor key) -> ()", tags=_tags)

_handed: dict[int, Tensor] = {}
_numbers = itertools.count(1)


def hand_in(gradient: Tensor) -> Tensor:
    """Its key, which is good for one reading."""
    number = next(_numbers)
    _handed[number] = gradient
    return torch.tensor([number], dtype=torch.float64)


def handed(key: Tensor) -> Tensor | None:
    """The gradient of a key, None for zero. Raises BrokenInvariant if it was read before."""
    if not (number := int(key.item())):
        return None
    if number not in _handed:
        raise BrokenInvariant(f"the gradient {number} was handed in once and is read twice")
    return _handed.pop(number)


def _gradient_key(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.float64)


def _gradient_of(key: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    found, made = handed(key), torch.zeros(size, dtype=dtype, device=device)
    return made if found is None else made.copy_(found)


def _add_gradient_of_(x: Tensor, key: Tensor) -> None:
    if (found := handed(key)) is not None:
        x.add_(found)


def _add_gradient_of(x: Tensor, key: Tensor) -> Tensor:
    _add_gradient_of_(made := x.clone(), key)
    return made


def _empty(key: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    (x,) = inputs
    ctx.like = (x.shape, x.dtype, x.device)


def _backward(ctx: Any, key: Tensor) -> Tensor:
    made: Tensor = GRADIENT_OF(key, *ctx.like)
    return made


_library.impl("gradient_key", _gradient_key, "CompositeExplicitAutograd")
_library.impl("gradient_of", _gradient_of, "CompositeExplicitAutograd")
_library.impl("add_gradient_of", _add_gradient_of, "CompositeExplicitAutograd")
_library.impl("add_gradient_of_", _add_gradient_of_, "CompositeExplicitAutograd")
torch.library.register_fake("coda::gradient_key", _gradient_key, lib=_library)
torch.library.register_fake("coda::gradient_of", _empty, lib=_library)
torch.library.register_fake("coda::add_gradient_of", lambda x, key: torch.empty_like(x), lib=_library)
torch.library.register_fake("coda::add_gradient_of_", lambda x, key: None, lib=_library)
torch.library.register_autograd("coda::gradient_key", _backward, setup_context=_setup, lib=_library)

GRADIENT_KEY, GRADIENT_OF = torch.ops.coda.gradient_key.default, torch.ops.coda.gradient_of.default
ADD_GRADIENT_OF, ADD_GRADIENT_OF_ = torch.ops.coda.add_gradient_of.default, torch.ops.coda.add_gradient_of_.default


def _lower(x: ir.TensorBox, key: ir.TensorBox) -> ir.TensorBox:
    x = alone_in_memory(x)
    fallback_handler(ADD_GRADIENT_OF_, add_to_fallback_set=False)(x, key)
    return x


@cache
def register() -> None:
    """Tells Inductor, once. For an operation without a lowering it writes all that its arguments are made of into a log
    line that nobody reads, which takes it minutes for 16 layers."""
    register_lowering(ADD_GRADIENT_OF, type_promotion_kind=None)(_lower)
    for op in (GRADIENT_KEY, GRADIENT_OF):
        register_lowering(op, type_promotion_kind=None)(fallback_handler(op, add_to_fallback_set=False))
