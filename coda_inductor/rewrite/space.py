"""The tile space of an epilogue: which accumulators share it, and what varies over what there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from coda_inductor.patterns.terms import Term

Extent = str
Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """How columns lie: [heads, two halves, `minor`], or of `neighbours` [heads, `minor`, two]. The halves are the axis
    `inner` of the product, whose columns are `columns`, and the axis `lane` of what is stored: the same, unless two
    values were put together anew."""

    lane: int
    inner: int
    minor: Axes
    columns: Axes

    @property
    def neighbours(self) -> bool:
        """Are the two features of a pair beside each other?"""
        return self.columns[-1] == self.inner

    def lie(self, axis: int) -> Axes:
        """The axes of a head of which the halves are the axis `axis`, major to minor."""
        return (*self.minor, axis) if self.neighbours else (axis, *self.minor)

    @property
    def stored(self) -> Axes:
        """The axes of a row that is stored, major to minor."""
        return tuple(self.lane if i == self.inner else i for i in self.columns)


@dataclass(frozen=True, slots=True)
class Computed:
    """A vector that no node holds and that is too much for an epilogue: a small computation of its own, [M] or [N],
    over the axes `order`."""

    term: Term
    extent: Extent
    order: Axes


@dataclass(frozen=True, slots=True)
class Lane:
    """A half of what a node holds for each head (its first, 0, or second, 1), or a node that holds one half: None."""

    node: fx.Node
    index: int | None


@dataclass(frozen=True, slots=True)
class Half:
    """The first or second half (0, 1) of each head of a vector that is computed."""

    whole: Computed
    index: int


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

    def within(self, t: Term) -> Axes:
        """The rows' axes within a sample, if of the rows' axes t varies over the outermost alone: those of samples."""
        rows = t.axes & set(self.rows)
        alike = rows == set(self.rows[: len(rows)]) and self.heads is None
        return self.rows[len(rows) :] if alike else ()

    def extent(self, t: Term) -> Extent:
        """What t varies over here: "scalar", "token", "feature", "sample", "table", "tile", or "other"."""
        rows, columns = t.axes & set(self.rows), t.axes & set(self.columns)
        if t.axes - rows - columns:
            return "other"
        if rows and columns and self.heads and columns <= set(self.heads.minor):
            return "table"
        if rows and columns:
            return "sample" if columns == set(self.columns) and self.within(t) else "tile"
        return "token" if rows else "feature" if columns else "scalar"
