"""Products with nothing beside them, of DEEP_LEAST and more in all three sizes, as Regions: there a generated kernel
may multiply faster than cuBLAS, weights' gradients among them, whose left operand lies as [K, M]. So may smaller ones
that are added to others in memory, as the gradient of a head's weight is, block by block (coda.added_up).

They are looked for when all other Regions are in the graph, and where one loses (tuning/plain_products.py) the
product stays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from coda_inductor.codegen.target import SM_90A
from coda_inductor.core.dtypes import DTYPE_NAMES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Product, Region, Store
from coda_inductor.core.verify import verify
from coda_inductor.ops.custom import ADDED_REGION, ADDED_UP, REGION
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import contiguous_rows, dense
from coda_inductor.write.writing import ORIGIN

Found = dict[fx.Node, tuple[Region, tuple[fx.Node, fx.Node]]]
"""Products, each as a Region and the two tensors that it reads."""
Slower = Callable[[Found], dict[fx.Node, str]]
"""Which of these products stay as they are, and why."""
NONE_SLOWER: Slower = lambda found: {}  # noqa: E731
PLAIN = "bare"
"""The kind of these Regions. Nodes of REGION bear it as a mark."""
DEEP_LEAST = SM_90A.deep_least
ADDED_LEAST = 1024  # of what is added to others; smaller ones were not timed
PITCH = 8  # elements of 16 bits at whose multiples rows start


def plain_products(
    graph: fx.Graph, legal: Callable[[Region], None], device: torch.device
) -> tuple[Found, dict[fx.Node, str]]:
    """The products on a device that may be plain Regions, and those of that size that may not, with the reason. `legal`
    raises Unsupported for one that the target cannot run."""
    found, refused = Found(), dict[fx.Node, str]()
    for node in graph.nodes:
        if (made := as_region(node)) is None or node.meta["val"].device != device:
            continue
        try:
            legal(made[0])
            found[node] = made
        except Unsupported as why:
            refused[node] = why.said
    return found, refused


def as_region(node: fx.Node) -> tuple[Region, tuple[fx.Node, fx.Node]] | None:
    """A product as a plain Region and the tensors that it reads. None if it is smaller, or if these are none that a
    kernel can load."""
    adds = node.target is ADDED_UP and node.args[0] is not None
    if not adds and node.target not in (aten.mm.default, aten.mm.dtype):
        return None
    x, w = node.args[1:] if adds else node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(w, fx.Node)
    sizes, least = [*node.meta["val"].shape, x.meta["val"].shape[1]], ADDED_LEAST if adds else DEEP_LEAST
    if not all(isinstance(n, int) and n >= least and n % PITCH == 0 for n in sizes):
        return None
    left, right = in_rows(x), in_rows(w)
    dtype, out = (DTYPE_NAMES.get(n.meta["val"].dtype) for n in (x, node))
    if left is None or right is None or left is right or not dense(node) or not dtype or not out:
        return None
    product = Product("acc0", 0, 1, sizes[2], "kn" if right is w else "nk", a_layout="mk" if left is x else "km")
    return verify(Region(sizes[1], dtype, (product,), (), (), (Store("acc0", out),), (), adds=adds)), (left, right)


def in_rows(node: fx.Node) -> fx.Node | None:
    """The matrix of known sizes whose rows hold the node's elements or its transpose's. None if there is none, or if
    its rows overlap or do not start at multiples of 16 bytes."""
    rows = contiguous_rows(node)
    if rows is None:
        return None
    value = rows.meta["val"]
    (pitch, _), offset, columns = value.stride(), value.storage_offset(), value.shape[1]
    if not all(isinstance(n, int) for n in (pitch, offset, columns)):
        return None
    return rows if pitch % PITCH == offset % PITCH == 0 and pitch >= columns else None


def write_plain(graph: fx.Graph, target_name: str, found: Found) -> list[fx.Node]:
    """Puts the Regions in the products' place; their results."""
    outputs = dict[fx.Node, fx.Node]()
    for node, (region, inputs) in found.items():
        if region.adds:
            read = [outputs.get(n, n) for n in inputs]
            node.target, node.args = ADDED_REGION, (node.args[0], *read, region.text, target_name)
            outputs[node] = node
            continue
        with graph.inserting_before(node):
            read = [outputs.get(n, n) for n in inputs]
            made = graph.call_function(REGION, (read, region.text, target_name))
            out = graph.call_function(operator.getitem, (made, 0))
        for new, value in ((made, [node.meta["val"]]), (out, node.meta["val"])):
            new.meta = {key: node.meta[key] for key in ORIGIN if key in node.meta} | {"val": value}
        made.meta[PLAIN] = True
        node.replace_all_uses_with(out)
        graph.erase_node(node)
        outputs[node] = out
    return [*outputs.values()]
