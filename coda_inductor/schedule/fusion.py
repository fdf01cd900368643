"""Which loops of a graph share a kernel: the second part of the byte model (lowering.py is the first).

Loops are fused greedily under Inductor's rules, like with like and what shares most bytes first: equal iteration
spaces, or a reduction with pointwise work over its rows; sums over rows beside sums over columns (mixed.py), if both
read a whole tensor; no cycle; not too far apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import fx

from coda_inductor.patterns.graph import name_of
from coda_inductor.schedule import mixed
from coda_inductor.schedule.kinds import HEAVY, Extern, Loop, Lowered, itemsize, owner
from coda_inductor.schedule.paths import Path

FAR = 64
"""Inductor does not fuse kernels that are further apart than this."""


@dataclass(eq=False, slots=True)
class Group:
    """Loops that share a kernel. `first`, `last`: positions in the graph; the space is the reduction's, if any."""

    loops: list[Loop]
    first: int
    last: int
    numel: int
    rnumel: int
    inner: bool

    def reads(self) -> set[fx.Node]:
        return {buffer for loop in self.loops for buffer in loop.reads}

    @property
    def halves(self) -> tuple[list[Loop], list[Loop]]:
        """The loops over rows, and those over columns."""
        columns = [loop for loop in self.loops if loop.rnumel > 1 and not loop.inner]
        return [loop for loop in self.loops if loop not in columns], columns

    @property
    def mixed(self) -> bool:
        """Does it reduce over rows and over columns?"""
        return _of_both_orders(self, self)


class Fusion:
    """Greedy fusion in rounds, as Inductor's Scheduler.fuse_nodes: best scored pairs first, until nothing changes."""

    def __init__(self, lowered: Lowered) -> None:
        self.unit: dict[fx.Node, Group | Extern] = {}
        self.position: dict[Extern, int] = {}
        self.groups: list[Group] = []
        self.bit: dict[fx.Node, int] = {}
        self.ancestors: dict[fx.Node, int] = {}  # of an operation's output: the bits of all that it is computed of
        for i, op in enumerate(lowered.order):
            self.ancestors[op.out] = _union(self.bit.get(n, 0) | self.ancestors.get(n, 0) for n in map(owner, op.reads))
            self.bit[op.out] = 1 << i
            if isinstance(op, Extern):
                self.unit[op.out], self.position[op] = op, i
            else:
                group = Group([op], i, i, op.numel, op.rnumel, op.inner)
                self.unit[op.out] = group
                self.groups.append(group)

    def run(self) -> list[Group]:
        for _ in range(10):
            fused = 0
            for _, a, b in sorted(self.candidates(), key=_rank):
                a, b = self.current(a), self.current(b)
                if a is not b and self.score(a, b) > 0 and not self.cycle(a, b):
                    self.fuse(a, b)
                    fused += 1
            if not fused:
                break
        return self.groups

    def current(self, group: Group) -> Group:
        """The group that the first loop of `group` belongs to by now."""
        found = self.unit[group.loops[0].out]
        assert isinstance(found, Group)
        return found

    def candidates(self) -> list[tuple[int, Group, Group]]:
        """Pairs that touch a common buffer and are near each other."""
        touching: dict[fx.Node, list[Group]] = defaultdict(list)
        for group in self.groups:
            for buffer in group.reads() | {loop.out for loop in group.loops}:
                touching[owner(buffer)].append(group)
        pairs = {
            (a, b)
            for groups in touching.values()
            for i, a in enumerate(groups)
            for b in groups[i + 1 : i + 1 + FAR]
            if a is not b and b.first - a.last <= FAR
        }
        return [(score, a, b) for a, b in pairs if (score := self.score(a, b)) > 0]

    def score(self, a: Group, b: Group) -> int:
        """Bytes that one kernel instead of two would not move again; 0 if the two cannot be one kernel. Of two that
        become one of both orders, Inductor counts elements, so that what shares as many bytes goes first."""
        if not _same_space(a, b) or not self.joins(a, b):
            return 0
        made = {loop.out: group for group in (a, b) for loop in group.loops}
        of_a, of_b = parts_read(a.loops), parts_read(b.loops)
        for parts, group in ((of_a, a), (of_b, b)):
            if any(path and made.get(owner(buffer), group) is not group for buffer, path in parts):
                return 0
        shared = of_a.keys() & of_b.keys()
        shared |= {key for key in of_a.keys() | of_b.keys() if key not in shared and owner(key[0]) in made}
        if _of_both_orders(a, b) and not (a.mixed or b.mixed):
            return a.numel * a.rnumel
        return sum({**of_a, **of_b}[key] * itemsize(key[0]) for key in shared)

    def cycle(self, a: Group, b: Group) -> bool:
        """Would something outside have to run both after and before the fused kernel?"""
        return self.leads(a, b) or self.leads(b, a)

    def leads(self, source: Group, target: Group) -> bool:
        """Is there a way from `source` to `target` through something else?"""
        stack = [u for u in self.before(target) if u is not source]
        seen = set(stack)
        while stack:
            for unit in self.before(stack.pop()):
                if unit is source:
                    return True
                last = unit.last if isinstance(unit, Group) else self.position[unit]
                if unit not in seen and last >= source.first:
                    seen.add(unit)
                    stack.append(unit)
        return False

    def joins(self, a: Group, b: Group) -> bool:
        """May the two be one, if that reduces over rows and over columns? Rows are read as they lie, not put together
        of parts. Two kernels that become such a one are independent, and read a whole tensor both. What joins one comes
        after it, is independent of the other half, and if it is a sum it reads as much of what is read or made there by
        its like."""
        if not _of_both_orders(a, b):
            return True
        size, rows = max(group.numel * group.rnumel for group in (a, b)), a.halves[0] + b.halves[0]
        if any(name_of(node) in HEAVY for loop in rows for node in loop.nodes):
            return False
        if not (a.mixed or b.mixed):
            return self.independent(a.loops, b.loops) and max(_common(a.loops, b.loops), default=0) >= size
        first, second = sorted((a, b), key=lambda group: group.first)
        if not first.mixed or len({*map(owner, a.reads() | b.reads())}) > mixed.most_reads():
            return False
        joined = [there + more for there, more in zip(first.halves, second.halves, strict=True)]
        like = [
            (there, more) for there, more in zip(first.halves, second.halves, strict=True) if any(map(_reduces, more))
        ]
        return self.independent(*joined) and all(sum(_common(there, more)) >= size for there, more in like)

    def independent(self, loops: list[Loop], others: list[Loop]) -> bool:
        """Is nothing of either computed of the other, by whatever way?"""
        made, needed = (
            [_union(of[loop.out] for loop in side) for side in (loops, others)] for of in (self.bit, self.ancestors)
        )
        return not (made[0] & needed[1] or made[1] & needed[0])

    def before(self, unit: Group | Extern) -> set[Group | Extern]:
        """The units whose buffers `unit` reads."""
        reads = unit.reads() if isinstance(unit, Group) else unit.reads
        return {u for buffer in reads if (u := self.unit.get(owner(buffer))) is not None and u is not unit}

    def fuse(self, a: Group, b: Group) -> None:
        space = max((a, b), key=lambda group: (group.rnumel > 1, group.inner, group.rnumel))  # of both orders the rows'
        fused = Group(
            a.loops + b.loops, min(a.first, b.first), max(a.last, b.last), space.numel, space.rnumel, space.inner
        )
        for loop in fused.loops:
            self.unit[loop.out] = fused
        self.groups = [g for g in self.groups if g is not b]
        self.groups[self.groups.index(a)] = fused


def _rank(candidate: tuple[int, Group, Group]) -> tuple[int, ...]:
    """Reductions with each other and pointwise work with its like, most bytes first, then the nearest, as Inductor's
    score_fusion; then the order of the graph."""
    score, a, b = candidate
    return (a.rnumel > 1) != (b.rnumel > 1), -score, max(abs(a.first - b.last), abs(b.first - a.last)), a.first, b.first


def parts_read(loops: list[Loop]) -> dict[tuple[fx.Node, Path], int]:
    """Every part of a buffer that loops read, with its number of elements."""
    return {(buffer, path): n for loop in loops for buffer, paths in loop.reads.items() for path, n in paths.items()}


def _of_both_orders(a: Group, b: Group) -> bool:
    """Would the two together reduce over rows and over columns?"""
    return all(any(_reduces(loop) and loop.inner == inner for loop in a.loops + b.loops) for inner in (True, False))


def _union(masks: Iterable[int]) -> int:
    return reduce(or_, masks, 0)


def _reduces(loop: Loop) -> bool:
    return loop.rnumel > 1


def _common(there: list[Loop], more: list[Loop]) -> list[int]:
    """Of the parts that `more` reads and `there` reads or makes, the numbers of elements."""
    known, made = parts_read(there), {loop.out for loop in there}
    return [n for part, n in parts_read(more).items() if part in known or owner(part[0]) in made]


def _same_space(a: Group, b: Group) -> bool:
    """Can the two share loops? Two reductions, a reduction and pointwise work, or pointwise work of one size."""
    if a.rnumel == 1 and b.rnumel == 1:
        return a.numel == b.numel
    if a.rnumel > 1 and b.rnumel > 1:
        return (a.numel, a.rnumel, a.inner) == (b.numel, b.rnumel, b.inner) or _mixed_order(a, b)
    pointwise, reduction = (a, b) if a.rnumel == 1 else (b, a)
    return pointwise.numel == reduction.numel or (
        pointwise.numel == reduction.numel * reduction.rnumel and reduction.inner
    )


def _mixed_order(a: Group, b: Group) -> bool:
    """Sums over the rows beside a reduction along them, as triton.mix_order_reduction allows."""
    rows, columns = (a, b) if a.inner else (b, a)
    if not rows.inner or columns.inner or (rows.numel, rows.rnumel) != (columns.rnumel, columns.numel):
        return False
    sums = [loop for loop in columns.loops if _reduces(loop)]
    return mixed.allowed(rows.numel, rows.rnumel) and all(loop.additive and mixed.adds(_dtype(loop)) for loop in sums)


def _dtype(loop: Loop) -> torch.dtype:
    """Of what a reduction writes."""
    dtype: torch.dtype = loop.out.meta["val"].dtype
    return dtype
