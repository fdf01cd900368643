"""The axes of every node of a graph. Views dissolve into axes; slices, cats and stacks of features into lanes.

First pass of reading: no terms yet, so that the axes are final when terms are made. What does not fit is opaque: it
gets fresh axes, and its consumers go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.axes import Axes, Ids, Misfit
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.pointwise import POINTWISE
from coda_inductor.patterns.sizes import ONE, Size

MAX_LANES = 8

Dims = tuple[Ids, ...]


@dataclass(slots=True)
class Reading:
    """The dims of every floating-point node; `opaque` says why a node is not understood; lanes[node] = (axis,
    index)."""

    axes: Axes = field(default_factory=Axes)
    dims: dict[fx.Node, Dims] = field(default_factory=dict)
    opaque: dict[fx.Node, str] = field(default_factory=dict)
    lanes: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    parts: list[tuple[Ids, Ids]] = field(default_factory=list)
    """Where no lanes are made: the fresh axes of a part or a cat, and the axes of a dimension that they came from."""

    final: bool = False
    """No axis is split or united any more: what roots() finds is kept."""
    _roots: dict[fx.Node, Dims] = field(default_factory=dict)

    def roots(self, node: fx.Node) -> Dims:
        """The node's dims in atomic axes."""
        if (known := self._roots.get(node)) is not None:
            return known
        found = tuple(self.axes.roots(d) for d in self.dims[node])
        if self.final:
            self._roots[node] = found
        return found


def read_axes(graph: fx.Graph, matrices: Collection[fx.Node] = ()) -> Reading:
    """Infers all axes. Lanes are made on feature dimensions only, which a first pass without lanes finds: the columns
    of what is multiplied with a weight, and of these `matrices`."""
    plain = _pass(graph, None)
    products = [n for n in graph.nodes if n.target in g.PRODUCTS and n in plain.dims and g.reads_weight(n)]
    products += [n for n in matrices if n in plain.dims]
    features = {i for n in products for i in plain.roots(n)[-1]}
    rows = {i for n in products for i in plain.roots(n)[-2]}
    for fresh, source in plain.parts:
        if features.intersection(plain.axes.roots(source)):
            features.update(plain.axes.roots(fresh))
        # (Of what a Region reads no product in the graph says that its parts are features.)
        elif matrices and features.intersection(plain.axes.roots(fresh)):
            features.update(plain.axes.roots(source))

    def is_feature(node: fx.Node, dim: int) -> bool:
        ids = set(plain.axes.roots(plain.dims[node][dim])) if node in plain.dims else set()
        return bool(ids & features) and not ids & rows

    reading = _pass(graph, is_feature)
    reading.final = True
    return reading


IsFeature = Callable[[fx.Node, int], bool] | None
"""Is this dimension one of features? None: find that out, and make no lanes."""


def _pass(graph: fx.Graph, is_feature: IsFeature) -> Reading:
    reading = Reading()
    for number, node in enumerate(graph.nodes):
        if node.op == "output" or not g.floating(node):
            continue
        mark = reading.axes.mark()
        try:
            dims = _dims(reading, node, is_feature)
            reading.axes.occupy(number, [i for d in dims for i in d])
        except Misfit as why:
            reading.axes.undo(mark)
            reading.lanes.pop(node, None)
            reading.opaque[node] = str(why)
            dims = tuple(_fresh(reading, s) for s in g.sizes(node))
            reading.axes.occupy(number, [i for d in dims for i in d])
        reading.dims[node] = dims
    return reading


def _fresh(reading: Reading, size: Size) -> Ids:
    return () if size == ONE else (reading.axes.new(size),)


def _dims(reading: Reading, node: fx.Node, is_feature: IsFeature) -> Dims:
    if node.op != "call_function":
        raise Misfit("an input")
    tensors = [a for a in node.all_input_nodes if g.tensor(a) is not None]
    if (part := slices.lane(node)) is not None:
        return _part(reading, node, part, is_feature)
    if (like := g.laid_out_as(node)) is not None and like[0] in reading.dims:
        return reading.dims[like[0]][:: -1 if like[1] else 1]
    if (choice := g.choice(node)) is not None:
        return _broadcast(reading, node, choice[1])
    if any(a not in reading.dims for a in tensors):
        raise Misfit("it reads integers or empty tensors")
    if node.target in POINTWISE and not node.kwargs.get("rounding_mode"):
        return _broadcast(reading, node, tensors)
    if g.is_view(node):
        return _view(reading, node)
    if node.target in g.PRODUCTS:
        return _product(reading, node)
    if (reduction := g.reduction(node)) is not None:
        return _reduce(reading, reduction)
    if node.target in (aten.cat.default, aten.stack.default):
        return _cat(reading, node, is_feature)
    if (scattered := slices.scattered(node)) is not None:
        return _scatter(reading, node, scattered, is_feature)
    if node.target is aten.full.default or node.target is aten.scalar_tensor.default:
        return tuple(_fresh(reading, s) for s in g.sizes(node))
    raise Misfit(f"{node.target} is not an operation that we lift")


def _broadcast(reading: Reading, node: fx.Node, tensors: Sequence[fx.Node]) -> Dims:
    out: list[Ids] = []
    shapes = [(g.sizes(a), reading.dims[a]) for a in tensors]
    for back, size in enumerate(reversed(g.sizes(node)), 1):
        ids: Ids = ()
        for shape, dims in shapes:
            if back > len(shape) or shape[-back] == ONE:
                continue
            if shape[-back] != size:  # equal by a guard alone
                raise Misfit(f"sizes {shape[-back]} and {size}, whose equality we cannot see")
            theirs = dims[-back]
            if ids:
                reading.axes.unify(ids, theirs)
            ids = ids or theirs
        out.insert(0, ids or _fresh(reading, size))
    return tuple(out)


def _view(reading: Reading, node: fx.Node) -> Dims:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dims, rank = reading.dims[source], len(g.sizes(source))
    if node.target is aten.permute.default:
        return tuple(dims[i] for i in node.args[1])  # type: ignore[union-attr,index]
    if node.target is aten.t.default:
        return dims[::-1]
    if node.target is aten.transpose.int:
        order = list(range(rank))
        i, j = (int(x) % rank for x in node.args[1:3])  # type: ignore[arg-type]
        order[i], order[j] = order[j], order[i]
        return tuple(dims[i] for i in order)
    if node.target is aten.expand.default:
        return _broadcast(reading, node, [source])
    if node.target is aten.slice.Tensor:
        return dims
    return reading.axes.regroup([i for d in dims for i in d], g.sizes(node))


def _product(reading: Reading, node: fx.Node) -> Dims:
    of = g.operands(node)
    if not of.understood:
        raise Misfit("addmm with alpha or beta, or scales of blocks")
    a, b = reading.dims[of.left], reading.dims[of.right]
    reading.axes.unify(a[-1], b[-2])
    if len(a) == 3:
        reading.axes.unify(a[0], b[0])
    out = (*a[:-1], b[-1])
    for t in (*of.addends, *of.scales):
        for mine, theirs, size in zip(out[::-1], reading.dims[t][::-1], g.sizes(t)[::-1], strict=False):
            if size != ONE:
                reading.axes.unify(mine, theirs)
    return out


def _reduce(reading: Reading, reduction: g.Reduction) -> Dims:
    dims = reading.dims[reduction.source]
    for i in reduction.dims:
        if reading.axes.total(dims[i]).static is None:
            raise Misfit("a reduction over a symbolic size")
    return tuple(
        () if i in reduction.dims else d for i, d in enumerate(dims) if reduction.keepdim or i not in reduction.dims
    )


def _part(reading: Reading, node: fx.Node, part: tuple[fx.Node, int, int, int], is_feature: IsFeature) -> Dims:
    source, dim, count, index = part
    if source not in reading.dims or count > MAX_LANES or (is_feature and not is_feature(source, dim)):
        raise Misfit("a part of rows, of integers, or one of many")
    dims = reading.dims[source]
    dropped = node.target is not aten.slice.Tensor and len(g.sizes(node)) < len(dims)
    whole = g.sizes(source)[dim]
    length = whole.over(Size(count))
    assert length is not None
    rest = _fresh(reading, length)
    if is_feature is None:
        reading.parts.append((rest, dims[dim]))
    else:
        lane = reading.axes.new(Size(count))
        reading.axes.unify(dims[dim], (*rest, lane) if slices.step(node) > 1 else (lane, *rest))
        reading.lanes[node] = (lane, index)
    return (*dims[:dim], *(() if dropped else (rest,)), *dims[dim + 1 :])


def _cat(reading: Reading, node: fx.Node, is_feature: IsFeature) -> Dims:
    parts, dim = list(node.args[0]), int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    rank = len(g.sizes(node))
    dim %= rank
    first = reading.dims[parts[0]]
    if len({g.sizes(p) for p in parts}) > 1 or len(parts) > MAX_LANES:
        raise Misfit("a cat of unequal or many parts")
    joined = node.target is aten.cat.default and g.sizes(parts[0])[dim] != ONE  # of single ones it is a stack
    if is_feature and joined and not all(is_feature(p, dim) for p in parts):
        raise Misfit("a cat of rows")
    for p in parts[1:]:
        for mine, theirs in zip(first, reading.dims[p], strict=True):
            reading.axes.unify(mine, theirs)
    if is_feature is None:
        fresh = _fresh(reading, g.sizes(node)[dim])
        reading.parts.append((fresh, first[dim] if node.target is aten.cat.default else ()))
        return (*first[:dim], fresh, *first[dim + (node.target is aten.cat.default) :])
    lane = reading.axes.new(Size(len(parts)))
    reading.lanes[node] = (lane, -1)
    if node.target is aten.stack.default:
        return (*first[:dim], (lane,), *first[dim:])
    return (*first[:dim], (lane, *first[dim]), *first[dim + 1 :])


def _scatter(reading: Reading, node: fx.Node, part: tuple[fx.Node, int, int, int], is_feature: IsFeature) -> Dims:
    source, dim, count, index = part
    first = reading.dims[source]
    if count > MAX_LANES or (is_feature and not is_feature(source, dim)):
        raise Misfit("a part of rows, or one of many")
    if is_feature is None:
        fresh = _fresh(reading, g.sizes(node)[dim])
        reading.parts.append((fresh, first[dim]))
        return (*first[:dim], fresh, *first[dim + 1 :])
    lane = reading.axes.new(Size(count))
    reading.lanes[node] = (lane, index)
    return (*first[:dim], (lane, *first[dim]), *first[dim + 1 :])
