"""Values that mix the two halves of each head, as rotary embeddings do.

An epilogue makes such a value where the halves are two accumulators side by side: the rows of the weight are read in
that order, and both halves leave as one tensor. What it reads beside them varies over the features, or over the tokens
and one head: a table, which the features of all heads share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.terms import Term

if TYPE_CHECKING:
    from coda_inductor.rewrite.program import Program

Axes = tuple[int, ...]
MIXED = "it combines features that are not two halves of the columns, nor of each head"


@dataclass(frozen=True, slots=True)
class Heads:
    """How columns lie: [heads, two halves, `minor`]. The halves are the axis `inner` of the product, whose columns are
    `whole`, and the axis `lane` of what is stored: the same, unless two values were put together anew."""

    lane: int
    inner: int
    minor: Axes
    whole: Axes

    @property
    def stored(self) -> Axes:
        """The axes of a row that is stored, major to minor."""
        return tuple(self.lane if i == self.inner else i for i in self.whole)


@dataclass(frozen=True, slots=True)
class Lane:
    """A half of what a node holds for each head (its first, 0, or second, 1), or a node that holds one half: None."""

    node: fx.Node
    index: int | None


def heads(program: Program, t: Term, last: Term) -> tuple[Heads, tuple[Term, Term]]:
    """How the product behind `last` has to be read so that its epilogue makes t, and the accumulators of its halves.
    Raises Unsupported."""
    product, terms = program.product(last), program.lifted.terms
    inside = {axis for acc in program.accumulators(t) if acc.bit == last.bit for axis, _ in acc.lanes}
    if last.bit in program.whole or len(inside) != 1 or not inside <= set(product.columns):
        raise Unsupported(MIXED)
    (inner,) = inside
    lane = t.over[0] if t.kind == "lanes" and inner not in t.axes else inner
    if set(program.lifted.extents((lane, inner)).values()) != {2} or lane not in t.axes:
        raise Unsupported(MIXED)
    if g.is_backward(product.node) or not program.by_rows(product):
        raise Unsupported(MIXED)
    parts = [terms.select(t, lane, i) for i in (0, 1)]
    accs = {acc for part in parts for acc in program.accumulators(part) if acc.bit == last.bit}
    if {acc.lanes for acc in accs} != {((inner, 0),), ((inner, 1),)}:
        raise Unsupported(MIXED)
    minor = product.columns[product.columns.index(inner) + 1 :]
    first, second = sorted(accs, key=lambda acc: acc.lanes)
    return Heads(lane, inner, minor, product.columns), (first, second)


def lanes(program: Program, rows: Axes, of: Heads) -> dict[Term, Lane]:
    """What an epilogue can read beside halves of heads, by term: vectors over all features, and tables over tokens and
    a head (or half of one). Of nodes that differ by a cast the narrowest."""
    found, terms = dict[Term, Lane](), program.lifted.terms
    for t, nodes in program.nodes.items():
        fitting = [n for n in nodes if not t.hosts and _fits(*program.lies(n), rows, of)]
        if not fitting or not t.axes:
            continue
        node = min(fitting, key=lambda n: n.meta["val"].dtype.itemsize)
        axis = next((i for i in program.lies(node)[0] if i in (of.lane, of.inner)), None)
        if axis is None:
            found.setdefault(t, Lane(node, None))
            continue
        same = repeats(node)
        for i in (0, 1):
            found.setdefault(terms.select(t, axis, i), Lane(node, 0 if same else i))
    return found


def _fits(order: Axes, dense: bool, rows: Axes, of: Heads) -> bool:
    """Is it a feature vector, or a table?"""
    if order == of.whole:
        return dense
    tokens = tuple(i for i in order if i in rows)
    tables = ((of.lane, *of.minor), (of.inner, *of.minor), of.minor)
    return bool(tokens) and tokens == tuple(i for i in rows if i in tokens) and order[len(tokens) :] in tables


def repeats(node: fx.Node) -> bool:
    """Are its two halves equal: what is computed element by element of one tensor twice, one beside the other?"""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        if node.target is g.aten.cat.default:
            value, parts = node.meta["val"], node.args[0]
            dim = node.args[1] if len(node.args) > 1 else 0
            return dim in (-1, value.dim() - 1) and len(parts) == 2 and parts[0] is parts[1]  # type: ignore[arg-type,index]
        tags = getattr(node.target, "tags", ())
        each_alone = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
        if not each_alone and node.target not in LAST_STAYS:
            return False
        node = node.all_input_nodes[0]
    return False


LAST_STAYS = frozenset({g.aten.unsqueeze.default, g.aten.clone.default, g.prims.convert_element_type.default})
"""What leaves the last dimension, which holds the halves, as it is. (One unsqueezed behind it would be the last.)"""
