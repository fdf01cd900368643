"""Attention that its author wrote out, as two products and a softmax between them, is one operation of torch's.

    softmax(q @ k.mT * scale + mask) @ v

No scores are written, read or kept then. With `p` the softmax, and `do` the gradient of the result, the gradients are

    dv = p' do,   ds = p * (do v' - sum over the keys of p * do v'),   dq = scale ds k,   dk = scale ds' q

and those of the operation. Side conditions: nothing else reads what is computed of the scores; nothing of it is dropped
out; the mask has the dtype of the queries, or is exact in any; and if it is learned, its addends become features.
Numerics: scores are not rounded to 16 bits before the softmax. A row whose every key minus infinity hides has a mean of
the values, where it had no number.
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
from coda_inductor.attention.meaning import Added, Hidden, Numbers, Softmax, cases
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
LOW = -65504.0
"""A score whose weight is 0 beside any that is not hidden: float16's least number, by which torch hides, too."""
ABSORBS = -1e12
"""A score that no other one changes in float32."""
LEAST, NEVER = -1e38, -2e38
"""What is written for a lower number, and for minus infinity; or float16's least number. cuDNN turns scores into powers
of two, where the least number of bfloat16 would be infinite."""
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

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """The operands [samples and heads, rows, features], as fake tensors."""
        query, key, value = (x.node.meta["val"].mT if x.turned else x.node.meta["val"] for x in self.operands)
        return query, key, value


def written_out(graph: fx.Graph, overwritten: AbstractSet[fx.Node], positions: bool) -> Iterator[Written]:
    """What of a graph is such attention, and may be one operation. `positions`: what is added by the place of a key may
    be features."""
    looked = Looked()
    for node in [n for n in graph.nodes if n.target in PRODUCTS and long_enough(n)]:
        for turned in (False, True):
            try:
                found = checked(read(node, turned), overwritten, positions, looked)
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
    found = Written(scores, Softmax.of(scores), (query, key, result.by), result)
    found = replace(found, gradient=products[1].by if len(products) > 1 else None)
    with unset_fake_temporarily(), torch.no_grad():
        its = roles(found, [p.node for p in products])
    parts = tuple(one for part in found.softmax.parts for one in addends(scores, part))
    return replace(found, softmax=replace(found.softmax, parts=parts), gradients=its)


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


def roles(found: Written, products: Sequence[fx.Node]) -> tuple[tuple[Read, int, float], ...]:
    """Of each product that reads scores, but for that of the result: whose gradient it makes, and how often, as random
    numbers say. Raises Misfit where it makes something else, or the result is something else."""
    reads, sums = [r for r in found.scores.reads if r != found.result], found.scores.sums
    perhaps: list[dict[int, float | None]] = [dict.fromkeys(whose(found, read)) for read in reads]
    for case in cases(found.scores):
        drawn = Numbers.drawn(found.scores, found.softmax, products, case)
        if not drawn.is_weights(found.result.scores):
            raise Misfit("something else than a softmax")
        if drawn.gradient is None and (reads or sums):
            raise Misfit("gradients of nothing")
        if drawn.gradient is not None and not all(drawn.agrees(n, drawn.gradient, 1.0) for n in sums.values()):
            raise Misfit("sums of something else than the gradient of a softmax")
        for read, each in zip(reads, perhaps, strict=True):
            for i, times in [*each.items()]:
                like = drawn.weights if i == VALUE else drawn.gradient
                assert like is not None
                each[i] = drawn.times(read.scores, like) if times is None else times
                if not drawn.agrees(read.scores, like, each[i]):
                    del each[i]
    its = [next(((i, times) for i, times in each.items() if times), None) for each in perhaps]
    if any(role is None for role in its):
        raise Misfit("something else than the gradient of a softmax")
    return tuple((read, *role) for read, role in zip(reads, its, strict=True) if role is not None)


def whose(found: Written, read: Read) -> Iterator[int]:
    """Whose gradient a product may make, by what it multiplies scores with."""
    query, key, _ = found.operands
    its = {QUERY: (key, True), KEY: (query, False), VALUE: (found.gradient, False)}
    return (i for i, how in its.items() if how == (read.by, read.over_keys))


# ---- conditions


def checked(found: Written, overwritten: AbstractSet[fx.Node], positions: bool, looked: Looked) -> Written:
    """The same, with masks as they are written. Raises Misfit of attention that the operation does not take, or that
    would mean something else."""
    dtype, widths, trained = found.rows[QUERY].dtype, [x.width for x in found.operands], bool(found.gradients)
    if found.rows[KEY].shape[1] < (KEYS_TRAINED if trained else KEYS):
        raise Misfit("few keys")
    if found.scores.first.meta["val"].numel() < (NUMBERS_TRAINED if trained else NUMBERS):
        raise Misfit("few scores")
    if dtype not in DTYPES or any(x.dtype != dtype for x in found.rows):
        raise Misfit(f"attention in {dtype}")
    if widths[QUERY] != widths[KEY] or any(width % STEP or width > WIDEST for width in widths):
        raise Misfit("heads of a width that cuDNN does not take")
    found = bounded(found, trained or dtype not in WIDE, looked)
    if found.scores.sums:
        check_learned(found, positions)
    if any(not overwritten.isdisjoint(made_of(part.node)) for part in found.softmax.parts):
        raise Misfit("a mask in memory that is overwritten")
    if not chosen(*found.rows, widths[QUERY], trained):
        raise Misfit("torch would choose another kernel here")
    return found


def bounded(found: Written, known: bool, looked: Looked) -> Written:
    """With such numbers in place of hidden scores as kernels may compute with. Raises Misfit of masks in another dtype,
    of what another product adds to all scores, and of such as may hide every key of a row by a number, if that is to be
    `known`: the number has absorbed the row's scores, all weights are equal, and have a gradient if the mask is added.
    A kernel finds weights again by a sum of exponentials, which is absorbed as well; and float16 has no such number. A
    row whose every key minus infinity hides is no number as it was written."""
    scores, parts, hiding = found.scores, list(found.softmax.parts), list[int]()
    for i, part in enumerate(parts):
        facts = looked.at(scores, part)
        if isinstance(part, Hidden) and part.value > LOW:
            raise Misfit("a mask that leaves a weight")
        if isinstance(part, Added) and part.node.meta["val"].dtype != found.rows[QUERY].dtype and not facts.exact:
            raise Misfit("a mask of another dtype")
        if isinstance(part, Added) and finite(part.node) and keys_of(scores, part) == scores.axes.roots([scores.keys]):
            raise Misfit("a sum of two products for each score")
        if isinstance(part, Hidden) and part.value != -math.inf and any(isinstance(p, Added) for p in parts[:i]):
            raise Misfit("what is added to a number that hides")  # it may show the key again
        if facts.hides:
            hiding.append(i)
    one = parts[hiding[0]] if len(hiding) == 1 else None
    infinite = isinstance(one, Hidden) and one.value == -math.inf
    shows = not hiding or (one is not None and looked.at(scores, one).shows)
    if known and not infinite and not shows:
        raise Misfit("rows whose every key is hidden, perhaps")
    if isinstance(one, Hidden):
        parts[hiding[0]] = replace(one, value=LEAST)
    elif any(part.value > ABSORBS for part in parts if isinstance(part, Hidden)):
        raise Misfit("masks of which none absorbs all scores")
    return replace(found, softmax=replace(found.softmax, parts=tuple(parts)))


def keys_of(scores: Scores, part: Added | Hidden) -> Ids:
    """The axes of the keys that a mask tells apart."""
    its = {i for dim in part.dims for i in scores.axes.roots(dim)}
    return tuple(i for i in scores.axes.roots([scores.keys]) if i in its)


def check_learned(found: Written, positions: bool) -> None:
    """Raises Misfit of a mask whose gradient is asked for, unless it will be features (positions.py): of no kernel that
    has a mask's gradient attention is faster than as it was written."""
    scores, told, parts = found.scores, list[Ids](), found.softmax.parts
    if not positions or any(isinstance(p, Hidden) or p.times != 1 or not finite(p.node) for p in parts):
        raise Misfit("a learned mask")
    told = [keys_of(scores, part) for part in parts]
    every = scores.axes.roots([scores.keys])
    for node, source in scores.sums.items():
        over = [i for d in g.reduction(node).dims for i in scores.axes.roots(scores.own[source][d])]  # type: ignore[union-attr]
        if not {*over} <= {*every} or tuple(i for i in every if i not in over) not in told:
            raise Misfit("a learned mask, which is summed over queries")
    width = found.operands[QUERY].width + sum(static(scores.axes.total(keys)) for keys in told)
    keys, number = found.rows[KEY].shape[1], scores.first.meta["val"].numel()
    if found.rows[QUERY].dtype not in features.DTYPES or padded(width) > WIDEST or keys % STEP:
        raise Misfit("a learned mask that cannot be features")
    if number < features.NUMBERS or keys < features.KEYS:
        raise Misfit("a learned mask of few keys, or scores")


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a mask: may it hide a key? Is it known to leave each row one? Is it known to be exact in any dtype, as of 0
    and of what hides?"""

    hides: bool = True
    shows: bool = False
    exact: bool = False

    @classmethod
    def of(cls, part: Added | Hidden, along: tuple[int, ...], value: Tensor) -> Facts:
        """Of the mask's value, with keys along these dimensions."""
        with unset_fake_temporarily():
            if isinstance(part, Hidden):
                hidden, exact = value == part.where, True
            else:
                hidden = value * part.times <= LOW
                exact = bool((hidden | (value == 0)).all())
            whole = hidden.all(along) if along else hidden
            return cls(bool(hidden.any()), not bool(whole.any()), exact)


@dataclass(slots=True)
class Looked:
    """What is known of masks, by how they are computed: each layer may make its own."""

    found: dict[tuple[object, ...], Facts] = field(default_factory=dict)

    def at(self, scores: Scores, part: Added | Hidden) -> Facts:
        """Of a mask that no input enters, all; of others nothing. What products make of finite numbers hides none."""
        if isinstance(part, Added) and finite(part.node):
            return Facts(hides=False, shows=True)
        keys = scores.axes.roots([scores.keys])
        along = tuple(d for d, dim in enumerate(part.dims) if not {*keys}.isdisjoint(scores.axes.roots(dim)))
        how = structure(part.node), along, part.where if isinstance(part, Hidden) else part.times
        if how not in self.found:
            value = constant(part.node, frozenset())
            self.found[how] = Facts() if value is None else Facts.of(part, along, value)
        return self.found[how]
