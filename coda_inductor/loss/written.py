"""A cross-entropy whose scores' gradient leaves the epilogue that makes the scores, but for two numbers a row.

    before:  s = f(z), z = x W^T [M, V];  loss: logsumexp(s) - s_t;  D = a f' (softmax(s) - onehot(t));  D W,  D^T x
    after:   c = s_t, of x and the row t of W;  E = exp(s - c) f', and 0 at t;  S = the sum of exp(s - c), t apart
             loss = log(1 + S);  E = -S f'_t at t;  r = a / (1 + S);  r (E W),  E^T (r x)

softmax(s) - onehot(t) = E / (1 + S) for any c (the law `softmax`), and here c is known before the product. So E and S
leave its epilogue. No pass reads the scores and writes their gradient, and the scores are not stored. The factor of a
row that is known later is the product's, whose epilogue takes it, or the other operand's (the law `bilinearity`).

The score of the target makes S the exponential of the loss, so E is of the size of bfloat16's numbers. ops/loss.py says
what becomes of rows of which it is not; `bounded` says which scores need no such care.

    (a + b) softmax(s) - a onehot(t) = (a + b) E / (1 + S), at t 1 - (1 + S) a / (a + b)               a z-loss
    (D + u 1^T) W = D W + u (1^T W),  (D + u 1^T)^T x = D^T x + 1 (u^T x)                      label smoothing's ones

The sum of a row's scores, of which smoothed losses are, is that of x and the sum of W's rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from coda_inductor.loss.factors import added, at_one, shares, tangent_of
from coda_inductor.loss.parts import SOFTMAX, Gradient, NotRead, Part, factors, unchanged
from coda_inductor.loss.reading import LOG_SUMS, LOGARITHMS, NORMALISER, SCORES, Head
from coda_inductor.ops.custom import ADDED_UP
from coda_inductor.ops.loss import CAP, LOSS_ROWS, LOSS_TARGETS
from coda_inductor.passes.casts import Cast
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.effects import Effects
from coda_inductor.patterns.graph import aten, prims
from coda_inductor.write.order import sort
from coda_inductor.write.writing import Writing

COLUMNS, AMPLIFIED = 1 << 13, 4
"""The least columns of scores, and how many times the features of x they are. Vectors of the features' length are read
and written five times for it."""
DTYPES = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
"""Of E, with that of the softmax. (In float16 a loss of 11 is too great for E.)"""
HEADS = frozenset({aten.mm.default, aten.addmm.default})
GREATEST = 256.0
"""Of bounded scores. (Those of bfloat16 are a whole number apart there.)"""
EXACT = 1 << 24
"""Whole numbers up to here are float32's, too."""
WHAT = "gradient stored in place of the scores"


def write_losses(
    graph: fx.Graph, target: str, whole: frozenset[str], before: Effects
) -> tuple[tuple[Cast, ...], dict[fx.Node, str]]:
    """Rewrites the heads of a joint graph in place, but for products named `whole`; `before` are its effects before it
    was rewritten. Returns what `explain` tells of each product, and of others that a softmax is taken of, why not."""
    done, left, names = list[Cast](), dict[fx.Node, str](), {n.name for n in graph.nodes}
    for product in list(graph.nodes):
        if product.target not in HEADS or g.is_backward(product) or product.name in whole or product.name not in names:
            continue
        if not is_wide(product, target):
            continue
        head = Head(product)
        try:
            head.follow()
            scale, summed = repeated_by(head), summed_by(head)
            require_one_ratio(head)
        except NotRead as why:
            if head.scores is not None:
                left[product] = str(why)
            continue
        _write(graph, head, scale, summed)
        sort(graph, before)
        here = {n.name for n in graph.nodes}
        done.append(replace(Cast.of(product, WHAT, g.source_line(product)), gone=tuple(sorted(names - here))))
        names = here
    return tuple(done), left


def is_wide(product: fx.Node, target: str) -> bool:
    """Has it the columns of a vocabulary, and a dtype in which E is stored? On the target `reference` any number is."""
    read = g.operands(product)
    if not read.understood or any(n.meta["val"].dim() != 1 for n in read.addends):
        return False
    left, right = read.left.meta["val"], read.right.meta["val"]
    if left.dtype not in DTYPES or not all(isinstance(n, int) for n in (*left.shape, *right.shape)):
        return False
    return right.shape[1] <= EXACT and amplifies(right.shape[1], left.shape[1], target)


def amplifies(columns: int, features: int, target: str) -> bool:
    """Are there as many columns as a vocabulary has, and many more than features?"""
    return target == "reference" or (columns >= COLUMNS and columns >= AMPLIFIED * features)


# ---- how large scores may be


def steps(head: Head) -> list[fx.Node]:
    """From the product, which is not among them, to the scores: the operations but for views and casts. Raises NotRead
    if they read several things."""
    node, found = head.scores, list[fx.Node]()
    while node is not None and node is not head.product:
        if len(node.all_input_nodes) != 1:
            raise NotRead("its scores are neither a multiple of the product nor bounded")
        if unchanged(node) is None:
            found.insert(0, node)
        node = node.all_input_nodes[0]
    return found


def repeated_by(head: Head) -> float | None:
    """The number that a product which is computed again is multiplied by; None if no row need be. Raises NotRead if
    that is another function of the product."""
    scores = head.scores.meta["val"].dtype  # type: ignore[union-attr]
    if scores != DTYPES[head.product.meta["val"].dtype]:
        raise NotRead("its softmax is of other numbers than the epilogue's")
    if bounded(head):
        return None
    if any(gradient.slopes for gradient in head.gradients.values()):
        raise NotRead("its gradient is multiplied by what is made of the scores, which are not bounded")
    return factor(head)


def factor(head: Head) -> float:
    """The number that the product is multiplied by. Raises NotRead if other things are done to it."""
    number = 1.0
    for node in steps(head):
        by = node.args[1] if len(node.args) == 2 and isinstance(node.args[0], fx.Node) and not node.kwargs else None
        if node.target in (aten.mul.Tensor, aten.mul.Scalar) and isinstance(by, int | float):
            number *= by
        elif node.target in (aten.div.Tensor, aten.div.Scalar) and isinstance(by, int | float) and by:
            number /= by
        else:
            raise NotRead("its scores are neither a multiple of the product nor bounded")
    return number


def summed_by(head: Head) -> float:
    """The number by which the sum of a row's scores is that of the product's; 1 if nothing reads it. Raises NotRead."""
    if not any(of.ones for of in head.gradients.values()) and not {*LOG_SUMS.values()} & {*head.picked.values()}:
        return 1.0
    try:
        return factor(head)
    except NotRead as why:
        raise NotRead("its loss adds up scores that are no multiple of the product") from why


def require_one_ratio(head: Head) -> None:
    """Raises NotRead if softmax and one-hot have different factors that are not proportional to the loss's gradient, or
    not the same for all that read the scores' gradient; or if the logsumexp would be made of a biased score, which may
    be infinite where it is not."""
    if NORMALISER in head.picked.values() and g.operands(head.product).addends:
        raise NotRead("its logsumexp is read, of scores with a bias")
    found = [gradient for gradient in head.gradients.values() if gradient.rest]
    for gradient in found:
        tangent_of(gradient.softmax)
    rests = {tuple(sorted(map(str, (factors(p, head.keys) for p in of.softmax)))) for of in head.gradients.values()}
    if found and len(rests) > 1:
        raise NotRead("its products read gradients in which softmax and one-hot have different factors")


def bounded(head: Head) -> bool:
    """Is the difference of two scores of a row at most CAP, as that of 30 tanh(z / 30), also as they are rounded?"""
    low, high = -torch.inf, torch.inf
    for node in steps(head):
        if node.target is aten.tanh.default:
            low, high = max(-1.0, low), min(1.0, high)
        elif node.target is aten.sigmoid.default:
            low, high = 0.0, 1.0
        elif (ends := _moved(node, low, high)) is not None:
            low, high = min(ends), max(ends)
        else:
            low, high = -torch.inf, torch.inf
        if max(-low, high) > GREATEST:
            low, high = -torch.inf, torch.inf
    return high - low <= CAP


def _moved(node: fx.Node, low: float, high: float) -> tuple[float, float] | None:
    """The ends of a range behind a number."""
    by = node.args[1] if len(node.args) == 2 and isinstance(node.args[0], fx.Node) else None
    if not isinstance(by, int | float) or node.kwargs:
        return None
    functions: dict[object, Callable[[float, float], float]] = {
        aten.mul.Tensor: operator.mul, aten.mul.Scalar: operator.mul, aten.div.Tensor: operator.truediv,
        aten.div.Scalar: operator.truediv, aten.add.Tensor: operator.add, aten.sub.Tensor: operator.sub,
    }  # fmt: skip
    function = functions.get(node.target)
    return None if function is None or not by else (function(low, by), function(high, by))


# ---- writing


def _write(graph: fx.Graph, head: Head, scale: float | None, summed: float) -> None:
    """Writes one head; `scale`: None if its scores are bounded. `summed`: as summed_by has it."""
    target, read = _early_target(head), g.operands(head.product)
    x, weight, bias = read.left, read.right, next(iter(read.addends), None)
    write = _Head(Writing(graph, max(head.product, target).next), head)
    call = write.call
    turned = weight.target is aten.permute.default
    weight = weight.all_input_nodes[0] if turned else call(aten.permute.default, weight, [1, 0])
    rows, columns = head.product.meta["val"].shape
    index = call(aten.reshape.default, target, [rows, 1])
    picked = call(aten.index.Tensor, weight, [call(aten.reshape.default, index, [rows])])
    product = call(aten.sum.dim_IntList, call(aten.mul.Tensor, write.wide(x), write.wide(picked)), [1], True)
    if bias is not None:
        product = call(aten.add.Tensor, product, write.wide(call(aten.index.Tensor, bias, [index])))
    dtype = head.product.meta["val"].dtype
    there, here = {head.product: write.cast(product, dtype)}, {head.product: head.product}
    assert head.scores is not None
    score, scores = write.made_of(head.scores, there), write.made_of(head.scores, here)
    gradient = next(iter(head.gradients.values()))

    of = {"start": 0, "step": 1, "dtype": torch.int64, "device": x.meta["val"].device, "requires_grad": False}
    away = call(aten.sub.Tensor, write.wide(call(prims.iota.default, columns, **of)), write.wide(index))
    elsewhere = call(aten.clamp_max.default, call(aten.abs.default, away), 1.0)  # 1, but 0 at the target
    exponent = call(aten.clamp_max.default, call(aten.sub.Tensor, scores, score), CAP)
    others = call(aten.mul.Tensor, call(aten.exp.default, exponent), elsewhere)
    total = call(aten.sum.dim_IntList, others, [1], True)
    slope = None
    for each in gradient.slopes:
        others = call(aten.mul.Tensor, others, write.wide(write.made_of(each, here)))
        at = write.wide(write.made_of(each, there))
        slope = at if slope is None else call(aten.mul.Tensor, slope, at)
    again = (None, None, None, 1.0) if scale is None else (x, weight, bias, scale)
    op = call(LOSS_ROWS, write.cast(others, dtype), total, index, slope, *again)
    exponentials, loss, part = (call(operator.getitem, op, i) for i in range(3))
    for node, what in head.picked.items():
        if what == SCORES:
            value = write.made_of(node.all_input_nodes[0], there)
        elif what == LOGARITHMS:
            value = call(aten.neg.default, loss)
        else:
            value = call(aten.add.Tensor, score, loss)
        if what in LOG_SUMS.values():
            value = call(aten.sub.Tensor, write.sums(x, weight, bias, summed), call(aten.mul.Tensor, value, columns))
            value = value if what == LOG_SUMS["sum"] else call(aten.div.Tensor, value, columns)
        like = node.meta["val"]
        node.replace_all_uses_with(call(aten.reshape.default, write.cast(value, like.dtype), [*like.shape]))
    if gradient.rest:
        hot, rest = (at_one(call, parts, part.meta["val"]) for parts in (gradient.pairs, gradient.rest))
        every, *parted = shares(call, hot, rest, exponentials.meta["val"].dtype)
        parted = [call(aten.expand.default, share, [rows, 1]) for share in parted]
        op = call(LOSS_TARGETS, exponentials, part, loss, index, *parted, slope)
        exponentials, part = (call(operator.getitem, op, i) for i in range(2))
        part = call(aten.mul.Tensor, part, every)
    for node, terms in head.gradients.items():
        _multiply(graph, head, node, terms, exponentials, part)


def _multiply(graph: fx.Graph, head: Head, node: fx.Node, of: Gradient, exponentials: fx.Node, part: fx.Node) -> None:
    """Writes a product of the gradient as one of E, with the factors of the rows. Where softmax and one-hot have
    different ones, `part` is all of them but the gradient of the loss; else it has none of the terms'."""
    writing, rows = Writing(graph, node), head.product.meta["val"].shape[0]

    def call(target: object, *args: object) -> fx.Node:
        return writing.call(node, target, *args)

    def cast(x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else call(prims.convert_element_type.default, x, dtype)

    dtype = part.meta["val"].dtype
    tangent = tangent_of(of.softmax) if of.rest else None
    known = (Part(SOFTMAX, 1.0, (tangent,) if tangent is not None else ()),) if of.rest else of.pairs
    factor = call(aten.mul.Tensor, part, added(call, known, part.meta["val"]))
    ones = added(call, of.ones, part.meta["val"]) if of.ones else None
    if g.reduction(node) is not None:
        each = call(aten.mul.Tensor, cast(exponentials, dtype), factor)
        new = call(aten.sum.dim_IntList, each, [0], True)
        if ones is not None:
            every = call(aten.expand.default, ones, [rows, 1])
            new = call(aten.add.Tensor, new, call(aten.sum.dim_IntList, every, [0], True))
        new = cast(call(aten.reshape.default, new, [*node.meta["val"].shape]), node.meta["val"].dtype)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        return
    left, right = node.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if left.target is aten.permute.default:
        scaled = cast(call(aten.mul.Tensor, cast(right, dtype), factor), right.meta["val"].dtype)
        turned = call(aten.permute.default, exponentials, [1, 0])
        if ones is None:
            new = call(aten.mm.default, turned, scaled)
        else:  # rounded once they are added
            total = call(aten.sum.dim_IntList, call(aten.mul.Tensor, cast(right, dtype), ones), [0], True)
            new = cast(call(aten.add.Tensor, call(ADDED_UP, None, turned, scaled), total), node.meta["val"].dtype)
    else:
        product = call(aten.mm.default, exponentials, right)
        product.meta[g.SIDE] = g.IN_BACKWARD  # or it is computed in the forward, and kept beside E
        new = call(aten.mul.Tensor, cast(product, dtype), factor)
        if ones is not None:
            total = call(aten.sum.dim_IntList, cast(right, dtype), [0], True)
            new = call(aten.add.Tensor, new, call(aten.mul.Tensor, ones, total))
        new = cast(new, node.meta["val"].dtype)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _early_target(head: Head) -> fx.Node:
    """The target, as the forward reads it."""
    index = next(n.args[2] for n in head.picked if n.target is aten.gather.default)
    assert isinstance(index, fx.Node)
    return index


@dataclass(frozen=True, slots=True)
class _Head:
    """What writes nodes in the place of a head's product."""

    writing: Writing
    head: Head

    def call(self, target: object, *args: object, **kwargs: object) -> fx.Node:
        return self.writing.call(self.head.product, target, *args, **kwargs)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else self.call(prims.convert_element_type.default, x, dtype)

    def wide(self, x: fx.Node) -> fx.Node:
        """In the dtype of the scores' sums."""
        assert self.head.scores is not None
        return self.cast(x, self.head.scores.meta["val"].dtype)

    def sums(self, x: fx.Node, weight: fx.Node, bias: fx.Node | None, number: float) -> fx.Node:
        """The sums of the scores of each row, [rows, 1]: `number` times those of the product."""
        total = self.call(aten.sum.dim_IntList, self.wide(weight), [0], True)
        made = self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, self.wide(x), total), [1], True)
        if bias is not None:
            made = self.call(aten.add.Tensor, made, self.call(aten.sum.dim_IntList, self.wide(bias), [0], True))
        return made if number == 1 else self.call(aten.mul.Tensor, made, number)

    def made_of(self, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
        """The node, of the product that `made` has in its place, [rows, columns]."""
        if node not in made:
            source = unchanged(node)
            if source is not None and not g.is_cast(node):
                made[node] = self.made_of(source, made)
            else:
                for n in node.all_input_nodes:
                    self.made_of(n, made)
                made[node] = self.call(node.target, *fx.map_arg(node.args, lambda n: made[n]), **node.kwargs)
        return made[node]
