"""Tables that many elements read, as the cosines of rotary embeddings: computed once, where Inductor would compute them
for every element that reads them.

f(x) repeated along new dimensions is f(x repeated), so the values are the same to the bit. Inductor puts a pointwise
value into memory only when it reads much or is long; sin and cos are one operation each, of up to a hundred
instructions. (H200, Llama-1B's RoPE of 8192 tokens by torch 2.11: 60 and 91 us for q forward and backward, which read
and write 67 MB; with the tables in memory the bytes are what they take.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from coda_inductor.inductor.emit import ORIGIN
from coda_inductor.inductor.lowering import elements, is_tensor, kind_of
from coda_inductor.inductor.ops import STORED
from coda_inductor.patterns.graph import source_line

aten = torch.ops.aten

LONG = frozenset({aten.cos.default, aten.sin.default, aten.tan.default})
"""Operations that take longer than memory does: their arguments may be large, and are reduced in many steps."""
REPEATED = 8
"""How often each element of a table is read, at least: a sixteenth of its readers' bytes is then added."""
WORTH = 1 << 22
"""Elements that read a table, at least: at 2.6 ns for 1024 of them (H200) they take longer than the launch of another
kernel."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table: the node that computes it, its shape, and the user's line."""

    node: str
    shape: str
    source: str


def store_tables(graph: fx.Graph) -> tuple[Table, ...]:
    """Puts the tables of a joint or inference graph into memory, in place."""
    found = dict.fromkeys(last(n) for n in graph.nodes if n.target in LONG and is_tensor(n))
    return tuple(store(graph, node) for node in found if is_worth(node))


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a value, as it is or through views."""
    found = list[fx.Node]()
    for user in node.users:
        viewed = user.op == "call_function" and kind_of(user) in ("view", "part")
        found += readers(user) if viewed else [user]
    return list(dict.fromkeys(found))


def last(node: fx.Node) -> fx.Node:
    """The end of the small computation that `node` begins: a factor, a cast, two halves put together."""
    match readers(node):
        case [reader] if is_loop(reader) and elements(reader) < REPEATED * elements(node):
            return last(reader)
    return node


def is_loop(node: fx.Node) -> bool:
    """Is it computed element by element?"""
    return node.op == "call_function" and is_tensor(node) and kind_of(node) == "loop"


def is_worth(node: fx.Node) -> bool:
    """Is it read often enough, by enough elements?"""
    wide = [elements(r) for r in readers(node) if is_loop(r) and elements(r) >= REPEATED * elements(node)]
    return sum(wide) >= WORTH


def store(graph: fx.Graph, node: fx.Node) -> Table:
    """Lets all read the stored value in place of the formula."""
    value = node.meta["val"]
    with graph.inserting_after(node):
        stored = graph.call_function(STORED, (node,))
    stored.meta = {key: node.meta[key] for key in ORIGIN if key in node.meta} | {"val": STORED(value)}
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    return Table(node.name, f"[{', '.join(map(str, value.shape))}]", source_line(node))
