"""Casts of one tensor to 8 bits, in rows and transposed, as one pass over memory.

Products of 8-bit matrices read rows of K alone. So a gradient is cast twice, in rows for the gradient of what its layer
reads and transposed for that of the weight, each time with other scales; and so is what the layer reads. Inductor makes
a kernel of each, and writes transposed at 1.2 TB/s of 3 (H100). Where a tensor is cast transposed, all of its casts
become one operation that reads it once. What the backward multiplies of the forward's tensors is made in the forward
with the rest, and kept in 8 bits, unless the backward reads the tensor anyway.

Every operation and rounding stays as it is written in the graph.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from coda_inductor.core.dtypes import DTYPE_NAMES, EIGHT_BITS, NARROW
from coda_inductor.core.elementwise import PLACED, Elementwise, Output, verify
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.ops import OPS
from coda_inductor.core.region import Let, Operand
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.passes.tables import is_loop, readers
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Memory, computes, effects
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.infer import Reading, read_axes
from coda_inductor.patterns.layout import dense, major_to_minor
from coda_inductor.patterns.pointwise import FUNCTIONS
from coda_inductor.patterns.sizes import assumed
from coda_inductor.write.order import sort
from coda_inductor.write.verifying import Before
from coda_inductor.write.writing import Writing

LOADED = DTYPE_NAMES.keys() - {torch.float64}
DEPTH = 32  # operations between a cast and its tensor
LARGEST_DIVISOR = 2.0**126  # neither such a number nor its reciprocal is subnormal
PITCH = 16  # elements of 8 bits of which rows are made that TMA reads
WORTH = 1 << 24
"""The elements of a tensor from which it gets a pass: an estimate of where a pass saves as much as its launch takes.
(H100, rowwise, two layers of width 512, 16384 tokens, passes of all tensors and no Regions: kernels take 4.2 ms for
5.4, but the CPU 13 ms for 7 to launch them. Inductor makes scales in the kernels of its casts, here they have kernels
of their own.)"""

OPERATIONS = {op: name for name, ops in FUNCTIONS.items() for op in ops if OPS[name].triton} | {
    aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.neg.default: "neg",
    aten.add.Scalar: "add", aten.sub.Scalar: "sub", aten.mul.Scalar: "mul",
}  # fmt: skip
"""What a pass computes, and its name among OPS."""

SMALL = f"it casts fewer than {WORTH} numbers in both layouts, for which a pass is taken not to be worth its launch"


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: its record, its shape [M, N], the nodes that it supplies, and the user's line."""

    record: Elementwise
    m: str
    outputs: tuple[str, ...]
    source: str


@dataclass(slots=True)
class Made:
    """One tensor that leaves a cast: the cast, the node that holds it (the cast, or a copy of its transpose), and where
    the axes of the source's memory are cut to be read in the other order: 0 if they are not."""

    cast: fx.Node
    node: fx.Node
    cut: int


@dataclass(slots=True)
class Expression:
    """The statements of a pass, as they are written. `full` are the axes of its tensors [M, N]."""

    reading: Reading
    source: fx.Node
    full: frozenset[int]
    operands: dict[fx.Node, str] = field(default_factory=dict)
    lets: list[Let] = field(default_factory=list)
    places: dict[fx.Node, tuple[fx.Node, float]] = field(default_factory=dict)
    """Of tensors of one number in each row, at which place, and the number."""

    def value(self, node: fx.Node) -> str:
        """The name of a node's value."""
        if node in self.places:
            place, number = self.places[node]
            return self._let(PLACED, self.value(place), number)
        if axes(self.reading, node) != self.full or node is self.source:
            return self.operands.setdefault(node, f"in{len(self.operands)}")
        if g.is_view(node):
            return self.value(node.all_input_nodes[0])
        dtype = node.meta["val"].dtype
        name = self.value(node.all_input_nodes[0]) if g.is_cast(node) else self._computed(node)
        if dtype in NARROW:
            name = self._let(NARROW[dtype], name)
        return name

    def loads(self, whole: tuple[int, ...], cut: int) -> tuple[Operand, ...] | None:
        """The operands of the values so far: `whole` are the tensor's axes as they lie, rows before `cut`. None if one
        lies otherwise or has a dtype that no pass reads."""
        kinds = {(): "scalar", whole[:cut]: "token", whole[cut:]: "feature"}
        found = list[Operand]()
        for node, name in self.operands.items():
            order = tuple(i for d in self.reading.roots(node) for i in d)
            extent, dtype = "tile" if node is self.source else kinds.get(order), node.meta["val"].dtype
            if extent is None or dtype not in LOADED:
                return None
            found.append(Operand(name, extent, DTYPE_NAMES[dtype]))  # type: ignore[arg-type]
        return tuple(found)

    def _computed(self, node: fx.Node) -> str:
        if number := divisor(node):
            return self._let("mul", self.value(node.all_input_nodes[0]), 1 / number)
        args = [self.value(a) if isinstance(a, fx.Node) else float(a) for a in node.args]  # type: ignore[arg-type]
        return self._let(OPERATIONS[node.target], *args)

    def _let(self, op: str, *args: str | float) -> str:
        for known in self.lets:
            if (known.op, known.args) == (op, args):
                return known.name
        self.lets.append(Let(f"v{len(self.lets)}", op, args))
        return self.lets[-1].name


def axes(reading: Reading, node: fx.Node) -> frozenset[int]:
    """The axes that a node varies over."""
    return frozenset(i for d in reading.roots(node) for i in d)


def axes_in_memory(reading: Reading, node: fx.Node) -> tuple[int, ...] | None:
    """The node's axes as they lie, major to minor; None if there are gaps."""
    dims = major_to_minor(g.tensor(node))  # type: ignore[arg-type]
    return tuple(i for d in dims for i in reading.roots(node)[d]) if dense(node, dims) else None


def write_passes(graph: fx.Graph, target: str, before: Before) -> tuple[tuple[Pass, ...], dict[fx.Node, str]]:
    """Puts the passes into a joint or inference graph, in place. Also returns the casts of one tensor in both layouts
    that stay, and why."""
    found = graph.find_nodes(op="call_function", target=prims.convert_element_type.default)
    casts = [n for n in found if n.args[1] in EIGHT_BITS]
    if not casts:
        return (), {}
    reading, made, left = read_axes(graph), list[Pass](), dict[fx.Node, str]()
    for source, members in grouped(graph, casts, reading):
        try:
            expression, record = _record(target, reading, source, members)
        except Unsupported as why:
            left |= {x.cast: why.what for x in members}
        else:
            made.append(_write(graph, target, expression, record, members))
    if made:
        sort(graph, before.effects)
    return tuple(made), left


def grouped(graph: fx.Graph, casts: list[fx.Node], reading: Reading) -> list[tuple[fx.Node, list[Made]]]:
    """The tensors whose casts become passes, and what the casts leave, of which one at least is transposed."""
    found, known = defaultdict[fx.Node, list[Made]](list), dict[fx.Node, set[fx.Node]]()
    is_overwritten = overwritten(graph)
    for cast in casts:
        if cast not in reading.dims or (source := source_of(cast.all_input_nodes[0], reading, known)) is None:
            continue
        if early(cast, source) and not is_overwritten(source):
            found[source] += leaving(cast, reading, source)
    groups = []
    for source, some in found.items():
        sides = [some]
        if not g.is_backward(source) and (g.is_weight(source) or read_anyway(source, [made.cast for made in some])):
            sides = [[made for made in some if g.is_backward(made.cast) == late] for late in (False, True)]
        for side in sides:
            cuts = [made.cut for made in side if made.cut]
            members = [made for made in side if made.cut in (0, *cuts[:1])]
            groups += [(source, members)] if cuts else []
    return groups


def overwritten(graph: fx.Graph) -> Callable[[fx.Node], bool]:
    """Tells of tensors whether the graph overwrites their memory."""
    unstable = effects(graph).unstable
    memory = Memory(graph) if unstable else None
    return lambda node: memory is not None and memory.of(node) in unstable


def read_anyway(source: fx.Node, casts: list[fx.Node]) -> bool:
    """Does the backward read the forward's tensor anyway, for something else than these casts? Then what it multiplies
    is cast there, and nothing more is kept."""
    between = g.reached(casts, lambda n: [a for a in n.all_input_nodes if a is not source])
    widened = g.reached([source], lambda n: [u for u in n.users if g.is_view(u) or g.is_cast(u)])
    return any(g.is_backward(u) and u not in between and u not in widened for n in widened for u in n.users)


def source_of(value: fx.Node, reading: Reading, known: dict[fx.Node, set[fx.Node]]) -> fx.Node | None:
    """The one tensor [M, N] that a value is made of, with vectors and numbers; None if there are several, or what makes
    it is nothing that a pass computes."""
    found = tensors_of(value, axes(reading, value), reading, known)
    source = next(iter(found)) if len(found) == 1 else None
    return source if source is not None and axes_in_memory(reading, source) is not None else None


def tensors_of(
    node: fx.Node, full: frozenset[int], reading: Reading, known: dict[fx.Node, set[fx.Node]], depth: int = DEPTH
) -> set[fx.Node]:
    """The tensors over the axes `full` that a node is made of by what a pass computes; of 16 bits and made of several,
    or of what Inductor computes in float32, or in memory anyway, it is one itself. (`known` are those of other
    nodes.)"""
    if node not in reading.dims or axes(reading, node) != full:
        return set()
    if node not in known:
        found = {node}
        if depth and (g.is_view(node) or is_computed(node)):
            each = (tensors_of(a, full, reading, known, depth - 1) for a in node.all_input_nodes)
            below = set[fx.Node]().union(*each)
            narrow = node.meta["val"].dtype in NARROW and not g.is_view(node)
            wide = any(is_loop(n) and n.meta["val"].dtype not in NARROW for n in below)
            found = {node} if narrow and (wide or len(below) > 1 or not all(map(_inline, readers(node)))) else below
        known[node] = found
    return known[node]


def is_computed(node: fx.Node) -> bool:
    """Does a pass compute the operation, in float32 and rounded to 16 bits where that is so in the graph?"""
    value = g.tensor(node)
    if value is None or value.dtype not in (torch.float32, *NARROW) or node.kwargs:
        return False
    if g.is_cast(node) or divisor(node):
        return True
    return node.target in OPERATIONS and all(isinstance(a, fx.Node | int | float) for a in node.args)


def divisor(node: fx.Node) -> float:
    """The number by which the node divides, 0 if there is none. On a GPU torch and Inductor multiply by its reciprocal,
    and so does a pass."""
    number = node.args[1] if node.target is aten.div.Tensor else 0
    if not isinstance(number, int | float) or not 1 / LARGEST_DIVISOR < abs(number) < LARGEST_DIVISOR:
        return 0.0
    return float(number)


def _inline(user: fx.Node) -> bool:
    """Would Inductor compute what the user reads in the user's own loop?"""
    return g.is_cast(user) or is_computed(user) or g.reduction(user) is not None


def leaving(cast: fx.Node, reading: Reading, source: fx.Node) -> list[Made]:
    """What of a cast is in memory: itself, or copies of its transpose."""
    whole, found, rest = axes_in_memory(reading, source), list[Made](), False
    assert whole is not None
    todo = [*cast.users]
    for user in todo:  # which grows
        copy = user.target is aten.clone.default
        if copy and (cut := _cut(whole, axes_in_memory(reading, user))):
            found.append(Made(cast, user, cut))
        elif g.is_view(user) and not copy:
            todo += user.users
        else:
            rest = True
    if rest and (cut := _cut(whole, axes_in_memory(reading, cast))) is not None:
        found.append(Made(cast, cast, cut))
    return found


def _cut(whole: tuple[int, ...], found: tuple[int, ...] | None) -> int | None:
    """Where the axes are cut to be read in the other order; 0 if they are not, None if they lie otherwise."""
    if found == whole:
        return 0
    return next((i for i in range(1, len(whole)) if whole[i:] + whole[:i] == found), None)


def early(cast: fx.Node, source: fx.Node) -> bool:
    """Is all that a cast reads there as soon as its source is, by way of operations that may run there?"""
    between = g.reached([cast], lambda n: [a for a in n.all_input_nodes if source < a])
    gradients = any(g.is_tangent(a) for n in between for a in n.all_input_nodes)
    return (g.is_backward(source) or g.is_tangent(source) or not gradients) and all(map(_early, between))


def _early(node: fx.Node) -> bool:
    given = node.op == "placeholder" or node.target is operator.getitem
    return given or (computes(node) and node.target not in g.PRODUCTS)


def _record(target: str, reading: Reading, source: fx.Node, members: list[Made]) -> tuple[Expression, Elementwise]:
    """The pass of a tensor's casts, which it reads to make them. Raises Unsupported if there is none."""
    whole, cut = axes_in_memory(reading, source), next(made.cut for made in members if made.cut)
    assert whole is not None
    m, n = (reading.axes.total(part) for part in (whole[:cut], whole[cut:]))
    if n.static is None or n.static % PITCH or m.static is None or m.static % PITCH:
        raise Unsupported(f"it casts a tensor in both layouts whose sizes {m} and {n} are no multiples of {PITCH}")
    if not large(source, target):
        raise Unsupported(SMALL)
    expression = Expression(reading, source, frozenset(whole))
    values = [expression.value(made.cast.args[0]) for made in members]  # type: ignore[arg-type]
    if (operands := expression.loads(whole, cut)) is None:
        raise Unsupported("it casts a tensor in both layouts by vectors that do not lie as its rows or columns do")
    outputs = [Output(v, DTYPE_NAMES[x.cast.args[1]], bool(x.cut)) for v, x in zip(values, members, strict=True)]  # type: ignore[index]
    return expression, verify(Elementwise(n.static, operands, tuple(expression.lets), tuple(outputs)))


def _write(graph: fx.Graph, target: str, expression: Expression, record: Elementwise, members: list[Made]) -> Pass:
    writing, op = written(graph, target, expression, record, [made.node for made in members])
    for i, made in enumerate(members):
        out = writing.call(op, operator.getitem, op, i)
        out.meta[g.LAID_OUT_AS] = ([*expression.operands].index(expression.source), bool(made.cut))
        made.node.replace_all_uses_with(_laid_out(writing, out, made.node))
    rows = expression.source.meta["val"].numel() // record.n
    return Pass(record, str(rows), tuple(made.node.name for made in members), line_of(writing, expression.source))


def large(node: fx.Node, target: str) -> bool:
    """Has the tensor elements enough for a pass? The reference takes all."""
    return target == "reference" or math.prod(map(assumed, node.meta["val"].shape)) >= WORTH


def line_of(writing: Writing, source: fx.Node) -> str:
    """The user's line of a pass, or of its tensor."""
    return g.source_line(writing.anchor) or g.source_line(source)


def written(
    graph: fx.Graph, target: str, expression: Expression, record: Elementwise, replaced: list[fx.Node]
) -> tuple[Writing, fx.Node]:
    """The pass as a node, before the first of those that it replaces: on its tensor's side of a joint graph, or in the
    backward, and kept there, if all of them are."""
    first, source = min(replaced), expression.source
    for node in sorted(g.reached(expression.operands, lambda n: [a for a in n.all_input_nodes if first < a])):
        if first < node:
            first.prepend(node)
    writing = Writing(graph, first)
    extents = [o.extent for o in record.operands]
    inputs = [_flat(writing, x, extent, record.n) for x, extent in zip(expression.operands, extents, strict=True)]
    late = all(map(g.is_backward, replaced))
    op = writing.call(first if late or g.is_weight(source) else source, ELEMENTWISE, inputs, record.text, target)
    if late and not (g.is_backward(source) or g.is_tangent(source)):
        op.meta[g.SIDE] = g.IN_BACKWARD
    hoist(op, source)
    return writing, op


def _flat(writing: Writing, node: fx.Node, extent: str, n: int) -> fx.Node:
    """An input as the operation reads it."""
    order = major_to_minor(node.meta["val"]) if extent == "tile" else []
    if order != sorted(order):
        node = writing.call(node, aten.permute.default, node, order)
    shape = {"tile": [-1, n], "scalar": []}.get(extent, [-1])
    return writing.call(node, aten.reshape.default, node, shape)


def _laid_out(writing: Writing, out: fx.Node, like: fx.Node) -> fx.Node:
    """An output in another node's shape."""
    order, shape = major_to_minor(like.meta["val"]), like.meta["val"].shape
    out = writing.reshape(out, [shape[d] for d in order])
    back = [order.index(d) for d in range(len(order))]
    return out if back == sorted(back) else writing.call(out, aten.permute.default, out, back)


def hoist(op: fx.Node, source: fx.Node) -> None:
    """What the operation reads stands on the side of its source."""
    if g.is_backward(op):
        return
    for node in g.reached([op], lambda n: n.all_input_nodes):
        node.meta.pop(g.SIDE, None) if g.is_backward(node) else None
