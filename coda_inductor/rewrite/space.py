"""The tile space of an epilogue: which accumulators share it, and what varies over what there."""

from __future__ import annotations

from dataclasses import dataclass

from coda_inductor.patterns.terms import Term
from coda_inductor.rewrite.halves import Heads

Extent = str
Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """One output tile space: the accumulators that share it, lane by lane, and its axes in memory order. Where the
    accumulators are the `heads`' halves, `columns` are those of one half."""

    accs: tuple[Term, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: Heads | None = None

    @property
    def order(self) -> Axes:
        """The axes of what it stores, major to minor."""
        return self.rows + (self.heads.stored if self.heads else self.columns)

    @property
    def mask(self) -> int:
        """The products that compute it, as a bit set."""
        mask = 0
        for acc in self.accs:
            mask |= acc.hosts
        return mask

    def extent(self, t: Term) -> Extent:
        """What t varies over here: "scalar", "token", "feature", "table", "tile", or "other"."""
        rows, columns = t.axes & set(self.rows), t.axes & set(self.columns)
        if t.axes - rows - columns:
            return "other"
        if rows and columns and self.heads and columns <= set(self.heads.minor):
            return "table"
        if rows and columns:
            return "tile"
        return "token" if rows else "feature" if columns else "scalar"
