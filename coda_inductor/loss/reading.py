"""What a cross-entropy and its gradient compute of a product's scores, read as softmax and one-hot.

    s = f(x W^T);  m = amax(s);  y = s - m - log(sum(exp(s - m)));  loss: y at t           the forward
    D = a (exp(y) - onehot(t)) f'                                                          the gradient of x W^T

Each tensor [rows, V] that follows the product gets a meaning by its operation: the scores, exp(s - m), y, or a sum of
terms a p f' with p the softmax or the one-hot, a number and values of a row. So no spelling is matched. An operation
that the table does not have, or a result that somebody else reads, leaves the head as it came.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from coda_inductor.passes.dropped import is_zero
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.graph import aten
from coda_inductor.patterns.pointwise import POINTWISE

SCORES, SHIFTED, EXPONENTIALS, LOGARITHMS = "scores", "scores - max", "exp(scores - max)", "log of the softmax"
MAXIMUM, TOTAL, LOG, NORMALISER = "max", "sum of exponentials", "its log", "logsumexp"
SOFTMAX, ONE_HOT = "softmax", "one-hot"
ABSOLUTE, INFINITE = "|max|", "is max infinite"
SCATTERS = frozenset({aten.scatter.value, aten.scatter.src, aten.scatter_add.default})
SAME = g.VIEWS | g.COPIES | {aten.alias.default, aten.detach.default}


class NotRead(Exception):
    """What a head's scores go through that has no meaning here."""


@dataclass(frozen=True, slots=True)
class Part:
    """number * rows * slopes * (softmax or one-hot): `rows` have one value a row, `slopes` are made of the product."""

    of: str
    number: float = 1.0
    rows: tuple[fx.Node, ...] = ()
    slopes: tuple[fx.Node, ...] = ()

    @property
    def factors(self) -> tuple[list[str], list[str]]:
        """What it is multiplied by, the number apart, so that equal ones compare equal."""
        return sorted(map(key, self.rows)), sorted(map(key, self.slopes))


Parts = tuple[Part, ...]
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
    targets: dict[str, fx.Node] = field(default_factory=dict)
    """Where the one-hot is 1, by key."""
    picked: dict[fx.Node, str] = field(default_factory=dict)
    """Values of a row that the rest of the graph reads: the softmax' logarithm or the scores at the target, or the
    logsumexp."""
    gradients: dict[fx.Node, Parts] = field(default_factory=dict)
    """What reads the scores' gradient: products, of it as it is or transposed, and sums over the rows."""

    def value(self, node: object) -> Value | None:
        """Its meaning; None of what is not made of the scores, nor of a one-hot."""
        if isinstance(node, fx.Node) and node not in self.values and node not in self.early:
            self._one_hot(node)
        return self.values.get(node) if isinstance(node, fx.Node) else None

    def parts(self, node: object) -> Parts | None:
        """Its terms, if it is a sum of such."""
        found = self.value(node)
        return found if isinstance(found, tuple) else None

    def of_rows(self, node: object) -> bool:
        """Has it one value for each row of the product, or one number?"""
        value = g.tensor(node)
        if value is None or not isinstance(node, fx.Node) or node in self.values or node in self.early:
            return False
        return value.numel() in (1, self.product.meta["val"].shape[0]) and (not value.dim() or value.shape[-1] == 1)

    def large(self, node: object) -> bool:
        """Is it as large as the scores, with their columns?"""
        value, scores = g.tensor(node), self.product.meta["val"]
        return value is not None and value.numel() == scores.numel() and value.shape[-1] == scores.shape[-1]

    def _one_hot(self, node: fx.Node) -> None:
        """Reads what is made of zeros with a number at the target, and of values of a row."""
        if node.target in SCATTERS and self.large(node):
            zeros, dim, index, what = node.args
            last = dim in (-1, node.meta["val"].dim() - 1)
            if last and is_zero(zeros) and isinstance(index, fx.Node) and self.of_rows(index):
                found = times_row((Part(ONE_HOT),), what) if self.of_rows(what) else _scaled_by(Part(ONE_HOT), what)
                if found is not None:
                    self.target(index)
                    self.values[node] = found
        elif (same := unchanged(node)) is not None or node.target in (aten.mul.Tensor, aten.neg.default):
            if all(n in self.values or self._may(n) for n in node.all_input_nodes):
                found = self.parts(same) if same is not None else ARITHMETIC[node.target](self, *node.args)
                if found is not None:
                    self.values[node] = found
        elif (of := g.reduction(node)) is not None and of.name == "sum" and self._may(of.source):
            found = self.parts(of.source)
            if found is not None and self._of_columns(of) and all(p.of == ONE_HOT and not p.slopes for p in found):
                self.values[node] = tuple(replace(p, of="") for p in found)

    def _may(self, node: fx.Node) -> bool:
        return self.of_rows(node) or self.parts(node) is not None

    def target(self, index: fx.Node) -> None:
        """One of the targets. Raises NotRead if it is another than before."""
        self.targets.setdefault(key(index), index)
        if len(self.targets) > 1:
            raise NotRead("its loss has several targets")

    def _of_columns(self, of: g.Reduction) -> bool:
        return of.dims == (of.source.meta["val"].dim() - 1,)

    def _of_bias(self, of: g.Reduction) -> bool:
        """Is it the sum of the gradient over all rows?"""
        rank = of.source.meta["val"].dim()
        return of.name == "sum" and of.dims == (*range(rank - 1),) and self.parts(of.source) is not None

    def follow(self) -> None:
        """Reads all that is made of the product. Raises NotRead."""
        self.early.add(self.product)
        node = self.product
        while (node := node.next).op != "root":
            if any(n in self.early or n in self.values for n in node.all_input_nodes) and not self._only_logsumexp(
                node
            ):
                self._read(node)
        index = next((n.args[2] for n in self.picked if n.target is aten.gather.default), None)
        if self.scores is None or index is None or not self.gradients:
            raise NotRead("no loss and gradient of its scores")
        for parts in self.gradients.values():
            check(parts)

    def _only_logsumexp(self, node: fx.Node) -> bool:
        """Does it read the logsumexp and nothing else of the scores, as another loss does?"""
        read = [n for n in node.all_input_nodes if n in self.early or n in self.values]
        mine = any((node.target, *map(self._meaning, (*node.args[:i], x))) in NAMED for i, x in enumerate(node.args))
        if mine or unchanged(node) is not None or any(self.value(n) != NORMALISER for n in read):
            return False
        self.picked |= dict.fromkeys(read, NORMALISER)
        return True

    def _read(self, node: fx.Node) -> None:
        same = unchanged(node)
        if node in self.values or self.value(node) is not None:
            return
        by_number = same is not None or node.target in POINTWISE
        if by_number and self.early.issuperset(node.all_input_nodes) and self.large(node):
            self.early.add(node)
            return
        if node.target is aten.exp.default and node.args[0] in self.early:
            raise NotRead(f"{node} is an exponential of the scores themselves")
        if same is not None and (found := self.value(same)) is not None:
            if self.large(same) and not self.large(node):
                raise NotRead(f"{node} is a part of the scores")
            self.values[node] = found
        elif (of := g.reduction(node)) is not None and self._of_bias(of):
            self.gradients[node] = self.parts(of.source) or ()
        elif of is not None:
            self.values[node] = self._reduced(node, of)
        elif node.target is aten.gather.default:
            self._pick(node)
        elif node.target in (aten.mm.default, aten.permute.default):
            self._multiplied(node)
        else:
            found = NAMED.get((node.target, *map(self._meaning, node.args)))
            if found is None:
                rule = ARITHMETIC.get(node.target)
                found = rule(self, *node.args) if rule is not None else None
            if found is None:
                raise NotRead(f"{node} is made of the scores in another way")
            self.values[node] = found

    def _meaning(self, x: object) -> object:
        if isinstance(x, fx.Node) and x is self.scores:
            return SCORES
        if isinstance(x, fx.Node) and x.target in (aten.scalar_tensor.default, aten.full.default) and self.of_rows(x):
            return x.args[-1]
        return self.value(x) if isinstance(x, fx.Node) else x if isinstance(x, int | float) else None

    def _reduced(self, node: fx.Node, of: g.Reduction) -> Value:
        """Its meaning. Raises NotRead."""
        if not self._of_columns(of):
            raise NotRead(f"{node} is taken over the rows")
        if of.name == "max" and of.source in self.early and self.scores in (None, of.source):
            self.scores = of.source
            return MAXIMUM
        if of.name == "sum" and self.value(of.source) == EXPONENTIALS:
            return TOTAL
        raise NotRead(f"{node} is taken of the scores")

    def _pick(self, node: fx.Node) -> None:
        source, dim, index, *_ = node.args
        what = SCORES if source in self.early else self.value(source)
        if what not in (LOGARITHMS, SCORES) or dim not in (-1, node.meta["val"].dim() - 1):
            raise NotRead(f"{node} picks of something else than the softmax' logarithm")
        if not isinstance(index, fx.Node) or not self.of_rows(index):
            raise NotRead(f"{node} picks several scores of a row")
        self.target(index)
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
            self.values[node] = parts
        else:
            self.gradients[node] = parts


def unchanged(node: fx.Node) -> fx.Node | None:
    """The tensor that the node only rearranges by rows, copies, or casts to another floating-point dtype."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or g.tensor(source) is None or node.target is aten.permute.default:
        return None
    if node.target in SAME and node.target not in (aten.expand.default, aten.slice.Tensor):
        return source
    return source if g.is_cast(node) and all(g.floating(n) for n in (node, source)) else None


def viewed(node: fx.Node) -> fx.Node | None:
    """The tensor whose numbers are the node's, in their order: of a view, or of what is written over all of another."""
    whole = node.target in (aten.select_scatter.default, aten.slice_scatter.default)
    if not whole and (node.target not in g.VIEWS or node.target in (aten.permute.default, aten.expand.default)):
        return None
    source = node.args[int(whole)]
    same = g.tensor(source) is not None and g.tensor(source).numel() == g.tensor(node).numel()  # type: ignore[union-attr]
    return source if same and isinstance(source, fx.Node) else None


def key(node: object) -> str:
    """A text that is equal for equal computations, whatever views stand between."""
    if not isinstance(node, fx.Node):
        return repr(node)
    if (source := viewed(node)) is not None:
        return key(source)
    if node.op != "call_function" or not (g.is_pointwise(node) or node.target is aten.scalar_tensor.default):
        return node.name
    given = ", ".join([*map(key, node.args), repr(sorted(node.kwargs.items()))])
    return f"{node.target}({given}) {g.tensor(node).dtype}"  # type: ignore[union-attr]


def check(parts: Parts) -> None:
    """Raises NotRead unless the gradient is a f' (softmax - one-hot)."""
    kinds = {p.of: p for p in parts}
    if len(parts) != 2 or kinds.keys() != {SOFTMAX, ONE_HOT}:
        raise NotRead("its gradient is more than a softmax less a one-hot")
    soft, hot = kinds[SOFTMAX], kinds[ONE_HOT]
    if soft.number != -hot.number or soft.factors != hot.factors:
        raise NotRead("its gradient multiplies the softmax and the one-hot by different values")


# ---- what an operation makes of meanings


def times_row(parts: Parts, row: object) -> Parts:
    """The terms, times a value of each row: of -r, that is -1 and r."""
    assert isinstance(row, fx.Node)
    number = 1.0
    while (source := viewed(row)) is not None or row.target is aten.neg.default:
        number = number if source is not None else -number
        row = row.all_input_nodes[0] if source is None else source
    return tuple(replace(p, number=p.number * number, rows=(*p.rows, row)) for p in parts)


def _scaled_by(part: Part, number: object) -> Parts | None:
    return _scaled((part,), float(number)) if isinstance(number, int | float) else None


def _scaled(parts: Parts, number: float) -> Parts:
    return tuple(replace(p, number=p.number * number) for p in parts)


def _times(head: Head, a: object, b: object) -> Parts | None:
    for x, y in ((a, b), (b, a)):
        parts = head.parts(x)
        if parts is None:
            continue
        if isinstance(y, int | float):
            return _scaled(parts, float(y))
        if isinstance(y, fx.Node) and y in head.early and head.large(y):
            return tuple(replace(p, slopes=(*p.slopes, y)) for p in parts)
        if (others := head.parts(y)) is not None and len(others) == 1 and not others[0].of:
            by = others[0]
            return tuple(replace(p, number=p.number * by.number, rows=(*p.rows, *by.rows)) for p in parts)
        if isinstance(y, fx.Node) and head.of_rows(y):
            return times_row(parts, y)
    return None


def _over(head: Head, a: object, b: object) -> Parts | None:
    parts = head.parts(a)
    return _scaled(parts, 1 / b) if parts is not None and isinstance(b, int | float) and b else None


def _plus(head: Head, a: object, b: object, sign: float = 1.0) -> Parts | None:
    first, second = head.parts(a), head.parts(b)
    if first is None or second is None or any(not p.of for p in (*first, *second)):
        return None
    return (*first, *_scaled(second, sign))


def _minus(head: Head, a: object, b: object) -> Parts | None:
    return _plus(head, a, b, -1.0)


def _negative(head: Head, a: object) -> Parts | None:
    parts = head.parts(a)
    return None if parts is None else _scaled(parts, -1.0)


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


def heads(graph: fx.Graph, wide: Callable[[fx.Node], bool]) -> tuple[list[Head], dict[fx.Node, str]]:
    """The products of a joint graph whose scores are read for a cross-entropy and its gradient alone; of others that a
    softmax is taken of, why not."""
    found, left = list[Head](), dict[fx.Node, str]()
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and not g.is_backward(node) and wide(node):
            head = Head(node)
            try:
                head.follow()
                found.append(head)
            except NotRead as why:
                if head.scores is not None:
                    left[node] = str(why)
    return found, left


def dtype_of(head: Head) -> torch.dtype:
    """Of the sums over a row."""
    assert head.scores is not None
    dtype: torch.dtype = head.scores.meta["val"].dtype
    return dtype
