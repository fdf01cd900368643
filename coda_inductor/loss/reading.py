"""What a cross-entropy and its gradient compute of a product's scores, read as softmax and one-hot.

    s = f(x W^T);  m = amax(s);  y = s - m - log(sum(exp(s - m)));  loss: y at t           the forward
    D = a (exp(y) - onehot(t)) f'                                                          the gradient of x W^T

Each tensor [rows, V] that follows the product gets a meaning by its operation: the scores, exp(s - m), y, or a sum of
terms a p f' with p the softmax, the one-hot or 1, a number and values of a row. So no spelling is matched. An operation
that the table does not have, or a result that somebody else reads, leaves the head as it came.

A z-loss adds terms of the softmax, label smoothing terms of the softmax and of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from coda_inductor.loss.parts import (
    OF_ROWS,
    ONE_HOT,
    ONES,
    SOFTMAX,
    Gradient,
    Keys,
    NotRead,
    Part,
    Parts,
    scaled,
    sorted_out,
    unchanged,
)
from coda_inductor.passes.dropped import is_zero
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.pointwise import POINTWISE

SCORES, SHIFTED, EXPONENTIALS, LOGARITHMS = "scores", "scores - max", "exp(scores - max)", "log of the softmax"
MAXIMUM, TOTAL, LOG, NORMALISER = "max", "sum of exponentials", "its log", "logsumexp"
ABSOLUTE, INFINITE = "|max|", "is max infinite"
LOG_SUMS = {"sum": "sum of the softmax' logs", "mean": "mean of the softmax' logs"}
LARGE = frozenset({SHIFTED, EXPONENTIALS, LOGARITHMS, SOFTMAX, ONE_HOT, ONES})
"""What has a value for each score. The others have one for each row."""
SCATTERS = frozenset({aten.scatter.value, aten.scatter.src, aten.scatter_add.default})
Value = str | Parts


@dataclass(slots=True)
class Head:
    """One product's scores, and what is made of them."""

    product: fx.Node
    scores: fx.Node | None = None
    early: set[fx.Node] = field(default_factory=set)
    """What is made of the product alone, number by number."""
    values: dict[fx.Node, Value] = field(default_factory=dict)
    """The meanings: of tensors [rows, V], and of values of a row."""
    keys: Keys = field(default_factory=Keys)
    targets: dict[int, fx.Node] = field(default_factory=dict)
    """Where the one-hot is 1, by key."""
    others: set[fx.Node] = field(default_factory=set)
    """What was asked for a meaning as of a one-hot, so that it is asked once."""
    picked: dict[fx.Node, str] = field(default_factory=dict)
    """Values of a row that the rest of the graph reads: the softmax' logarithm at the target, what is made of the
    product there, the logsumexp, or one of LOG_SUMS."""
    gradients: dict[fx.Node, Gradient] = field(default_factory=dict)
    """What reads the scores' gradient: products, of it as it is or transposed, and sums over the rows."""

    @property
    def count(self) -> int:
        """How many rows there are."""
        rows: int = self.product.meta["val"].shape[0]
        return rows

    def value(self, node: object) -> Value | None:
        """Its meaning; None of what is not made of the scores, nor of a one-hot."""
        if isinstance(node, fx.Node) and node not in self.values and node not in self.early | self.others:
            self.others.add(node)
            self._one_hot(node)
        return self.values.get(node) if isinstance(node, fx.Node) else None

    def parts(self, node: object) -> Parts | None:
        """Its terms, if it is a sum of such."""
        found = self.value(node)
        return found if isinstance(found, tuple) else None

    def of_rows(self, node: object) -> bool:
        """Has it one value for each row of the product, or one number, and is it not made of the scores?"""
        value = g.tensor(node)
        if value is None or not isinstance(node, fx.Node) or node in self.values or node in self.early:
            return False
        return value.numel() in (1, self.count) and (not value.dim() or value.shape[-1] == 1)

    def large(self, node: object) -> bool:
        """Is it as large as the scores, with their columns?"""
        value, scores = g.tensor(node), self.product.meta["val"]
        return value is not None and value.numel() == scores.numel() and value.shape[-1:] == scores.shape[-1:]

    def follow(self) -> None:
        """Reads all that is made of the product. Raises NotRead."""
        self.early.add(self.product)
        node = self.product
        while (node := node.next).op != "root":
            mine = any(n in self.early or n in self.values for n in node.all_input_nodes)
            if mine and not self._only_logsumexp(node):
                self._read(node)
        index = next((n.args[2] for n in self.picked if n.target is aten.gather.default), None)
        if self.scores is None or not isinstance(index, fx.Node) or not self.gradients:
            raise NotRead("no loss and gradient of its scores")
        if self.product in g.reached([index], lambda n: n.all_input_nodes):
            raise NotRead("its target is made of the scores")
        if len({tuple(sorted(map(self.keys.of, of.slopes))) for of in self.gradients.values()}) > 1:
            raise NotRead("its products read gradients that are multiplied by different values of the scores")

    def _take(self, node: fx.Node, found: Value) -> None:
        """The node has this meaning. Raises NotRead unless it has the size that goes with it, and what it reads of the
        rows lies along them."""
        what = {found} if isinstance(found, str) else {p.of for p in found}
        size = self.large(node) if what & LARGE else node.meta["val"].numel() == self.count
        if what & LARGE and node.target not in (*SCATTERS, aten.permute.default):
            values = [n.meta["val"] for n in node.all_input_nodes if not self.large(n)]
            size &= all(v.numel() == 1 or v.shape[-1] == 1 for v in values)
        if not size and node.target is not aten.permute.default:
            raise NotRead(f"{node} repeats its rows")
        self.values[node] = found

    def _one_hot(self, node: fx.Node) -> None:
        """Reads what is made of zeros with a number at the target, and of values of a row, also repeated for all
        columns."""
        same, of, found = unchanged(node), g.reduction(node), None
        if node.target in SCATTERS and self.large(node) and not node.kwargs:
            found = self._scattered(node.args)
        elif node.target is aten.expand.default and self.large(node) and self.of_rows(node.args[0]):
            found = (Part(ONES).times(node.all_input_nodes[0]),)
        elif same is not None:
            found = self.parts(same) if not self.of_rows(same) else None
        elif node.target in ARITHMETIC and not node.kwargs:
            if all(self.parts(n) is not None or self.of_rows(n) for n in node.all_input_nodes):
                found = ARITHMETIC[node.target](self, *node.args)
        elif of is not None and of.name == "sum" and self._of_columns(of):
            columns, parts = {ONE_HOT: 1, ONES: self.product.meta["val"].shape[1]}, self.parts(of.source) or ()
            if parts and all(p.of in columns and not p.slopes for p in parts):
                found = tuple(replace(p, of=OF_ROWS, number=p.number * columns[p.of]) for p in parts)
        if found is not None:
            self._take(node, found)

    def _scattered(self, args: tuple[Any, ...]) -> Parts | None:
        zeros, dim, index, what = args
        last = dim in (-1, zeros.meta["val"].dim() - 1)
        if not last or not is_zero(zeros) or not self._a_target(index):
            return None
        if isinstance(what, int | float):
            return (Part(ONE_HOT, float(what)),)
        return (Part(ONE_HOT).times(what),) if isinstance(what, fx.Node) and self.of_rows(what) else None

    def _a_target(self, index: fx.Node) -> bool:
        """Is it one place for each row? Raises NotRead if it is another than before."""
        if not self.of_rows(index) or index.meta["val"].numel() != self.count:
            return False
        self.targets.setdefault(self.keys.of(index), index)
        if len(self.targets) > 1:
            raise NotRead("its loss has several targets")
        return True

    def _of_columns(self, of: g.Reduction) -> bool:
        return of.dims == (of.source.meta["val"].dim() - 1,)

    def _of_bias(self, of: g.Reduction) -> bool:
        """Is it the sum of the gradient over all rows?"""
        rank = of.source.meta["val"].dim()
        return of.name == "sum" and of.dims == (*range(rank - 1),) and self.parts(of.source) is not None

    def _only_logsumexp(self, node: fx.Node) -> bool:
        """Does it read the logsumexp and nothing else of the scores, as another loss does?"""
        read = [n for n in node.all_input_nodes if n in self.early or n in self.values]
        if unchanged(node) is not None or any(self.value(n) != NORMALISER for n in read):
            return False
        for each in read:
            while (source := unchanged(each)) is not None and self.value(source) == NORMALISER:
                each = source  # the views of one value stay views of one
            self.picked[each] = NORMALISER
        return True

    def _read(self, node: fx.Node) -> None:
        same = unchanged(node)
        if node in self.values or self.value(node) is not None:
            return
        by_number = same is not None or node.target in POINTWISE
        if by_number and self.early.issuperset(node.all_input_nodes) and self.large(node):
            self.early.add(node)
            return
        if same is not None and (found := self.value(same)) is not None:
            self._take(node, found)
        elif (of := g.reduction(node)) is not None and self._of_bias(of):
            self._reads_gradient(node, self.parts(of.source) or ())
        elif of is not None and self._of_columns(of) and of.name in LOG_SUMS and self.value(of.source) == LOGARITHMS:
            self.picked[node] = LOG_SUMS[of.name]
        elif of is not None:
            self._take(node, self._reduced(node, of))
        elif node.target is aten.gather.default:
            self._pick(node)
        elif node.target in (aten.mm.default, aten.permute.default):
            self._multiplied(node)
        else:
            rule = None if node.kwargs else ARITHMETIC.get(node.target)
            named = None if node.kwargs else NAMED.get((node.target, *map(self._meaning, node.args)))
            result = named or (rule(self, *node.args) if rule is not None else None)
            if result is None:
                raise NotRead(f"{node} is made of the scores in another way")
            self._take(node, result)

    def _are_scores(self, x: fx.Node) -> bool:
        """Is it the scores, or made of the product as they are?"""
        if self.scores is None or x not in self.early:
            return False
        return x is self.scores or self.keys.of(x) == self.keys.of(self.scores)

    def _meaning(self, x: object) -> object:
        if isinstance(x, fx.Node) and self._are_scores(x):
            return SCORES
        if isinstance(x, fx.Node) and x.target in (aten.scalar_tensor.default, aten.full.default) and self.of_rows(x):
            return x.args[-1]
        return self.value(x) if isinstance(x, fx.Node) else x if isinstance(x, int | float) else None

    def _reduced(self, node: fx.Node, of: g.Reduction) -> Value:
        """Its meaning. Raises NotRead."""
        along = self._of_columns(of)
        if along and of.name == "max" and of.source in self.early:
            self.scores = self.scores or of.source
            if self._are_scores(of.source):
                return MAXIMUM
        if along and of.name == "sum" and self.value(of.source) == EXPONENTIALS:
            return TOTAL
        raise NotRead(f"{node} is taken of the scores")

    def _pick(self, node: fx.Node) -> None:
        source, dim, index, *_ = node.args
        what = SCORES if source in self.early else self.value(source)
        last = dim in (-1, node.meta["val"].dim() - 1)
        if what not in (LOGARITHMS, SCORES) or not last or not isinstance(index, fx.Node) or not self._a_target(index):
            raise NotRead(f"{node} picks of something else than the softmax' logarithm at the targets")
        self.picked[node] = what

    def _multiplied(self, node: fx.Node) -> None:
        left, turns = node.args[0], node.target is aten.permute.default
        of_weight = (u.target is aten.mm.default and u.args[0] is node for u in node.users)
        if turns and (node.args[1] != [1, 0] or not all(of_weight)):
            raise NotRead(f"{node} turns the scores")
        parts, right = self.parts(left), node.args[-1]
        if parts is None or (isinstance(right, fx.Node) and (right in self.values or right in self.early)):
            raise NotRead(f"{node} multiplies the scores")
        if turns:
            self._take(node, parts)
        else:
            self._reads_gradient(node, parts)

    def _reads_gradient(self, node: fx.Node, parts: Parts) -> None:
        if not g.is_backward(node):
            raise NotRead(f"{node} reads the gradient of its scores in the forward")
        self.gradients[node] = sorted_out(parts, self.keys)


# ---- what an operation makes of meanings


def _times(head: Head, a: object, b: object) -> Parts | None:
    for x, y in ((a, b), (b, a)):
        parts = head.parts(x)
        if parts is None:
            continue
        if isinstance(y, int | float):
            return scaled(parts, float(y))
        if isinstance(y, fx.Node) and y in head.early:
            return tuple(replace(p, slopes=(*p.slopes, y)) for p in parts)
        if (others := head.parts(y)) is not None and all(by.of == OF_ROWS for by in others):
            pairs = ((p, by) for p in parts for by in others)
            return tuple(replace(p, number=p.number * by.number, rows=(*p.rows, *by.rows)) for p, by in pairs)
        if isinstance(y, fx.Node) and head.of_rows(y):
            return tuple(p.times(y) for p in parts)
    return None


def _over(head: Head, a: object, b: object) -> Parts | None:
    parts = head.parts(a)
    return scaled(parts, 1 / b) if parts is not None and isinstance(b, int | float) and b else None


def _plus(head: Head, a: object, b: object, sign: float = 1.0) -> Parts | None:
    first, second = head.parts(a), head.parts(b)
    return None if first is None or second is None else (*first, *scaled(second, sign))


def _minus(head: Head, a: object, b: object) -> Parts | None:
    return _plus(head, a, b, -1.0)


def _negative(head: Head, a: object) -> Parts | None:
    parts = head.parts(a)
    return None if parts is None else scaled(parts, -1.0)


ARITHMETIC: dict[object, Callable[..., Parts | None]] = {
    aten.mul.Tensor: _times,
    aten.mul.Scalar: _times,
    aten.div.Tensor: _over,
    aten.div.Scalar: _over,
    aten.add.Tensor: _plus,
    aten.sub.Tensor: _minus,
    aten.neg.default: _negative,
}
SOFT: Parts = (Part(SOFTMAX),)
NAMED: dict[tuple[object, ...], Value] = {
    (aten.sub.Tensor, SCORES, MAXIMUM): SHIFTED,
    (aten.exp.default, SHIFTED): EXPONENTIALS,
    (aten.log.default, TOTAL): LOG,
    (aten.sub.Tensor, SHIFTED, LOG): LOGARITHMS,
    (aten.add.Tensor, LOG, MAXIMUM): NORMALISER,
    (aten.add.Tensor, MAXIMUM, LOG): NORMALISER,
    (aten.sub.Tensor, SCORES, NORMALISER): LOGARITHMS,
    (aten.exp.default, LOGARITHMS): SOFT,
    (aten.div.Tensor, EXPONENTIALS, TOTAL): SOFT,
    (aten.abs.default, MAXIMUM): ABSOLUTE,
    (aten.eq.Scalar, ABSOLUTE, math.inf): INFINITE,
    (aten.where.self, INFINITE, 0, MAXIMUM): MAXIMUM,
}
"""Operations, with the meanings of what they read."""


def read(product: fx.Node) -> Head:
    """A head. Raises NotRead."""
    head = Head(product)
    head.follow()
    return head
