"""One operation of attention in place of products and a softmax (written.py says which)."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import fx

from coda_inductor.attention.calls import (
    CUDNN,
    CUDNN_BACKWARD,
    EFFICIENT,
    EFFICIENT_BACKWARD,
    SAVED,
    SAVED_BY_EFFICIENT,
)
from coda_inductor.attention.changes import Changed
from coda_inductor.attention.meaning import Added, Hidden
from coda_inductor.attention.positions import OF_MASK, before, finite, static
from coda_inductor.attention.repeats import Dims
from coda_inductor.attention.scores import Operand, Read, Scores
from coda_inductor.attention.written import LEAST, NEVER, VALUE, Written, written_out
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.axes import Axes, Ids, Misfit
from coda_inductor.patterns.constants import of_memory_that_is_written
from coda_inductor.patterns.effects import ordered
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.layout import side_by_side
from coda_inductor.write.strides import OutputStrides, restrided
from coda_inductor.write.writing import Writing

VIEWS = (aten.view.default, aten._unsafe_view.default)
WHAT = "products and a softmax are one operation of attention"


def fuse_attention(graph: fx.Graph, positions: bool) -> tuple[Changed, ...]:
    """Has torch compute attention that is written out, in place. `positions`: masks may become features later."""
    overwritten = of_memory_that_is_written(graph)
    found = [*located(written_out(graph, overwritten, positions), overwritten)]
    if not found:
        return ()
    layouts, there, now = OutputStrides(graph), [*graph.nodes], dict[fx.Node, fx.Node]()
    still, made = layouts.fixed(), dict[tuple[object, ...], fx.Node]()
    changes = [(Fusing(graph, one, still, now, made).write(), one.written) for one in found]
    graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
    layouts.restore(Writing(graph, graph.output_node()).call)
    left = {*graph.nodes}
    gone = [n for n in there if n not in left]
    return tuple(record(node, one, gone) for node, one in changes)


def record(node: fx.Node, written: Written, gone: Sequence[fx.Node]) -> Changed:
    """What explain says of it."""
    its = {*written.scores.own, *(r.product for r in written.scores.reads)}
    return Changed.of(node, written.scores.first, WHAT, [n.name for n in gone if n in its])


# ---- where its operands and its mask come from


Way = list[tuple[fx.Node, Dims]]
"""What holds the numbers of an operand, from the operand itself back through views and copies, and the axes of its
dimensions."""


@dataclass(frozen=True, slots=True)
class Located:
    """Attention that is written out; the ways of its operands and of the result's gradient, the axes of their rows and
    features; and the parts of its mask before they were repeated."""

    written: Written
    ways: tuple[Way, ...]
    places: tuple[tuple[int, int], ...]
    masks: tuple[tuple[Added | Hidden, fx.Node, Dims], ...]

    @classmethod
    def of(cls, written: Written, overwritten: AbstractSet[fx.Node]) -> Located:
        """Raises Misfit where views cut across each other, and of memory that is overwritten."""
        scores, operands = written.scores, [*written.operands, *filter(None, [written.gradient])]
        wide = [scores.axes.new(g.sizes(x.node)[1 if x.turned else 2]) for x in written.operands]
        of_rows = scores.queries, scores.keys, scores.keys, scores.queries
        places = tuple(zip(of_rows, (*wide, wide[-1]), strict=True))[: len(operands)]
        ways = tuple(way(scores, x, *place) for x, place in zip(operands, places, strict=True))
        if not overwritten.isdisjoint(node for each in ways for node, _ in each):
            raise Misfit("operands in memory that is overwritten")
        masks = tuple((part, *once(scores.axes, part.node, part.dims)) for part in written.softmax.parts)
        return cls(written, ways, places, masks)


def located(found: Iterable[Written], overwritten: AbstractSet[fx.Node]) -> Iterator[Located]:
    """Those of which nothing stands in the way; of what makes one result, the first."""
    results = set[fx.Node]()
    for one in found:
        try:
            each = Located.of(one, overwritten)
        except Misfit:
            continue
        if one.result.product not in results:
            results.add(one.result.product)
            yield each


def way(scores: Scores, operand: Operand, rows: int, features: int) -> Way:
    """What holds an operand's numbers; `rows` and `features` are axes."""
    node = operand.node
    dims: Dims = ((scores.apart,), (features,), (rows,)) if operand.turned else ((scores.apart,), (rows,), (features,))
    found: Way = [(node, dims)]
    while g.is_view(node):
        source: fx.Node = node.all_input_nodes[0]
        if node.target is aten.expand.default and g.sizes(node) != g.sizes(source):
            break
        try:
            node, dims = source, before(scores.axes, node, dims)
        except Misfit:
            break
        found.append((node, dims))
    return found


def once(axes: Axes, node: fx.Node, dims: Dims) -> tuple[fx.Node, Dims]:
    """The tensor before it was repeated, and the axes of its dimensions: BLOOM repeats a mask for all samples."""
    while node.target in (aten.repeat.default, aten.expand.default):
        source: fx.Node = node.all_input_nodes[0]
        sizes, found = g.sizes(source), list[Ids]()
        for dim, size in zip(dims[len(dims) - len(sizes) :], sizes, strict=True):
            times = axes.total(dim).over(size)
            found.append(axes.regroup(dim, [times, size])[1] if dim and times else ())
        node, dims = source, tuple(found)
    return node, tuple(map(axes.roots, dims))


# ---- writing


@dataclass(slots=True)
class Fusing:
    """The operation that stands for attention that is written out. Results of `still` lie in memory as they did; `now`
    has what stands for results of attention that was written before, and `made` what was made for its masks."""

    graph: fx.Graph
    found: Located
    still: AbstractSet[fx.Node]
    now: dict[fx.Node, fx.Node]
    made: dict[tuple[object, ...], fx.Node]

    @property
    def written(self) -> Written:
        """What it stands for."""
        return self.found.written

    def write(self) -> fx.Node:
        """The forward, and the backward if there is one."""
        its, scores = self.written, self.written.scores
        first, result, by = scores.first, self.written.result.product, self.written.softmax.scale
        at, ways, places = Writing(self.graph, result), self.found.ways, self.found.places
        read = [self.laid_out(at, first, *each) for each in zip(ways[:3], places, strict=False)]
        mask = self.mask(at)
        trained, learned = bool(its.gradients), bool(scores.sums)
        kernel, more, saved = (EFFICIENT, (), SAVED_BY_EFFICIENT) if learned else (CUDNN, (False,), SAVED)
        node = at.instead(result, kernel, *read, mask, trained, 0.0, False, *more, scale=by)
        own = [at.call(result, operator.getitem, node, i) for i in saved]
        self.in_place_of(at, its.result, own[0], 1.0)
        if trained:
            like = min(read.product for read, _, _ in its.gradients)
            at = Writing(self.graph, like)
            given = self.laid_out(at, like, ways[-1], places[-1], copied=False)
            self.backward(at, like, given, read, own, mask)
        return node

    def backward(
        self,
        at: Writing,
        like: fx.Node,
        given: fx.Node,
        read: Sequence[fx.Node],
        saved: Sequence[fx.Node],
        mask: fx.Node | None,
    ) -> None:
        """The gradients, in place of the products that made them, and of what is summed of the scores'."""
        its, by = self.written, self.written.softmax.scale
        if its.scores.sums:
            more: tuple[object, ...] = (mask, *saved, 0.0, [True] * 4, False)
            node = at.instead(like, EFFICIENT_BACKWARD, given, *read, *more, scale=by)
        else:
            sizes = (x.meta["val"].shape[2] for x in read[:2])
            node = at.instead(
                like, CUDNN_BACKWARD, given, *read, *saved, mask, None, None, *sizes, 0.0, False, scale=by
            )  # fmt: skip
        made = [at.call(like, operator.getitem, node, i) for i in range(len(node.meta["val"]))]
        for product, whose, times in its.gradients:
            self.in_place_of(at, product, made[whose], times if whose == VALUE else times / by)
        for total, scores in its.scores.sums.items():
            shape = [*scores.meta["val"].shape]
            new = Writing(self.graph, total).call(total, aten.reshape.default, made[OF_MASK], shape)
            total.replace_input_with(scores, new)

    # ---- operands

    @property
    def groups(self) -> tuple[Ids, Ids]:
        """The axes of samples and those of heads."""
        apart = self.written.scores.axes.roots([self.written.scores.apart])
        return apart[:1], apart[1:]

    def laid_out(self, at: Writing, like: fx.Node, way: Way, own: tuple[int, int], copied: bool = True) -> fx.Node:
        """An operand [samples, heads, rows, features], of the first of what holds its numbers that shows them so. A
        copy where a row's numbers lie apart; and where there was one, if it is still `copied`: the next stage knows
        where attention may read what was copied."""
        axes = self.written.scores.axes
        wanted = [*self.groups, *(axes.roots([i]) for i in own)]
        shape = [static(axes.total(group)) for group in wanted]
        for old, dims in reversed(way):
            source = self.now.get(old, old)
            order = in_place(tuple(map(axes.roots, dims)), [i for group in wanted for i in group])
            value = source.meta["val"]
            if order is None or not viewable(value.permute(order), shape):
                continue
            node = at.call(like, aten.permute.default, source, order)
            node = at.call(like, aten.view.default, node, shape)
            copied &= any(n.target in g.COPIES for n, _ in way[: way.index((old, dims))])
            if copied or not side_by_side(node.meta["val"], -1):
                node = at.call(like, aten.clone.default, node, memory_format=torch.contiguous_format)
            return node
        raise BrokenInvariant("an operand that is not [samples and heads, rows, features]")

    # ---- the mask

    def mask(self, at: Writing) -> fx.Node | None:
        """[samples or 1, heads or 1, queries, keys]: what is added to scores; None if nothing is."""
        its, value = self.written, self.written.operands[0].node.meta["val"]
        total: fx.Node | None = None
        for part, source, dims in reversed(self.found.masks):
            one = self.spread(at, self.now.get(source, source), dims)
            if isinstance(part, Added):
                if one.meta["val"].dtype != value.dtype:
                    one = self.shared(at, prims.convert_element_type.default, one, value.dtype)
                one = one if part.times == 1 else self.shared(at, aten.mul.Tensor, one, part.times)
                total = one if total is None else self.shared(at, aten.add.Tensor, total, one)
            else:
                hidden, rest = self.number(at, part.value), self.number(at, 0.0) if total is None else total
                total = self.shared(at, aten.where.self, one, *((hidden, rest) if part.where else (rest, hidden)))
        if total is None:
            return None
        if not all(map(in_range, its.softmax.parts)):
            never = self.shared(at, aten.eq.Scalar, total, -math.inf)
            total = self.shared(at, aten.clamp_min.default, total, max(LEAST, torch.finfo(value.dtype).min))
            total = self.shared(at, aten.where.self, never, self.number(at, NEVER), total)
        shape = [*total.meta["val"].shape[:2], *(x.shape[1] for x in its.rows[:2])]
        if [*total.meta["val"].shape] != shape:
            total = self.shared(at, aten.expand.default, total, shape)
        if not total.meta["val"].is_contiguous():
            total = self.shared(at, aten.clone.default, total, memory_format=torch.contiguous_format)
        return total

    def number(self, at: Writing, x: float) -> fx.Node:
        """A number in the dtype of the queries; one that is lower than all of these, but for minus infinity, is the
        lowest."""
        value = self.written.operands[0].node.meta["val"]
        x = x if x == -math.inf else max(x, torch.finfo(value.dtype).min)
        how = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        return self.shared(at, aten.full.default, [], x, **how)

    def spread(self, at: Writing, source: fx.Node, dims: Dims) -> fx.Node:
        """Part of a mask [samples or 1, heads or 1, queries or 1, keys or 1]."""
        scores = self.written.scores
        axes, size = scores.axes, scores.axes.size
        wanted = [*self.groups, *(axes.roots([i]) for i in (scores.queries, scores.keys))]
        own, every = [i for dim in dims for i in axes.roots(dim)], [i for group in wanted for i in group]
        full = [[static(size[i]) if {*group} & {*own} else 1 for i in group] for group in wanted]
        order = [own.index(i) for i in every if i in own]
        node = self.reshaped(at, source, [static(size[i]) for i in own])
        if order != sorted(order):
            node = self.shared(at, aten.permute.default, node, order)
        node = self.reshaped(at, node, [static(size[i]) if i in own else 1 for i in every])
        if [*node.meta["val"].shape] != (long := [n for group in full for n in group]):
            node = self.shared(at, aten.expand.default, node, long)
        return self.reshaped(at, node, [math.prod(group) for group in full])

    def reshaped(self, at: Writing, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """The node in that shape."""
        there = [*node.meta["val"].shape] == [*shape]
        return node if there else self.shared(at, aten.reshape.default, node, [*shape])

    def shared(self, at: Writing, target: object, *args: object, **kwargs: object) -> fx.Node:
        """What an earlier layer made for the same mask, or else a new node. What a checkpoint computes again stays its
        own."""
        like, how = self.written.scores.first, (target, repr(args), repr(kwargs))
        made = self.made.get(how)
        if made is None or "recompute" in like.meta or not made < at.anchor:
            made = self.made[how] = at.call(like, target, *args, **kwargs)
        return made

    # ---- results

    def in_place_of(self, at: Writing, read: Read, made: fx.Node, times: float) -> None:
        """What an operation made, [samples, heads, rows, features], in place of a product and of views of that."""
        like = read.product
        node = at.call(like, aten.permute.default, made, [0, 1, 3, 2]) if read.turned else made
        if not math.isclose(times, 1.0, rel_tol=1e-9):
            node = at.call(like, aten.mul.Tensor, node, times)
        users = [user for user in like.users if user.target in VIEWS]
        if not self.still.isdisjoint([like, *users]):
            users = []  # results that share memory with this one stay views of it
        for old in (*users, like):
            value = old.meta["val"]
            new = at.call(old, aten.reshape.default, node, [*value.shape])
            self.now[old] = restrided(new, value, at.call) if old in self.still else new
            old.replace_all_uses_with(self.now[old])


def in_range(part: Added | Hidden) -> bool:
    """Is all that it adds or puts in place of scores a number that cuDNN may turn into powers of two?"""
    return finite(part.node) if isinstance(part, Added) else part.value >= NEVER


def in_place(dims: Dims, wanted: Sequence[int]) -> list[int] | None:
    """The order of a tensor's dimensions in which its axes are the wanted ones; None if there is none."""
    own = [dim for dim in dims if dim]
    found = sorted(own, key=lambda dim: wanted.index(dim[0]) if dim[0] in wanted else -1)
    if [i for dim in found for i in dim] != [*wanted]:
        return None
    order = [dims.index(dim) for dim in found]
    return [*(d for d, dim in enumerate(dims) if not dim), *order]


def viewable(value: torch.Tensor, shape: Sequence[int]) -> bool:
    """May it be viewed in that shape?"""
    try:
        value.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True
