"""What is added to the scores of attention by the place of a key along one of its axes: how the graph says it.

For an image, SAM adds two numbers to the score of a query i and a key at (y, x): `h[i, y] + w[i, x]`. torch's
attention reads such a sum as a mask [tokens, tokens] of every head. Views and additions lead back from there to `h` and
`w`; the axes of these views (patterns/axes.py) say along which axes of the keys each is told apart. The gradient of
`h` is the mask's, summed over all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from coda_inductor.attention.repeats import Dims, behind, permuted, summed_over
from coda_inductor.attention.windows import Step, index
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.axes import Axes, Ids, Misfit
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import TRANSPOSES
from coda_inductor.patterns.sizes import ONE

OF_KEYS = 3
"""The dimension of keys in [batch, heads, queries, keys]."""
OF_MASK = 3
"""Which result of the memory-efficient backward is the gradient of the mask."""
CUTS = (aten.slice.Tensor, aten.select.int)
"""What takes a part of a tensor, whose numbers it does not change."""
FINITE = (aten.mm.default, aten.bmm.default)
"""Products that add nothing else. (An addmm's bias may be minus infinity.)"""
WHOLE = (0, None, None, 1)
"""The dimension, start, end and step of a slice that are not given."""


@dataclass(frozen=True, slots=True)
class Addend:
    """A tensor that is added to scores, the axes of its dimensions, and those of the keys that it tells apart."""

    node: fx.Node
    dims: Dims
    keys: Ids


@dataclass(slots=True)
class Sum:
    """A mask [batch, heads, queries, keys]: the axes of its dimensions, its addends, and what lies between."""

    axes: Axes
    dims: Dims
    addends: list[Addend] = field(default_factory=list)
    way: list[fx.Node] = field(default_factory=list)

    @classmethod
    def of(cls, mask: fx.Node, readers: set[fx.Node]) -> Sum:
        """Raises Misfit of a mask that tells all keys apart in one tensor, that may hide keys, or that others than the
        `readers` read."""
        axes = Axes()
        own: Dims = tuple(() if n == ONE else (axes.new(n),) for n in g.sizes(mask))
        if len(own) > OF_KEYS + 1:
            raise Misfit("a mask of more dimensions")
        found = cls(axes, ((),) * (OF_KEYS + 1 - len(own)) + own)
        found._add(mask, own, readers)
        found.dims = tuple(map(axes.roots, found.dims))
        found.addends = [Addend(a.node, found.roots(a.dims), axes.roots(a.keys)) for a in found.addends]
        return found

    def roots(self, dims: Dims) -> Dims:
        """The atomic axes that they now stand for."""
        return tuple(map(self.axes.roots, dims))

    def known(self, dims: Dims) -> Ids:
        """The axes of the keys among these, in their order."""
        here = {i for dim in self.roots(dims) for i in dim}
        return tuple(i for i in self.axes.roots(self.dims[OF_KEYS]) if i in here)

    def _add(self, node: fx.Node, dims: Dims, readers: set[fx.Node]) -> None:
        keys = self.known(dims)
        if self.axes.total(keys) != self.axes.total(self.dims[OF_KEYS]) and finite(node):
            self.addends.append(Addend(node, dims, keys))
            return
        if not readers.issuperset(node.users):
            raise Misfit("a mask that something else reads")
        self.way.append(node)
        if (source := behind_padding(node)) is not None:
            wide = node.all_input_nodes[0]
            self.way.append(wide)
            self._add(source, dims, {wide} if {*wide.users} == {node} else set())
        elif node.target is aten.add.Tensor and not node.kwargs:
            for addend in node.args:
                if not isinstance(addend, fx.Node) or addend.meta["val"].dtype != node.meta["val"].dtype:
                    raise Misfit("a number, or one of another dtype, that is added to all scores")
                self._add(addend, narrowed(addend, dims), {node})
        elif g.is_view(node):
            source = node.all_input_nodes[0]
            self._add(source, before(self.axes, node, dims), {node})
        else:
            raise Misfit("a mask that tells all keys apart, or perhaps hides some")

    def sums(self, node: fx.Node, dims: Dims) -> Iterator[Part]:
        """The sums of the gradient of the mask, each an addend's gradient. Raises Misfit of anything else."""
        for user in node.users:
            cut = next(iter(user.users), user)
            if behind_padding(cut) is node and len(user.users) == 1:
                yield from self.sums(cut, dims)
                continue
            if g.is_view(user):
                yield from self.sums(user, behind(self.axes, dims, [user]))
                continue
            _, left = summed_over(user, dims, node)
            part = Part(user, self.roots(left))
            if self.known(part.dims) in [a.keys for a in self.addends]:
                yield part
            else:
                yield from self.sums(user, part.dims)


@dataclass(frozen=True, slots=True)
class Part:
    """A sum of the gradient of a mask, and the axes of its dimensions."""

    node: fx.Node
    dims: Dims


@dataclass(frozen=True, slots=True)
class Features:
    """A step of attention, what its mask is the sum of, and what is made of the mask's gradient."""

    step: Step
    mask: Sum
    parts: tuple[Part, ...]

    @property
    def number(self) -> int:
        """How many features are new."""
        return sum(self.of(a) for a in self.mask.addends)

    def of(self, addend: Addend) -> int:
        """How many features an addend has: so many places it tells apart."""
        return static(self.mask.axes.total(addend.keys))

    def of_part(self, part: Part) -> int:
        """From which of the new features on a sum is the gradient."""
        first = 0
        for addend in self.mask.addends:
            if addend.keys == self.mask.known(part.dims):
                return first
            first += self.of(addend)
        raise Misfit("the gradient of no addend")


def parts(mask: Sum, step: Step) -> list[Part]:
    """The sums of the gradient of the mask. Raises Misfit where one is also over samples, heads or queries."""
    found = list[Part]()
    for call in step.backwards:
        for result in call.node.users:
            if index(result) == OF_MASK:
                found += mask.sums(result, mask.dims)
    outside = {i for dim in mask.dims[:-1] for i in dim}
    for part in found:
        if not outside.issubset(i for dim in part.dims for i in dim):
            raise Misfit("a gradient that is summed over more than keys")
    return found


def static(size: Any) -> int:
    """A size as a number. Raises Misfit of a symbol."""
    if (number := size.static) is None:
        raise Misfit("a symbolic size")
    return int(number)


def finite(node: fx.Node) -> bool:
    """Is it what a matrix product makes of finite numbers, or some of that?"""
    return g.root(node, lambda n: g.is_view(n) or n.target in CUTS).target in FINITE


def behind_padding(node: fx.Node) -> fx.Node | None:
    """The same tensor before its rows were made longer, as torch pads a mask for the memory-efficient kernel, and cut
    off again; of a gradient the same. None if that is not what the node does."""
    wide = next(iter(node.all_input_nodes), node)
    read, args = tuple[Any, ...](wide.args), tuple[Any, ...](node.args)
    if (node.target, wide.target) == (aten.slice.Tensor, aten.constant_pad_nd.default):
        source, pads, cut = read[0], read[1], args[1:]
    elif (node.target, wide.target) == (aten.constant_pad_nd.default, aten.slice_scatter.default):
        source, pads, cut = read[1], args[1], read[2:]
    else:
        return None
    given: list[Any] = [*cut, *WHOLE[len(cut) :]]
    dim, start, _, step = given
    last = len(g.sizes(node)) - 1
    at_the_end = dim in (last, -1) and start in (0, None) and step == 1 and pads[:-1] == [0]
    return source if at_the_end and g.sizes(source) == g.sizes(node) else None


def before(axes: Axes, view: fx.Node, dims: Dims) -> Dims:
    """The axes of what the view reads, by those of the view."""
    source = view.all_input_nodes[0]
    if view.target in TRANSPOSES:
        order = permuted(view)
        return tuple(dims[order.index(d)] for d in range(len(order)))
    if view.target is aten.expand.default:
        return narrowed(source, dims)
    return axes.regroup([i for dim in dims for i in dim], g.sizes(source))


def narrowed(node: fx.Node, dims: Dims) -> Dims:
    """The axes of a tensor that is repeated to these."""
    sizes = g.sizes(node)
    return tuple(() if n == ONE else dim for n, dim in zip(sizes, dims[len(dims) - len(sizes) :], strict=True))


def in_order(dims: Dims, wanted: Sequence[int]) -> list[int]:
    """Where the wanted axes are among those of the dimensions, each taken for itself."""
    own = [i for dim in dims for i in dim]
    return [own.index(i) for i in wanted if i in own]
