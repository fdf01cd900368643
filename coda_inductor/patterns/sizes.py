"""Sizes of axes: an integer times powers of torch's own symbols, compared structurally.

No comparison here asks a SymInt anything, so none adds a guard. An expression that is no monomial (s0 + 1) counts as
one opaque factor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import sympy
import torch


@dataclass(frozen=True, slots=True)
class Size:
    """coefficient * product of factor ** power; factors are torch's expressions as text, sorted."""

    coefficient: int
    powers: tuple[tuple[str, int], ...] = ()

    def __mul__(self, other: Size) -> Size:
        return _size(self.coefficient * other.coefficient, Counter(dict(self.powers)), Counter(dict(other.powers)))

    def over(self, other: Size) -> Size | None:
        """self / other where that is exact for every value of the symbols, else None."""
        if other.coefficient == 0 or self.coefficient % other.coefficient:
            return None
        powers = Counter(dict(self.powers))
        powers.subtract(dict(other.powers))
        if any(p < 0 for p in powers.values()):
            return None
        return _size(self.coefficient // other.coefficient, powers)

    @property
    def static(self) -> int | None:
        """The integer, None if a symbol is in it."""
        return None if self.powers else self.coefficient

    def __str__(self) -> str:
        factors = [name if p == 1 else f"{name}**{p}" for name, p in self.powers]
        return "*".join(([str(self.coefficient)] if self.coefficient != 1 or not factors else []) + factors)


ONE = Size(1)


def _size(coefficient: int, *powers: Counter[str]) -> Size:
    total: Counter[str] = Counter()
    for p in powers:
        total.update(p)
    return Size(coefficient, tuple(sorted((name, p) for name, p in total.items() if p)))


def size_of(n: int | torch.SymInt) -> Size:
    """The Size of one dimension."""
    if isinstance(n, int):
        return Size(n)
    coefficient, powers = 1, Counter[str]()
    for factor in sympy.Mul.make_args(n.node.expr):
        base, exponent = factor.as_base_exp()
        if factor.is_Integer:
            coefficient *= int(factor)
        elif base.is_Symbol and exponent.is_Integer and exponent > 0:
            powers[str(base)] += int(exponent)
        else:
            powers[f"({factor})"] += 1
    return _size(coefficient, powers)


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    return reduce(Size.__mul__, sizes, ONE)
