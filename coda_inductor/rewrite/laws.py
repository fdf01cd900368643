"""The laws: what a program may become. Each is an equation between two functions, and being in LAWS is what gets it tested.

The functions use operators only, so that tests run them on float64 tensors and, for the proof, on arrays of sympy symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Numerics = Literal["exact", "moves a rounding"]


@dataclass(frozen=True, slots=True)
class Law:
    """before(*arrays) == after(*arrays) for arrays of the given `shapes` (M tokens, N outputs, K contracted).

    `refuses` lists shapes for which the equation is false; the derivation must not fire there. `numerics` is what happens in
    floating point, `when` says what makes the derivation want the law.
    """

    name: str
    before: Callable[..., Any]
    after: Callable[..., Any]
    shapes: dict[str, str]
    refuses: tuple[dict[str, str], ...]
    when: str
    numerics: Numerics
    source: str


BILINEARITY = Law(
    name="bilinearity",
    before=lambda x, r, w: (x * r) @ w,
    after=lambda x, r, w: (x @ w) * r,
    shapes={"x": "M K", "r": "M 1", "w": "K N"},
    refuses=({"x": "M K", "r": "M K", "w": "K N"}, {"x": "M K", "r": "1 K", "w": "K N"}),
    when="r is finished only after the product that makes x has ended, so that x * r could not leave its epilogue",
    numerics="moves a rounding",
    source="sum_k (x[m,k] r[m]) w[k,n] = r[m] sum_k x[m,k] w[k,n]; CODA, arXiv:2605.19269",
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

LAWS: tuple[Law, ...] = (BILINEARITY, GAUGE)
