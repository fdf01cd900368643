"""A plan written into the graph: one coda.region operation for each Region, in place of the nodes that it supplies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

import torch
from torch import fx

from coda_inductor.core.blocks import pitch
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.ops.custom import REGION
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.terms import Term
from coda_inductor.plan.built import Built, Source, Table, Weight
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.sources import statistics
from coda_inductor.rewrite.space import Axes, Computed, Lane
from coda_inductor.write.aliases import part
from coda_inductor.write.order import sort
from coda_inductor.write.strides import OutputStrides
from coda_inductor.write.vectors import Vectors
from coda_inductor.write.verifying import Before
from coda_inductor.write.writing import Writing


@dataclass(slots=True)
class Emission(Writing):
    """The graph being written, and where the outputs of each Region already stand."""

    target: str
    plan: Plan
    made: dict[object, fx.Node] = field(default_factory=dict)
    vectors: dict[torch.dtype, Vectors] = field(default_factory=dict)

    def _vectors(self, compute: torch.dtype) -> Vectors:
        """What writes small computations in the dtype in which a Region computes."""

        def sum_of(s: Term, rows: Axes) -> tuple[fx.Node, Axes] | None:
            return (self.made[s], self.plan.rows(s)) if self.plan.taken(s, rows) else None

        def statistic(s: Term, rows: Axes) -> tuple[fx.Node, Fraction]:
            held = self.plan.program.statistic(s, rows)
            if held is None:
                raise BrokenInvariant(f"no node holds {s}")
            return held

        lifted = self.plan.program.lifted
        if compute not in self.vectors:
            self.vectors[compute] = Vectors(lifted, self.call, sum_of, statistic, self.plan.pair, compute)
        return self.vectors[compute]

    def input(self, built: Built, index: int, source: Source) -> fx.Node:
        """The node that a Region reads as its input `index`, in the shape that the Region wants."""
        if isinstance(source, Weight):
            node = self._apart(source.node) if source.ragged else source.node
            if source.stop is None:
                return node
            dim = 0 if built.region.products[0].b_layout == "nk" else 1
            return self.call(node, aten.slice.Tensor, node, dim, source.start, source.stop)
        if isinstance(source, Computed):
            return self._vectors(built.region.compute).write(source)
        if isinstance(source, Table):
            if source not in self.made:
                self.made[source] = self._table(source, built)
            return self.made[source]
        node = source if isinstance(source, fx.Node) else self.made[source]
        r = built.region
        extent = r.operands[index - r.matrices].extent if index >= r.matrices else "matrix"
        shapes = {"matrix": [-1, r.ks.get(index, 0)], "tile": [-1, r.n], "sample": [-1, r.n], "table": [-1, 2 * r.half]}
        shape = shapes.get(extent, [-1])
        value = g.tensor(node)
        assert value is not None
        fits = value.dim() == len(shape) and (len(shape) == 1 or str(value.shape[1]) == str(shape[1]))
        return node if fits else self.view(node, shape)

    def _apart(self, weight: fx.Node) -> fx.Node:
        """A copy of a weight in rows of the pitch that kernels read, one for all Regions. Its line is the first's."""
        if weight not in self.made:
            columns, pad = weight.meta["val"].shape[1], aten.constant_pad_nd.default
            more = pitch(columns + 1) - columns  # some in any case: what pads nothing is no copy
            padded = self.call(weight, pad, weight, [0, more], 0)
            line = {key: self.anchor.meta[key] for key in ("stack_trace", "nn_module_stack") if key in self.anchor.meta}
            padded.meta |= line | {"original_aten": pad}
            self.made[weight] = self.call(padded, aten.slice.Tensor, padded, 1, 0, columns)
        return self.made[weight]

    def _table(self, table: Table, built: Built) -> fx.Node:
        """The pairs of a table, side by side, for every token. Its line is that of the first Region that reads it: its
        nodes may be inputs."""
        sizes = [self._extent(axis) for axis in table.rows]
        parts = [self._lane(lane, table, sizes) for lane in table.lanes]
        columns = [self.call(part, aten.unsqueeze.default, part, -1) for part in parts]
        pairs = self.call(columns[0], aten.cat.default, columns, -1)  # stack has no lowering
        out = self.call(pairs, aten.reshape.default, pairs, [-1, 2 * table.half])
        line = self.plan.program.product(built.draft.space.accs[-1]).node.meta.get("stack_trace")
        for node in (pairs, out) if line else ():
            node.meta.setdefault("stack_trace", line)
        return out

    def _lane(self, lane: Lane, table: Table, sizes: Sequence[int | fx.Node]) -> fx.Node:
        """What it holds, [*sizes, half], in the table's dtype."""
        node = lane.node
        mine = {i for d in self.plan.program.lifted.reading.roots(node) for i in d}
        shape = [size if axis in mine else 1 for axis, size in zip(table.rows, sizes, strict=True)]
        if lane.index is None:
            out = self.call(node, aten.reshape.default, node, [*shape, table.half])
        else:
            two = [table.half, 2] if table.neighbours else [2, table.half]
            both = self.call(node, aten.reshape.default, node, [*shape, *two])
            out = self.call(node, aten.select.int, both, -1 if table.neighbours else -2, lane.index)
        if g.tensor(out).dtype != table.dtype:  # type: ignore[union-attr]
            out = self.call(node, prims.convert_element_type.default, out, table.dtype)
        return self.call(node, aten.expand.default, out, [*sizes, table.half])

    def _extent(self, axis: int) -> int | fx.Node:
        """The size of an axis: a number, or the node that holds it."""
        lifted = self.plan.program.lifted
        if (static := lifted.extents((axis,)).get(axis)) is not None:
            return static
        for node in lifted.reading.dims:
            for size, roots in zip(g.tensor(node).shape, lifted.reading.roots(node), strict=True):  # type: ignore[union-attr]
                if roots == (axis,):
                    return self._size(size)
        raise BrokenInvariant(f"no tensor has a dimension of axis {axis}")

    def region(self, like: fx.Node, built: Built) -> None:
        """Writes one Region and records its outputs."""
        inputs = [self.input(built, i, s) for i, s in enumerate(built.inputs)]
        node = self.call(like, REGION, inputs, built.region.text, self.target)
        keys: list[object] = [*built.draft.stores, *built.draft.sums]
        for i, key in enumerate(keys):
            self.made[key] = self.call(like, operator.getitem, node, i)

    def supply(self, built: Built) -> None:
        """Puts the stores and the sums over tokens in the place of the nodes that they replace."""
        for node, (red, number) in built.draft.totals.items():
            value = g.tensor(node)
            assert value is not None
            new = self.made[red]
            new = new if number == 1 else self.call(new, aten.mul.Tensor, new, float(number))
            if g.tensor(new).dtype != value.dtype:  # type: ignore[union-attr]
                new = self.call(new, prims.convert_element_type.default, new, value.dtype)
            new = self.reshape(new, list(value.shape))
            node.replace_all_uses_with(new, delete_user_cb=partial(operator.is_not, new))
        for node, stored in built.draft.supplies.items():
            value = g.tensor(node)
            assert value is not None
            order = self.plan.program.turn(node, built.draft.space)
            assert order is not None
            new = self.reshape(self.made[stored], [value.shape[d] for d in order])
            if order != sorted(order):
                new = self.call(new, aten.permute.default, new, [order.index(d) for d in range(len(order))])
            found = g.tensor(new)
            assert found is not None
            if g.sizes(new) != g.sizes(node) or found.dtype != value.dtype:
                raise BrokenInvariant(
                    f"{node} is {value.dtype}{list(value.shape)}, its store {found.dtype}{list(found.shape)}"
                )
            if stored.again:
                self.redirect(node, new, self.plan.again.waiting[node])
            else:
                node.replace_all_uses_with(new, delete_user_cb=partial(operator.is_not, new))

    def share(self, built: Built) -> None:
        """Gives loops the sums over columns that the epilogue takes for a Region: else they would take them again."""
        for red in built.draft.sums:
            made = self.made[red]
            for node, factor in self.plan.shared(built.draft, red):
                new = made if factor == 1 else self.call(made, aten.mul.Tensor, made, float(1 / factor))
                new = self.reshape(new, list(node.meta["val"].shape))
                node.replace_all_uses_with(new, delete_user_cb=partial(operator.is_not, new))

    def redirect(self, node: fx.Node, new: fx.Node, readers: list[fx.Node]) -> None:
        """Gives the readers of a forward's node `new` in its place, also where they read a view of it."""
        for user in list(node.users):
            if user in readers:
                user.replace_input_with(node, new)
            elif g.is_view(user):
                args = fx.map_arg(user.args, lambda a: new if a is node else a)
                self.redirect(user, self.call(new, user.target, *args, **user.kwargs), readers)


def emit(plan: Plan, target: str, before: Before) -> None:
    """Writes all Regions of a plan, each where the last of its products stood, sorts, and drops what nobody reads any
    more. Raises Unsupported as `sort` does, and where no node holds a symbolic size."""
    graph, builts = plan.program.lifted.graph, plan.builts
    if not builts:
        return
    output = graph.output_node()
    emission = Emission(graph, output, target, plan)
    strides = OutputStrides(graph)
    pending = list(builts)
    while pending:
        ready = [b for b in pending if all(_known(emission, s) for s in b.inputs)]
        if not ready:
            raise BrokenInvariant("Regions that wait for each other")
        for built in ready:
            emission.anchor = _stands(plan, built)
            emission.region(emission.anchor, built)
        pending = [b for b in pending if b not in ready]
    for built in sorted(builts, key=lambda b: not any(s.again for s in b.draft.supplies.values())):
        emission.anchor = _stands(plan, built)
        emission.supply(built)
    for built in builts:
        emission.anchor = _stands(plan, built)
        emission.share(built)
    emission.anchor = output
    part(graph, before.sharing, emission.call)
    sort(graph, before.effects)
    strides.restore(emission.call)
    sort(graph, before.effects)
    left = set(graph.nodes)
    if twice := [n.name for b in builts for acc in b.products if (n := plan.program.product(acc).node) in left]:
        raise BrokenInvariant(f"{', '.join(twice)} would be computed twice")
    graph.lint()


def _stands(plan: Plan, built: Built) -> fx.Node:
    """The last product of a Region, before which it is written."""
    return plan.program.lifted.products[built.draft.space.accs[-1].bit].node


def _known(emission: Emission, source: Source) -> bool:
    if isinstance(source, Computed):
        return all(s in emission.made for s in statistics(source.term) if emission.plan.taken(s, source.order))
    return isinstance(source, fx.Node | Weight | Table) or source in emission.made
