"""What the tensors of a measurement take: those that both sides read, those that ours stores, and those that lie in
memory on the other side. A little too much, as nothing counts as given back before the end."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.region import Region
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.sizes import hint
from coda_inductor.plan.built import Source, Table, Weight
from coda_inductor.plan.draft import Stored
from coda_inductor.plan.plan import Plan
from coda_inductor.tuning.extract import layouts
from coda_inductor.tuning.group import Group


def footprint(group: Group, plan: Plan) -> int:
    """Bytes that measuring a group takes. Raises Unsupported for sizes that are not known."""
    nodes, apart = layouts(group, plan), 0
    for built in group.builts:
        region = built.region
        apart += stored(region, group.tokens)
        for i, source in enumerate(built.inputs):
            nodes |= _nodes(source)
            apart += _beside(source, region, region.ks.get(i, region.n), group.tokens)
    return of_nodes(nodes) + apart


def of_nodes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the tensors that the nodes are, or are views of."""
    roots = {g.root(node, g.is_view): None for node in nodes}
    values = [v for n in roots for v in tree_leaves(n.meta.get("val")) if isinstance(v, Tensor)]
    return sum(math.prod(map(hint, v.shape)) * v.dtype.itemsize for v in values)


def stored(region: Region, tokens: int) -> int:
    """Bytes of a Region's outputs."""
    sums: int = sum(region.length(r, tokens) for r in region.reductions) * region.compute.itemsize
    return sums + sum(tokens * region.width * DTYPES[s.dtype].itemsize for s in region.stores)


def _nodes(source: Source) -> set[fx.Node]:
    if isinstance(source, Weight):
        return {source.node}
    return {source} if isinstance(source, fx.Node) else set()


def _beside(source: Source, region: Region, width: int, tokens: int) -> int:
    """Bytes of an input that is no tensor of the graph: what another Region stores, a table, a vector."""
    if isinstance(source, Table):
        return tokens * 2 * source.half * source.dtype.itemsize
    if isinstance(source, Stored):
        return tokens * width * DTYPES[source.dtype].itemsize
    return 0 if _nodes(source) else max(tokens, region.width) * region.compute.itemsize
