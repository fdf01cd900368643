"""Large scores in blocks of rows: what a head and its loss make of [tokens, vocabulary] is made of some tokens at a time.

The scores' gradient D is read by two products alone, D W and D^T x, and is as large as the scores. Both are written by
blocks of rows here: rows of D W are of those rows of D, and D^T x is added up over the blocks in float32.

- Where the scores are returned, as models of transformers do, they stay whole, and D is never whole.
- Elsewhere the scores are made by blocks, too, each with its loss, its D and both products: nothing of [tokens,
  vocabulary] is ever in memory. That runs in the forward, where the gradient t of the loss is not known yet: all is
  made for t = 1 and multiplied by t in the backward, since gradients are linear in it (patterns/linear.py).

Only where a score's row is computed of its own row (patterns/rows.py). The sums of D^T x are in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from coda_inductor.core.dtypes import NARROW
from coda_inductor.ops.custom import ADDED_UP, AFTER, REGION, STORED
from coda_inductor.patterns import graph as g
from coda_inductor.patterns import rows as by
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.linear import Degree, NotLinear, degree
from coda_inductor.patterns.rows import LIST, SUMMED, TURNED, WHOLE, Demands, Form, NotByRow, Rows, Spread
from coda_inductor.write.order import sort
from coda_inductor.write.verifying import Before
from coda_inductor.write.writing import Writing

AMPLIFIED = 8
"""A product makes scores if they have so many times the features of what it reads: a vocabulary, and no layer."""
TILE = 128
MINIMUM = 1024
"""Of the rows of a block. (H100, width 2048, vocabulary 128256, bfloat16: adding the weight's gradient up takes 1.77 ms
for 2048 rows where a quarter of the whole takes 1.43, and 1.11 for 1024 where an eighth takes 0.71.)"""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Scores that are made, or whose gradient is, by blocks: the gradient's node and shape, how many, whether the
    scores stay whole, and the user's line of the scores."""

    node: str
    shape: str
    count: int
    whole: str
    source: str


@dataclass(slots=True)
class Program:
    """What is computed by blocks: each node's form, and what is read of the rest of the graph."""

    gradient: fx.Node
    rows: int
    early: bool
    """In the forward, with the scores themselves."""
    forms: dict[fx.Node, Form] = field(default_factory=dict)
    inputs: Demands = field(default_factory=dict)
    once: set[fx.Node] = field(default_factory=set)
    """Numbers that are made of the loss's gradient before the blocks."""
    tangents: set[fx.Node] = field(default_factory=set)
    """Nodes that depend on gradients of results."""

    def need(self, node: fx.Node, form: Form) -> None:
        """The node, and what it reads, in this form. Raises NotByRow."""
        if node in self.forms or node in self.inputs:
            if self.forms.get(node, self.inputs.get(node)) != form:
                raise NotByRow(f"{node} is read in two ways")
        elif self.belongs(node, form):
            self.take(node, form)
        else:
            self.inputs[node] = form

    def take(self, node: fx.Node, form: Form) -> None:
        """The node is computed by blocks."""
        self.inputs.pop(node, None)
        self.forms[node] = form
        for source, demanded in by.demands(node, form, self.rows).items():
            self.need(source, demanded)

    def belongs(self, node: fx.Node, form: Form) -> bool:
        """Must it be computed by blocks? What is as large as the scores must; but not scores that stay whole."""
        if node.op != "call_function" or form is WHOLE or (form is not LIST and not self.large(node)):
            return form in (LIST, TURNED) and node.op == "call_function"
        return self.early or g.is_backward(node) or not self.product(node)

    def product(self, node: fx.Node) -> bool:
        """Is it a product's result, in memory?"""
        return node.target in g.PRODUCTS or any(n.target is REGION for n in node.all_input_nodes)

    def large(self, node: fx.Node) -> bool:
        """Is it of the scores' size, a half at least?"""
        value = g.tensor(node)
        return value is not None and 2 * value.numel() >= self.gradient.meta["val"].numel()

    def follow(self) -> None:
        """Takes in who reads what is never whole, and what lies between. Raises NotByRow."""
        self.take(self.gradient, Rows(by.lead(by.shape(self.gradient), self.rows)))
        before = -1
        while before != len(self.forms):
            before = len(self.forms)
            for node, form in list(self.forms.items()):
                if form in (LIST, TURNED) or (form is not SUMMED and self.large(node)):
                    self.readers(node, form)
            self.between()

    def readers(self, node: fx.Node, form: Form) -> None:
        """Takes in those of a node that is never whole."""
        for user in node.users:
            stays = not self.early and not g.is_backward(node) and not g.is_backward(user)
            if user in self.forms or stays:
                continue
            if user.op == "output":
                raise NotByRow(f"{node} is returned")
            self.take(user, by.form_of(user, node, form, self.rows))

    def between(self) -> None:
        """Takes in what is read and depends on what is made by blocks, or on the loss's gradient."""
        made = g.reached(self.forms, lambda n: n.users)
        late = self.tangents if self.early else set[fx.Node]()
        for node, form in list(self.inputs.items()):
            if isinstance(form, Rows) and (node in made or node in late):
                self.take(node, form)
            elif node in made or (node in late and form is not WHOLE):
                raise NotByRow(f"{node} is of all rows")
            elif node in late:
                self.once |= {n for n in g.reached([node], lambda n: n.all_input_nodes) if n in late}


def write_blocks(graph: fx.Graph, limit: int, before: Before) -> tuple[tuple[Blocks, ...], dict[fx.Node, str]]:
    """Rewrites the graph in place where scores would take more than `limit` bytes. Returns what was done, and why other
    large gradients stay whole."""
    done, left = list[Blocks](), dict[fx.Node, str]()
    for gradient, rows in gradients(graph, limit).items():
        try:
            program, reason = gathered(gradient, rows)
        except NotByRow as whole:
            left[gradient] = f"stays whole: {whole}"
            continue
        value = gradient.meta["val"]
        sizes = blocks(rows, value.numel() * value.element_size(), limit)
        if len(sizes) < 2:
            continue
        source = g.source_line(gradient)
        Written(Writing(graph, anchor(graph, program)), program, sizes).write()
        shape = f"[{', '.join(map(str, value.shape))}]"
        done.append(Blocks(gradient.name, shape, len(sizes), reason, source))
    if done:
        sort(graph, before.effects)
    return tuple(done), left


def gradients(graph: fx.Graph, limit: int) -> dict[fx.Node, int]:
    """The large gradients of scores, with their rows: what products of the backward read as [rows, features]."""
    found = dict[fx.Node, int]()
    for node in graph.nodes:
        matrix, width = multiplied(node) if g.is_backward(node) else (None, 0)
        if matrix is None or not all(isinstance(n, int) for n in matrix.meta["val"].shape):
            continue
        rows, features = matrix.meta["val"].shape
        size = rows * features * matrix.meta["val"].element_size()
        source = g.root(matrix, lambda n: n.target in by.RESHAPES | by.SAME)
        if size > limit and features >= AMPLIFIED * width and g.is_backward(source) and source.op == "call_function":
            found[source] = rows
    return found


def multiplied(node: fx.Node) -> tuple[fx.Node | None, int]:
    """The matrix [rows, features] that a product multiplies with a weight, or transposed with what the weight was
    multiplied with; and the features of the other one."""
    if node.target is REGION:
        left, right = node.args[0][:2]  # type: ignore[index]
    elif node.target is aten.mm.default:
        left, right = node.args
    else:
        return None, 0
    if left.target is aten.permute.default:  # type: ignore[union-attr]
        left = left.args[0]  # type: ignore[union-attr]
    return left, int(right.meta["val"].shape[-1])  # type: ignore[union-attr,return-value]


def gathered(gradient: fx.Node, rows: int) -> tuple[Program, str]:
    """What is computed by blocks, and why not the scores themselves. Raises NotByRow if nothing can be."""
    tangents = [n for n in gradient.graph.nodes if g.is_tangent(n)]
    late = g.reached(tangents, lambda n: n.users)
    try:
        program = Program(gradient, rows, True, tangents=late)
        program.follow()
        degrees(program)
        return program, ""
    except (NotByRow, NotLinear) as why:
        program = Program(gradient, rows, False, tangents=late)
        program.follow()
        return program, str(why)


def degrees(program: Program) -> dict[fx.Node, Degree | tuple[Degree, ...]]:
    """Of all that is computed early, in the gradient of the loss, which is the one number among the gradients that it
    depends on. Raises NotLinear, NotByRow."""
    number = tangent(program)
    if not any(f is LIST or program.product(n) for n, f in program.forms.items() if not g.is_backward(n)):
        raise NotByRow("no scores are made here")
    if any(n.meta["val"].dtype == torch.float16 for n in program.forms if g.tensor(n) is not None):
        raise NotLinear("gradients of float16 may vanish unless they are multiplied by the loss's")
    found: dict[fx.Node, Degree | tuple[Degree, ...]] = {number: 1}
    for node in program.gradient.graph.nodes:
        if node is not number and (node in program.once or node in program.forms):
            found[node] = degree(node, found)
    return found


def tangent(program: Program) -> fx.Node:
    """The gradient of the loss. Raises NotLinear."""
    found = [n for n in program.once if g.is_tangent(n)]
    if len(found) != 1 or found[0].meta["val"].dim():
        raise NotLinear("several gradients, or one that is no number")
    return found[0]


def blocks(rows: int, size: int, limit: int) -> list[int]:
    """The rows of each block: equal ones, of whole tiles, but for the last."""
    each = max(MINIMUM, math.ceil(rows / math.ceil(size / limit)))
    each = math.ceil(each / TILE) * TILE
    return [min(each, rows - start) for start in range(0, rows, each)]


def anchor(graph: fx.Graph, program: Program) -> fx.Node:
    """The node before which the blocks are written: the first behind all that they read, so that sorting the graph
    leaves block behind block."""
    read = {n for n in (*program.inputs, *program.once) if not g.is_tangent(n)}
    return next(n for n in reversed(graph.nodes) if n in read or n.op == "placeholder").next


@dataclass(slots=True)
class Written:
    """The blocks as they are written, and what they leave."""

    writing: Writing
    program: Program
    sizes: Sequence[int]
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """What is made once, or of the block at hand."""
    flat: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Inputs in rows, as [rows, ...]."""
    parts: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Results in rows, block by block."""
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    behind: list[fx.Node] = field(default_factory=list)
    """What the block before leaves: only then the next one starts, or Inductor would begin with all of them."""

    def call(self, like: fx.Node, target: object, *args: object, **kwargs: object) -> fx.Node:
        """A node of the side on which the blocks run."""
        node = self.writing.call(like, target, *args, **kwargs)
        if self.program.early:
            node.meta[g.SIDE] = "is_forward"
        return node

    def write(self) -> None:
        """All blocks, and their results in the place of the nodes'."""
        program, graph = self.program, self.writing.graph
        found = degrees(program) if program.early else {}
        number = tangent(program) if program.early else None
        for node in graph.nodes:
            if node is number:
                value = node.meta["val"]
                self.made[node] = self.call(
                    program.gradient, aten.full.default, [], 1.0, dtype=value.dtype, device=value.device
                )
            elif node in program.once:
                self.made[node] = self.call(
                    node, node.target, *fx.map_arg(node.args, lambda n: self.made.get(n, n)), **node.kwargs
                )
        order = [n for n in graph.nodes if n in program.forms]
        results = {n for n in order if program.forms[n] is not LIST and self.leaves(n)}
        start = 0
        for size in self.sizes:
            self.block(order, results, start, size)
            start += size
        for node in results:
            whole = self.sums[node] if node in self.sums else self.joined(node)
            self.writing.anchor = node
            if found.get(node) == 1:
                whole = self.writing.call(node, aten.mul.Tensor, whole, number)
            if whole.meta["val"].dtype != node.meta["val"].dtype:
                whole = self.writing.call(node, prims.convert_element_type.default, whole, node.meta["val"].dtype)
            whole = self.writing.reshape(whole, list(node.meta["val"].shape))
            inside = program.forms.keys()
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in inside)

    def leaves(self, node: fx.Node) -> bool:
        """Does the rest of the graph read it as the blocks make it?"""
        mine = self.program.early or g.is_backward(node)
        return mine and any(user not in self.program.forms for user in node.users)

    def joined(self, node: fx.Node) -> fx.Node:
        """The rows of all blocks."""
        return self.call(node, aten.cat.default, self.parts[node], 0)

    def block(self, order: Sequence[fx.Node], results: set[fx.Node], start: int, size: int) -> None:
        """Writes one block, and what it leaves."""
        made = dict(self.made)
        for source, form in self.program.inputs.items():
            if isinstance(form, Rows | Spread):
                if source not in self.flat:
                    self.flat[source] = self.flattened(source, form)
                made[source] = self.call(source, aten.slice.Tensor, self.flat[source], 0, start, start + size)
        for node in order:
            form = self.program.forms[node]
            if form is SUMMED:
                self.add(node, made)
                continue
            made[node] = self.rows_of(node, form, made, size)
            if self.behind and (node is self.program.gradient or (self.program.large(node) and self.program.product(node))):
                made[node] = self.call(node, AFTER, made[node], self.behind)
            if node in results:
                made[node] = made[node] if self.program.product(node) else self.call(node, STORED, made[node])
                self.parts.setdefault(node, []).append(made[node])
        sums = [s for s in self.sums.values() if s.target is ADDED_UP]
        self.behind = [*sums, *(made[node] for node in results if node not in self.sums)]

    def flattened(self, node: fx.Node, form: Rows | Spread) -> fx.Node:
        """An input in rows, which are one dimension."""
        rest = list(node.meta["val"].shape)
        if isinstance(form, Spread):
            rest = rest[form.own :]
            node = self.call(node, aten.expand.default, node, [*form.first, *rest])
        else:
            rest = rest[form.lead :]
        return self.reshaped(node, [self.program.rows, *rest])

    def reshaped(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """The node in a shape."""
        if list(node.meta["val"].shape) == shape:
            return node
        return self.call(node, aten.reshape.default, node, shape)

    def rows_of(self, node: fx.Node, form: Form, made: dict[fx.Node, fx.Node], size: int) -> fx.Node:
        """The node, of some rows, which are one dimension."""
        program, lead = self.program, form.lead if isinstance(form, Rows) else 1
        rest = [] if form is LIST else list(node.meta["val"].shape[lead:])
        kwargs = dict(node.kwargs)
        if node.target in by.FILLED:
            return self.call(node, node.target, [size, *rest], *node.args[1:], **kwargs)
        if node.target in by.RESHAPES:
            return self.reshaped(made[node.args[0]], [size, *rest])  # type: ignore[index]
        layout = node.target not in (*g.PRODUCTS, REGION) and isinstance(form, Rows)

        def argument(source: fx.Node) -> fx.Node:
            read = made.get(source, source)
            return self.fitting(read, len(rest)) if layout and source not in inside else read

        inside = {n for n, f in (program.forms | program.inputs).items() if f is not WHOLE}
        args = [*fx.map_arg(node.args, argument)]  # type: ignore[arg-type]
        if node.target is aten.expand.default:
            args[1] = [size, *rest]
        elif (found := by.reduction(node)) is not None:
            args[1] = [d - lead + 1 for d in found.dims]
        elif node.target in by.ALONG:
            args[1] = args[1] % node.args[0].meta["val"].dim() - lead + 1  # type: ignore[union-attr,operator]
        return self.call(node, node.target, *args, **kwargs)

    def fitting(self, node: fx.Node, rank: int) -> fx.Node:
        """What all rows read, without its first dimensions of one row, if it has those."""
        value = g.tensor(node)
        if value is None or value.dim() <= rank + 1:
            return node
        return self.reshaped(node, list(value.shape[value.dim() - rank :]))

    def add(self, node: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
        """Adds the block's part to a sum over all rows."""
        before = self.sums.get(node)
        if node.target is aten.mm.default:
            left, right = (made[a] for a in node.args)  # type: ignore[index]
            self.sums[node] = self.call(node, ADDED_UP, before, left, right)
            return
        if (found := by.reduction(node)) is not None:
            part = made[found.source]
            lead = len(found.source.meta["val"].shape) - len(part.meta["val"].shape) + 1
            dims = sorted({max(0, d - lead + 1) for d in found.dims})
            if part.meta["val"].dtype in NARROW:
                part = self.call(node, prims.convert_element_type.default, part, torch.float32)
            part = self.call(node, aten.sum.dim_IntList, part, dims)
            if found.name == "mean":
                total = math.prod(found.source.meta["val"].shape[d] for d in found.dims)
                part = self.call(node, aten.div.Tensor, part, total)
        else:
            part = self.call(node, node.target, made[node.args[0]], node.args[1])  # type: ignore[index]
        self.sums[node] = part if before is None else self.call(node, aten.add.Tensor, before, part)
