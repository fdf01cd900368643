"""Values that mix the two halves of each head, or neighbouring features, as rotary embeddings do.

An epilogue makes such a value where the halves are two accumulators side by side: the rows of the weight are read in
that order, and both halves leave as one tensor. Neighbouring features lie so already. What it reads beside them varies
over the features, or over the tokens and one head: a table, which the features of all heads share.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.lift import Product
from coda_inductor.patterns.terms import Term
from coda_inductor.rewrite.sources import given, statistics
from coda_inductor.rewrite.space import Axes, Computed, Half, Heads, Lane
from coda_inductor.rewrite.state import State

MIXED = "it combines features that are not two halves of the columns, nor of each head, nor beside each other"
NOT_ROWS = "a tile that it needs is not laid out as rows of tokens"
OF_HEADS = frozenset({MIXED, NOT_ROWS})
"""What a rotary embedding is refused for where its product does not divide heads into halves."""


def heads(state: State, t: Term, last: Term) -> tuple[Heads, tuple[Term, Term]]:
    """How the product behind `last` has to be read so that its epilogue makes t, and the accumulators of its halves.
    Raises Unsupported."""
    product, terms = state.product(last), state.lifted.terms
    inside = {axis for acc in state.accumulators(t) if acc.bit == last.bit for axis, _ in acc.lanes}
    if last.bit in state.limits.whole_heads or len(inside) != 1 or not inside <= set(product.columns):
        raise Unsupported(MIXED)
    (inner,) = inside
    lane = t.over[0] if t.kind == "lanes" and inner not in t.axes else inner
    if set(state.lifted.extents((lane, inner)).values()) != {2} or lane not in t.axes:
        raise Unsupported(MIXED)
    if g.is_backward(product.node) or not state.by_rows(product):
        raise Unsupported(MIXED)
    minor = product.columns[product.columns.index(inner) + 1 :] or product.columns[-2:-1]  # behind it, or before
    parts = (state.accumulators(terms.select(t, lane, i)) for i in (0, 1))
    mine = [{acc for acc in part if acc.bit == last.bit} for part in parts]
    accs = mine[0] | mine[1]
    halves = {acc.lanes for acc in accs} == {((inner, 0),), ((inner, 1),)} and len(accs) == 2
    if not (minor and all(mine) and halves):
        raise Unsupported(MIXED)
    first, second = sorted(accs, key=lambda acc: acc.lanes)
    return Heads(lane, inner, minor, product.columns), (first, second)


def lanes(state: State, rows: Axes, of: Heads, product: Product) -> dict[Term, Lane | Half]:
    """What an epilogue can read beside halves of heads, by term: vectors over all features, also those that a law has
    split off the product, and tables over tokens and a head (or half of one). Of nodes that differ by a cast the first
    with which the user's program goes on."""
    found, terms = dict[Term, Lane | Half](), state.lifted.terms
    fits = cache(lambda order, dense: _fits(order, dense, rows, of))  # few orders, but many nodes in each
    for t, nodes in state.nodes.items():
        if t.hosts or not t.axes.issuperset(of.minor):
            continue
        fitting = [n for n in nodes if fits(*state.layout(n))]
        if not fitting:
            axis = next((i for i in (of.lane, of.inner) if t.axes == {i, *of.minor} and not t.deps), None)
            if axis is not None:  # the same for all heads, as the weight of a norm of each
                computed = Computed(t, "feature", tuple(axis if i == of.inner else i for i in of.columns))
                found |= {terms.select(t, axis, i): Half(computed, i) for i in (0, 1)}
            continue
        node = next((n for n in fitting if not n.users.keys() <= set(nodes)), fitting[0])
        node = g.root(node, g.is_view) if g.root(node, g.is_view) in fitting else node
        axis = next((i for i in state.layout(node)[0] if i in (of.lane, of.inner)), None)
        if axis is None:
            found.setdefault(t, Lane(node, None))
            continue
        same = alike(state, node, of.lie(axis), -1 if of.neighbours else 0)
        for i in (0, 1):
            found.setdefault(terms.select(t, axis, i), Lane(node, 0 if same else i))
    for t in split_off(state, of, product):
        computed = Computed(t, "feature", of.columns)
        found |= {h: Half(computed, i) for i in (0, 1) if (h := terms.select(t, of.inner, i)) not in found}
    return found


def split_off(state: State, of: Heads, product: Product) -> list[Term]:
    """The vectors over the columns of a product that it is made of besides itself, and that sum over its weight: of a
    LayerNorm before it, W b and W 1."""
    whole = state.lifted.term.get(product.node)
    found, todo = dict[Term, None](), [] if whole is None else [state.new.get(whole, whole)]
    while todo:
        t = todo.pop()
        if t not in found and t.kind != "con":
            todo += t.args
            found[t] = None
    return [t for t in found if t.axes == set(of.columns) and not t.hosts and statistics(t) and given(t)]


def _fits(order: Axes, dense: bool, rows: Axes, of: Heads) -> bool:
    """Is it a feature vector, or a table?"""
    if order == of.columns:
        return dense
    tokens = tuple(i for i in order if i in rows)
    tables = (of.lie(of.lane), of.lie(of.inner), of.minor)
    return bool(tokens) and tokens == tuple(i for i in rows if i in tokens) and order[len(tokens) :] in tables


def alike(state: State, node: fx.Node, axes: Axes, place: int) -> bool:
    """Are the two halves of a table equal, as cosines of the same angles twice? `axes` are those of its one dimension
    [2, half] or [half, 2], `place` is where the 2 stands. What is computed element by element of two equal halves has
    two equal halves."""
    reading, terms = state.lifted.reading, state.lifted.terms
    dim = next((d for d, ids in enumerate(reading.roots(node)) if ids == axes), None)
    shape = node.meta["val"].shape
    while dim is not None:
        term, ids = state.lifted.term.get(node), reading.roots(node)[dim]
        lane = ids[place] if len(ids) > 1 else -1
        two = lane >= 0 and state.lifted.extents((lane,)) == {lane: 2}
        if term is not None and two and terms.select(term, lane, 0) is terms.select(term, lane, 1):
            return True
        tags = getattr(node.target, "tags", ())
        each_alone = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
        if not (each_alone or g.is_cast(node)) or len(node.all_input_nodes) != 1:
            return False
        (node,) = node.all_input_nodes
        if node not in reading.dims or [*map(str, node.meta["val"].shape)] != [*map(str, shape)]:
            return False
    return False
