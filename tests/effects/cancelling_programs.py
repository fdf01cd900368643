"""Sums in float32 whose terms cancel in the reals and must not: what is left is rounding, and is what people want.

Each takes x [T, D], w [D, D], v [D, D] and g [D], and returns with each value what cancels, by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CANCELLING: dict[str, tuple[Callable[..., Any], int, int, str]] = {}
"""Name to function, the Regions that it gets at least, by default and in strict numerics, why fewer than could be."""
MAGIC = 12582912.0
"""1.5 * 2 ** 23: what is added to it and subtracted again is rounded to an integer."""


def case(regions: int, strict: int, why: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(f: Callable[..., Any]) -> Callable[..., Any]:
        CANCELLING[f.__name__] = f, regions, strict, why
        return f

    return keep


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def two_sum(a: Tensor, b: Any) -> tuple[Tensor, Tensor]:
    """Knuth's: the sum and its error."""
    s = a + b
    z = s - a
    return s, (a - (s - z)) + (b - z)


@case(1, 1)
def rounded(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    q = ((4 * (x @ w) + MAGIC) - MAGIC) / 4
    return torch.relu(q), torch.sigmoid(q) @ v


@case(1, 1)
def rounded_product(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    q = (x @ w + MAGIC) - MAGIC
    return q, torch.relu(q @ v)


@case(1, 1)
def rounded_by_subtraction(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    q = MAGIC - (MAGIC - x @ w)
    return q, torch.relu(q)


@case(1, 1)
def rounded_by_rsub(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    q = torch.rsub(torch.rsub(x @ w, MAGIC), MAGIC)
    return q * 2, torch.tanh(q) @ v


@case(1, 1)
def rounded_by_a_vector(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """The constant is a bias."""
    big = g.square() + MAGIC
    q = (x @ w + big) - big
    return q, F.gelu(q) @ v


@case(2, 0)
def rounded_in_a_norm(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    q = ((8 * (x @ w) + MAGIC) - MAGIC) / 8
    return rms(q) @ v, q


@case(1, 1)
def rounded_gate(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    gate = ((x @ w) * 16 + MAGIC - MAGIC) * 0.0625
    return F.silu(gate) * (x @ v), gate


@case(1, 1)
def kahan(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    h = x @ w
    s = 1e6 * h + h
    return s, (s - 1e6 * h) - h


@case(1, 1)
def kahan_over_tiles(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """A compensated sum of three products."""
    total, lost = 1000 * (x @ w), torch.zeros_like(x)
    for part in (x @ v, x @ w.t()):
        y = part - lost
        t = total + y
        lost = (t - total) - y
        total = t
    return total, lost, torch.relu(lost * 1e4) @ v


@case(1, 1)
def two_sums(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    s, e = two_sum(1000 * (x @ w), 0.123)
    return s, e


@case(1, 1)
def two_sums_of_a_bias(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    s, e = two_sum(x @ w, 1e4 * g)
    return torch.relu(s), e, torch.sigmoid(1e3 * e) @ v


@case(1, 1)
def fast_two_sum(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """Dekker's, of a residual."""
    a = 4096 * x
    b = x @ w
    s = a + b
    e = b - (s - a)
    return s, e, torch.relu(e @ v)


@case(1, 1)
def split(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """Veltkamp's: the upper half of the digits, and the lower."""
    h = x @ w
    c = 4097.0 * h
    high = c - (c - h)
    return high, h - high, torch.relu(high) @ v


@case(1, 1)
def two_products(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """Dekker's product of a tile and a gain, with its error."""
    h = x @ w
    c, d = 4097.0 * h, 4097.0 * g
    a1, b1 = c - (c - h), d - (d - g)
    a2, b2 = h - a1, g - b1
    p = h * g
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


@case(1, 1)
def constant_there_and_back(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    h = x @ w
    q = (h + 1e5) - 1e5
    return q, q - h, torch.tanh(q @ v)


@case(1, 1)
def difference_of_a_difference(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """x - (x - y), the digits of y that x leaves."""
    h = x @ w
    big = 1e5 * x
    q = big - (big - h)
    return q, q - h, torch.relu(q @ v)


@case(1, 1)
def residual_subtracted(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    r = 3e4 * x
    h = r + x @ w
    q = h - r
    return h, q - x @ w, torch.relu(q @ v)


@case(2, 1)
def bias_subtracted(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    bias = 1e5 * g
    q = (x @ w + bias) - bias
    return q - x @ w, rms(q) @ v


@case(1, 1)
def extrapolated(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """Richardson's: two differences, of which the leading part cancels."""
    h = x @ w

    def difference(d: float) -> Tensor:
        return ((h + d) * (h + d) - h * h) / d

    first, second = difference(2.0**-7), difference(2.0**-8)
    step = (h + 1e-3) - h
    return step, 2 * second - first, torch.relu(2 * second - first) @ v


@case(2, 2)
def straight_through(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    h = 100 * (x @ w)
    y = h + (torch.round(h) - h).detach()
    return y - torch.round(h), torch.relu(y @ v)


@case(1, 1)
def straight_through_signs(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    h = x @ w
    y = h + (torch.sign(h) - h)
    return y - torch.sign(h), torch.relu(y @ v)


@case(1, 1)
def compensated_mean(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """A mean, and the mean of what it left."""
    h = x @ w + 1000.0
    first = h.mean(-1, keepdim=True)
    second = (h - first).mean(-1, keepdim=True)
    return first + second, torch.sigmoid((h - first - second) @ v)


@case(1, 1)
def centred_twice(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    h = (x @ w + 5e4) - 5e4
    c = h - h.mean(-1, keepdim=True)
    return c, torch.relu((c * torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-5)) @ v)


@case(1, 1)
def relu_by_halves(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """(h + |h|) / 2, and what it is off of h by."""
    h = x @ w
    positive = 0.5 * (h + h.abs())
    negative = positive - h
    return positive - torch.relu(h), (h - positive) + negative, torch.sqrt(positive) @ v


@case(1, 1)
def maximum_by_halves(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    a, b = x @ w, 1e4 * x
    most = 0.5 * (a + b + (a - b).abs())
    return most - torch.maximum(a, b), torch.relu(most @ v)


@case(1, 1)
def residue(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Any:
    """What rounding loses, scaled up, goes into the next product."""
    h = x @ w
    lost = h - ((h + 4096.0) - 4096.0)
    return lost, torch.relu((1e4 * lost) @ v)
