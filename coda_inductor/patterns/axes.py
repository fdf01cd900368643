"""Axes: every tensor dimension is a list of atomic axes, major to minor; views split and merge, operations unify.

A union-find with splitting. Binding an axis is recorded on a trail, so that an operation that does not fit is undone
and becomes opaque. Two axes that occur in one tensor are never unified (a tensor's diagonal is not the tensor).
"""

from __future__ import annotations

from collections.abc import Sequence

from coda_inductor.patterns.sizes import ONE, Size, product

Ids = tuple[int, ...]


class Misfit(Exception):
    """These axes do not fit together; the operation is left opaque."""


class Axes:
    """The axes of one graph. An id is bound to other ids (united with one, or split into several) or is a root."""

    def __init__(self) -> None:
        self.size: list[Size] = []
        self._bound: list[Ids | None] = []
        self._tensors: list[int] = []  # bit sets: one axis of tokens is in most tensors of a graph
        self._trail: list[tuple[int, int]] = []

    def new(self, size: Size) -> int:
        """A fresh axis."""
        self.size.append(size)
        self._bound.append(None)
        self._tensors.append(0)
        return len(self.size) - 1

    def roots(self, ids: Sequence[int]) -> Ids:
        """The atomic axes that `ids` now stand for."""
        out: list[int] = []
        for i in ids:
            to = self._bound[i]
            out += (i,) if to is None else self.roots(to)
        return tuple(out)

    def occupy(self, tensor: int, ids: Sequence[int]) -> None:
        """Records that the tensor varies over `ids`. Raises Misfit if one axis would occur twice."""
        roots = self.roots(ids)
        if len(set(roots)) < len(roots):
            raise Misfit("one axis occurs twice in a tensor")
        for i in roots:
            self._trail.append((i, self._tensors[i]))
            self._tensors[i] |= 1 << tensor

    def mark(self) -> int:
        """A point to undo to."""
        return len(self._trail)

    def undo(self, mark: int) -> None:
        """Takes back every binding and occupation since `mark`."""
        while len(self._trail) > mark:
            i, tensors = self._trail.pop()
            self._bound[i], self._tensors[i] = None, tensors

    def _bind(self, i: int, to: Ids) -> None:
        self._trail.append((i, self._tensors[i]))
        self._bound[i] = to
        for j in to:
            self._trail.append((j, self._tensors[j]))
            self._tensors[j] |= self._tensors[i]

    def split(self, i: int, minor: Size) -> tuple[int, int]:
        """Splits the root `i` into (major, minor)."""
        major = self.size[i].over(minor)
        if major is None:
            raise Misfit(f"an axis of {self.size[i]} does not split by {minor}")
        pair = (self.new(major), self.new(minor))
        self._bind(i, pair)
        return pair

    def unify(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Makes two lists of axes the same list, splitting where one side is finer."""
        left, right = list(self.roots(a)), list(self.roots(b))
        while left and right:
            i, j = left.pop(), right.pop()
            if i == j:
                continue
            if self.size[i] == self.size[j]:
                if self._tensors[i] & self._tensors[j]:
                    raise Misfit("two axes of one tensor would become one, as a square weight's in x + x @ W")
                self._bind(j, (i,))
            elif (major := self.size[i].over(self.size[j])) is not None and major != ONE:
                left += self.split(i, self.size[j])
                right.append(j)
            else:
                right += self.split(j, self.size[i])
                left.append(i)
            left, right = list(self.roots(left)), list(self.roots(right))
        if left or right:
            raise Misfit("the sizes differ")

    def regroup(self, ids: Sequence[int], sizes: Sequence[Size]) -> tuple[Ids, ...]:
        """The dims of `view`: the same axes in the same order, grouped so that each group has the given size."""
        rest, out = list(self.roots(ids)), list[Ids]()
        for size in reversed(sizes):
            group: list[int] = []
            have = ONE
            while have != size:
                need = size.over(have)
                if not rest or need is None:
                    raise Misfit(f"a view to {size} cuts across axes")
                i = rest.pop()
                if need.over(self.size[i]) is None:
                    rest += self.split(i, need)
                    i = rest.pop()
                group.insert(0, i)
                have = have * self.size[i]
            out.insert(0, tuple(group))
        if rest:
            raise Misfit("a view that drops axes")
        return tuple(out)

    def total(self, ids: Sequence[int]) -> Size:
        """The number of elements that the axes span."""
        return product(self.size[i] for i in ids)
