"""Attention that its author wrote out, as two products and a softmax between them, is one operation of torch's.

    softmax(q @ k.mT * scale + mask) @ v

Nothing of the size queries x keys is written, read or kept then. With `p` the softmax, and `do` the gradient of the
result, the gradients are

    dv = p' do,   ds = p * (do v' - sum over the keys of p * do v'),   dq = scale ds k,   dk = scale ds' q

and those of the operation. Side conditions: nothing else reads what is computed of the scores (a learned mask's
gradient does), nothing of it is dropped out, and the mask has the dtype of the queries. Numerics: scores are not
rounded to 16 bits before the softmax. A row whose every key minus infinity hides has a mean of the values, where it had
no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from coda_inductor.attention import features
from coda_inductor.attention.calls import STEP, WIDEST, chosen, padded
from coda_inductor.attention.meaning import SEEDS, Added, Hidden, Softmax, ratio, values
from coda_inductor.attention.positions import before, finite, narrowed, static
from coda_inductor.attention.scores import PRODUCTS, Operand, Product, Read, Scores, factors
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.axes import Ids, Misfit
from coda_inductor.patterns.constants import constant, made_of, structure
from coda_inductor.patterns.graph import aten

DTYPES = (torch.bfloat16, torch.float16)
WIDE = (torch.bfloat16, torch.float64)
"""Dtypes of which some number hides a score whatever the others are: a row whose every key is hidden stays a mean."""
KEYS, KEYS_TRAINED = 96, 128
"""The fewest keys with which it is faster. On an H200, 16 heads of 64 numbers, 131072 tokens: 96 keys take 0.54 ms for
1.36 in inference, and with a mask 0.72 for 1.38; 49 with a mask 2.53 for 1.62. Forward and backward 128 keys take 4.10
for 4.77 and 4.49 for 4.85, 96 with a mask 4.90 for 4.49."""
NUMBERS, NUMBERS_TRAINED = 1 << 20, 1 << 24
"""The fewest scores: with fewer the host takes longer than the card, and cuDNN longest."""
LOW = -(2.0**30)
"""A score whose weight is 0 in float32 beside any that is not hidden."""
QUERY, KEY, VALUE = range(3)


@dataclass(frozen=True, slots=True)
class Written:
    """Attention that is written out: what its softmax is taken of, its three operands, the product that makes its
    result, the gradient of that; and of each product that makes a gradient, whose it is and how often."""

    scores: Scores
    softmax: Softmax
    operands: tuple[Operand, Operand, Operand]
    result: Read
    gradient: Operand | None = None
    gradients: tuple[tuple[Read, int, float], ...] = ()


def written_out(graph: fx.Graph, overwritten: AbstractSet[fx.Node], positions: bool) -> Iterator[Written]:
    """What of a graph is such attention, and may be one operation. `positions`: what is added by the place of a key may
    be features."""
    looked = Looked()
    for node in [n for n in graph.nodes if n.target in PRODUCTS and long_enough(n)]:
        for turned in (False, True):
            try:
                found = read(node, turned)
                if found.scores.sums and not positions:
                    continue
                check(found, overwritten, looked)
            except Misfit:
                continue
            yield found
            break


def long_enough(product: fx.Node) -> bool:
    """Are there so many scores that they cost more than the operation's start?"""
    value = g.tensor(product)
    if value is None or not all(isinstance(n, int) for n in value.shape):
        return False
    return min(value.shape[-2:]) > 1 and max(value.shape[-2:]) >= KEYS and value.numel() >= NUMBERS


# ---- reading


def read(product: fx.Node, turned: bool = False) -> Written:
    """The attention whose scores a product makes, [samples and heads, queries, keys] or `turned`. Raises Misfit where
    it makes none."""
    query, key = (Operand.of(x, t) for x, t in zip(factors(product), (False, True), strict=True))
    if turned:
        query, key = key, query
    products = [Product(product, query, turned)]
    reads = Scores.of(*products, strictly=False).reads
    result = min(reads, key=lambda r: r.product, default=None)
    if result is None or not result.over_keys:  # of weights that add up to one for each key, the gradient has this form
        raise Misfit("scores that no product reads")
    products += [p for p in result.by.products() if p.node > result.product and len(reads) > 1]
    scores = Scores.of(*products)
    if len(products) > 2 or (len(products) < 2 and len(scores.reads) > 1):
        raise Misfit("gradients of several results")
    gradient = products[1].by if len(products) > 1 else None
    found = Written(scores, Softmax.of(scores), (query, key, result.by), result, gradient)
    with unset_fake_temporarily(), torch.no_grad():
        its = [roles(found, [p.node for p in products], seed) for seed in range(SEEDS)]
    if any(not same(its[0], again) for again in its[1:]):
        raise Misfit("another gradient")
    parts = tuple(one for part in found.softmax.parts for one in addends(scores, part))
    return replace(found, softmax=replace(found.softmax, parts=parts), gradients=tuple(its[0]))


def addends(scores: Scores, part: Added | Hidden) -> list[Added | Hidden]:
    """What is a sum of products' results is each of them: by the place of a key such a mask may be features."""
    found = [*terms(scores, part)] if isinstance(part, Added) else []
    return [*found] if found and all(finite(each.node) for each in found) else [part]


def terms(scores: Scores, part: Added) -> Iterator[Added]:
    """The addends of a mask, and theirs, behind views."""
    node, dims = part.node, part.dims
    while g.is_view(node):
        try:
            node, dims = node.all_input_nodes[0], before(scores.axes, node, dims)
        except Misfit:
            break
    its = [a for a in node.args if isinstance(a, fx.Node)] if node.target is aten.add.Tensor and not node.kwargs else []
    if len(its) < 2 or any(a.meta["val"].dtype != node.meta["val"].dtype for a in its):
        yield part
        return
    for each in its:
        yield from terms(scores, Added(each, narrowed(each, dims), part.times))


def roles(found: Written, products: list[fx.Node], seed: int) -> list[tuple[Read, int, float]]:
    """Of each product that reads scores, but for that of the result: whose gradient it makes, and how often, as random
    numbers say. Raises Misfit where it makes something else, or the result is something else."""
    of, raw = values(found.scores, seed, products)
    weights = found.softmax.value(raw[0], of)
    if not one(ratio(of[found.result.scores], weights)):
        raise Misfit("something else than a softmax")
    if len(raw) > 1:
        inner = weights * raw[1]
        gradient = inner - weights * inner.sum(-1, keepdim=True)
    if not all(len(raw) > 1 and one(ratio(of[scores], gradient)) for scores in found.scores.sums.values()):
        raise Misfit("sums of something else than the gradient of a softmax")
    query, key, _ = found.operands
    its = list[tuple[Read, int, float]]()
    for read in found.scores.reads:
        if read == found.result:
            continue
        like = {KEY: (query, False), QUERY: (key, True)}
        whose = [i for i, how in like.items() if how == (read.by, read.over_keys) and len(raw) > 1]
        times = [(i, ratio(of[read.scores], gradient)) for i in whose]
        if (read.by, read.over_keys) == (found.gradient, False):
            times.append((VALUE, ratio(of[read.scores], weights)))
        by = next(((i, n) for i, n in times if n is not None), None)
        if by is None:
            raise Misfit("something else than the gradient of a softmax")
        its.append((read, *by))
    return its


def one(number: float | None) -> bool:
    """Is it 1, but for rounding?"""
    return number is not None and math.isclose(number, 1.0, rel_tol=1e-9)


def same(a: list[tuple[Read, int, float]], b: list[tuple[Read, int, float]]) -> bool:
    """Do two lists say the same, but for rounding?"""
    return all(x[:2] == y[:2] and math.isclose(x[2], y[2], rel_tol=1e-9) for x, y in zip(a, b, strict=True))


# ---- conditions


def check(found: Written, overwritten: AbstractSet[fx.Node], looked: Looked) -> None:
    """Raises Misfit of attention that the operation does not take, or that would mean something else."""
    query, key, value = (x.node.meta["val"] for x in found.operands)
    dtype, widths = query.dtype, [x.width for x in found.operands]
    trained = bool(found.gradients)
    if rows(found)[KEY].shape[1] < (KEYS_TRAINED if trained else KEYS):
        raise Misfit("few keys")
    if found.scores.first.meta["val"].numel() < (NUMBERS_TRAINED if trained else NUMBERS):
        raise Misfit("few scores")
    if dtype not in DTYPES or any(x.dtype != dtype for x in (key, value)):
        raise Misfit(f"attention in {dtype}")
    if widths[0] != widths[1] or any(width % STEP or width > WIDEST for width in widths):
        raise Misfit("heads of a width that cuDNN does not take")
    for part in found.softmax.parts:
        if not overwritten.isdisjoint(made_of(part.node)):
            raise Misfit("a mask in memory that is overwritten")
        if isinstance(part, Hidden) and part.value > LOW:
            raise Misfit("a mask that leaves a weight")
        if isinstance(part, Added) and part.node.meta["val"].dtype != dtype:
            raise Misfit("a mask of another dtype")
        if may_hide(part) and (trained or dtype not in WIDE) and not looked.shows(part):
            raise Misfit("rows whose every key is hidden, perhaps")
    if found.scores.sums:
        check_learned(found, widths)
    operands = (*found.operands, *filter(None, [found.gradient]))
    if not overwritten.isdisjoint(n for x in operands for n in (x.node, *x.node.all_input_nodes)):
        raise Misfit("operands in memory that is overwritten")
    if not chosen(*rows(found), widths[0], trained):
        raise Misfit("torch would choose another kernel here")


def may_hide(part: Added | Hidden) -> bool:
    """May it hide keys by a number? What products make of finite numbers hides none; and a row whose every key minus
    infinity hides is no number as it was written."""
    return not finite(part.node) if isinstance(part, Added) else part.value != -math.inf


def check_learned(found: Written, widths: Sequence[int]) -> None:
    """Raises Misfit of a mask whose gradient is asked for, unless it will be features (positions.py): of no kernel that
    has a mask's gradient attention is faster than as it was written."""
    scores, number = found.scores, 0
    axes, queries, keys = scores.axes, *(x.shape[1] for x in rows(found)[:2])
    every = axes.roots([scores.keys])
    told = list[Ids]()
    for part in found.softmax.parts:
        if isinstance(part, Hidden) or not one(part.times) or not finite(part.node):
            raise Misfit("a learned mask")
        told.append(tuple(i for i in every if i in {i for dim in part.dims for i in axes.roots(dim)}))
        number += static(axes.total(told[-1]))
    for node, source in scores.sums.items():
        over = [i for d in g.reduction(node).dims for i in axes.roots(scores.own[source][d])]  # type: ignore[union-attr]
        if not {*over} <= {*every} or tuple(i for i in every if i not in over) not in told:
            raise Misfit("a learned mask, which is summed over queries")
    if every in told or padded(widths[QUERY] + number) > WIDEST or keys % STEP:
        raise Misfit("a learned mask of too many features")
    if queries * keys * scores.first.meta["val"].shape[0] < features.NUMBERS or keys < features.KEYS:
        raise Misfit("too few keys, or scores, for features")


def rows(found: Written) -> tuple[Tensor, Tensor, Tensor]:
    """The operands [samples and heads, rows, features], as fake tensors."""
    query, key, value = (x.node.meta["val"].mT if x.turned else x.node.meta["val"] for x in found.operands)
    return query, key, value


@dataclass(slots=True)
class Looked:
    """What masks show, by how they are computed: each layer may make its own."""

    found: dict[tuple[str, bool, float], bool] = field(default_factory=dict)

    def shows(self, part: Added | Hidden) -> bool:
        """Is it known to leave each row a key?"""
        where, times = (part.where, 0.0) if isinstance(part, Hidden) else (False, part.times)
        how = structure(part.node), where, times
        if how not in self.found:
            self.found[how] = shows(part, constant(part.node, frozenset()))
        return self.found[how]


def shows(part: Added | Hidden, value: Tensor | None) -> bool:
    """Does a mask of this value leave each row a key? Of a value that only a run knows nobody can say. Where every key
    of a row is hidden, a number has absorbed the row's scores: its weights are equal, and have gradients if the mask is
    added. Kernels find these weights by a sum of exponentials that is absorbed, too."""
    if value is None:
        return False
    with unset_fake_temporarily():
        hidden = value == part.where if isinstance(part, Hidden) else value * part.times <= LOW
        return not bool(hidden.all(-1).any())
