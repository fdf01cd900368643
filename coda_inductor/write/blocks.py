"""Blocks of rows, written one behind the other: the nodes of each, and what all of them leave."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from coda_inductor.core.dtypes import NARROW
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.ops.custom import ADDED_UP, AFTER, STORED
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.write import rows as by
from coda_inductor.write.by_rows import ByRows, tangent
from coda_inductor.write.rows import LIST, SUMMED, WHOLE, Rows, Spread
from coda_inductor.write.writing import Writing


@dataclass(slots=True)
class Written:
    """The blocks as they are written, and what they leave."""

    writing: Writing
    program: ByRows
    sizes: Sequence[int]
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """What is made once, before the blocks."""
    flat: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Inputs in rows, as [rows, ...]."""
    parts: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Results in rows, block by block."""
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    behind: list[fx.Node] = field(default_factory=list)
    """What the block before leaves. A block starts behind it (coda.after), or Inductor would begin with all of them. In
    a block, the gradient is computed behind what else reads the scores, so that it may take their memory."""

    def call(self, like: fx.Node, target: object, *args: object, **kwargs: object) -> fx.Node:
        """A node of the side on which the blocks run. Those of the forward run there alone, also under activation
        checkpointing, by which the backward would compute some of them again."""
        node = self.writing.call(like, target, *args, **kwargs)
        if self.program.early:
            node.meta[g.SIDE] = "is_forward"
            node.meta.pop("recompute", None)
        return node

    def write(self) -> None:
        """All blocks, and their results in the place of the nodes'."""
        program = self.program
        order = [n for n in self.writing.graph.nodes if n in program.forms]
        results = {n for n in order if program.forms[n] is not LIST and self.leaves(n)}
        number = self.ones() if program.early else None
        start = 0
        for size in self.sizes:
            self.block(order, results, start, size)
            start += size
        for node in results:
            whole = self.sums[node] if node in self.sums else self.call(node, aten.cat.default, self.parts[node], 0)
            self.put(node, whole, number if node in program.proportional else None)

    def ones(self) -> fx.Node | None:
        """The gradient of the loss, in whose place 1 is read, also by what is made of it once; None if nothing is."""
        number = tangent(self.program)
        if number is None:
            return None
        value = number.meta["val"]
        one = self.call(self.program.gradient, aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
        self.made[number] = one
        for node in self.writing.graph.nodes:
            if node in self.program.once and node is not number:
                args = fx.map_arg(node.args, lambda n: self.made.get(n, n))
                self.made[node] = self.call(node, node.target, *args, **node.kwargs)
        return number

    def put(self, node: fx.Node, whole: fx.Node, number: fx.Node | None) -> None:
        """Puts what the blocks left in the place of a node, times a number."""
        self.writing.anchor, value = node, node.meta["val"]
        if number is not None:
            whole = self.writing.call(node, aten.mul.Tensor, whole, number)
        if whole.meta["val"].dtype != value.dtype:
            whole = self.writing.call(node, prims.convert_element_type.default, whole, value.dtype)
        whole = self.writing.reshape(whole, list(value.shape))
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in self.program.forms)

    def leaves(self, node: fx.Node) -> bool:
        """Does the rest of the graph read it as the blocks make it?"""
        mine = self.program.early or g.is_backward(node)
        return mine and any(user not in self.program.forms for user in node.users)

    def block(self, order: Sequence[fx.Node], results: set[fx.Node], start: int, size: int) -> None:
        """Writes one block, and what it leaves."""
        program, made, left = self.program, dict(self.made), list[fx.Node]()
        for source, form in program.inputs.items():
            if isinstance(form, Rows | Spread):
                if source not in self.flat:
                    self.flat[source] = self.flattened(source, form)
                made[source] = self.call(source, aten.slice.Tensor, self.flat[source], 0, start, start + size)
        for node in order:
            if program.forms[node] is SUMMED:
                self.add(node, made)
                continue
            new = self.rows_of(node, made, size)
            begins = program.large(node) and program.product(node)
            if others := self.behind if begins else [*self.behind, *left] if node is program.gradient else []:
                new = self.call(node, AFTER, new, others)
            if node in results:
                new = new if program.product(node) else self.call(node, STORED, new)
                self.parts.setdefault(node, []).append(new)
                left.append(new)
            made[node] = new
        self.behind = [*(s for s in self.sums.values() if s.target is ADDED_UP), *left]

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

    def rows_of(self, node: fx.Node, made: dict[fx.Node, fx.Node], size: int) -> fx.Node:
        """The node, of some rows, which are one dimension."""
        form = self.program.forms[node]
        if not isinstance(form, Rows) or node.target in (*g.PRODUCTS, operator.getitem):
            return self.call(node, node.target, *fx.map_arg(node.args, lambda n: self.read(n, made)), **node.kwargs)
        rest = list(node.meta["val"].shape[form.lead :])
        if node.target in by.FILLED:
            return self.call(node, node.target, [size, *rest], *node.args[1:], **node.kwargs)
        if node.target in by.RESHAPES:
            return self.reshaped(made[node.all_input_nodes[0]], [size, *rest])
        args: list[Any] = [*fx.map_arg(node.args, lambda n: self.argument(n, made, len(rest)))]
        if node.target is aten.expand.default:
            args[1] = [size, *rest]
        elif (found := by.reduction(node)) is not None:
            args[1] = [d - form.lead + 1 for d in found.dims]
        elif node.target in by.ALONG:
            args[1] = args[1] % node.meta["val"].dim() - form.lead + 1
        return self.call(node, node.target, *args, **node.kwargs)

    def read(self, source: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
        """An input: of the block, or as it is."""
        if source not in made and self.program.inputs.get(source) is not WHOLE:
            raise BrokenInvariant(f"{source} is not known to the blocks that read it")
        return made.get(source, source)

    def argument(self, source: fx.Node, made: dict[fx.Node, fx.Node], rank: int) -> fx.Node:
        """An input as a block reads it: what all rows read has no dimensions for them, beside `rank` others."""
        program = self.program
        if (program.forms | program.inputs).get(source, WHOLE) is not WHOLE:
            return made[source]
        read = self.read(source, made)
        shape = list(read.meta["val"].shape)
        return self.reshaped(read, shape[len(shape) - rank :]) if len(shape) > rank + 1 else read

    def add(self, node: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
        """Adds the block's part to a sum over all rows."""
        before = self.sums.get(node)
        if (operands := by.product_operands(node)) is not None:
            left, right = operands
            self.sums[node] = self.call(node, ADDED_UP, before, made[left], made[right])
            return
        if (found := by.reduction(node)) is not None:
            part = self.part(node, found, made[found.source])
        else:
            part = self.call(node, node.target, made[node.all_input_nodes[0]], node.args[1])
        self.sums[node] = part if before is None else self.call(node, aten.add.Tensor, before, part)

    def part(self, node: fx.Node, found: g.Reduction, block: fx.Node) -> fx.Node:
        """A block's part of a sum or a mean over all rows, in float32 at least."""
        shape, value = found.source.meta["val"].shape, block.meta["val"]
        lead = len(shape) - value.dim() + 1
        dims = sorted({max(0, d - lead + 1) for d in found.dims})
        if value.dtype in NARROW:
            block = self.call(node, prims.convert_element_type.default, block, torch.float32)
        total = self.call(node, aten.sum.dim_IntList, block, dims)
        count = math.prod(shape[d] for d in found.dims)
        return self.call(node, aten.div.Tensor, total, count) if found.name == "mean" else total
