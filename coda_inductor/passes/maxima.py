"""The largest magnitudes of a tensor's rows and of its columns, taken in one pass over memory.

torchao's scales are made of both: rows for one product, columns for another. Inductor reads the tensor twice. (H100,
16384 x 8192 in bf16: 129 and 120 us, the pass 93, bench/results/float8.jsonl.) What epilogues take is gone before.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from coda_inductor.core.elementwise import Elementwise, Output, verify
from coda_inductor.passes.elementwise import (
    Expression,
    Pass,
    axes,
    axes_in_memory,
    early,
    large,
    line_of,
    overwritten,
    source_of,
    written,
)
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Effects
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.infer import Reading, read_axes
from coda_inductor.write.order import sort


@dataclass(frozen=True, slots=True)
class Largest:
    """A node that takes the largest magnitude of `value`; `kept` are the axes that are left, in the node's order."""

    node: fx.Node
    value: fx.Node
    kept: tuple[int, ...]


def write_maxima(graph: fx.Graph, target: str, before: Effects) -> tuple[Pass, ...]:
    """Puts the passes into a graph, in place; `before` are its effects before it was rewritten."""
    nodes = [n for n in graph.find_nodes(op="call_function", target=aten.amax.default) if magnitude(n) is not None]
    if len(nodes) < 2:
        return ()
    reading, made = read_axes(graph), list[Pass]()
    for source, members in grouped(graph, nodes, reading).items():
        whole = axes_in_memory(reading, source)
        assert whole is not None
        cut = next((len(x.kept) for x in members if x.kept == whole[: len(x.kept)]), 0)
        over = {whole[:cut]: "N", whole[cut:]: "M"}
        both = {x: over[x.kept] for x in members if x.kept in over}
        wanted = len({*both.values()}) == 2 and large(source, target)
        if wanted and (done := _write(graph, target, reading, source, both, cut)) is not None:
            made.append(done)
    if made:
        sort(graph, before)
    return tuple(made)


def magnitude(node: fx.Node) -> fx.Node | None:
    """The value whose largest magnitude an amax takes; None if it takes another's."""
    root = g.root(node.args[0], g.is_view)  # type: ignore[arg-type]
    return root.all_input_nodes[0] if root.target is aten.abs.default else None


def grouped(graph: fx.Graph, nodes: list[fx.Node], reading: Reading) -> dict[fx.Node, list[Largest]]:
    """What is taken of each tensor on its side of the graph, of weights also what the backward takes."""
    found, known = defaultdict[fx.Node, list[Largest]](list), dict[fx.Node, set[fx.Node]]()
    is_overwritten = overwritten(graph)
    for node in nodes:
        value = magnitude(node)
        if value is None or value not in reading.dims or node not in reading.dims:
            continue
        source = source_of(value, reading, known)
        if source is None or not early(node, source):
            continue
        if g.is_backward(node) != (g.is_backward(source) or g.is_tangent(source)) and not g.is_weight(source):
            continue  # in the forward, the partitioner could compute the backward's other readers there, and keep them
        if not _above(value, source).isdisjoint(nodes):
            continue  # a pass cannot read what it makes itself
        if not is_overwritten(source):
            kept = tuple(i for d in reading.roots(node) for i in d)
            found[source].append(Largest(node, value, kept))
    return found


def _above(value: fx.Node, source: fx.Node) -> set[fx.Node]:
    """What a value is made of behind its source."""
    return g.reached([value], lambda n: [a for a in n.all_input_nodes if source < a])


def _write(
    graph: fx.Graph, target: str, reading: Reading, source: fx.Node, members: dict[Largest, str], cut: int
) -> Pass | None:
    """`members`: with the axis that each takes the largest over."""
    whole = axes_in_memory(reading, source)
    assert whole is not None
    m, n = (reading.axes.total(part) for part in (whole[:cut], whole[cut:]))
    expression = Expression(reading, source, axes(reading, source))
    outputs = [Output(expression.value(x.value), "f32", largest_over=over) for x, over in members.items()]
    if n.static is None or (operands := expression.loads(whole, cut)) is None:
        return None
    record = verify(Elementwise(n.static, operands, tuple(expression.lets), tuple(outputs)))
    writing, op = written(graph, target, expression, record, [x.node for x in members])
    made = Pass(record, str(m), tuple(x.node.name for x in members), line_of(writing, source))
    for i, x in enumerate(members):
        like = x.node.meta["val"]
        out = writing.call(op, operator.getitem, op, i)
        out = writing.call(op, prims.convert_element_type.default, out, like.dtype)
        x.node.replace_all_uses_with(writing.reshape(out, list(like.shape)))
    for x in members:
        graph.erase_node(x.node)
    return made
