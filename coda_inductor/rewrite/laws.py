"""The laws: what a program may become. Each is an equation between two functions; being in LAWS gets it tested.

The functions use operators and sum() only, so that tests run them on float64 tensors and, for the proof, on arrays of
sympy symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Numerics = Literal["exact", "moves a rounding"]


@dataclass(frozen=True, slots=True)
class Law:
    """before(*arrays) == after(*arrays) for arrays of the given `shapes` (M tokens, N outputs, K contracted).

    `refuses` lists shapes for which the equation is false; the derivation must not fire there. `numerics` is what
    happens in floating point, `when` says what makes the derivation want the law.
    """

    name: str
    before: Callable[..., Any]
    after: Callable[..., Any]
    shapes: dict[str, str]
    refuses: tuple[dict[str, str], ...]
    when: str
    numerics: Numerics
    source: str


def over_k(x: Any) -> Any:
    """The sum over K, kept as a dimension of one: [M, K] -> [M, 1]."""
    return x.sum(1)[:, None]


def _relu(z: Any) -> Any:
    """max(z, 0)."""
    return (z + abs(z)) / 2


def _slope(z: Any) -> Any:
    """1 where z > 0, 0 where z < 0: the derivative of ReLU."""
    return _relu(z) / z


BILINEARITY = Law(
    name="bilinearity",
    before=lambda x, r, v, g, w: (x * r + v * g) @ w,
    after=lambda x, r, v, g, w: (x @ w) * r + v * (g @ w),
    shapes={"x": "M K", "r": "M 1", "v": "M 1", "g": "1 K", "w": "K N"},
    refuses=(
        {"x": "M K", "r": "M K", "v": "M 1", "g": "1 K", "w": "K N"},
        {"x": "M K", "r": "1 K", "v": "M 1", "g": "1 K", "w": "K N"},
    ),
    when="r or v is finished only after the product that makes x has ended: x * r + v * g could not leave its epilogue",
    numerics="moves a rounding",
    source="sum_k (x[m,k] r[m] + v[m] g[k]) w[k,n] = r[m] sum_k x[m,k] w[k,n] + v[m] sum_k g[k] w[k,n]; "
    "CODA, arXiv:2605.19269",
)

GAUGE = Law(
    name="gauge",
    before=lambda x, v, w: x @ w,
    after=lambda x, v, w: ((x * v) @ w) / v,
    shapes={"x": "M K", "v": "M 1", "w": "K N"},
    refuses=({"x": "M K", "v": "1 K", "w": "K N"},),
    when="several products read one operand: all of them read it in the one row scaling v * x that is stored",
    numerics="moves a rounding",
    source="bilinearity with r = v and its inverse, v > 0",
)

SHIFT = Law(
    name="shift",
    before=lambda x, c: over_k(x),
    after=lambda x, c: over_k(x - c) + x.shape[1] * c,
    shapes={"x": "M K", "c": "M 1"},
    refuses=({"x": "M K", "c": "M K"},),
    when="a mean is taken in the epilogue that makes x: c, the mean of the stream so far, keeps the summands small",
    numerics="moves a rounding",
    source="sum_k x[m,k] = sum_k (x[m,k] - c[m]) + K c[m]",
)

MOMENTS = Law(
    name="moments",
    before=lambda x, c: over_k((x - over_k(x) / x.shape[1]) ** 2),
    after=lambda x, c: over_k((x - c) ** 2) - over_k(x - c) ** 2 / x.shape[1],
    shapes={"x": "M K", "c": "M 1"},
    refuses=({"x": "M K", "c": "M K"},),
    when="a variance is taken in the epilogue that makes x, where the mean is not known yet",
    numerics="moves a rounding",
    source="sum (d - mean d)^2 = sum d^2 - (sum d)^2 / K with d = x - c; c near the mean, or it cancels",
)

TRIANGLE = Law(
    name="triangle",
    before=lambda q, z, w: over_k(q * (z @ w.T)),
    after=lambda q, z, w: over_k(z * (q @ w)),
    shapes={"q": "M K", "z": "M N", "w": "K N"},
    refuses=(),  # true of all matrices; what it needs is that q W is there already, which only the derivation knows
    when="a norm's backward sums q times z W^T over the row that this product still makes, and q W is there",
    numerics="moves a rounding",
    source="sum_k q[m,k] sum_n z[m,n] w[k,n] = sum_n z[m,n] sum_k q[m,k] w[k,n]",
)

ADJOINT = Law(
    name="adjoint",
    before=lambda x, y, g, h, a, b, c, d: over_k(x * (a * g + b * h)) + over_k(y * (c * g + d * h)),
    after=lambda x, y, g, h, a, b, c, d: over_k(g * (a * x + c * y)) + over_k(h * (b * x + d * y)),
    shapes=dict.fromkeys("xyghabcd", "M K"),
    refuses=(),  # true of any map between two lanes: no orthogonality is assumed
    when="a statistic is taken of a gradient that came through a rotary embedding: the rotated tensor is there",
    numerics="moves a rounding",
    source="sum_l x[l] sum_r L[l,r] g[r] = sum_r g[r] sum_l L[l,r] x[l], over the lanes l, r and over K",
)

RELU = Law(
    name="relu",
    before=lambda s, x, v, u, g: over_k(x * (g * _slope(s * x - v * u))),
    after=lambda s, x, v, u, g: (
        (over_k(_relu(s * x - v * u) * (g * _slope(s * x - v * u))) + v * over_k(u * (g * _slope(s * x - v * u)))) / s
    ),
    shapes={"s": "M 1", "x": "M K", "v": "M 1", "u": "1 K", "g": "M K"},
    refuses=(),  # true of all finite z = s x - v u; what it needs is that g came through the ReLU of this z
    when="a statistic is taken of a gradient that came through ReLU: what stands behind it is stored anyway",
    numerics="moves a rounding",
    source="z relu'(z) = relu(z) = relu(z) relu'(z) for finite z; of z = s x - v u, s x is what is asked for",
)

ROOT = Law(
    name="root",
    before=lambda y, g: y * g,
    after=lambda y, g: (y * y) ** 0.5 * g,
    shapes={"y": "M K", "g": "M K"},
    refuses=(),  # true of all y >= 0, which max(z, 0) is; what it needs is that the square of small y is not 0
    when="a gradient asks for max(z, 0), of which the next product reads the square: that is stored anyway, and has "
    "more exponents than float16",
    numerics="moves a rounding",
    source="y = sqrt(y^2) for y >= 0",
)

SOFTMAX = Law(
    name="softmax",
    before=lambda e, c: (e / c) / over_k(e / c),
    after=lambda e, c: e / over_k(e),
    shapes={"e": "M K", "c": "M 1"},
    refuses=({"e": "M K", "c": "M K"},),
    when="a loss normalises the scores that an epilogue makes: their logsumexp is taken there, without their maximum",
    numerics="moves a rounding",
    source="e = exp(x), c = exp(max x): x - max x - log sum exp(x - max x) = x - log sum exp(x); the sum is kept "
    "relative to the greatest score so far, arXiv:1805.02867",
)

LAWS: tuple[Law, ...] = (BILINEARITY, GAUGE, SHIFT, MOMENTS, TRIANGLE, ADJOINT, RELU, ROOT, SOFTMAX)
