"""Products with nothing beside them, of DEEP_LEAST and more in all three sizes, as Regions: there a generated kernel
may multiply faster than cuBLAS, weights' gradients among them, whose left operand lies as [K, M]; and products that are
added to a float32 matrix, which the kernel reads and overwrites tile by tile (ops/lowering.py).

They are looked for when all other Regions are in the graph, and where one loses (tuning/plain_products.py) the
product stays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from coda_inductor.codegen.target import SM_90A
from coda_inductor.core.dtypes import DTYPE_NAMES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Let, Operand, Product, Region, Store
from coda_inductor.core.verify import verify
from coda_inductor.ops.custom import ADDED_UP, REGION
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.layout import contiguous_rows, dense
from coda_inductor.write.writing import Writing

Read = tuple[fx.Node, ...]
"""The two matrices, and what their product is added to, if it is."""
Found = dict[fx.Node, tuple[Region, Read]]
"""Products, each as a Region and the tensors that it reads."""
Slower = Callable[[Found], dict[fx.Node, str]]
"""Which of these products stay as they are, and why."""
NONE_SLOWER: Slower = lambda found: {}  # noqa: E731
PLAIN = "bare"
"""The kind of these Regions; their nodes bear it as a mark."""
DEEP_LEAST = SM_90A.deep_least
ADDED_LEAST = 1024
"""The same of products that are added to a matrix, whose memory cuBLAS reads and writes beside less of its work: 0.389
ms for 0.441 to 0.480, [32000, 2048] of 2048 rows, and 0.794 for 0.800 to 0.839 of 4096 (H200)."""
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


def multiplied(node: fx.Node) -> tuple[Any, ...]:
    """What a product is added to, None if it is not, and its two matrices; of what is no product, nothing."""
    if node.target is ADDED_UP and node.args[0] is not None:
        return node.args
    return (None, *node.args[:2]) if node.target in (aten.mm.default, aten.mm.dtype) else ()


def as_region(node: fx.Node) -> tuple[Region, Read] | None:
    """A product as a plain Region, or as one that adds it up, and the tensors that it reads. None if it is smaller, or
    if these are none that a kernel can load."""
    if not (read := multiplied(node)):
        return None
    into, x, w = read
    sizes, least = [*node.meta["val"].shape, x.meta["val"].shape[1]], DEEP_LEAST if into is None else ADDED_LEAST
    if not all(isinstance(n, int) and n >= least and n % PITCH == 0 for n in sizes):
        return None
    left, right = in_rows(x), in_rows(w)
    dtype, out = (DTYPE_NAMES.get(n.meta["val"].dtype) for n in (x, node))
    if left is None or right is None or left is right or not dense(node) or not dtype or not out:
        return None
    product = Product("acc0", 0, 1, sizes[2], "kn" if right is w else "nk", a_layout="mk" if left is x else "km")
    if into is None:
        return verify(Region(sizes[1], dtype, (product,), (), (), (Store("acc0", out),), ())), (left, right)
    if not dense(into) or into.meta["val"].dtype != node.meta["val"].dtype:
        return None
    operand, total = Operand("into", "tile", out), Let("sum", "add", ("acc0", "into"))
    added = Region(sizes[1], dtype, (product,), (operand,), (total,), (Store("sum", out),), ())
    return verify(added), (left, right, into)


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
        writing, read = Writing(graph, node), [outputs.get(n, n) for n in inputs]
        if region.accumulates:
            out = writing.call(node, ADDED_UP, *read[2:], *read[:2], region.text, target_name)
        else:
            made = writing.call(node, REGION, read, region.text, target_name)
            made.meta[PLAIN], made.meta["val"] = True, [node.meta["val"]]
            out = writing.call(node, operator.getitem, made, 0)
        out.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(out)
        graph.erase_node(node)
        outputs[node] = out
    return [*outputs.values()]
