"""Large scores in blocks of rows: what a head and its loss make of [tokens, vocabulary] is made of some rows at a time.

The scores' gradient D is read by two products alone, D W and D^T x, and is as large as the scores. Both are written by
blocks of rows here: rows of D W are of those rows of D, and D^T x is added up over the blocks in float32.

- Where the scores are returned, as models of transformers do, they stay whole, and D is never whole.
- Elsewhere the scores are made by blocks, too, each with its loss, its D and both products: nothing of [tokens,
  vocabulary] is ever in memory. That runs in the forward, where the gradient t of the loss is not known yet: all is
  made for t = 1 and multiplied by t in the backward, since gradients are linear in it (write/linear.py).

Only where a score's row is computed of its own row (write/rows.py). The sums of D^T x are in another order.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from torch import fx

from coda_inductor.ops.custom import REGION
from coda_inductor.ops.loss import LOSS_ROWS, LOSS_TARGETS
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten
from coda_inductor.write import rows as by
from coda_inductor.write.blocks import Written
from coda_inductor.write.by_rows import ByRows, proportional
from coda_inductor.write.linear import NotLinear
from coda_inductor.write.order import sort
from coda_inductor.write.rows import SUMMED, NotByRow
from coda_inductor.write.verifying import Before
from coda_inductor.write.writing import Writing

AMPLIFIED = 8
"""A product makes scores if they have so many times the features of what it reads: a vocabulary, and no layer."""
SPARED = 2
"""Scores' gradients are made by blocks that take so many times less memory, with what is added up over them."""
TILE = 128


@dataclass(frozen=True, slots=True)
class Blocks:
    """Scores that are made, or whose gradient is, by blocks: the gradient's node and shape, how many blocks, why the
    scores stay whole ("" if they do not), and the user's line."""

    node: str
    shape: str
    count: int
    whole: str
    source: str


def write_blocks(graph: fx.Graph, chunk: int, before: Before) -> tuple[tuple[Blocks, ...], dict[fx.Node, str]]:
    """Rewrites the graph in place where blocks of `chunk` rows take at most half as much memory. Returns what was done,
    and why other large gradients stay whole."""
    done, left, written = list[Blocks](), dict[fx.Node, str](), set[fx.Node]()
    for gradient, rows in gradients(graph, chunk).items():
        if gradient in written:
            continue  # of several products, which other blocks hold already
        try:
            program, reason = gathered(gradient, rows)
        except NotByRow as whole:
            left[gradient] = f"stays whole: {whole}"
            continue
        value = gradient.meta["val"]
        size = value.numel() * value.element_size()
        sizes = blocks(rows, chunk)
        if SPARED * (size * sizes[0] // rows + added(program)) > size:
            left[gradient] = f"stays whole: in blocks of {sizes[0]} rows it would take more than 1/{SPARED} as much"
            continue
        source = g.source_line(gradient)
        Written(Writing(graph, anchor(graph, program)), program, sizes).write()
        written |= program.forms.keys()
        shape = f"[{', '.join(map(str, value.shape))}]"
        done.append(Blocks(gradient.name, shape, len(sizes), reason, source))
    if done:
        sort(graph, before.effects)
    return tuple(done), left


def added(program: ByRows) -> int:
    """The bytes in which products are added up over the blocks."""
    sums = [n for n, form in program.forms.items() if form is SUMMED and by.product_operands(n) is not None]
    return sum(n.meta["val"].numel() * max(4, n.meta["val"].element_size()) for n in sums)


def gradients(graph: fx.Graph, chunk: int) -> dict[fx.Node, int]:
    """The large gradients of scores, with their rows: what products of the backward read as [rows, features]."""
    found = dict[fx.Node, int]()
    for node in graph.nodes:
        matrix, width = multiplied(node) if g.is_backward(node) else (None, 0)
        if matrix is None or not all(isinstance(n, int) for n in matrix.meta["val"].shape):
            continue
        rows, features = matrix.meta["val"].shape
        source = g.root(matrix, lambda n: n.target in by.RESHAPES | by.SAME)
        if rows > chunk and features >= AMPLIFIED * width and (g.is_backward(source) or of_loss(source)):
            found[source] = rows
    return {n: rows for n, rows in found.items() if n.op == "call_function"}


def of_loss(node: fx.Node) -> bool:
    """Is it what the forward has stored in place of scores, but for a factor their gradient (loss/written.py)?"""
    if node.target is not operator.getitem:
        return False
    source = node.all_input_nodes[0]
    return source.target is LOSS_ROWS or source.target is LOSS_TARGETS


def multiplied(node: fx.Node) -> tuple[fx.Node | None, int]:
    """The matrix [rows, features] that a product multiplies with a weight, or transposed with what the weight was
    multiplied with; and the features of the other one."""
    if node.target is REGION:
        left, right = node.all_input_nodes[:2]
    elif (operands := by.product_operands(node)) is not None and len(node.all_input_nodes) == 2:
        left, right = operands
    else:
        return None, 0
    turned = left.target is aten.permute.default
    sizes = [n for n in right.meta["val"].shape if isinstance(n, int)]  # of a Region's weight, either is first
    return left.all_input_nodes[0] if turned else left, min(sizes, default=0)


def gathered(gradient: fx.Node, rows: int) -> tuple[ByRows, str]:
    """What is computed by blocks, and why not the scores themselves. Raises NotByRow if nothing can be."""
    tangents = [n for n in gradient.graph.nodes if g.is_tangent(n)]
    late = g.reached(tangents, lambda n: n.users)
    try:
        program = ByRows(gradient, rows, True, tangents=late)
        program.follow()
        program.proportional = proportional(program)
        return program, ""
    except (NotByRow, NotLinear) as why:
        if of_loss(gradient):
            raise NotByRow(str(why)) from why
        program = ByRows(gradient, rows, False, tangents=late)
        program.follow()
        return program, str(why)


def blocks(rows: int, chunk: int) -> list[int]:
    """The rows of each block: equal ones, of whole tiles where `chunk` is, but for the last."""
    step = TILE if chunk % TILE == 0 else 1
    each = math.ceil(rows / math.ceil(rows / chunk))
    each = math.ceil(each / step) * step
    return [min(each, rows - start) for start in range(0, rows, each)]


def anchor(graph: fx.Graph, program: ByRows) -> fx.Node:
    """The node before which the blocks are written: the first behind all that they read, so that sorting the graph
    leaves block behind block."""
    read = {n for n in (*program.inputs, *program.once) if not g.is_tangent(n)}
    last: fx.Node = next(n for n in reversed(graph.nodes) if n in read or n.op == "placeholder")
    return last.next
