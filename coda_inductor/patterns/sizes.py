"""Sizes of axes: an integer times powers of torch's own symbols, compared structurally.

No comparison here asks a SymInt anything, so none adds a guard. An expression that is no monomial (s0 + 1) counts as
one opaque factor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from coda_inductor.core.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Size:
    """coefficient * product of factor ** power; factors are torch's expressions as text, sorted."""

    coefficient: int
    powers: tuple[tuple[str, int], ...] = ()

    def __mul__(self, other: Size) -> Size:
        if not self.powers and not other.powers:
            return _integer(self.coefficient * other.coefficient)
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


@cache
def _integer(n: int) -> Size:
    """The same each time: a graph of 16 layers asks 600 000 times."""
    return Size(n)


def _size(coefficient: int, *powers: Counter[str]) -> Size:
    total: Counter[str] = Counter()
    for p in powers:
        total.update(p)
    return Size(coefficient, tuple(sorted((name, p) for name, p in total.items() if p)))


def size_of(n: int | torch.SymInt) -> Size:
    """The Size of one dimension."""
    return _integer(n) if isinstance(n, int) else _of(n.node.expr)


def _of(expr: sympy.Expr) -> Size:
    size = ONE
    for factor in sympy.Mul.make_args(expr):
        base, exponent = factor.as_base_exp()
        # torch leaves s0**2 // s0, a square image's width behind F.linear, as it is
        whole = _of(factor.args[0]).over(_of(factor.args[1])) if isinstance(factor, FloorDiv) else None
        if factor.is_Integer:
            size *= Size(int(factor))
        elif whole is not None:
            size *= whole
        elif base.is_Symbol and exponent.is_Integer and exponent > 0:
            size *= Size(1, ((str(base), int(exponent)),))
        else:
            size *= Size(1, ((f"({factor})", 1),))
    return size


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    return reduce(Size.__mul__, sizes, ONE)


UNKNOWN = 8192  # what Inductor schedules by where no extent is known: its unbacked_symint_fallback


def hint(size: Any) -> int:
    """The extent that torch traced a symbolic size with: what is measured, and what records of measurements are kept
    under. Raises Unsupported where there was none."""
    known = size.node.hint if isinstance(size, torch.SymInt) else size
    if known is None:
        raise Unsupported(f"the size {size} is known only when the model runs")
    return int(known)


def assumed(size: Any) -> int:
    """The same for what only foresees Inductor's kernels and their bytes; where no extent is known, what it assumes."""
    try:
        return hint(size)
    except Unsupported:
        return UNKNOWN


def guards_of(graph: torch.fx.Graph) -> int:
    """How many guards there are on the graph's symbols."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return len(value.node.shape_env.guards)
    return 0
