"""What is added to scores along an axis of the keys is a feature of queries and keys, not a mask.

With `E[j, y] = 1` where the key j lies at y, and 0 elsewhere:

    softmax(s q k' + h E' + w F') = softmax(s [q, h/s, w/s] [k, E, F]')

So nothing of the size tokens x tokens is written, read or kept, nor is its gradient: that of `h` is that of its
features. Side condition: `h` and `w` are finite, as what products make of finite numbers is; minus infinity times 0
would be no number, so `h/s` is at most the dtype's largest number. Numerics: it is rounded, where the mask's sum was.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx

from coda_inductor.attention.calls import OPERANDS, STEP, WIDEST, Call, chosen, padded
from coda_inductor.attention.changes import Changed
from coda_inductor.attention.masks import masked
from coda_inductor.attention.positions import Features, Sum, parts
from coda_inductor.attention.wider import write
from coda_inductor.attention.windows import steps
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.axes import Misfit
from coda_inductor.patterns.constants import of_memory_that_is_written
from coda_inductor.patterns.effects import draws, ordered
from coda_inductor.patterns.graph import aten

DTYPES = (torch.bfloat16,)
"""In float16 `h/s` is soon larger than its largest number."""
KEYS, NUMBERS = 256, 1 << 25
"""The fewest keys, and numbers of a mask, with which it is faster. On an H200, forward and backward, 16 heads of 80
numbers between two products: 4096 keys take 2.48 ms for 5.24, 100 windows of 256 keys 2.89 for 3.98, but 25 such
windows 1.75 for 1.60."""


def write_positions(graph: fx.Graph) -> tuple[Changed, ...]:
    """Has attention add up positions among the features of queries and keys, in place."""
    calls = defaultdict[fx.Node, list[Call]](list)
    for call in masked(graph):
        calls[call.mask].append(call)
    overwritten = of_memory_that_is_written(graph) if calls else set()
    found = list[tuple[Features, list[fx.Node]]]()
    for mask, its in calls.items():
        for made in features(mask, its):
            if overwritten.isdisjoint([*made.mask.way, *(a.node for a in made.mask.addends)]):
                found.append((made, [*made.mask.way, *(n for part in made.parts for n in up_to(part.node, made))]))
    for made, _ in found:
        write(graph, made)
    if found:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or ordered(n))
    return tuple(record(made, between, {*graph.nodes}) for made, between in found)


def record(made: Features, between: Sequence[fx.Node], left: set[fx.Node]) -> Changed:
    """What explain says of it."""
    gone = tuple(n.name for n in dict.fromkeys(between) if n not in left)
    mask, first = made.mask.way[0], made.mask.way[-1]
    what = f"what is added to scores is {made.number} features of queries and keys"
    shape = str([*mask.meta["val"].shape])
    return Changed(mask.name, shape, what, g.source_line(first), gone, features=made.number)


def features(mask: fx.Node, calls: Sequence[Call]) -> list[Features]:
    """The steps that read the mask, if it is such a sum and all are faster without it."""
    if not all(map(may, calls)) or not (found := steps(calls)):
        return []
    try:
        made = Sum.of(mask, {call.node for call in calls})
        its = [Features(step, made, tuple(parts(made, step))) for step in found]
        for each in its:
            for part in each.parts:
                each.of_part(part)  # a later sum may have split its axes further
        return its if all(map(pays, its)) else []
    except Misfit:
        return []


def may(call: Call) -> bool:
    """Is it an operation of CUDA's that another may stand for, and are all its sizes numbers?"""
    operands = [g.tensor(call.given[name]) for name in (*OPERANDS, call.masked_by or "")]
    if not any(kernel in str(call.node.target) for kernel in ("cudnn", "efficient")) or draws(call.node):
        return False
    if any(x is None or x.dtype not in DTYPES or x.dtype != operands[0].dtype for x in operands):  # type: ignore[union-attr]
        return False
    return all(isinstance(n, int) for x in operands for n in x.shape) and call.scale > 0  # type: ignore[union-attr]


def pays(made: Features) -> bool:
    """Does cuDNN take heads with these features, and is it faster?"""
    query, key, value = (made.step.forward.given[name].meta["val"] for name in OPERANDS)
    width = padded(query.shape[-1] + made.number)
    if key.shape[-2] < KEYS or math.prod(query.shape[:-1]) * key.shape[-2] < NUMBERS:
        return False
    if max(width, value.shape[-1]) > WIDEST or value.shape[-1] % STEP:
        return False
    return chosen(query, key, value, width, bool(made.step.backwards))


def up_to(node: fx.Node, made: Features) -> list[fx.Node]:
    """The node, and what it is made of back to attention."""
    found = list[fx.Node]()
    while node not in {call.node for call in made.step.backwards}:
        found.append(node)
        node = node.args[1] if node.target is aten.slice_scatter.default else node.all_input_nodes[0]  # type: ignore[assignment]
    return found
