"""The scalar vocabulary of an epilogue: one row per operation, with its meaning and its spelling on the device.

Rows are the only place that knows an operation: graphs are read by `aten`, the interpreter calls `torch`, code
generation formats `cute`, the verifier reads `arity`. A new operation is one new row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coda_inductor.core.dtypes import FORMATS


@dataclass(frozen=True, slots=True)
class Op:
    """`torch` maps tensors or floats to a tensor; `cute` is a CuTeDSL expression over float32 values {0}, {1}, {2}
    (what some operations give, rcp_approx for one, has no `.to`).

    `at_zero` is the value where every argument is 0 (None: not finite or not defined); it decides which sums need a
    mask where a tile hangs over the edge of the matrix, since hardware fills those places with 0.

    `aten` names the ATen operations that compute it of tensors, the one that small computations are written with first;
    empty where terms say it otherwise, as powers say `sqrt`. `positive`: tests give it positive arguments alone.

    `triton` is a Triton expression with torch's own rounding, for elementwise passes (elementwise.py); empty: none
    computes it.
    """

    arity: int
    torch: Callable[..., Tensor]
    cute: str
    at_zero: float | None
    aten: tuple[str, ...] = ()
    positive: bool = False
    triton: str = ""


def _in_triton(name: str) -> str:
    """Rounded to a format and widened again, in Triton."""
    return f"({{0}}).to(tl.{name}).to(tl.float32)"


def _round(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def _by_sign(holds: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """(c, x, y): x where c stands to 0 as asked, y elsewhere, also where c is NaN; x and y may be literals."""

    def chosen(*cxy: Tensor | float) -> Tensor:
        like = next(a for a in cxy if isinstance(a, Tensor))
        c, x, y = (torch.as_tensor(a, dtype=like.dtype, device=like.device) for a in cxy)
        return torch.where(holds(c, 0.0), x, y)

    return chosen


SIGNS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "if_positive": (torch.gt, ">"), "if_nonpositive": (torch.le, "<="),
    "if_negative": (torch.lt, "<"), "if_nonnegative": (torch.ge, ">="),
}  # fmt: skip
"""Choices by a sign, with the comparison with 0."""

# fmt: off
OPS: dict[str, Op] = {
    "add":     Op(2, torch.add,                       "({0} + {1})",                           0.0,
                  triton="({0} + {1})"),
    "sub":     Op(2, torch.sub,                       "({0} - {1})",                           0.0,
                  triton="({0} - {1})"),
    "mul":     Op(2, torch.mul,                       "({0} * {1})",                           0.0,
                  triton="({0} * {1})"),
    "neg":     Op(1, torch.neg,                       "(-{0})",                                0.0,
                  triton="(-{0})"),
    "rcp":     Op(1, torch.reciprocal,                "cute.arch.rcp_approx({0})",             None, positive=True),
    "sqrt":    Op(1, torch.sqrt,                      "cute.math.sqrt({0}, fastmath=True)",    0.0, positive=True),
    "rsqrt":   Op(1, torch.rsqrt,                     "cute.math.rsqrt({0}, fastmath=True)",   None, positive=True),
    "exp":     Op(1, torch.exp,                       "cute.math.exp({0}, fastmath=True)",     1.0, ("exp.default",),
                  triton="tl.exp({0})"),
    "log":     Op(1, torch.log,                       "cute.math.log({0})",                    None, ("log.default",),
                  positive=True),
    "tanh":    Op(1, torch.tanh,                      "tanh({0})",                             0.0, ("tanh.default",),
                  triton="libdevice.tanh({0})"),
    "erf":     Op(1, torch.erf,                       "erf({0})",                              0.0, ("erf.default",)),
    "sigmoid": Op(1, torch.sigmoid,                   "sigmoid({0})",                          0.5),
    "abs":     Op(1, torch.abs,                       "cute.math.abs({0})",                    0.0, ("abs.default",),
                  triton="tl.abs({0})"),
    "max":     Op(2, lambda a, b: _pairwise(torch.maximum, a, b), "cute.arch.fmax({0}, {1}, nan=True)", 0.0,
                  ("maximum.default", "clamp_min.default"),
                  triton="tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
    "min":     Op(2, lambda a, b: _pairwise(torch.minimum, a, b), "cute.arch.fmin({0}, {1}, nan=True)", 0.0,
                  ("minimum.default", "clamp_max.default"),
                  triton="tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
    "scaled":  Op(3, lambda x, rows, columns: x * rows * columns, "({0} * {1} * {2})", 0.0),  # x [M, N]
    "first":   Op(1, lambda t: t[..., 0],             "{0}.a",                                 0.0),  # of a pair
    "second":  Op(1, lambda t: t[..., 1],             "{0}.b",                                 0.0),
    "over_head": Op(3, lambda x, y, width: _over_head(x + y, int(width)), "",                  0.0),
}
# fmt: on
OPS |= {
    name: Op(1, _round(row.torch), f"Float32({{0}}).to({row.cute}).to(Float32)", 0.0, triton=_in_triton(row.triton))
    for name, row in FORMATS.items()
    if row.narrow
}
OPS |= {
    name: Op(3, _by_sign(holds), f"select_({{0}} {sign} 0.0, Float32({{1}}), Float32({{2}}))", 0.0)
    for name, (holds, sign) in SIGNS.items()
}


OF_PAIRS, OVER_HEAD = ("first", "second"), "over_head"
"""Operations that do not compute number by number: a number of a pair, and the sum of x + y over the `width` columns of
each head, which all of these read. (y is the other half of a head, if its halves are two accumulators, else 0.0.) A
kernel takes it before it stores anything (codegen/source.py)."""


def _over_head(x: Tensor, width: int) -> Tensor:
    """x [M, N] summed over each `width` columns, [M, N]."""
    heads: Tensor = x.unflatten(-1, (-1, width))
    return heads.sum(-1, keepdim=True).expand(heads.shape).flatten(-2)


def _pairwise(f: Callable[[Tensor, Tensor], Tensor], a: Tensor | float, b: Tensor | float) -> Tensor:
    """torch.maximum and torch.minimum take tensors only; an epilogue also compares with a literal."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    return f(*(x if isinstance(x, Tensor) else torch.full_like(like, x) for x in (a, b)))


def at_zero(op: str, args: tuple[float | None, ...]) -> float | None:
    """The value of `op` at known scalar arguments, None if unknown or not finite."""
    if any(a is None for a in args):
        return None
    if op == OVER_HEAD:  # of one number there are no heads
        return 0.0 if not any(args[:2]) else None
    value = float(OPS[op].torch(*(torch.tensor(a, dtype=torch.float32, device="cpu") for a in args)))
    return value if math.isfinite(value) else None
