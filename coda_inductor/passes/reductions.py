"""What is taken over the rows and the columns of tensors, and no epilogue takes, in fewer reads.

Both at once: the largest magnitudes of a tensor's rows and of its columns are one pass. torchao's scales are made of
both: rows for one product, columns for another. Inductor reads the tensor twice. (H100, 16384 x 8192 in bf16: 129 and
120 us, the pass 93, bench/results/float8.jsonl.)

Along rows: so are the maximum of a long row and the sum of exp(x - maximum), as the loss takes them of scores that no
epilogue makes. TorchTitan compiles its loss by itself. Inductor's loop reads at half of what memory gives. (H200, 8192
x 128256 in bf16: 1,137 us, the pass 526, bench/results/loss.jsonl.)

The gradient of such scores is less by a number at the target of each row. Inductor's loop adds up rows of which only
that number is not 0. A pass knows the sum. (H200, 8192 x 128256 in bf16, forward and backward: 1,912 us, with the pass
1,747, bench/results/loss.jsonl.) Where nobody reads the scores behind it, it writes over them (ops/elementwise.py).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from coda_inductor.core.dtypes import DTYPE_NAMES
from coda_inductor.core.elementwise import EXPONENTIALS, LARGEST, MAXIMUM, Elementwise, Output, verify
from coda_inductor.ops.elementwise import ELEMENTWISE
from coda_inductor.passes.dropped import is_zero
from coda_inductor.passes.elementwise import (
    Expression,
    Pass,
    axes,
    axes_in_memory,
    early,
    is_computed,
    large,
    line_of,
    overwritten,
    source_of,
    written,
)
from coda_inductor.passes.tables import is_loop, readers
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Effects
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.infer import Reading, read_axes
from coda_inductor.patterns.sizes import ONE
from coda_inductor.schedule.kinds import elements
from coda_inductor.write.order import sort
from coda_inductor.write.writing import Writing

GREATEST = torch.finfo(torch.float32).max
"""The greatest number that may stand in a row."""
EXACT = 1 << 24
"""Whole numbers up to here are float32's, too: the most columns of which each knows its place."""
LONG_GRADIENTS, STEP = 1 << 14, 8
"""The columns of rows of which a pass makes gradients, and of which number they are a multiple. (H200, 2 ** 30 bytes of
scores in bf16, forward and backward of a loss by itself: rows of 8192 take 1,253 us, with the pass 1,456, of 16384
1,407 and 1,281; 16384 rows of 50257 2,403 and 2,421.)"""
LONG_ROWS = 1 << 13
"""The columns of rows along which a pass takes sums. (H200, 2 ** 30 bytes of scores in bf16, the forward of a loss by
itself: rows of 8192 take 872 us, with the pass 372, of 16384 763 and 366; shorter ones were not tried.)"""


APART = (aten.gather.default, aten.index.Tensor, aten.select.int, aten.slice.Tensor, ELEMENTWISE)
"""What reads a part of the rows, or is no loop of Inductor's."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A node that takes something of `value` over the axes that are not `kept`, which are in the node's order."""

    node: fx.Node
    value: fx.Node
    kept: tuple[int, ...]
    what: str = LARGEST


Found = Mapping[fx.Node, tuple[fx.Node, str]]
"""Nodes that take something, with the value of which they do, and what."""
Choose = Callable[[Reading, fx.Node, tuple[int, ...], list[Taken]], tuple[dict[Taken, str], int]]
"""What one pass takes of a tensor, of all that is taken of it: each with the axis over which it is, "M" or "N"; and
where the axes of the tensor, as they lie, are cut into these. Nothing, if there is no pass."""


def write_maxima(graph: fx.Graph, target: str, before: Effects) -> tuple[Pass, ...]:
    """Puts the passes into a graph, in place; `before` are its effects before it was rewritten."""
    nodes = graph.find_nodes(op="call_function", target=aten.amax.default)
    found = {n: (x, LARGEST) for n in nodes if (x := magnitude(n)) is not None}

    def choose(
        reading: Reading, source: fx.Node, whole: tuple[int, ...], members: list[Taken]
    ) -> tuple[dict[Taken, str], int]:
        cut = next((len(x.kept) for x in members if x.kept == whole[: len(x.kept)]), 0)
        over = {whole[:cut]: "N", whole[cut:]: "M"}
        both = {x: over[x.kept] for x in members if x.kept in over}
        return both if len({*both.values()}) == 2 else {}, cut

    return _passes(graph, target, before, found, choose) if len(found) > 1 else ()


def write_softmax_sums(graph: fx.Graph, target: str, before: Effects) -> tuple[Pass, ...]:
    """Puts the passes along rows into a graph, in place; `before` are its effects before it was rewritten."""
    totals = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    found = {node: (value, what) for n in totals for node, value, what in _softmax(n)}

    def choose(
        reading: Reading, source: fx.Node, whole: tuple[int, ...], members: list[Taken]
    ) -> tuple[dict[Taken, str], int]:
        rows = {x: "N" for x in members if x.kept == whole[:-1]}
        size = reading.axes.total(whole[-1:]).static
        long = size is not None and (size >= LONG_ROWS or target == "reference")
        wanted = long and not is_loop(source) and readers_of(source) <= {x.node for x in rows}
        return rows if wanted else {}, len(whole) - 1

    return _passes(graph, target, before, found, choose) if found else ()


def _passes(graph: fx.Graph, target: str, before: Effects, found: Found, choose: Choose) -> tuple[Pass, ...]:
    reading, made = read_axes(graph), list[Pass]()
    for source, members in grouped(graph, found, reading).items():
        whole = axes_in_memory(reading, source)
        assert whole is not None
        chosen, cut = choose(reading, source, whole, members)
        wanted = chosen and large(source, target)
        if wanted and (done := _write(graph, target, reading, source, chosen, cut)) is not None:
            made.append(done)
    if made:
        sort(graph, before)
    return tuple(made)


def readers_of(source: fx.Node) -> set[fx.Node]:
    """What else reads whole rows of a tensor on its side of the graph and makes another shape of them: a sum, argmax,
    sort. If one does, Inductor's loop may take all at once."""
    size = elements(source)

    def beside(node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if u.op != "output" and g.is_backward(u) == g.is_backward(source)]

    def same(node: fx.Node) -> bool:
        return elements(node) == size and (g.is_view(node) or is_loop(node))

    made = g.reached([source], lambda n: filter(same, beside(n)))
    return {user for node in made for user in beside(node) if not same(user) and user.target not in APART}


def _softmax(total: fx.Node) -> list[tuple[fx.Node, fx.Node, str]]:
    """The maximum and the sum of a softmax, with the value that they are of: m = amax(x), sum(exp(x - m)). Of a sum
    whose exponentials somebody else reads, nothing: that reads the value anyway."""
    exp = total.args[0]
    if not isinstance(exp, fx.Node) or exp.target is not aten.exp.default or len(exp.users) != 1:
        return []
    shifted = exp.args[0]
    if not isinstance(shifted, fx.Node) or shifted.target is not aten.sub.Tensor or shifted.kwargs:
        return []
    value, maximum = shifted.args
    if not isinstance(maximum, fx.Node) or maximum.target is not aten.amax.default or maximum.args[0] is not value:
        return []
    of, over = g.reduction(maximum), g.reduction(total)
    if of is None or over is None or not of.keepdim:
        return []
    return [(maximum, of.source, MAXIMUM), (total, of.source, EXPONENTIALS)]


def magnitude(node: fx.Node) -> fx.Node | None:
    """The value whose largest magnitude an amax takes; None if it takes another's."""
    root = g.root(node.args[0], g.is_view)  # type: ignore[arg-type]
    return root.all_input_nodes[0] if root.target is aten.abs.default else None


def grouped(graph: fx.Graph, nodes: Found, reading: Reading) -> dict[fx.Node, list[Taken]]:
    """What is taken of each tensor: on its side of the graph, and of weights on both."""
    found, known = defaultdict[fx.Node, list[Taken]](list), dict[fx.Node, set[fx.Node]]()
    is_overwritten = overwritten(graph)
    for node, (value, what) in nodes.items():
        if value not in reading.dims or node not in reading.dims:
            continue
        source = source_of(value, reading, known)
        if source is None or not early(node, source):
            continue
        if g.is_backward(node) != (g.is_backward(source) or g.is_tangent(source)) and not g.is_weight(source):
            continue  # in the forward, the partitioner could compute the backward's other readers there, and keep them
        if not _above(value, source).isdisjoint(nodes.keys()):
            continue  # a pass cannot read what it makes itself
        if not is_overwritten(source):
            kept = tuple(i for d in reading.roots(node) for i in d)
            found[source].append(Taken(node, value, kept, what))
    return found


def _above(value: fx.Node, source: fx.Node) -> set[fx.Node]:
    """What a value is made of behind its source."""
    return g.reached([value], lambda n: [a for a in n.all_input_nodes if source < a])


def _write(
    graph: fx.Graph, target: str, reading: Reading, source: fx.Node, members: dict[Taken, str], cut: int
) -> Pass | None:
    """`members`: with the axis over which each takes something."""
    whole = axes_in_memory(reading, source)
    assert whole is not None
    m, n = (reading.axes.total(part) for part in (whole[:cut], whole[cut:]))
    expression = Expression(reading, source, axes(reading, source))
    outputs = [Output(expression.value(x.value), "f32", False, over, x.what) for x, over in members.items()]
    if n.static is None or (operands := expression.loads(whole, cut)) is None:
        return None
    record = verify(Elementwise(n.static, operands, tuple(expression.lets), tuple(outputs)))
    writing, op = written(graph, target, expression, record, [x.node for x in members])
    made = Pass(record, str(m), tuple(x.node.name for x in members), line_of(writing, source))
    for i, x in enumerate(members):
        like = x.node.meta["val"]
        out = writing.call(op, operator.getitem, op, i)
        if like.dtype != out.meta["val"].dtype:
            out = writing.call(op, prims.convert_element_type.default, out, like.dtype)
        x.node.replace_all_uses_with(writing.reshape(out, list(like.shape)))
    for x in members:
        graph.erase_node(x.node)
    return made


def write_gradients(graph: fx.Graph, target: str, before: Effects) -> tuple[Pass, ...]:
    """Puts what is made of scores and of one number in each row, as the gradient of a loss, into a graph as passes, in
    place; `before` are its effects before it was rewritten."""
    made = list[Pass]()
    for scatter in graph.find_nodes(op="call_function", target=aten.scatter.value):
        if not _long_rows_of_one(scatter, target):
            continue
        there = {*graph.nodes}
        placed, instead = _by_place(graph, scatter)
        for old, new in instead:
            old.replace_all_uses_with(new)
        if (done := _gradient(graph, target, placed)) is not None:
            made.append(done)
        else:
            for old, new in reversed(instead):
                new.replace_all_uses_with(old)
            for node in reversed([n for n in graph.nodes if n not in there]):
                graph.erase_node(node)
    if made:
        sort(graph, before)
    return tuple(made)


def _long_rows_of_one(scatter: fx.Node, target: str) -> bool:
    """Does it put one number into each long row of float32 zeros?"""
    value = scatter.meta["val"]
    if len(scatter.args) != 4 or scatter.kwargs or value.dtype != torch.float32 or not value.dim():
        return False
    zeros, dim, index, number = scatter.args
    if not isinstance(index, fx.Node) or not isinstance(number, int | float) or not abs(number) <= GREATEST:
        return False
    columns = value.shape[-1]
    if not isinstance(columns, int) or columns > EXACT:
        return False
    long = target == "reference" or (columns >= LONG_GRADIENTS and columns % STEP == 0)
    return long and dim in (-1, value.dim() - 1) and is_zero(zeros) and _of_rows(index, scatter)


def _of_rows(node: fx.Node, scatter: fx.Node) -> bool:
    """Is it a number for each row?"""
    found = g.sizes(node)
    return found[:-1] == g.sizes(scatter)[:-1] and found[-1:] == (ONE,)


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows with one number each: their node, the numbers of the columns, the place in each row, and the number."""

    rows: fx.Node
    columns: fx.Node
    place: fx.Node
    number: float


def _by_place(graph: fx.Graph, scatter: fx.Node) -> tuple[Placed, list[tuple[fx.Node, fx.Node]]]:
    """What puts a number c into each row, at t, and sums over such rows times another for each, with what stands for
    them: c [n = t] = -c (min(|n - t|, 1) - 1), and f c + f 0 (NaN, as the sum is, where the factor f is infinite)."""
    _, _, index, number = scatter.args
    assert isinstance(index, fx.Node) and isinstance(number, int | float)
    writing, value = Writing(graph, scatter), scatter.meta["val"]
    of = {"start": 0, "step": 1, "dtype": torch.int64, "device": value.device, "requires_grad": False}
    numbers = writing.call(scatter, prims.iota.default, value.shape[-1], **of)
    columns, place = (
        writing.call(scatter, prims.convert_element_type.default, x, torch.float32) for x in (numbers, index)
    )
    away = writing.call(scatter, aten.abs.default, writing.call(scatter, aten.sub.Tensor, columns, place))
    there = writing.call(scatter, aten.sub.Tensor, writing.call(scatter, aten.clamp_max.default, away, 1.0), 1.0)
    rows = writing.call(scatter, aten.mul.Tensor, there, -float(number))
    found = [(scatter, rows)]
    for times in scatter.users:
        factor = next((a for a in times.all_input_nodes if a is not scatter), None)
        if times.target is not aten.mul.Tensor or factor is None or not _of_rows(factor, scatter):
            continue
        for total in times.users:
            of_rows = g.reduction(total)
            if of_rows is not None and (of_rows.name, of_rows.dims) == ("sum", (value.dim() - 1,)) and of_rows.keepdim:
                here = Writing(graph, total)
                there, elsewhere = (here.call(total, aten.mul.Tensor, factor, c) for c in (float(number), 0.0))
                found.append((total, here.call(total, aten.add.Tensor, there, elsewhere)))
    return Placed(rows, columns, place, float(number)), found


def _stands(scores: fx.Node, gradient: fx.Node) -> bool:
    """Are the scores in memory, and is there memory for their gradient? Inductor writes it over whole scores that the
    forward kept, and no pass does. Over those of the gradient's own side both do. Of what a graph is given, or of some
    rows, neither does."""
    if is_loop(scores):
        return False
    whole = g.root(scores, lambda n: g.is_view(n) or n.target is aten.slice.Tensor)
    some = whole is not g.root(scores, g.is_view)
    return whole.op == "placeholder" or some or g.is_backward(whole) == g.is_backward(gradient)


def _gradient(graph: fx.Graph, target: str, placed: Placed) -> Pass | None:
    """The pass that makes all that is made of rows of one number each, if that is one tensor, of scores."""
    reached = g.reached([placed.rows], lambda n: [u for u in n.users if g.is_view(u) or is_computed(u)])

    def read_on(node: fx.Node) -> bool:
        return any(u not in reached and (u.users or u.op == "output") for u in readers(node))

    lasts = [n for n in reached if not g.is_view(n) and read_on(n)]
    if len(lasts) != 1:
        return None
    reading, (last,) = read_axes(graph), lasts
    if last not in reading.dims or any(is_loop(u) or g.reduction(u) is not None for u in readers(last)):
        return None
    source = source_of(last.all_input_nodes[0] if g.is_cast(last) else last, reading, {})
    if source is None or not _stands(source, last) or not large(source, target) or overwritten(graph)(source):
        return None
    whole = axes_in_memory(reading, source)
    if whole is None or whole != axes_in_memory(reading, last):
        return None
    if tuple(i for d in reading.roots(placed.columns) for i in d) != whole[-1:]:
        return None
    full = axes(reading, source)

    def inside(node: fx.Node) -> bool:
        return node is not source and node in reading.dims and axes(reading, node) == full

    if not g.reached([last], lambda n: n.all_input_nodes if inside(n) else ()) <= reading.dims.keys():
        return None
    expression = Expression(reading, source, full, places={placed.rows: (placed.place, placed.number)})
    value, size = expression.value(last), reading.axes.total(whole[-1:]).static
    operands = expression.loads(whole, len(whole) - 1)
    if operands is None or size is None or size != last.meta["val"].shape[-1]:
        return None
    output = Output(value, DTYPE_NAMES[last.meta["val"].dtype])
    record = verify(Elementwise(size, operands, tuple(expression.lets), (output,)))
    writing, op = written(graph, target, expression, record, [last])
    out = writing.call(op, operator.getitem, op, 0)
    last.replace_all_uses_with(writing.reshape(out, [*last.meta["val"].shape]))
    rest = reading.axes.total(whole[:-1])
    return Pass(record, str(rest), (last.name,), line_of(writing, source))
