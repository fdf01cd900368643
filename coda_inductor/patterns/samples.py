"""Products of samples: one row for each image of a batch, of which all its tokens read the same."""

from __future__ import annotations

from torch import fx

from coda_inductor.core.region import SAMPLE
from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.infer import Reading
from coda_inductor.patterns.pointwise import POINTWISE


def conditions(reading: Reading, graph: fx.Graph) -> set[fx.Node]:
    """The products of one row for each sample of several, as of the conditions of images: what others read of them are
    vectors of samples. No epilogue is made for them, as for a product of a single row (graph.is_row)."""
    products = [n for n in graph.nodes if n.target in g.MATRIX_PRODUCTS and n in reading.dims]
    rows = {n: reading.roots(n)[0] for n in products}
    found = set[fx.Node]()
    for node in products:
        outer = len(rows[node])
        inside = {r[outer:] for r in {*rows.values()} if outer and r[:outer] == rows[node] and len(r) > outer}
        tokens = {axes: reading.axes.total(axes).static for axes in inside}
        fitting = {a for axes, many in tokens.items() if many and many % SAMPLE == 0 for a in axes}
        if fitting and _spread(reading, node, fitting):
            found.add(node)
    return found


def _spread(reading: Reading, product: fx.Node, inside: set[int]) -> bool:
    """Is what pointwise operations make of the product read for each of a sample's tokens, whose axes are `inside`?"""

    def onward(node: fx.Node) -> list[fx.Node]:
        alike = (u for u in node.users if u.target in POINTWISE or g.is_view(u) or slices.lane(u) is not None)
        return [] if spread(node) else [u for u in alike if u in reading.dims]

    def spread(node: fx.Node) -> bool:
        return any(inside.intersection(d) for d in reading.roots(node))

    return any(map(spread, g.reached([product], onward)))
