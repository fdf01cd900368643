"""Sums over the tokens beside our sums over the features of the same tensor, as the gradients of the biases of queries,
keys and values beside a norm's statistic: over blocks of tokens, then over the blocks.

Inductor would take both kinds in one kernel (triton.mix_order_reduction), which leaves a partial sum for every few
tokens, and torch.sum adds those up in more time than it takes to read the tensor again. (H200, torch 2.11, 8192 tokens
of width 1024, two statistics and three gradients of biases: 61 us for 79; of q, k and v in one product 66 for 77;
bench/results/token_sums.jsonl.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import fx
from torch._inductor import config as inductor_config

from coda_inductor.inductor.origin import called
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.patterns.pointwise import POINTWISE

SIZES = range(128, 513)
"""Tokens of a block. (Of 64 and fewer Inductor keeps all in registers at once: 25 us for 9, each of three gradients of
8192 tokens and width 1600.)"""


def in_blocks(graph: fx.Graph, statistics: Iterable[fx.Node]) -> None:
    """Writes so, in place, the sums over tokens of what the `statistics`, sums over features, read."""
    beside = tensors(statistics)
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        if g.root(node.args[0], g.is_view) in beside and (size := block(node)) is not None:
            node.replace_all_uses_with(summed(node, size))


def tensors(sums: Iterable[fx.Node]) -> set[fx.Node]:
    """What sums read, element by element, but for views."""
    found, todo = set[fx.Node](), [a for node in sums for a in node.all_input_nodes]
    while todo:
        node = g.root(todo.pop(), g.is_view)
        if node.target in POINTWISE:
            todo += node.all_input_nodes
        else:
            found.add(node)
    return found


def mixes(rows: int, columns: int) -> bool:
    """Does Inductor take sums over rows and over columns of such a tensor in one kernel?"""
    wanted = getattr(inductor_config.triton, "mix_order_reduction", False)
    return wanted and rows >= max(4096, 2 * columns) and rows * columns >= 5 << 20 and columns <= 16384


def block(node: fx.Node) -> int | None:
    """The tokens of a block, for a sum over all dimensions but the last that Inductor would mix with others."""
    of, dims = node.args[:2]
    value = g.tensor(of)
    if value is None or any(isinstance(n, torch.SymInt) for n in value.shape) or not isinstance(dims, list):
        return None
    *rows, columns = value.shape
    if sorted(d % value.dim() for d in dims) != [*range(len(rows))] or not g.dense(of):  # type: ignore[arg-type]
        return None
    tokens = math.prod(rows)
    return next((n for n in SIZES if tokens % n == 0), None) if mixes(tokens, columns) else None


def summed(node: fx.Node, size: int) -> fx.Node:
    """The sum over tokens, by blocks of that size."""
    of, before, call = node.args[0], node.meta["val"], partial(called, node, node)
    value = g.tensor(of)
    assert value is not None
    compute = torch.promote_types(value.dtype, torch.float32)
    out = call(aten.view.default, of, [-1, size, value.shape[-1]])
    if value.dtype != compute:
        out = call(prims.convert_element_type.default, out, compute)
    for _ in range(2):
        out = call(aten.sum.dim_IntList, out, [-2])
    if before.dtype != compute:
        out = call(prims.convert_element_type.default, out, before.dtype)
    return call(aten.view.default, out, list(before.shape))
